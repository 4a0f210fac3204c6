"""Wrong values in tensors: where they are, and what to say about the first of them."""

from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from fnppo.transforms import inside_transform


class Fault(NamedTuple):
    """Where something is wrong, and what to say about the first such place; "{value}" is its number in `values`."""

    bad: Bool[Tensor, "..."]
    message: str
    values: Tensor | None = None
    label: str | None = None
    """What the entries of a flat tensor are; rows where it is None."""


def refuse(*faults: Fault) -> None:
    """Raise the first fault there is. One question to the device for all; none inside a transform."""
    if inside_transform() or not faults:
        return
    found = torch.stack([fault.bad.any() for fault in faults]).tolist()
    for is_bad, (bad, message, values, label) in zip(found, faults, strict=True):
        if is_bad:
            place = bad.nonzero()[0].tolist()
            names = ("row", "column") if label is None else (label,)
            where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
            value = "" if values is None else values[tuple(place)].item()
            raise ValueError(f"{where}: {message.format(value=value)}")


def not_a_mask(name: str, mask: Tensor) -> Fault:
    """Anything but True/False and 0/1."""
    return Fault(
        (mask != 0) & (mask != 1),
        f"{name} is {{value}}; a mask holds True/False or 0/1. Sequence numbers of packed data are not a mask: give "
        "each sequence a row of its own.",
        mask,
    )


def not_finite(name: str, column: Tensor, learned: Bool[Tensor, "batch seq"]) -> Fault:
    """NaN or infinity at a learned token."""
    return Fault(
        learned & ~column.isfinite(),
        name + " is {value} at a learned token. Clear loss_mask there, or mend the value.",
        column,
    )


def outside_vocabulary(name: str, ids: Tensor, vocab_size: int, label: str | None) -> Fault:
    """Ids that a model has no entry for."""
    return Fault(
        (ids < 0) | (ids >= vocab_size),
        f"{name} holds {{value}}, but the model's vocabulary has {vocab_size} entries. Check that tokenizer and model "
        "belong together.",
        ids,
        label,
    )
