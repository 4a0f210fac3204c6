"""Learning rates as functions of the number of steps taken so far.

A schedule maps the step count, a 0-dim integer tensor, to a rate, a 0-dim float64 tensor. The first step is step 0, and
no warm-up wastes it on a rate of 0: it uses the rate that ends it.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_count, check_number

Schedule: TypeAlias = Callable[[Int[Tensor, ""]], Float[Tensor, ""]]


def constant(value: float, *, warmup: int = 0) -> Schedule:
    """`value`, after a linear warm-up over the first `warmup` steps.

    >>> [round(constant(1.0, warmup=4)(torch.tensor(step)).item(), 4) for step in (0, 1, 3, 100)]
    [0.25, 0.5, 1.0, 1.0]
    """
    _check({"value": value}, {"warmup": warmup})
    return lambda step: value * _warmup(step, warmup)


def linear(start: float, end: float, *, steps: int, warmup: int = 0) -> Schedule:
    """From `start` to `end` in a straight line over `steps` steps (after the warm-up), then `end`.

    >>> [round(linear(1.0, 0.0, steps=4)(torch.tensor(step)).item(), 4) for step in (0, 1, 4, 100)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _check({"start": start, "end": end}, {"warmup": warmup}, steps=steps)
    return lambda step: (start + (end - start) * _progress(step, warmup, steps)) * _warmup(step, warmup)


def cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine from `peak` to `final` over `steps` steps after the warm-up (Loshchilov & Hutter, 1608.03983, eq. 5).

    >>> [round(cosine(1.0, steps=4)(torch.tensor(step)).item(), 4) for step in (0, 2, 4, 100)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _check({"peak": peak, "final": final}, {"warmup": warmup}, steps=steps)

    def schedule(step: Int[Tensor, ""]) -> Float[Tensor, ""]:
        decay = (1 + torch.cos(math.pi * _progress(step, warmup, steps))) / 2
        return (final + (peak - final) * decay) * _warmup(step, warmup)

    return schedule


def warmup_stable_decay(peak: float, *, warmup: int, stable: int, decay: int, final: float = 0.0) -> Schedule:
    """Up in a straight line, flat for `stable` steps, down in a straight line over `decay` steps (arXiv:2404.06395, eq. 1).

    >>> schedule = warmup_stable_decay(1.0, warmup=2, stable=2, decay=2)
    >>> [round(schedule(torch.tensor(step)).item(), 4) for step in range(7)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _check({"peak": peak, "final": final}, {"warmup": warmup, "stable": stable}, decay=decay)
    return lambda step: (peak + (final - peak) * _progress(step, warmup + stable, decay)) * _warmup(step, warmup)


def _warmup(step: Int[Tensor, ""], warmup: int) -> Float[Tensor, ""]:
    return (_count(step + 1) / max(warmup, 1)).clamp(max=1.0)


def _progress(step: Int[Tensor, ""], start: int, steps: int) -> Float[Tensor, ""]:
    return (_count(step - start) / steps).clamp(0.0, 1.0)


def _check(rates: dict[str, float], counts: dict[str, int], **lengths: int) -> None:
    for name, rate in rates.items():
        check_number(name, rate, least=0, remedy="It is a learning rate.")
    for name, count in counts.items():
        check_count(name, count, least=0, remedy="It counts steps; 0 is none.")
    for name, length in lengths.items():
        check_count(name, length, least=1, remedy="A schedule needs at least 1 step.")


def _count(steps: int | Tensor) -> Float[Tensor, ""]:
    """In float64, on the device that it is on."""
    return torch.as_tensor(steps, dtype=torch.float64, device=getattr(steps, "device", "cpu"))
