"""PPO's surrogate, and the clip of a ratio that others share."""

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_hyper
from fnppo.surrogates.columns import PerTarget, as_floats, check_clips, column, log_ratio
from fnppo.types import Targets, TokenStats


def clipped_surrogate(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    dual_clip: float | Tensor | None = 3.0,
) -> PerTarget:
    """PPO's (arXiv:1707.06347, eq. 7), with a bound for negative advantages (arXiv:1912.09729, eq. 5).

        l_t = max(-A_t ρ_t, -A_t clip(ρ_t, 1 - clip_low, 1 + clip_high))
        for A_t < 0 further   l_t = min(l_t, -A_t dual_clip)

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. PPO has one ε for both; DAPO
            (arXiv:2503.14476, eq. 10) raises the upper one. One number, or one a target.
        dual_clip: upper bound c > 1 of the ratio for negative advantages; None for none.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`, `dual_clip`.

    Raises:
        ValueError: a column is missing, a clip is negative, or dual_clip is not above 1.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> loss, clips = clipped_surrogate(TokenStats(torch.tensor([1.5, 0.5]).log()), targets)
    >>> loss, clips["clip_high"]
    (tensor([-1.2000, -0.5000]), tensor([1., 0.]))
    """
    logratio, advantages = log_ratio(stats, targets), column("advantages", targets)
    return clip_ratio(logratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clip_ratio(
    logratio: Float[Tensor, " targets"],
    advantages: Float[Tensor, " targets"],
    logweight: Float[Tensor, " targets"] | None = None,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | Tensor | None = None,
) -> PerTarget:
    """exp(logweight) · max(-A ρ, -A clip(ρ, 1 - clip_low, 1 + clip_high)), with a dual clip, from log ρ.

    >>> clip_ratio(torch.tensor([1.0]), torch.tensor([2.0]), clip_low=0.2, clip_high=0.2)[0]
    tensor([-2.4000])
    """
    check_clips(clip_low, clip_high, logratio)
    if dual_clip is not None:
        check_hyper(
            "dual_clip", dual_clip, logratio, above=1, infinite=True, remedy="It bounds a ratio; None turns it off."
        )
    weight = torch.zeros_like(logratio.detach()) if logweight is None else logweight
    ratio = logratio.detach().exp()
    clips = {
        "clip_low": (advantages < 0) & (ratio < 1 - clip_low),
        "clip_high": (advantages > 0) & (ratio > 1 + clip_high),
    }
    bounds = {"clip_low": 1 - clip_low, "clip_high": 1 + clip_high}
    if dual_clip is not None:
        clips["dual_clip"], bounds["dual_clip"] = (advantages < 0) & (ratio > dual_clip), dual_clip
    clipped = torch.stack(list(clips.values())).any(0)
    losses = ratio_loss(torch.where(clipped, 0, logratio + weight), advantages)
    scale = -advantages * torch.where(clipped, weight, 0).exp()
    zero = torch.zeros_like(scale)  # a plain number alone would be rounded to float32
    for name, bound in bounds.items():
        # An infinite bound is never reached, and 0 · inf would be a gradient of NaN.
        losses = torch.where(clips[name], scale * torch.where(clips[name], zero + bound, 0), losses)
    return losses, as_floats(clips, ratio)


def ratio_loss(logratio: Float[Tensor, " targets"], advantages: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """-A_t ρ_t from log ρ_t.

    >>> ratio_loss(torch.tensor([0.0, 1000.0]), torch.tensor([2.0, 0.0]))
    tensor([-2., -0.])
    """
    # A ratio that no gradient comes from is left out before the exp: 0 · inf would be NaN.
    unread = (advantages == 0) & logratio.detach().exp().isinf()
    return -advantages * torch.where(unread, 0, logratio).exp()
