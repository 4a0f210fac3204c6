"""Rules that choose tokens by comparing them: over the whole mini-batch, before it is split.

Each takes a `PaddedBatch` and returns it with a column in `extra` that is 1 at the chosen tokens and 0 elsewhere, which a
surrogate of `fnppo.surrogates.selective` reads. What they compare is of the current policy, so they run once per
mini-batch, in `update_policy(prepare=...)`:

    def prepare(params, mini_batch):
        stats = compute_logprobs(params, mini_batch, policy=policy, temperature=1.0, max_tokens=16384)
        return select_kl_cov(mini_batch, stats.logprobs)

Chosen within micro-batches, the tokens would be others for every split. How many are candidates is known from values
only, so that these run on the host, neither under `vmap` nor compiled. Values where `loss_mask` is clear are never read.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_device, check_floating, check_number, check_type
from fnppo.checks import check_batch
from fnppo.faults import not_finite, refuse
from fnppo.types import PaddedBatch


def select_clip_cov(
    batch: PaddedBatch,
    logprobs: Float[Tensor, "batch seq"],
    *,
    generator: torch.Generator,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> PaddedBatch:
    """Clip-Cov's tokens (arXiv:2505.22617, eqs. 10 and 11): some of those of high covariance, at random.

        Cov_t = (log π(token_t) - mean log π) (A_t - mean A)        means over the N learned tokens of the batch
        floor(fraction · N) tokens, at least 1, drawn from those with low <= Cov_t <= high

    Args:
        batch: needs `advantages`.
        logprobs: of the current policy.
        generator: what draws; its state moves on.
        fraction: of all learned tokens. It is fewer where there are fewer candidates.
        low, high: bounds of the covariance; the paper sets both far above its mean.

    Returns:
        The batch with `extra["clip_cov"]`, for the surrogate `clip_cov`.

    Raises:
        ValueError: the batch is malformed or has no advantages, log-probs do not fit it or are not finite at a learned
            token, or a number is out of range.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3], [4, 5]], advantages=[1.0, -1.0])
    >>> logprobs = torch.tensor([[0.0, -1.0, -9.0], [0.0, -5.0, -5.0]])  # covariances 4, -4, 0, 0
    >>> select_clip_cov(batch, logprobs, generator=torch.Generator().manual_seed(0)).extra["clip_cov"]
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    check_type("generator", generator, torch.Generator, "Such as torch.Generator().manual_seed(0).")
    check_number("low", low, remedy="It is the least covariance of a candidate.")
    check_number("high", high, least=low, infinite=True, remedy="It is the largest covariance of a candidate.")
    batch, covariance = _covariance(batch, logprobs)
    candidate = (batch.loss_mask & (covariance >= low) & (covariance <= high)).flatten().nonzero()[:, 0]
    order = torch.randperm(candidate.numel(), generator=generator, device=generator.device)
    return _with_chosen(batch, "clip_cov", candidate[order[: _count(fraction, batch)].to(candidate.device)])


def select_kl_cov(batch: PaddedBatch, logprobs: Float[Tensor, "batch seq"], *, fraction: float = 2e-4) -> PaddedBatch:
    """KL-Cov's tokens (arXiv:2505.22617, eqs. 10 and 13): those of the highest covariance of log-prob and advantage.

    floor(fraction · N) tokens, at least 1; of several that are equal to the last, the first of the batch.

    Args, raises: as in `select_clip_cov`.

    Returns:
        The batch with `extra["kl_cov"]`, for the surrogate `kl_cov`.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1], [1]], [[2, 3], [4, 5]], advantages=[1.0, -1.0])
    >>> logprobs = torch.tensor([[0.0, -1.0, -9.0], [0.0, -5.0, -5.0]])  # covariances 4, -4, 0, 0
    >>> select_kl_cov(batch, logprobs, fraction=0.25).extra["kl_cov"]
    tensor([[0., 1., 0.],
            [0., 0., 0.]])
    """
    batch, covariance = _covariance(batch, logprobs)
    learned = batch.loss_mask.flatten().nonzero()[:, 0]
    order = covariance.flatten()[learned].argsort(descending=True, stable=True)
    return _with_chosen(batch, "kl_cov", learned[order[: _count(fraction, batch)]])


