"""Rules that choose tokens by comparing them: over the whole mini-batch, before it is split.

Each takes a `PaddedBatch` and returns it with a column in `extra` that is 1 at the chosen tokens and 0 elsewhere, which a
surrogate of `fnppo.surrogates.selective` reads. What they compare is of the current policy, so they run once per
mini-batch, in `update_policy(prepare=...)`:

    def prepare(params, mini_batch):
        stats = compute_logprobs(params, mini_batch, policy=policy, temperature=1.0, max_tokens=16384)
        return select_kl_cov(mini_batch, stats.logprobs)

Chosen within micro-batches, the tokens would be others for every split. Under `torch.func.vmap` the draw of
`select_clip_cov` needs randomness="same" or "different". Values where `loss_mask` is clear are never read.
"""

import torch
from jaxtyping import Bool, Float
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
    candidate = batch.loss_mask & (covariance >= low) & (covariance <= high)
    lots = torch.rand(covariance.shape, generator=generator, device=generator.device).to(covariance.device)
    return _with_chosen(batch, "clip_cov", _highest(lots, candidate, _count(fraction, batch)))


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
    return _with_chosen(batch, "kl_cov", _highest(covariance, batch.loss_mask, _count(fraction, batch)))


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
    values = _learned("entropy", entropy, batch)
    highest = _highest(values, batch.loss_mask, _count(fraction, batch))
    threshold = torch.where(highest, values, torch.inf).flatten().sort().values[:1].sum()  # of nothing 0
    return _with_chosen(batch, name, batch.loss_mask & (values >= threshold))


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


def _count(fraction: float, batch: PaddedBatch) -> Float[Tensor, ""]:
    check_number("fraction", fraction, above=0, most=1, remedy="It is the share of learned tokens, such as 0.2.")
    # 0.29 · 100 is 29, though not in floating point
    return (fraction * batch.loss_mask.sum().double() + 1e-9).floor().clamp(min=1)


def _highest(
    score: Float[Tensor, "batch seq"], among: Bool[Tensor, "batch seq"], count: Float[Tensor, ""]
) -> Bool[Tensor, "batch seq"]:
    """The `count` places of the highest score `among` some, or all of these if they are fewer; of equal ones the first."""
    order = torch.where(among, score, -torch.inf).flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    return among & (rank.view_as(among) < count)


def _with_chosen(batch: PaddedBatch, name: str, chosen: Bool[Tensor, "batch seq"]) -> PaddedBatch:
    """The batch with a column of 0 and 1, in the dtype that its weights will have."""
    dtype = torch.float32 if batch.advantages is None else torch.promote_types(batch.advantages.dtype, torch.float32)
    return batch._replace(extra=batch.extra | {name: chosen.to(dtype)})
