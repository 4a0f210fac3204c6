"""How far the policy that is trained is from the one that has sampled: diagnostics, and the columns they are read from.

With ρ_t = π_old(token_t) / π_sampler(token_t) at the learned tokens, N of them, in R rows; see `fnppo.corrections`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_device, check_floating
from fnppo.checks import check_batch
from fnppo.faults import Fault, not_finite, refuse
from fnppo.types import PaddedBatch


def off_policy_diagnostics(batch: PaddedBatch) -> dict[str, float]:
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

    They do not add over micro-batches: give the whole batch. They are numbers for a log, not for a transform, computed on
    the CPU in float64; what no float holds is inf. Over no token, all are NaN.

    Args:
        batch: needs `old_logprobs` and `extra["sampler_logprobs"]`.

    Raises:
        ValueError: a column is missing, malformed, or not finite at a learned token.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1]], [[2, 3]], old_logprobs=[[-1.0, -2.0]])
    >>> batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -2.0, -2.5]])})
    >>> found = off_policy_diagnostics(batch)
    >>> round(found["mismatch_k1"], 4), round(found["largest_ratio"], 4), round(found["ess_token"], 4)
    (-0.75, 2.7183, 0.9434)
    """
    old, sampler, mask = (column.detach().cpu() for column in both_logprobs(batch))
    old, sampler = old.double(), sampler.double()
    rows = mask.any(1)
    tokens = (old - sampler)[mask]
    sequences = (old - sampler).sum(1)[rows]
    means = [row_means(x, mask)[rows, 0] for x in (old, sampler)]
    found = {
        "mismatch_k1": -tokens.mean(),
        "mismatch_k3": (tokens.expm1() - tokens).mean(),
        "chi2_token": (2 * tokens).expm1().mean(),
        "chi2_sequence": (2 * sequences).expm1().mean(),
        "ess_token": _effective(tokens, tokens.numel()),
        "ess_sequence": _effective(sequences, sequences.numel()),
        "perplexity_trainer": (-means[0]).exp().mean(),
        "perplexity_sampler": (-means[1]).exp().mean(),
        "log_perplexity_gap": (means[1] - means[0]).mean(),
        "smallest_ratio": tokens.min().exp() if tokens.numel() else tokens.mean(),
        "largest_ratio": tokens.max().exp() if tokens.numel() else tokens.mean(),
    }
    return {name: value.item() for name, value in found.items()}


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


def _effective(logs: Tensor, count: Tensor | int) -> Tensor:
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
