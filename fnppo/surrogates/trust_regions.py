"""Surrogates that keep π near the old policy otherwise than by clipping ρ_t: a soft gate, a divergence, a penalty.

See `fnppo.surrogates` for what a surrogate is, and for ρ_t, A_t and sg. Below, p_t = π(token_t), q_t = π_old(token_t).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_hyper
from fnppo.surrogates.columns import PerTarget, as_floats, check_clips, column, log_ratio
from fnppo.surrogates.policy_gradients import capped_weight, score_loss
from fnppo.types import Targets, TokenStats


def sapo(
    stats: TokenStats, targets: Targets, *, tau_pos: float | Tensor = 1.0, tau_neg: float | Tensor = 1.05
) -> PerTarget:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a sigmoid gate instead of a clip.

        l_t = -A_t sigmoid(τ (ρ_t - 1)) 4 / τ        τ = tau_pos where A_t > 0, else tau_neg

    At ρ_t = 1 its gradient is that of -A_t ρ_t; away from 1 it fades on both sides.

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`.
        tau_pos, tau_neg: the larger, the faster the gradient fades.

    Returns:
        The losses, and no clips.

    Raises:
        ValueError: a column is missing, or a temperature is not above 0.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> sapo(TokenStats(torch.tensor([1.0, 3.0]).log()), targets)[0]
    tensor([-2.0000, -3.5232])
    """
    for name, number in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        check_hyper(name, number, above=0, remedy="It is an inverse width, such as 1.")
    logratio, advantages = log_ratio(stats, targets), column("advantages", targets)
    tau = by_sign(advantages, tau_pos, tau_neg)
    flat = logratio.detach().exp().isinf()  # the gate is 1 there; its gradient would be 0 · inf
    gate = torch.where(flat, 1, (tau * torch.where(flat, 0, logratio).expm1()).sigmoid())
    return -advantages * gate * 4 / tau, {}


def dppo_tv(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.15,
    clip_high: float | Tensor = 0.15,
    weight_cap: float | Tensor | None = None,
) -> PerTarget:
    """DPPO with the binary total variation (arXiv:2602.04879): tokens that moved too far, and would move on, are left.

        l_t = -M_t sg(ρ_t) A_t log p_t                whose gradient is that of -M_t ρ_t A_t
        M_t = 0   where A_t > 0, ρ_t > 1 and D_t > clip_high,   or A_t < 0, ρ_t < 1 and D_t > clip_low;   else 1
        D_t = |p_t - q_t|

    A ratio of 100 from 1e-5 to 1e-3 stays; a step from 0.99 to 0.8 does not.

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs`, of the policy that sampled, and `advantages`.
        clip_low, clip_high: bounds of the divergence D_t, not of the ratio. One number, or one a target.
        weight_cap: upper bound of the weight ρ_t; None for none.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`, and `weight_cap` if there is a cap.

    Raises:
        ValueError: a column is missing, a clip is negative, or weight_cap is not above 0.

    >>> index, one = torch.zeros(2, dtype=torch.long), torch.ones(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=torch.tensor([1e-5, 0.7]).log(), advantages=one)
    >>> dppo_tv(TokenStats(torch.tensor([1e-3, 0.9]).log()), targets)[1]["clip_high"]
    tensor([0., 1.])
    """
    divergence = (stats.logprobs.detach().exp() - column("old_logprobs", targets).exp()).abs()
    return _within(stats, targets, divergence, clip_low, clip_high, weight_cap)


def dppo_kl(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.05,
    clip_high: float | Tensor = 0.05,
    weight_cap: float | Tensor | None = None,
) -> PerTarget:
    """DPPO with the binary KL divergence (arXiv:2602.04879): as `dppo_tv`, with another D_t.

        D_t = q_t log(q_t / p_t) + (1 - q_t) log((1 - q_t) / (1 - p_t))

    Args, returns, raises: as in `dppo_tv`.

    >>> index, one = torch.zeros(2, dtype=torch.long), torch.ones(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=torch.tensor([1e-5, 0.7]).log(), advantages=one)
    >>> dppo_kl(TokenStats(torch.tensor([1e-3, 0.9]).log()), targets)[1]["clip_high"]
    tensor([0., 1.])
    """
    logp, logq = stats.logprobs.detach(), column("old_logprobs", targets)
    other = -logq.expm1()  # 1 - q
    rest = torch.where(other == 0, 0, other * (other.log() - (-logp.expm1()).log()))
    return _within(stats, targets, logq.exp() * (logq - logp) + rest, clip_low, clip_high, weight_cap)


def dro(stats: TokenStats, targets: Targets, *, beta: float | Tensor) -> PerTarget:
    """Direct Reward Optimization (arXiv:2405.19107) by token: a quadratic penalty holds π at the old policy.

        l_t = -A_t log p_t + beta / 2 · (log ρ_t)²

    The paper has it for whole sequences, with a learned value as baseline; this is the form by token of tinker and verl.

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`.
        beta: weight of the penalty. The loss is least at log ρ_t = A_t / beta.

    Returns:
        The losses, and no clips.

    Raises:
        ValueError: a column is missing, or beta is not above 0.

    >>> index, one = torch.zeros(1, dtype=torch.long), torch.ones(1)
    >>> targets = Targets(index, index, index, index, old_logprobs=-one, advantages=one)
    >>> dro(TokenStats(torch.tensor([-0.5])), targets, beta=0.4)[0]
    tensor([0.5500])
    """
    check_hyper("beta", beta, above=0, remedy="It is the weight of the penalty, such as 0.05.")
    penalty = log_ratio(stats, targets).square() / 2
    return beta * penalty - column("advantages", targets) * stats.logprobs, {}


def by_sign(
    advantages: Float[Tensor, " targets"], positive: float | Tensor, negative: float | Tensor
) -> Float[Tensor, " targets"]:
    """One number where A_t > 0, another elsewhere, in the dtype of the advantages.

    >>> by_sign(torch.tensor([2.0, -1.0, 0.0]), 3.0, 4.0)
    tensor([3., 4., 4.])
    """
    zero = torch.zeros_like(advantages)  # where() of two plain numbers would round them to float32
    return torch.where(advantages > 0, zero + positive, zero + negative)


def _within(
    stats: TokenStats,
    targets: Targets,
    divergence: Float[Tensor, " targets"],
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    weight_cap: float | Tensor | None,
) -> PerTarget:
    logratio, advantages = log_ratio(stats, targets).detach(), column("advantages", targets)
    check_clips(clip_low, clip_high, logratio, remedy="It bounds a divergence, such as 0.15.")
    outside = {
        "clip_low": (advantages < 0) & (logratio < 0) & (divergence > clip_low),
        "clip_high": (advantages > 0) & (logratio > 0) & (divergence > clip_high),
    }
    left_out = outside["clip_low"] | outside["clip_high"]
    weight, clips = capped_weight(logratio, torch.where(left_out, 0, advantages), weight_cap)
    return score_loss(stats, targets, torch.where(left_out, 0, weight)), as_floats(outside, weight) | clips
