"""Masks over tokens that another policy has sampled, True where a token is kept; and what takes the others out.

See `fnppo.corrections` for what they are made of, and how they are composed. Masks are combined with `&`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_floating, check_hyper, check_tensor
from fnppo.checks import check_batch
from fnppo.corrections.diagnostics import both_logprobs, check_fits, row_means
from fnppo.kl import KLEstimator, kl_k3
from fnppo.transforms import inside_transform
from fnppo.types import PaddedBatch


def inside(
    ratios: Float[Tensor, "batch seq"], *, low: float | Tensor, high: float | Tensor
) -> Bool[Tensor, "batch seq"]:
    """True where low <= ratio <= high.

    Raises:
        ValueError: `low` is below 0 or above `high`.

    >>> inside(torch.tensor([[0.0, 0.5, 4.0]]), low=0.5, high=2.0)
    tensor([[False,  True, False]])
    """
    check_floating("ratios", ratios)
    remedy = "It bounds a ratio, which is 1 where both policies agree."
    check_hyper("low", low, least=0, remedy=remedy)
    check_hyper("high", high, above=0, infinite=True, remedy=remedy)
    if not inside_transform() and bool(low > high):
        raise ValueError(f"low is {low}, high is {high}: nothing lies between them. Exchange them.")
    return (ratios >= low) & (ratios <= high)


def whole_rows(kept: Bool[Tensor, "batch seq"], batch: PaddedBatch) -> Bool[Tensor, "batch seq"]:
    """True in the rows of which every learned token is kept: one token that is not takes the row with it.

    Raises:
        ValueError: the batch is malformed, or `kept` is no mask of its shape.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3], [4, 5]])
    >>> whole_rows(torch.tensor([[True, True, True], [True, True, False]]), batch)
    tensor([[ True,  True,  True],
            [False, False, False]])
    """
    mask = check_batch(batch).loss_mask
    _check_mask(kept, batch)
    return (kept | ~mask).all(1, keepdim=True).expand(mask.shape)


def near_sampler(batch: PaddedBatch, *, most: float | Tensor, kl: KLEstimator = kl_k3) -> Bool[Tensor, "batch seq"]:
    """True in the rows whose mean estimate of KL(π_sampler ‖ π_old) over learned tokens is at most `most`.

    With d_t = -log ρ_t = log π_sampler - log π_old, k3 is ρ_t - 1 - log ρ_t. k1 bounds the geometric mean of the ratios
    from below only.

    Args:
        batch: as in `token_ratios`.
        most: in nats a token, above 0.
        kl: an estimator from `fnppo.kl`.

    Raises:
        ValueError: as `token_ratios`, or `most` is not above 0.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2], [3]], old_logprobs=[[-1.0], [-2.0]])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -1.01], [0.0, -1.0]])})
    >>> near_sampler(batch, most=0.1)
    tensor([[ True,  True],
            [False, False]])
    """
    check_hyper("most", most, above=0, infinite=True, remedy="It is a KL in nats, such as 0.1.")
    old, sampler, mask = both_logprobs(batch)
    estimates = kl(sampler.flatten(), old.flatten()).reshape(mask.shape)
    return (row_means(estimates, mask) <= most).expand(mask.shape)


def off_policy_mask(batch: PaddedBatch, *, threshold: float | Tensor) -> Bool[Tensor, "batch seq"]:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): False where A_t < 0 and, in the mean over the
    learned tokens of the row, log(π_sampler / π_old) > threshold.

    What the policy would hardly do any more is not unlearned further; good tokens are always kept. In the paper the mask
    multiplies the policy loss alone, as `with_importance_weights` has it; divisors and KL are those of all tokens. The
    policy is the current one: for that, put its log-probs into `old_logprobs`.

    Args:
        batch: as in `token_ratios`, and with `advantages`.
        threshold: δ, in nats a token.

    Raises:
        ValueError: as `token_ratios`, there are no advantages, or `threshold` is no number.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2], [3]], old_logprobs=[[-2.0], [-2.0]], advantages=[1.0, -1.0])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -1.0], [0.0, -1.0]])})
    >>> off_policy_mask(batch, threshold=0.5)
    tensor([[ True,  True],
            [ True, False]])
    """
    check_hyper("threshold", threshold, infinite=True, remedy="It is a mean of log-ratios, such as 0.1.")
    old, sampler, mask = both_logprobs(batch)
    if batch.advantages is None:
        raise ValueError("off_policy_mask needs batch.advantages. Compute them first, such as with grpo_advantages.")
    far = row_means(sampler - old, mask) > threshold
    return ~(mask & (batch.advantages < 0) & far)


def reject(batch: PaddedBatch, kept: Bool[Tensor, "batch seq"]) -> PaddedBatch:
    """The batch with `loss_mask` cleared where a token is not kept. The tokens stay, as context of those after them.

    What is rejected is in no sum and in no divisor: the loss is the mean over what is left, which so has a larger share
    each, as if the rest had never been sampled. To leave the divisors as they are, use weights of 0 instead
    (`with_importance_weights`). Weights made before stay as they are: normalise them afterwards.

    Raises:
        ValueError: as `whole_rows`, or the batch has `loss_weights` already, whose divisor counts what is rejected now.

    >>> from fnppo import padded_batch, token_mean
    >>> batch = padded_batch([[1]], [[2, 3]])
    >>> token_mean(reject(batch, torch.tensor([[True, True, False]]))).loss_weights
    tensor([[0., 1., 0.]])
    """
    batch = check_batch(batch)
    _check_mask(kept, batch)
    if batch.loss_weights is not None:
        raise ValueError(
            "the batch has loss_weights, whose divisor counts the tokens that are rejected now. Reject first, then call "
            "token_mean or a sibling."
        )
    return batch._replace(loss_mask=batch.loss_mask & kept)


def _check_mask(kept: Tensor, batch: PaddedBatch) -> None:
    check_tensor("kept", kept)
    if kept.dtype != torch.bool:
        raise ValueError(f"kept has dtype {kept.dtype}; a mask of booleans is needed. Compare: weights > 0.")
    check_fits("kept", kept, batch)
