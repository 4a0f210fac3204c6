"""What a difference is, and batches that fit on a line."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from batches import Columns
from torch import Tensor

BUG = "A bug"
CLAMP = "A clamp"
DEFAULT = "A default"
ROUNDING = "Rounding"
SPLIT = "A normaliser that depends on the split"
SELECTION = "A selection that depends on the split"
MEANING = "Another definition"
ALL = ("0.7.0", "0.8.0", "0.9.1")
OLD = ("0.7.0",)
BEFORE_091 = ("0.7.0", "0.8.0")
RECENT = ("0.8.0", "0.9.1")


class Call(NamedTuple):
    """One number or column that is compared.

    Attributes:
        label: what it is, for the reader.
        output: its name in the results.
        kind, options: the function of the peer's side, and its arguments.
        columns: the batch.
        compute: our side, columns -> results.
    """

    label: str
    output: str
    kind: str
    options: dict[str, Any]
    columns: Columns
    compute: Callable[[Columns], Columns]


class Difference(NamedTuple):
    """One difference.

    Attributes:
        name, title: to be pointed at, and to be read.
        kind: which kind of difference it is.
        versions: those that have it.
        reason: why, with the formula of the paper that decides; Markdown.
        batch: the batch in words.
        calls: what is compared.
        right: label of a call -> what the formula gives, derived by hand.
        peer: verl or trl.
        absent: versions that do not have the function.
    """

    name: str
    title: str
    kind: str
    versions: tuple[str, ...]
    reason: str
    batch: str
    calls: list[Call]
    right: dict[str, list[float]]
    peer: str = "verl"
    absent: tuple[str, ...] = ()


def matrix(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """A column of the batch."""
    return torch.tensor(rows, dtype=dtype)


def both(
    kind: str, options: dict[str, Any], columns: Columns, compute: Callable[[Columns], Columns], what: str = ""
) -> list[Call]:
    """Value and gradient of one call."""
    outputs = {"value": "value", "gradient": "gradient"}
    return [Call(f"{what}{label}", output, kind, options, columns, compute) for label, output in outputs.items()]


def tokens(log_prob: list[list[float]], mask: list[list[float]] | None = None, **columns: list[list[float]]) -> Columns:
    """A batch for a loss: old log-probs 0 and advantages 1 where nothing else is said."""
    current = matrix(*log_prob)
    there = torch.ones_like(current) if mask is None else matrix(*mask)
    plain = {"old_log_prob": torch.zeros_like(current), "advantages": torch.ones_like(current)}
    given = {name: matrix(*values) for name, values in columns.items()}
    return {"log_prob": current, "response_mask": there} | plain | given
