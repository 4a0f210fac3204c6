"""Single arguments: numbers in their range, and the type, dtype and device of a tensor. No tensor's values are read.

Each is answered by a `ValueError` with the name, what was given, what is needed and the way out.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor

from fnppo.transforms import inside_transform

LARGEST = torch.finfo(torch.float64).max
"""Of finite numbers."""


def check_count(name: str, value: Any, *, least: int, remedy: str) -> int:
    """`value` as an int, or a `ValueError`: NaN, fractions, strings and numbers below `least` are none.

    >>> check_count("max_tokens", 0.5, least=1, remedy="Raise it.")
    Traceback (most recent call last):
        ...
    ValueError: max_tokens is 0.5; it must be a whole number of at least 1. Raise it.
    """
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError):
        count = least - 1
    if count < least:
        raise ValueError(f"{name} is {value}; it must be a whole number of at least {least}. {remedy}")
    return count


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    infinite: bool = False,
    remedy: str,
) -> None:
    """Raise a `ValueError` if a hyper-parameter is no number, NaN or out of range. Inside a transform it is unknown.

    >>> check_number("horizon", float("nan"), above=0, remedy="Use the largest number of response tokens.")
    Traceback (most recent call last):
        ...
    ValueError: horizon is nan; it must be a finite number above 0. Use the largest number of response tokens.
    """
    if isinstance(value, Tensor) and inside_transform():
        return
    limits = (least, above, most, below, infinite)
    try:
        good = _number_is_within(value, *limits) if isinstance(value, int | float) else _all_are_within(value, *limits)
        if good:
            return
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    low = f" above {above}" if above > -math.inf else f" of at least {least}" if least > -math.inf else ""
    high = f" below {below}" if below < math.inf else f" of at most {most}" if most < math.inf else ""
    kind = "a number" if infinite else "a finite number"
    raise ValueError(f"{name} is {value}; it must be {kind}{' and'.join(filter(None, (low, high)))}. {remedy}")


def _number_is_within(number: float, least: float, above: float, most: float, below: float, infinite: bool) -> bool:
    """In plain Python, which is quick, and by comparisons alone, which torch.compile reads of a number that it has made
    symbolic: `math.isfinite` of one would break the graph. NaN is within nothing.
    """
    known = abs(number) <= LARGEST or (infinite and abs(number) == math.inf)
    from_below = least <= number and (number > above or above == -math.inf)
    return known and from_below and number <= most and (number < below or below == math.inf)


def _all_are_within(value: Any, least: float, above: float, most: float, below: float, infinite: bool) -> bool:
    """The same of the numbers in a tensor, or in what torch can make one of."""
    number = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
    good = (number >= least) & (number <= most) & (number.isfinite() | (infinite & number.isinf()))
    good = good & ((number > above) | (above == -math.inf)) & ((number < below) | (below == math.inf))
    return bool(number.numel()) and bool(good.all())


def check_hyper(name: str, number: Any, per_target: Tensor | None = None, **limits: Any) -> None:
    """Raise a `ValueError` if a hyper-parameter is out of its limits (see `check_number`), or a tensor of neither one
    number nor one a target: it would be broadcast.
    """
    if per_target is not None and isinstance(number, Tensor) and number.shape == per_target.shape == (0,):
        return  # a micro-batch without targets
    check_number(name, number, **limits)
    shapes = [()] if per_target is None else [(), tuple(per_target.shape)]
    if isinstance(number, Tensor) and tuple(number.shape) not in shapes:
        raise ValueError(
            f"{name} has shape {tuple(number.shape)}; it needs {' or '.join(map(str, shapes))}. Give a number."
        )


def check_type(name: str, value: Any, wanted: type, remedy: str) -> None:
    """Raise a `ValueError` if `value` is of another type."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name} is a {type(value).__name__}; a {wanted.__name__} is needed. {remedy}")


def check_floating(name: str, value: Any) -> None:
    """Raise a `ValueError` if `value` is no tensor of floating point."""
    check_tensor(name, value)
    if not value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; it needs floating point. Call .float() on it.")


def check_tensor(name: str, value: Any) -> None:
    """Raise a `ValueError` if `value` is no tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; a tensor is needed. Use torch.as_tensor.")
    if value.layout != torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; a dense tensor is needed. Call .to_dense() on it.")


def check_ids(name: str, ids: Tensor) -> None:
    """Raise a `ValueError` unless `ids` is int32 or int64, which are what models can look up."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {ids.dtype}; token ids are integers: int32 or int64. Call .long() on it.")


def check_whole(name: str, numbers: Tensor) -> None:
    """Raise a `ValueError` unless `numbers` has an integer dtype."""
    if numbers.is_floating_point() or numbers.is_complex():
        raise ValueError(f"{name} has dtype {numbers.dtype}; it needs integers. Number them, and call .long() on it.")


def check_device(name: str, column: Tensor, of: str, other: Tensor) -> None:
    """Raise a `ValueError` if two tensors are on different devices."""
    if column.device != other.device:
        raise ValueError(f"{name} is on {column.device}, {of} on {other.device}. Move one of them.")
