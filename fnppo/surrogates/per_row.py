"""Sums and means over the targets of a row, given back to each of them.

A row is one sequence, and is never split: these numbers are the same in every layout and in every micro-batch. Shapes do
not depend on values, so they work under torch.func transforms and torch.compile.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_tensor
from fnppo.types import Targets


def row_sum(values: Float[Tensor, " targets"], targets: Targets) -> Float[Tensor, " targets"]:
    """For each target, the sum of `values` over the targets of its row, which stand together: `Targets` are row-major.

    Raises:
        ValueError: there is not one value a target.

    >>> index, rows = torch.zeros(3, dtype=torch.long), torch.tensor([4, 4, 7])
    >>> row_sum(torch.tensor([1.0, 2.0, 5.0]), Targets(index, index, rows, index))
    tensor([3., 3., 5.])
    """
    check_tensor("values", values)
    if values.shape != targets.rows.shape:  # it would be broadcast
        raise ValueError(
            f"values has shape {tuple(values.shape)}; there are {targets.rows.numel()} targets. Give one a target."
        )
    segment = _segment(targets)
    return torch.zeros_like(values).index_add(0, segment, values)[segment]


def row_mean(values: Float[Tensor, " targets"], targets: Targets) -> Float[Tensor, " targets"]:
    """For each target, the mean of `values` over the targets of its row.

    >>> index, rows = torch.zeros(3, dtype=torch.long), torch.tensor([4, 4, 7])
    >>> row_mean(torch.tensor([1.0, 2.0, 5.0]), Targets(index, index, rows, index))
    tensor([1.5000, 1.5000, 5.0000])
    """
    return row_sum(values, targets) / row_sum(torch.ones_like(values), targets)


def _segment(targets: Targets) -> Int[Tensor, " targets"]:
    """0 for the targets of the first row that has any, 1 for those of the next, and so on: targets are row-major."""
    first = torch.zeros_like(targets.rows[:1])
    return torch.cat([first, (targets.rows[1:] != targets.rows[:-1]).to(first.dtype)]).cumsum(0)
