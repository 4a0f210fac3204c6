"""Losses, metrics and errors of all ranks, on every rank."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnppo.metrics import Metrics


def sum_losses(loss: Tensor, metrics: Metrics, group: dist.ProcessGroup) -> tuple[Tensor, Metrics]:
    """Loss and metrics of the targets of all ranks, which are disjoint. A name that a rank has not adds nothing there.

    One message for the names, one for the sums and one for the extremes, in float64, in which counts are exact up to 2⁵³.
    """
    names = [{name: (value.dtype, value.shape) for name, value in kind.items()} for kind in metrics]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, names, group=group)
    empty = (0.0, 0.0, 0.0, math.inf, -math.inf)  # of each kind, what changes no other
    full = []
    for place, (kind, none) in enumerate(zip(metrics, empty, strict=True)):
        everywhere = {name: about for each in found for name, about in each[place].items()}
        full.append(
            {
                name: kind.get(name, torch.full(shape, none, dtype=dtype, device=loss.device))
                for name, (dtype, shape) in sorted(everywhere.items())
            }
        )
    sums = _reduced([loss, *(value for kind in full[:3] for value in kind.values())], dist.ReduceOp.SUM, group)
    extremes = [*(-value for value in full[3].values()), *full[4].values()]
    # The largest of NaN and a number is either, by the order of ranks: so whether one is NaN goes along.
    nan = [value.isnan().double() for value in extremes]
    known = [value.nan_to_num(-math.inf, math.inf, -math.inf) for value in extremes]
    found_highs = list(_reduced([*known, *nan], dist.ReduceOp.MAX, group))
    pairs = zip(found_highs[: len(known)], found_highs[len(known) :], strict=True)
    highs = (torch.where(bad > 0, math.nan, high) for high, bad in pairs)
    total = next(sums)
    per_step, per_token, totals = ({name: next(sums) for name in kind} for kind in full[:3])
    minima = {name: -next(highs) for name in full[3]}
    maxima = {name: next(highs) for name in full[4]}
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
