"""Prompt groups: which rows are responses to one prompt, and statistics over them, given to each row.

Rows of a group have the same id, which may be any integer, and may stand anywhere. No shape here depends on the ids, so
that all of it runs under torch.func and torch.compile, too: a buffer has room for as many groups as there are rows.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def group_index(groups: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """The groups numbered from 0 on, as the inverse of `torch.unique` numbers them.

    >>> group_index(torch.tensor([7, -5, 7, 0]))
    tensor([2, 0, 2, 1])
    """
    ids, order = groups.sort()
    begins = torch.cat([torch.zeros_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])
    return torch.empty_like(order).scatter(0, order, begins.cumsum(0))


def group_sum(values: Shaped[Tensor, "batch *rest"], index: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch *rest"]:
    """The sum over the rows of its group, for each row.

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]))
    tensor([5., 2., 5.])
    """
    return torch.zeros_like(values).index_add(0, index, values).index_select(0, index)


def group_max(values: Float[Tensor, "batch *rest"], index: Int[Tensor, " batch"]) -> Float[Tensor, "batch *rest"]:
    """The largest value among the rows of its group, for each row.

    >>> group_max(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]))
    tensor([4., 2., 4.])
    """
    places = index.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    largest = torch.full_like(values, -torch.inf).scatter_reduce(0, places, values, "amax")
    return largest.index_select(0, index)


def group_count(index: Int[Tensor, " batch"], kept: Bool[Tensor, "batch *rest"]) -> Int[Tensor, "batch *rest"]:
    """How many rows of its group are kept, for each row."""
    return group_sum(kept.long(), index)


def above_lowest(
    values: Float[Tensor, "batch *rest"], index: Int[Tensor, " batch"], kept: Bool[Tensor, "batch *rest"]
) -> Float[Tensor, "batch *rest"]:
    """Values counted from the smallest that is kept in their group; 0 where they are not kept.

    Differences to a mean are the same, but exactly 0 where all values are equal, as the mean is then one of 0s. In float32
    the mean of seven 0.7 is not 0.7, and a division by the standard deviation would blow the residue up.
    """
    lowest = -group_max(torch.where(kept, -values.detach(), -torch.inf), index)
    return torch.where(kept, values - lowest, 0)


def group_centred(
    values: Float[Tensor, "batch *rest"], index: Int[Tensor, " batch"], kept: Bool[Tensor, "batch *rest"]
) -> Float[Tensor, "batch *rest"]:
    """Value minus the mean of those that are kept in its group; exactly 0 where these are equal, and where it is not kept."""
    above = above_lowest(values, index, kept)
    return torch.where(kept, above - group_sum(above, index) / group_count(index, kept).clamp(min=1), 0)


def root(variance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The square root, with gradient 0 instead of infinity at 0.

    >>> torch.func.grad(root)(torch.tensor(0.0))
    tensor(0.)
    """
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), 0)
