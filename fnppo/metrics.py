"""Metrics as sums: they add over micro-batches, ranks and steps, and are divided once, when a person reads them.

per_step     sums already weighted by `loss_weights` (loss, policy_loss): divided by the number of optimizer steps,
             so the reported value is the quantity that was optimised, whatever the split
per_token    plain sums over targets (entropy, kl, clip fractions): divided by the number of targets
totals       counts (tokens, rows): not divided
minima, maxima
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fnppo.types import Targets


class Metrics(NamedTuple):
    """Sums and extremes over targets; see the head of `fnppo.metrics`. A custom loss adds keys of its own freely."""

    per_step: dict[str, Tensor] = {}
    per_token: dict[str, Tensor] = {}
    totals: dict[str, Tensor] = {}
    minima: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of the union of two disjoint sets of targets.

    >>> a = Metrics(per_token={"kl": torch.tensor(2.0)}, totals={"tokens": torch.tensor(1)})
    >>> b = Metrics(per_token={"kl": torch.tensor(2.0)}, totals={"tokens": torch.tensor(3)})
    >>> summarize(merge_metrics(a, b))["kl"]
    1.0
    """
    _check(a)
    _check(b)
    return Metrics(
        _combine(a.per_step, b.per_step, torch.add),
        _combine(a.per_token, b.per_token, torch.add),
        _combine(a.totals, b.totals, torch.add),
        _combine(a.minima, b.minima, torch.minimum),
        _combine(a.maxima, b.maxima, torch.maximum),
    )


def summarize(metrics: Metrics) -> dict[str, float]:
    """Plain floats for a log, divided here and nowhere else.

    Means over no tokens, and extremes of nothing, are NaN.

    Raises:
        ValueError: a metric is no scalar tensor.

    >>> summarize(Metrics(per_token={"entropy": torch.tensor(6.0)}, totals={"tokens": torch.tensor(4)}))
    {'entropy': 1.5, 'tokens': 4.0}
    """
    _check(metrics)
    steps = max(int(metrics.totals.get("steps", 1)), 1)
    tokens = int(metrics.totals.get("tokens", 0))
    summary = {name: value.item() / steps for name, value in metrics.per_step.items()}
    summary |= {name: value.item() / tokens if tokens else float("nan") for name, value in metrics.per_token.items()}
    extremes = metrics.minima | metrics.maxima
    summary |= {name: value.item() if value.isfinite() or tokens else float("nan") for name, value in extremes.items()}
    return summary | {name: float(value) for name, value in metrics.totals.items()}


def count_targets(targets: Targets) -> dict[str, Tensor]:
    """The totals of a loss: `tokens`, and `rows` that have one. Targets stand row by row.

    >>> index = torch.tensor([0, 0, 2])
    >>> count_targets(Targets(index, index, index, index))
    {'tokens': tensor(3), 'rows': tensor(2)}
    """
    changes = (targets.rows[1:] != targets.rows[:-1]).sum() + min(targets.rows.numel(), 1)
    return {"tokens": torch.tensor(targets.rows.numel(), device=targets.rows.device), "rows": changes}


def _combine(a: dict[str, Tensor], b: dict[str, Tensor], how: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    both = {name: how(a[name], b[name]) for name in a.keys() & b.keys()}
    return {name: both[name] if name in both else (a | b)[name] for name in a | b}


def _check(metrics: Metrics) -> None:
    if not isinstance(metrics, Metrics):
        raise ValueError(
            f"metrics is a {type(metrics).__name__}; Metrics are needed. Return fnppo.Metrics(...) from the loss."
        )
    for kind, found in metrics._asdict().items():
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{kind}[{name!r}] is {what}; a metric is a tensor of one number. Sum it in the loss.")