def select_top_entropy(
    batch: PaddedBatch, entropy: Float[Tensor, "batch seq"], *, fraction: float = 0.2, name: str = "selected"
) -> PaddedBatch:
    """The tokens at which the policy is least sure (arXiv:2506.01939): those of the highest entropy.

    floor(fraction · N) tokens, at least 1, and all that are equal to the last: the rule of the paper is a threshold. It
    learns from them alone, with the other tokens still in the divisor: `selected(clipped_surrogate)` with `token_mean`.

    Args:
        batch: the rollouts.
        entropy: of the current policy, such as `compute_logprobs(..., entropy=True)` gives.
        fraction: of all learned tokens.
        name: of the new column.

    Returns:
        The batch with `extra[name]`, for the combinator `selected`.

    Raises:
        ValueError: the batch is malformed, entropies do not fit it or are not finite at a learned token, or fraction is
            not above 0 and at most 1.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[1]], [[2, 3]])
    >>> select_top_entropy(batch, torch.tensor([[9.0, 0.1, 0.7]]), fraction=0.5).extra["selected"]
    tensor([[0., 0., 1.]])
    """
    batch = check_batch(batch)
    values, count = _learned("entropy", entropy, batch), _count(fraction, batch)
    threshold = values[batch.loss_mask].topk(count).values[-1:].sum()  # of nothing 0
    return _with_chosen(batch, name, (batch.loss_mask & (values >= threshold)).flatten().nonzero()[:, 0])


def _covariance(batch: PaddedBatch, logprobs: Tensor) -> tuple[PaddedBatch, Float[Tensor, "batch seq"]]:
    batch = check_batch(batch)
    if batch.advantages is None:
        raise ValueError("the covariance needs batch.advantages: such as grpo_advantages gives.")
    tokens = batch.loss_mask.sum().clamp(min=1)
    columns = (_learned("logprobs", logprobs, batch), _learned("advantages", batch.advantages, batch))
    centred = [column - column.sum() / tokens for column in columns]
    return batch, centred[0] * centred[1]


def _learned(name: str, values: Tensor, batch: PaddedBatch) -> Float[Tensor, "batch seq"]:
    """The values, in float32 or better, 0 where nothing is learned."""
    check_floating(name, values)
    check_device(name, values, "input_ids", batch.input_ids)
    if values.shape != batch.input_ids.shape:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, input_ids has {tuple(batch.input_ids.shape)}. Give one value a "
            "token, such as compute_logprobs does for the same batch."
        )
    refuse(not_finite(name, values, batch.loss_mask))
    return torch.where(batch.loss_mask, values.to(torch.promote_types(values.dtype, torch.float32)), 0)


def _count(fraction: float, batch: PaddedBatch) -> int:
    check_number("fraction", fraction, above=0, most=1, remedy="It is the share of learned tokens, such as 0.2.")
    tokens = int(batch.loss_mask.sum())
    return min(tokens, max(1, int(fraction * tokens + 1e-9)))  # 0.29 · 100 is 29, though not in floating point


def _with_chosen(batch: PaddedBatch, name: str, places: Int[Tensor, " chosen"]) -> PaddedBatch:
    """The batch with a column that is 1 at some places of the flattened rectangle, in the dtype of its weights."""
    dtype = torch.float32 if batch.advantages is None else torch.promote_types(batch.advantages.dtype, torch.float32)
    column = torch.zeros_like(batch.input_ids, dtype=dtype)
    return batch._replace(extra=batch.extra | {name: column.flatten().index_fill(0, places, 1).view_as(column)})
