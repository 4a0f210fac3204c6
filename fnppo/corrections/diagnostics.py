"""How far the policy that is trained is from the one that has sampled: diagnostics, and the columns they are read from.

With ρ_t = π_old(token_t) / π_sampler(token_t) at the learned tokens, N of them, in R rows; see `fnppo.corrections`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_device, check_floating
from fnppo.checks import check_batch
from fnppo.faults import Fault, not_finite, refuse
from fnppo.types import PaddedBatch


def off_policy_diagnostics(batch: PaddedBatch) -> dict[str, Float[Tensor, ""]]:
    """Distances between trainer and sampler over a batch, from its untouched ratios.

        mismatch_k1, mismatch_k3     mean over tokens of -log ρ_t, and of ρ_t - 1 - log ρ_t: estimates of
                                     KL(π_sampler ‖ π_old) in nats a token; 0 where both agree
        chi2_token                   mean over tokens of ρ_t², minus 1
        chi2_sequence                mean over rows of (Π_t ρ_t)², minus 1: the variance of sequence weights
        ess_token, ess_sequence      (Σ w)² / (n Σ w²) with w = ρ_t, n = N; or w = Π_t ρ_t, n = R. The effective sample
                                     size as a share of the samples: from 1 / n to 1
        perplexity_trainer, perplexity_sampler
                                     mean over rows of exp(- mean over the row's tokens of log π)
        log_perplexity_gap           mean over rows of the row's mean of -log ρ_t
        smallest_ratio, largest_ratio
                                     of ρ_t

    They do not add over micro-batches: give the whole batch. Scalars in float64, since a squared product of ratios soon
    leaves float32; what float64 cannot hold is inf. Over no token, all are NaN.

    Args:
        batch: needs `old_logprobs` and `extra["sampler_logprobs"]`.

    Raises:
        ValueError: a column is missing, malformed, or not finite at a learned token.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1]], [[2, 3]], old_logprobs=[[-1.0, -2.0]])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -2.0, -2.5]])})
    >>> found = off_policy_diagnostics(batch)
    >>> round(found["mismatch_k1"].item(), 4), round(found["largest_ratio"].item(), 4), round(found["ess_token"].item(), 4)
    (-0.75, 2.7183, 0.9434)
    """
    old, sampler, mask = both_logprobs(batch)
    old, sampler, rows = old.double(), sampler.double(), mask.any(1)
    tokens, sequences = old - sampler, (old - sampler).sum(1)  # log-ratios, 0 where nothing is learned
    trainer_means, sampler_means = (row_means(x, mask)[:, 0] for x in (old, sampler))
    return {
        "mismatch_k1": -_mean(tokens, mask),
        "mismatch_k3": _mean(tokens.expm1() - tokens, mask),
        "chi2_token": _mean((2 * tokens).expm1(), mask),
        "chi2_sequence": _mean((2 * sequences).expm1(), rows),
        "ess_token": _effective(torch.where(mask, tokens, -math.inf).flatten(), mask.sum()),
        "ess_sequence": _effective(torch.where(rows, sequences, -math.inf), rows.sum()),
        "perplexity_trainer": _mean((-trainer_means).exp(), rows),
        "perplexity_sampler": _mean((-sampler_means).exp(), rows),
        "log_perplexity_gap": _mean(sampler_means - trainer_means, rows),
        "smallest_ratio": _least(tokens, mask).exp(),
        "largest_ratio": (-_least(-tokens, mask)).exp(),
    }


def effective_share(weights: Float[Tensor, "batch seq"], batch: PaddedBatch) -> Float[Tensor, ""]:
    """(Σ w)² / (N Σ w²) over the learned tokens: the effective sample size of weights, as a share of the N tokens.

    1 where all weights are equal, 1 / N where one holds everything; NaN where there is none or all are 0.

    Raises:
        ValueError: a weight is negative or not finite at a learned token, the batch is malformed, or shapes differ.

    >>> from fnppo import padded_batch
    >>> effective_share(torch.tensor([[0.0, 1.0, 3.0]]), padded_batch([[1]], [[2, 3]]))
    tensor(0.8000)
    """
    weights, mask = checked_weights(weights, batch)
    return _effective(weights.log().flatten(), mask.sum())


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """NaN over nothing."""
    return torch.where(where, values, 0).sum() / where.sum()


def _least(values: Tensor, where: Tensor) -> Tensor:
    """NaN over nothing."""
    found = torch.where(where, values, math.inf).flatten()
    return torch.where(where.any(), torch.cat([found, found.new_tensor([math.inf])]).amin(), math.nan)


def _effective(logs: Tensor, count: Tensor) -> Tensor:
    """(Σ w)² / (count Σ w²) from log w, where no square overflows."""
    return (2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)).exp() / count


def both_logprobs(
    batch: PaddedBatch,
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """(old log-probs, the sampler's, loss mask), in float32 or better; log-probs are 0 where the mask is clear. Or a `ValueError`."""
    batch = check_batch(batch)
    sampler = batch.extra.get("sampler_logprobs")
    if batch.old_logprobs is None or sampler is None:
        missing = "old_logprobs" if batch.old_logprobs is None else 'extra["sampler_logprobs"]'
        raise ValueError(
            f"a correction needs batch.{missing}. Put the sampler's log-probs into extra['sampler_logprobs'], and those "
            "of compute_logprobs into old_logprobs."
        )
    check_floating("extra['sampler_logprobs']", sampler)
    mask = batch.loss_mask
    refuse(not_finite("extra['sampler_logprobs']", sampler, mask))
    dtype = torch.promote_types(torch.promote_types(batch.old_logprobs.dtype, sampler.dtype), torch.float32)
    old, sampler = (torch.where(mask, column.to(dtype), 0) for column in (batch.old_logprobs, sampler))
    return old, sampler, mask


def row_means(values: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch 1"]:
    """Over the learned tokens of each row; `values` are 0 at all others. 0 for a row without."""
    return values.sum(1, keepdim=True) / or_one(mask.sum(1, keepdim=True))


def or_one(number: Tensor) -> Tensor:
    """What may be divided by."""
    return torch.where(number == 0, 1, number)


def checked_weights(
    weights: Tensor, batch: PaddedBatch
) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """(weights, 0 where the mask is clear; loss mask), or a `ValueError`."""
    mask = check_batch(batch).loss_mask
    check_floating("weights", weights)
    check_fits("weights", weights, batch)
    refuse(
        Fault(
            mask & ~(weights.isfinite() & (weights >= 0)),
            "the weight is {value} at a learned token; it must be a finite number of at least 0. Truncate ratios before "
            "they become weights.",
            weights,
        )
    )
    return torch.where(mask, weights, 0), mask


def check_fits(name: str, column: Tensor, batch: PaddedBatch) -> None:
    """Raise a `ValueError` where a column has not one value a token of the batch."""
    if column.shape != batch.loss_mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(column.shape)}, the batch {tuple(batch.loss_mask.shape)}. Make it from this batch."
        )
    check_device(name, column, "loss_mask", batch.loss_mask)
