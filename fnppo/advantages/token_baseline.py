"""The optimal token baseline: a baseline for every token, from the other responses of the group at the same place."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fnppo.advantages.gae import discounted_sum
from fnppo.advantages.groups import above_lowest, group_count, group_sum
from fnppo.advantages.rewards import check_groups
from fnppo.advantages.token_columns import learned_columns, learned_first, moved, moved_back
from fnppo.arguments import check_hyper


def otb_advantages(
    rewards: Float[Tensor, "batch seq"],
    groups: Int[Tensor, " batch"],
    loss_mask: Shaped[Tensor, "batch seq"],
    *,
    logprobs: Float[Tensor, "batch seq"],
    sum_squared_probs: Float[Tensor, "batch seq"],
    importance_weights: Float[Tensor, "batch seq"] | None = None,
    lone_baseline: float | Tensor | None = None,
) -> Float[Tensor, "batch seq"]:
    """Return minus the baseline of least variance at this token (OTB, arXiv:2602.07078).

        A_t = G_t - B_t        B_t = Σ_i G_it W_it / Σ_i W_it        W_t = Σ_{j ≤ t} ρ_j² (1 - 2 π_j + Σ_v π_j(v)²)

    over the responses i of the group that have a t-th learned token; G_t is the sum of the rewards from t on. A term of W
    is the squared norm of the gradient of log π_j in the logits. Tokens are counted along the learned ones, so several
    turns are as one. Returns that are equal over a group give exactly 0.

    Args:
        rewards: one a token; outcome rewards with `on_last_token`.
        groups: prompt group of each row, as in `grpo_advantages`.
        loss_mask: a row in which it is clear is rejected: it is in no baseline.
        logprobs: log π of the tokens under the policy that is trained, as it was when they were sampled.
        sum_squared_probs: Σ_v π(v)² over the vocabulary at each token, under the same policy and temperature:
            `compute_sum_squared_probs`.
        importance_weights: ρ of each token; 1 where it is None.
        lone_baseline: B where no other response of the group has a token; None for the token's own return, so that A is 0
            there. With 0 the end of the longest response keeps its return, and so does a response alone in its group.

    Returns:
        One advantage a token, 0 where `loss_mask` is clear.

    Raises:
        ValueError: the shapes differ, or a number is not finite at a learned token.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    >>> logprobs, squares = torch.tensor([[0.5, 0.5], [0.25, 0.25]]).log(), torch.tensor([[0.5, 0.5], [0.625, 0.625]])
    >>> otb_advantages(rewards, torch.tensor([0, 0]), mask, logprobs=logprobs, sum_squared_probs=squares)
    tensor([[ 0.6923,  0.0000],
            [-0.3077,  0.0000]])
    """
    if lone_baseline is not None:
        check_hyper("lone_baseline", lone_baseline, remedy="Use 0, or None for advantage 0.")
    columns = {"rewards": rewards, "logprobs": logprobs, "sum_squared_probs": sum_squared_probs}
    if importance_weights is not None:
        columns["importance_weights"] = importance_weights
    learned, (rewards, logprobs, sum_squared_probs, *weights) = learned_columns(loss_mask, **columns)
    index = check_groups(groups, loss_mask)
    energy = (1 - 2 * logprobs.exp() + sum_squared_probs).clamp(min=0)  # rounding can push it below 0
    for rho in weights:
        largest = rho.abs().amax().clamp(min=1) if rho.numel() else 1  # the baseline is a ratio of energies
        energy = energy * (rho / largest).square()

    places = learned_first(learned)
    there = moved(learned, places)
    returns = discounted_sum(moved(rewards, places), 1.0)
    weight = torch.where(there, moved(torch.where(learned, energy, 0), places).cumsum(1), 0)
    weight = torch.where(group_sum(weight, index) > 0, weight, there.to(weight.dtype))  # sure of all tokens: plain mean
    total, above = group_sum(weight, index), above_lowest(returns, index, there)
    advantages = torch.where(there, above - group_sum(weight * above, index) / torch.where(total > 0, total, 1), 0)
    if lone_baseline is not None:
        lone = there & (group_count(index, there) == 1)
        advantages = torch.where(lone, returns - lone_baseline, advantages)
    return moved_back(advantages, places)
