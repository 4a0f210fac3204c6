"""Surrogates that treat some tokens otherwise: left out, penalised or weighted, as a column of the batch says.

The columns come from `fnppo.surrogates.selection`, or from anywhere: they are computed over the mini-batch, before it is
split. See `fnppo.surrogates` for what a surrogate is.
"""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from fnppo.arguments import check_hyper
from fnppo.surrogates.clipped import clipped_surrogate, ratio_loss
from fnppo.surrogates.columns import PerTarget, Surrogate, as_floats, column, log_ratio
from fnppo.types import Targets, TokenStats


def clip_cov(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    dual_clip: float | Tensor | None = None,
) -> PerTarget:
    """Clip-Cov (arXiv:2505.22617, eq. 12) on PPO's surrogate: the tokens that `select_clip_cov` has drawn are left out.

        l_t = 0 where clip_cov_t is not 0, else that of `clipped_surrogate`

    Args:
        stats: the current policy's log-probs.
        targets: needs `extra["clip_cov"]`, `old_logprobs` and `advantages`.
        clip_low, clip_high, dual_clip: as in `clipped_surrogate`, but without a dual clip, as in the paper, if none is
            asked for. The paper's own loss has no clip: math.inf for both.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`, `dual_clip` and `clip_cov`.

    Raises:
        ValueError: as in `clipped_surrogate`.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> clip_cov(TokenStats(zero), targets._replace(extra={"clip_cov": torch.tensor([0.0, 1.0])}))[0]
    tensor([-1.,  0.])
    """
    drawn = column("clip_cov", targets) != 0
    numbers = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    losses, clips = _without(drawn, clipped_surrogate, stats, targets, numbers)
    return losses, clips | as_floats({"clip_cov": drawn}, losses)


def kl_cov(stats: TokenStats, targets: Targets, *, kl_cov_coef: float | Tensor = 1.0) -> PerTarget:
    """KL-Cov (arXiv:2505.22617, eq. 14): the tokens that `select_kl_cov` has chosen are held by a KL penalty.

        l_t = -A_t ρ_t + kl_cov_coef |log ρ_t|        the penalty where kl_cov_t is not 0 only

    The paper's KL(π_old ‖ π) is estimated by |log ρ_t|, as in its code. Nothing is clipped.

    Args:
        stats: the current policy's log-probs.
        targets: needs `extra["kl_cov"]`, `old_logprobs` and `advantages`.
        kl_cov_coef: the paper's β.

    Returns:
        The losses, and no clips.

    Raises:
        ValueError: a column is missing, or kl_cov_coef is negative.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero + 0.5, advantages=zero)
    >>> kl_cov(TokenStats(zero), targets._replace(extra={"kl_cov": torch.tensor([0.0, 1.0])}))[0]
    tensor([0.0000, 0.5000])
    """
    check_hyper("kl_cov_coef", kl_cov_coef, least=0, remedy="Below 0 it would drive the policy away.")
    logratio = log_ratio(stats, targets)
    penalty = torch.where(column("kl_cov", targets) != 0, logratio.abs(), 0)
    return ratio_loss(logratio, column("advantages", targets)) + kl_cov_coef * penalty, {}


def selected(surrogate: Surrogate, *, name: str = "selected") -> Surrogate:
    """`surrogate` on the tokens where a column is not 0; the others have loss 0 and no gradient.

        l_t = surrogate_t where column_t is not 0, else 0

    A token that is left out passes no gradient through the ratio of its sequence either, which it is still part of. To
    take tokens out of the divisor too, clear `loss_mask` instead.

    Args:
        surrogate: any; its numbers stay its own.
        name: of the column in `targets.extra`, such as `select_top_entropy` makes.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> targets = targets._replace(extra={"selected": torch.tensor([0.0, 1.0])})
    >>> selected(clipped_surrogate)(TokenStats(torch.tensor([float("nan"), 0.0])), targets)[0]
    tensor([ 0., -1.])
    """

    def on_selected(stats: TokenStats, targets: Targets, **numbers: Any) -> PerTarget:
        return _without(column(name, targets) == 0, surrogate, stats, targets, numbers)

    return on_selected


def weighted(surrogate: Surrogate, *, name: str = "importance_weights") -> Surrogate:
    """`surrogate` times a column, such as the importance weights between sampler and trainer.

        l_t = column_t · surrogate_t

    A weight of 0 removes a loss whatever it is, and its gradient, as in `selected`: a token may be rejected because its
    ratio overflows.

    Args:
        surrogate: any; its numbers stay its own.
        name: of the column in `targets.extra`.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> targets = targets._replace(extra={"importance_weights": torch.tensor([0.5, 0.0])})
    >>> weighted(clipped_surrogate)(TokenStats(torch.tensor([0.0, float("inf")])), targets)[0]
    tensor([-0.5000,  0.0000])
    """

    def with_weights(stats: TokenStats, targets: Targets, **numbers: Any) -> PerTarget:
        weights = column(name, targets)
        losses, clips = _without(weights == 0, surrogate, stats, targets, numbers)
        return weights * losses, clips

    return with_weights


def _without(
    left_out: Bool[Tensor, " targets"],
    surrogate: Surrogate,
    stats: TokenStats,
    targets: Targets,
    numbers: dict[str, Any],
) -> PerTarget:
    """Loss, clips and gradient 0 where left out. There log-probs are constants: 0 · NaN would be a gradient of NaN."""
    logprobs = torch.where(left_out, stats.logprobs.detach(), stats.logprobs)
    losses, clips = surrogate(stats._replace(logprobs=logprobs), targets, **numbers)
    return torch.where(left_out, 0, losses), {name: torch.where(left_out, 0, clip) for name, clip in clips.items()}
