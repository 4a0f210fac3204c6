"""Ratios of trainer and sampler, what is made of them as weights, and where the weights go. See `fnppo.corrections`."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_floating, check_hyper
from fnppo.corrections.diagnostics import both_logprobs, checked_weights, or_one, row_means
from fnppo.corrections.masks import inside
from fnppo.types import PaddedBatch


def token_ratios(batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    """ρ_t = π_old(token_t) / π_sampler(token_t) at each learned token.

    As weights they are biased, since the tokens before were drawn by the sampler too, but their variance is low.

    Args:
        batch: needs `old_logprobs` and `extra["sampler_logprobs"]`.

    Returns:
        In float32 or better. A ratio that is too large for a float is inf, which `truncate`, `inside` and
        `mask_outside` take as it is meant.

    Raises:
        ValueError: a column is missing, malformed, or not finite at a learned token.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1]], [[2, 3]], old_logprobs=[[-1.0, -2.0]])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -2.0, -2.5]])})
    >>> token_ratios(batch)
    tensor([[0.0000, 2.7183, 1.6487]])
    """
    old, sampler, mask = both_logprobs(batch)
    return torch.where(mask, (old - sampler).exp(), 0)


def sequence_ratios(batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    """Π ρ_t over the learned tokens of the row, multiplied in log space.

    As weights they are unbiased; their variance grows with the length.

    Args, returns, raises: as `token_ratios`.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1]], [[2, 3]], old_logprobs=[[-1.0, -2.0]])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -2.0, -2.5]])})
    >>> sequence_ratios(batch)
    tensor([[0.0000, 4.4817, 4.4817]])
    """
    old, sampler, mask = both_logprobs(batch)
    return torch.where(mask, (old - sampler).sum(1, keepdim=True).exp(), 0)


def geometric_ratios(batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    """(Π ρ_t)^(1/n), the geometric mean over the n learned tokens of the row: a distance that does not grow with n.

    For masks rather than weights, as it is no ratio of two probabilities.

    Args, returns, raises: as `token_ratios`.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1]], [[2, 3]], old_logprobs=[[-1.0, -2.0]])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -2.0, -2.5]])})
    >>> geometric_ratios(batch)
    tensor([[0.0000, 2.1170, 2.1170]])
    """
    old, sampler, mask = both_logprobs(batch)
    return torch.where(mask, row_means(old - sampler, mask).exp(), 0)


def truncate(weights: Float[Tensor, "batch seq"], *, at: float | Tensor) -> Float[Tensor, "batch seq"]:
    """min(w, at). Bounds the variance, and keeps every token.

    Raises:
        ValueError: `at` is not above 0.

    >>> truncate(torch.tensor([[0.0, 0.5, 4.0]]), at=2.0)
    tensor([[0.0000, 0.5000, 2.0000]])
    """
    check_floating("weights", weights)
    check_hyper("at", at, above=0, infinite=True, remedy="It is the largest weight, such as 2.")
    return torch.where(weights > at, at, weights)


def mask_outside(
    weights: Float[Tensor, "batch seq"], *, low: float | Tensor, high: float | Tensor
) -> Float[Tensor, "batch seq"]:
    """w where low <= w <= high, else 0.

    Raises:
        ValueError: `low` is below 0 or above `high`.

    >>> mask_outside(torch.tensor([[0.0, 0.5, 4.0]]), low=0.5, high=2.0)
    tensor([[0.0000, 0.5000, 0.0000]])
    """
    return torch.where(inside(weights, low=low, high=high), weights, 0)


def token_normalized(weights: Float[Tensor, "batch seq"], batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    """w / (mean of w over the learned tokens): self-normalised weights, which leave the size of the loss as it was.

    The mean is over `batch`: give the whole mini-batch, of all ranks. A token that a mask has given weight 0 counts in it.
    Weights that are all 0 stay 0.

    Raises:
        ValueError: a weight is negative or not finite at a learned token, the batch is malformed, or shapes differ.

    >>> from fnppo import padded_batch
    >>> token_normalized(torch.tensor([[0.0, 1.0, 3.0]]), padded_batch([[1]], [[2, 3]]))
    tensor([[0.0000, 0.5000, 1.5000]])
    """
    weights, mask = _at_most_one(weights, batch)
    return weights / or_one(weights.sum() / or_one(mask.sum()))


def sequence_normalized(weights: Float[Tensor, "batch seq"], batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    """w / (mean over the sequences of their mean of w): the same where each sequence counts once, as with `sequence_mean`.

    Raises:
        ValueError: as `token_normalized`.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3, 4], [5]])
    >>> sequence_normalized(torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 3.0, 0.0, 0.0]]), batch)
    tensor([[0.0000, 0.5000, 0.5000, 0.5000],
            [0.0000, 1.5000, 0.0000, 0.0000]])
    """
    weights, mask = _at_most_one(weights, batch)
    return weights / or_one(row_means(weights, mask).sum() / or_one(mask.any(1).sum()))


def with_importance_weights(batch: PaddedBatch, weights: Float[Tensor, "batch seq"]) -> PaddedBatch:
    """The batch with `extra["importance_weights"]`, which `ppo_loss(surrogate=weighted(...))` multiplies by; no other loss
    reads it. A mask of booleans is taken as weights of 0 and 1.

    A token of weight 0 adds no policy loss, but is still a learned token: it counts in the divisors of `token_mean` and
    its siblings, in the metrics, in the entropy and in the KL. So the loss of the others does not grow, and its
    expectation stays that of the weighted sum. To take tokens out of all that, use `reject`.

    Raises:
        ValueError: as `token_normalized`.

    >>> from fnppo import padded_batch
    >>> batch = with_importance_weights(padded_batch([[1]], [[2, 3]]), torch.tensor([[0.0, 1.0, 0.0]]))
    >>> batch.extra["importance_weights"]
    tensor([[0., 1., 0.]])
    """
    weights, _ = checked_weights(weights.float() if weights.dtype == torch.bool else weights, batch)
    return batch._replace(extra=batch.extra | {"importance_weights": weights})


def _at_most_one(weights: Tensor, batch: PaddedBatch) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Checked weights, divided by the largest, and the mask: a sum of large ones could overflow."""
    weights, mask = checked_weights(weights, batch)
    return weights / or_one(weights.amax() if weights.numel() else weights.sum()), mask
