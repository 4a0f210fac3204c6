"""Surrogates with one ratio for a whole sequence, reduced over its targets in log space.

See `fnppo.surrogates` for what a surrogate is, and for ρ_t, A_t and sg. Each gives one loss a target, as all surrogates
do: with the weights of `sequence_mean`, Σ w·l is the mean over sequences that the papers have. |y| is the number of
targets of the row.
"""

import torch
from torch import Tensor

from fnppo.arguments import check_hyper
from fnppo.surrogates.clipped import clip_ratio, ratio_loss
from fnppo.surrogates.columns import PerTarget, as_floats, check_clips, column, log_ratio
from fnppo.surrogates.per_row import row_mean, row_sum
from fnppo.surrogates.policy_gradients import score_loss
from fnppo.surrogates.trust_regions import by_sign
from fnppo.types import Targets, TokenStats


def gspo(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 3e-4,
    clip_high: float | Tensor = 4e-4,
) -> PerTarget:
    """Group Sequence Policy Optimization (arXiv:2507.18071, section 4.1): the geometric mean of the ratios is clipped.

        l_t = max(-A_t s, -A_t clip(s, 1 - clip_low, 1 + clip_high))        s = exp(1/|y| Σ_t log ρ_t)

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`, in the paper the same for all targets of a row.
        clip_low, clip_high: s is clipped to [1 - clip_low, 1 + clip_high]; the defaults are those of section 5.1. One
            number, or one a target.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`.

    Raises:
        ValueError: a column is missing, or a clip is negative.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero - 1)
    >>> gspo(TokenStats(torch.tensor([2.0, 8.0]).log()), targets)[0]
    tensor([4., 4.])
    """
    logratio = row_mean(log_ratio(stats, targets), targets)
    return clip_ratio(logratio, column("advantages", targets), clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 3e-4,
    clip_high: float | Tensor = 4e-4,
) -> PerTarget:
    """GSPO-token (arXiv:2507.18071, section 4.3): the value of `gspo`, the gradient of each token by its own A_t.

        l_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))        s_t = sg(s) π(token_t) / sg(π(token_t))

    Where A_t and the weights are the same for all targets of a row, its gradient is that of `gspo`.

    Args, returns, raises: as in `gspo`; `advantages` may differ within a row.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=torch.tensor([-1.0, -2.0]))
    >>> gspo_token(TokenStats(torch.tensor([2.0, 8.0]).log()), targets)[0]
    tensor([4., 8.])
    """
    logratio = row_mean(log_ratio(stats, targets), targets).detach() + (stats.logprobs - stats.logprobs.detach())
    return clip_ratio(logratio, column("advantages", targets), clip_low=clip_low, clip_high=clip_high)


def luspo(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 3e-4,
    clip_high: float | Tensor = 4e-4,
) -> PerTarget:
    """Length-Unbiased Sequence Policy Optimization (arXiv:2602.05261): the loss of `gspo` times the length.

        l_t = |y| max(-A_t s, -A_t clip(s, 1 - clip_low, 1 + clip_high))

    With `sequence_mean` it is the paper's objective, and so is `gspo` with `sequence_sum`.

    Args, returns, raises: as in `gspo`.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero - 1)
    >>> luspo(TokenStats(torch.tensor([2.0, 8.0]).log()), targets)[0]
    tensor([8., 8.])
    """
    losses, clips = gspo(stats, targets, clip_low=clip_low, clip_high=clip_high)
    return row_sum(torch.ones_like(losses), targets) * losses, clips


def gmpo(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.4,
    clip_high: float | Tensor = 0.4,
) -> PerTarget:
    """Geometric-Mean Policy Optimization (arXiv:2507.20673): each ratio is clipped, then their geometric mean is taken.

        l_t = -A_t exp(1/|y| Σ_u c_u)
        c_u = min(log ρ_u, clip_high) where A_u > 0,   max(log ρ_u, -clip_low) where A_u < 0

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`, in the paper the same for all targets of a row.
        clip_low, clip_high: bounds of log ρ, not of ρ: the ratio is clipped to [e^-clip_low, e^clip_high]. One number,
            or one a target.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`: where a target's own ratio is clipped.

    Raises:
        ValueError: a column is missing, or a clip is negative.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> losses, clips = gmpo(TokenStats(torch.tensor([-0.4, 0.8])), targets)
    >>> losses, clips["clip_high"]
    (tensor([-1., -1.]), tensor([0., 1.]))
    """
    logratio, advantages = log_ratio(stats, targets), column("advantages", targets)
    check_clips(clip_low, clip_high, logratio, remedy="It is a distance from log-ratio 0, such as 0.4.")
    clips = {
        "clip_low": (advantages < 0) & (logratio.detach() < -clip_low),
        "clip_high": (advantages > 0) & (logratio.detach() > clip_high),
    }
    clipped = torch.where(clips["clip_low"], -clip_low, logratio)
    clipped = torch.where(clips["clip_high"], clip_high, clipped)
    return ratio_loss(row_mean(clipped, targets), advantages), as_floats(clips, logratio)


def vespo(
    stats: TokenStats,
    targets: Targets,
    *,
    c1_pos: float | Tensor = 2.0,
    c2_pos: float | Tensor = 3.0,
    c1_neg: float | Tensor = 3.0,
    c2_neg: float | Tensor = 2.0,
) -> PerTarget:
    """Variational Sequence-Level Soft Policy Optimization (arXiv:2602.10693v3, eq. 20): the product of all ratios, tamed.

        l_t = -sg(φ(W)) A_t log π(token_t)        φ(W) = W^c1 exp(c2 (1 - W))        W = Π_t ρ_t

    φ(1) = 1; φ goes to 0 with W and as W grows. The mean over sequences of the paper is that of `sequence_sum`, as log π
    of a sequence is a sum.

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs`, of the policy that sampled, and `advantages`, in the paper the same for all
            targets of a row.
        c1_pos, c2_pos, c1_neg, c2_neg: c1 and c2 where A_t > 0, and elsewhere. A larger c1 holds small W down, a
            larger c2 large W.

    Returns:
        The losses, and no clips.

    Raises:
        ValueError: a column is missing, or a number is not above 0.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=torch.tensor([-2.0, -1.0]), advantages=zero + 1)
    >>> vespo(TokenStats(torch.tensor([-1.0, -2.0])), targets)[0]
    tensor([1., 2.])
    """
    numbers = {"c1_pos": c1_pos, "c2_pos": c2_pos, "c1_neg": c1_neg, "c2_neg": c2_neg}
    for name, number in numbers.items():
        check_hyper(name, number, above=0, remedy="Such as 2.")
    advantages = column("advantages", targets)
    log_w = row_sum(log_ratio(stats, targets).detach(), targets)
    c1, c2 = by_sign(advantages, c1_pos, c1_neg), by_sign(advantages, c2_pos, c2_neg)
    return score_loss(stats, targets, (c1 * log_w - c2 * log_w.expm1()).exp()), {}
