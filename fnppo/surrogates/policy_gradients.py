"""Policy gradients: -sg(weight) · A_t · log π(token_t), with different weights. None of them differentiates a ratio.

See `fnppo.surrogates` for what a surrogate is, and for ρ_t, A_t and sg.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_hyper
from fnppo.surrogates.columns import PerTarget, as_floats, check_clips, column, log_ratio, one_a_target
from fnppo.types import Targets, TokenStats


def gpg(stats: TokenStats, targets: Targets) -> PerTarget:
    """Group Policy Gradient (arXiv:2504.02546): no ratio, hence no old policy. Right for fresh samples only.

        l_t = -A_t log π(token_t)

    Args:
        stats: the current policy's log-probs.
        targets: needs `advantages`.

    Returns:
        The losses, and no clips.

    Raises:
        ValueError: a column is missing.

    >>> index = torch.zeros(2, dtype=torch.long)
    >>> gpg(TokenStats(torch.tensor([-0.5, -2.0])), Targets(index, index, index, index, advantages=torch.ones(2)))[0]
    tensor([0.5000, 2.0000])
    """
    return -column("advantages", targets) * one_a_target("stats.logprobs", stats.logprobs, targets), {}


def reinforce(stats: TokenStats, targets: Targets, *, weight_cap: float | Tensor | None = None) -> PerTarget:
    """REINFORCE (Williams, 1992) from samples of another policy, with the importance weight as a constant.

        l_t = -sg(min(ρ_t, weight_cap)) A_t log π(token_t)

    Without a cap, its gradient is that of -A_t ρ_t.

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`.
        weight_cap: upper bound of the weight (truncated importance sampling); None for none.

    Returns:
        The losses, and the clip `weight_cap`: where the weight is at its bound.

    Raises:
        ValueError: a column is missing, or weight_cap is not above 0.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero - 1, advantages=zero + 1)
    >>> reinforce(TokenStats(torch.tensor([-1.0, -0.5])), targets, weight_cap=1.5)
    (tensor([1.0000, 0.7500]), {'weight_cap': tensor([0., 1.])})
    """
    weight, clips = capped_weight(log_ratio(stats, targets), column("advantages", targets), weight_cap)
    return score_loss(stats, targets, weight), clips


def cispo(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 1.0,
    clip_high: float | Tensor = 4.0,
) -> PerTarget:
    """CISPO (MiniMax-M1, arXiv:2506.13585, section 3.1): the weight is clipped, and every token keeps a gradient.

        l_t = -sg(clip(ρ_t, 1 - clip_low, 1 + clip_high)) A_t log π(token_t)

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`.
        clip_low, clip_high: the weight is clipped to [1 - clip_low, 1 + clip_high]. The paper leaves the lower side
            open, as 1.0 does, and gives no number for the upper; 4.0 is a cap of 5, as in ScaleRL (arXiv:2510.13786).
            One number, or one a target.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`: where the weight is at its bound and A_t is not 0.

    Raises:
        ValueError: a column is missing, or a clip is negative.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero - 1, advantages=zero + 1)
    >>> losses, clips = cispo(TokenStats(torch.tensor([-1.0, -0.5])), targets, clip_high=0.2)
    >>> losses, clips["clip_high"]
    (tensor([1.0000, 0.6000]), tensor([0., 1.]))
    """
    ratio, advantages = log_ratio(stats, targets).detach().exp(), column("advantages", targets)
    check_clips(clip_low, clip_high, ratio)
    clips = {
        "clip_low": (advantages != 0) & (ratio < 1 - clip_low),
        "clip_high": (advantages != 0) & (ratio > 1 + clip_high),
    }
    weight = torch.where(clips["clip_low"], 1 - clip_low, ratio)
    weight = torch.where(clips["clip_high"], 1 + clip_high, weight)
    return score_loss(stats, targets, weight), as_floats(clips, ratio)


def score_loss(stats: TokenStats, targets: Targets, weight: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """-weight_t A_t log π(token_t), for weights that π has no gradient through.

    >>> index = torch.zeros(2, dtype=torch.long)
    >>> targets = Targets(index, index, index, index, advantages=torch.tensor([2.0, 0.0]))
    >>> score_loss(TokenStats(torch.tensor([-0.5, -0.5])), targets, torch.tensor([3.0, float("inf")]))
    tensor([3., 0.])
    """
    advantages = column("advantages", targets)
    weight = torch.where((advantages == 0) & weight.isinf(), 0, weight)  # 0 · inf would be NaN
    return -(weight * advantages) * one_a_target("stats.logprobs", stats.logprobs, targets)


def capped_weight(
    logratio: Float[Tensor, " targets"], advantages: Float[Tensor, " targets"], weight_cap: float | Tensor | None
) -> PerTarget:
    """sg(min(ρ_t, weight_cap)), and the clip `weight_cap` if there is a cap.

    >>> capped_weight(torch.tensor([0.0, 1.0]), torch.ones(2), 2.0)
    (tensor([1., 2.]), {'weight_cap': tensor([0., 1.])})
    """
    ratio = logratio.detach().exp()
    if weight_cap is None:
        return ratio, {}
    check_hyper("weight_cap", weight_cap, above=0, infinite=True, remedy="It bounds a ratio; None turns it off.")
    over = (advantages != 0) & (ratio > weight_cap)
    return torch.where(over, weight_cap, ratio), as_floats({"weight_cap": over}, ratio)
