"""What fnppo and a peer give, compared: random batches within a tolerance, listed differences by their numbers."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from batches import Columns
from differences.difference import Call, Difference
from rows.row import Row

TOLERANCE = 1e-6


def version_of(peer: str) -> str:
    """`0.9.1` of `verl-0.9.1`."""
    return peer.partition("-")[2]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative where numbers are above 1; infinite where one of the two is NaN."""
    scale = expected.abs().max().clamp(min=1)
    worst = ((found.double() - expected.double()).abs().max() / scale).item()
    return math.inf if math.isnan(worst) else worst


class Line(NamedTuple):
    """A row beside one version: the largest difference of its values and of its gradients, or the error."""

    value: float
    gradient: float | None
    error: str = ""


def compare(row: Row, batches: list[Columns], results: list[Columns]) -> Line:
    """One row on all batches. Columns of values are compared where there is a learned token, gradients everywhere."""
    worst: dict[str, float] = {}
    for batch, found in zip(batches, results, strict=True):
        if "error" in found:
            return Line(math.inf, None, str(found["error"]))
        expected, mask = row.compute(batch), batch["response_mask"]
        for name in found.keys() & expected.keys():
            each = [found[name], expected[name]]
            if name != "gradient" and each[1].shape == mask.shape:
                each = [torch.where(mask > 0, column, 0) for column in each]
            worst[name] = max(worst.get(name, 0.0), apart(*each))
    gradient = worst.pop("gradient", None)
    return Line(max(worst.values()), gradient)


class RowResult(NamedTuple):
    """A line of the table, with its comparison for each peer."""

    row: Row
    lines: dict[str, Line]


def row_faults(result: RowResult) -> Iterator[str]:
    """What the table would say wrongly about a row."""
    row = result.row
    for peer, line in result.lines.items():
        expected = version_of(peer) not in {*row.absent, *row.differs}
        if agrees(line) != expected:
            yield f"{row.theirs} of {peer} {'differs' if expected else 'agrees'}: {line}"


def agrees(line: Line) -> bool:
    """Whether it is within the tolerance."""
    return not line.error and max(line.value, line.gradient or 0.0) <= TOLERANCE


class Shown(NamedTuple):
    """A call of a difference: what each peer gives, and what fnppo gives."""

    call: Call
    theirs: dict[str, list[float] | str]
    ours: list[float] | str


class DifferenceResult(NamedTuple):
    """A difference, with its numbers."""

    difference: Difference
    shown: list[Shown]


def with_our_numbers(difference: Difference) -> DifferenceResult:
    """The side of fnppo; peers are yet to come."""
    calls = difference.calls
    return DifferenceResult(
        difference, [Shown(call, {}, numbers(call.compute(call.columns), call.output)) for call in calls]
    )


def numbers(result: Columns, output: str) -> list[float] | str:
    """The numbers of an output, or the name of the error."""
    if "error" in result:
        return str(result["error"]).partition(":")[0]
    return [float(value) for value in result[output].flatten()]


def close(some: list[float] | str, other: list[float] | str, tolerance: float = TOLERANCE) -> bool:
    """Whether two lists of numbers are equal, up to the tolerance."""
    if isinstance(some, str) or isinstance(other, str):
        return False
    return len(some) == len(other) and all(
        abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(some, other, strict=True)
    )


def difference_faults(result: DifferenceResult) -> Iterator[str]:
    """What the page would say wrongly about a difference."""
    difference, shown = result
    for each in shown:
        right = difference.right[each.call.label]
        if not close(each.ours, right):
            yield f"{difference.name}, {each.call.label}: fnppo gives {each.ours}, the formula {right}"
    for peer in shown[0].theirs:
        version = version_of(peer)
        if version in difference.absent:
            continue
        same = all(close(each.theirs[peer], each.ours, 1e-12) for each in shown)
        if same and version in difference.versions:
            yield f"{difference.name}: {peer} has no difference any more"
        elif version not in difference.versions:
            for each in shown:
                if not close(each.theirs[peer], each.ours):
                    yield f"{difference.name}, {each.call.label}: {peer} differs too: {each.theirs[peer]}, not {each.ours}"
