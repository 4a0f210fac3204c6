"""Decoupled PPO: the policy that sampled and the policy to stay close to are two. See `fnppo.surrogates`."""

import torch
from torch import Tensor

from fnppo.arguments import check_hyper
from fnppo.surrogates.clipped import clip_ratio
from fnppo.surrogates.columns import PerTarget, as_floats, column, log_ratio
from fnppo.types import Targets, TokenStats


def decoupled_surrogate(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    dual_clip: float | Tensor | None = None,
    weight_cap: float | Tensor | None = None,
) -> PerTarget:
    """Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2): one policy samples, another is kept close.

        l_t = w_t · max(-A_t ρ_t, -A_t clip(ρ_t, 1 - clip_low, 1 + clip_high))        w_t = π_prox / π_behaviour
        for A_t < 0 further   l_t = min(l_t, -w_t A_t dual_clip)                       ρ_t = π / π_prox

    Args:
        stats: the current policy's log-probs.
        targets: needs `extra["sampler_logprobs"]` of the policy that sampled (behaviour), `old_logprobs` of the one
            from which the ratio is clipped (proximal), and `advantages`.
        clip_low, clip_high, dual_clip: as in `clipped_surrogate`; without a dual clip, as in the papers.
        weight_cap: upper bound of w_t; None for none.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`, `dual_clip` and `weight_cap`: where w_t is at its bound and
        the ratio is not clipped.

    Raises:
        ValueError: as in `clipped_surrogate`, or weight_cap is not above 0.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> targets = targets._replace(extra={"sampler_logprobs": torch.tensor([0.5, 4.0]).log()})
    >>> loss, clips = decoupled_surrogate(TokenStats(torch.tensor([1.5, 0.5]).log()), targets)
    >>> loss, clips["clip_high"]
    (tensor([-2.4000, -0.1250]), tensor([1., 0.]))
    """
    logratio, advantages = log_ratio(stats, targets), column("advantages", targets)
    logweight = column("old_logprobs", targets) - column("sampler_logprobs", targets)
    over = torch.zeros_like(logweight, dtype=torch.bool)
    if weight_cap is not None:
        check_hyper("weight_cap", weight_cap, above=0, infinite=True, remedy="It bounds a ratio; None turns it off.")
        limit = (torch.zeros_like(logweight) + weight_cap).log()
        over = logweight > limit
        logweight = torch.where(over, limit, logweight)
    losses, clips = clip_ratio(
        logratio, advantages, logweight, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    if weight_cap is not None:
        bounded = over & (advantages != 0) & (sum(clips.values()) == 0)
        clips |= as_floats({"weight_cap": bounded}, losses)
    return losses, clips
