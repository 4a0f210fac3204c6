"""Losses, metrics and errors of all ranks, on every rank."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnppo.metrics import Metrics


def sum_losses(loss: Tensor, metrics: Metrics, group: dist.ProcessGroup) -> tuple[Tensor, Metrics]:
    """Loss and metrics of the targets of all ranks, which are disjoint. Every rank has metrics of the same names.

    One message for the sums and one for the extremes, in float64, in which counts are exact up to 2⁵³.
    """
    added = (metrics.per_step, metrics.per_token, metrics.totals)
    sums = _reduced([loss, *(value for kind in added for value in kind.values())], dist.ReduceOp.SUM, group)
    highs = _reduced(
        [*metrics.maxima.values(), *(-value for value in metrics.minima.values())], dist.ReduceOp.MAX, group
    )
    total = next(sums)
    per_step, per_token, totals = ({name: next(sums) for name in kind} for kind in added)
    maxima = {name: next(highs) for name in metrics.maxima}
    minima = {name: -next(highs) for name in metrics.minima}
    return total, Metrics(per_step, per_token, totals, minima, maxima)


def raise_together(error: str | None, group: dist.ProcessGroup) -> None:
    """Raise a `ValueError` on every rank where one of them has an error: with its rank, and what it says."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, error, group=group)
    for rank, said in enumerate(found):
        if said is not None:
            raise ValueError(f"rank {rank}: {said}")


def _reduced(values: list[Tensor], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Each number, reduced over the group, in its own dtype and shape."""
    if not values:
        return iter(())
    packed = torch.stack([value.detach().double().reshape(()) for value in values])
    dist.all_reduce(packed, op=how, group=group)
    return (number.to(value.dtype).reshape(value.shape) for number, value in zip(packed, values, strict=True))
