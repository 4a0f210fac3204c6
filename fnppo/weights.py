"""From a mask to loss weights: the one place where a loss is normalised.

    loss = Σ_t w_t · l_t        over the targets of the mini-batch

`w` is data. It is computed once, from the whole mini-batch, before any split. After that nothing divides, so padding,
packing, micro-batches and ranks only ever add, and every split gives the same loss and the same gradient.

Each function here returns the batch with `loss_weights` filled in. Places where `loss_mask` is clear get weight 0; a
batch without any learned token gets all zeros, hence loss 0 and gradient 0. "Sequences" are the rows with at least one
learned token: what a mask or a filter has removed is in no divisor. Weights are float32, or float64 like the advantages.
A malformed batch is a `ValueError` (see `fnppo.checks`).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnppo.arguments import check_number
from fnppo.checks import check_batch
from fnppo.types import PaddedBatch


def token_mean(batch: PaddedBatch) -> PaddedBatch:
    """w = 1 / (number of learned tokens): every token counts the same (DAPO, arXiv:2503.14476, eq. 8).

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3, 4], [5]])
    >>> token_mean(batch).loss_weights
    tensor([[0.0000, 0.2500, 0.2500, 0.2500],
            [0.0000, 0.2500, 0.0000, 0.0000]])
    """
    mask = _mask(batch)
    return batch._replace(loss_weights=mask / _at_least_one(mask.sum()))


def token_sum(batch: PaddedBatch) -> PaddedBatch:
    """w = 1: the plain sum over learned tokens.

    >>> from fnppo import padded_batch
    >>> token_sum(padded_batch([[1]], [[2, 3]])).loss_weights
    tensor([[0., 1., 1.]])
    """
    mask = _mask(batch)
    return batch._replace(loss_weights=mask)


def sequence_mean(batch: PaddedBatch) -> PaddedBatch:
    """w = 1 / (sequences · tokens of the sequence): mean over sequences of the mean over tokens.

    The aggregation of GRPO (DeepSeekMath, arXiv:2402.03300, eq. 3).

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3, 4], [5]])
    >>> sequence_mean(batch).loss_weights
    tensor([[0.0000, 0.1667, 0.1667, 0.1667],
            [0.0000, 0.5000, 0.0000, 0.0000]])
    """
    mask = _mask(batch)
    tokens = mask.sum(1, keepdim=True)
    return batch._replace(loss_weights=mask / _at_least_one(tokens) / _at_least_one(_sequences(mask)))


def sequence_sum(batch: PaddedBatch) -> PaddedBatch:
    """w = 1 / sequences: mean over sequences of the sum over tokens.

    >>> from fnppo import padded_batch
    >>> sequence_sum(padded_batch([[1], [1]], [[2, 3], [4]])).loss_weights
    tensor([[0.0000, 0.5000, 0.5000],
            [0.0000, 0.5000, 0.0000]])
    """
    mask = _mask(batch)
    return batch._replace(loss_weights=mask / _at_least_one(_sequences(mask)))


def constant_norm(batch: PaddedBatch, *, horizon: float) -> PaddedBatch:
    """w = 1 / (sequences · horizon): `sequence_sum` over a constant (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Args:
        horizon: the constant, usually the largest response length that the sampler allows. It does not depend on the
            width of the batch.

    Raises:
        ValueError: horizon is not above 0.

    >>> from fnppo import padded_batch
    >>> constant_norm(padded_batch([[1], [1]], [[2, 3], [4]]), horizon=4).loss_weights
    tensor([[0.0000, 0.1250, 0.1250],
            [0.0000, 0.1250, 0.0000]])
    """
    check_number("horizon", horizon, above=0, remedy="Use the largest number of response tokens.")
    mask = _mask(batch)
    return batch._replace(loss_weights=mask / _at_least_one(_sequences(mask)) / horizon)


def group_token_mean(batch: PaddedBatch) -> PaddedBatch:
    """w = 1 / (groups · tokens of the group): mean over prompt groups of the token mean within the group.

    Raises:
        ValueError: the batch has no `groups`.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3, 4], [5]], groups=[0, 7])
    >>> group_token_mean(batch).loss_weights
    tensor([[0.0000, 0.1667, 0.1667, 0.1667],
            [0.0000, 0.5000, 0.0000, 0.0000]])
    """
    mask = _mask(batch)
    if batch.groups is None:
        raise ValueError("group_token_mean needs batch.groups, the prompt group of each row. Give groups=... .")
    group = batch.groups.unique(return_inverse=True)[1]
    tokens = mask.new_zeros(group.numel()).index_add(0, group, mask.sum(1))  # learned tokens of each group
    per_row = _at_least_one(tokens[group]) * _at_least_one((tokens > 0).sum())
    return batch._replace(loss_weights=mask / per_row[:, None])


def _mask(batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    mask: Bool[Tensor, "batch seq"] = check_batch(batch).loss_mask
    dtype = torch.float32 if batch.advantages is None else batch.advantages.dtype
    return mask.to(torch.promote_types(dtype, torch.float32))


def _sequences(mask: Float[Tensor, "batch seq"]) -> Int[Tensor, ""]:
    return (mask.sum(1) > 0).sum()


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1)
