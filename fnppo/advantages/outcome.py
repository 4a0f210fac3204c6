"""Advantages of responses relative to a baseline that needs no critic: one number a response, from one reward each.

`on_every_token` gives them to the tokens. What they have in common:

    groups   prompt group of each response: any integers, in any order.
    keep     True on responses that count, such as those that were not cut off. Rejected ones are in no mean, no standard
             deviation and no count, their rewards are never read, and their advantage is 0.
    zeros    where all rewards of a group are equal, the advantage is exactly 0. So it is for a response alone in its
             group, which has nothing to be compared with; there is a warning, as wrong group ids look the same
             (`warnings.simplefilter("error")` makes it an error).

All are statistics of a whole batch: compute them before it is split. Standard deviations have n - 1 in the denominator.
Advantages are float32, or float64 like the rewards.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fnppo.advantages.groups import above_lowest, group_centred, group_count, group_max, group_sum, root
from fnppo.advantages.rewards import check_rewards, check_row_column, grouped
from fnppo.arguments import check_hyper, check_number, check_tensor
from fnppo.faults import Fault, refuse

Scale: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards, groups as `group_index` numbers them, rows that are kept) -> what a response's advantage is divided by: one
number a row, or one for all."""


def group_std(rewards: Tensor, groups: Tensor, kept: Tensor) -> Float[Tensor, " batch"]:
    """Standard deviation of the rewards of the group (GRPO)."""
    squares = group_sum(group_centred(rewards, groups, kept).square(), groups)
    return root(squares / (group_count(groups, kept) - 1).clamp(min=1))


def batch_std(rewards: Tensor, groups: Tensor, kept: Tensor) -> Float[Tensor, " batch"]:
    """Standard deviation of all rewards of the batch (Lite PPO, arXiv:2508.08221)."""
    return group_std(rewards, torch.zeros_like(groups), kept)


def grpo_advantages(
    rewards: Shaped[Tensor, " batch"],
    groups: Int[Tensor, " batch"],
    *,
    scale: Scale | None = group_std,
    eps: float | Tensor = 1e-6,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """Reward relative to the other responses of the same prompt (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

        A_i = (r_i - mean of the group) / (std + eps)

    Args:
        rewards: one a response, finite; integers and booleans count as float32.
        groups: prompt group of each response; members need not stand together.
        scale: the std, `group_std` or `batch_std`; None divides by nothing, not even by eps.
        eps: is added to the standard deviation.
        keep: responses that count; all where it is None.

    Returns:
        One advantage a response, 0 in rejected ones.

    Raises:
        ValueError: a reward is not finite or so large that its square is not, the shapes differ, scale is neither a
            function nor None, or eps is not above 0.

    >>> rewards, groups = torch.tensor([1.0, 0.0, 4.0, 0.0]), torch.tensor([0, 0, 1, 1])
    >>> grpo_advantages(rewards, groups)
    tensor([ 0.7071, -0.7071,  0.7071, -0.7071])
    >>> grpo_advantages(rewards, groups, scale=batch_std)
    tensor([ 0.2641, -0.2641,  1.0565, -1.0565])
    """
    check_scale(scale, eps)
    rewards, index, kept = grouped(rewards, groups, keep)
    return scaled(group_centred(rewards, index, kept), rewards, index, kept, scale=scale, eps=eps)


def dr_grpo_advantages(
    rewards: Shaped[Tensor, " batch"], groups: Int[Tensor, " batch"], *, keep: Shaped[Tensor, " batch"] | None = None
) -> Float[Tensor, " batch"]:
    """GRPO without the division, which favours prompts whose rewards hardly differ (arXiv:2503.20783).

        A_i = r_i - mean of the group

    Its loss weights are those of `constant_norm`. Arguments and errors are those of `grpo_advantages`.

    >>> dr_grpo_advantages(torch.tensor([1.0, 0.0, 4.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.5000, -0.5000,  2.0000, -2.0000])
    """
    return group_centred(*grouped(rewards, groups, keep))


def rloo_advantages(
    rewards: Shaped[Tensor, " batch"], groups: Int[Tensor, " batch"], *, keep: Shaped[Tensor, " batch"] | None = None
) -> Float[Tensor, " batch"]:
    """REINFORCE with the mean of the others as baseline: leave one out (arXiv:2402.14740).

        A_i = r_i - mean of the group without i  =  n / (n - 1) · (r_i - mean of the group)

    Arguments and errors are those of `grpo_advantages`.

    >>> rloo_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0]))
    tensor([ 0.7500, -0.7500,  0.0000])
    """
    rewards, index, kept = grouped(rewards, groups, keep)
    count = group_count(index, kept)
    return group_centred(rewards, index, kept) * count / (count - 1).clamp(min=1)


def gpg_advantages(
    rewards: Shaped[Tensor, " batch"], groups: Int[Tensor, " batch"], *, keep: Shaped[Tensor, " batch"] | None = None
) -> Float[Tensor, " batch"]:
    """Group policy gradient: what groups without a gradient take from the mean is given back (arXiv:2504.02546, AGE).

        A_i = α · (r_i - mean of the group)        α = groups / groups whose rewards differ

    Groups of which no response is kept are not counted. The F_norm of the paper is 1. Arguments and errors are those of
    `grpo_advantages`.

    >>> gpg_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ 1., -1.,  0.,  0.])
    """
    rewards, index, kept = grouped(rewards, groups, keep)
    differ = group_max(above_lowest(rewards, index, kept), index) > 0
    count = group_count(index, kept).clamp(min=1).to(rewards.dtype)
    share = torch.where(kept, 1 / count, 0)  # those of a group add up to 1
    alpha = share.sum() / torch.where(differ, share, 0).sum().clamp(min=1)
    return alpha * group_centred(rewards, index, kept)


def opo_advantages(
    rewards: Shaped[Tensor, " batch"],
    groups: Int[Tensor, " batch"],
    lengths: Shaped[Tensor, " batch"],
    *,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """The baseline of least variance, if gradients grow with the length (OPO, arXiv:2505.23585).

        A_i = r_i - Σ_j l_j r_j / Σ_j l_j        over the group

    Args:
        lengths: l, the number of response tokens of each row, such as `loss_mask.sum(1)`.
        rewards, groups, keep: as in `grpo_advantages`.

    Raises:
        ValueError: as `grpo_advantages` does, or a length is not a finite number above 0.

    >>> opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([3, 1]))
    tensor([ 0.2500, -0.7500])
    """
    check_row_column("lengths", lengths, rewards)
    rewards, index, kept = grouped(rewards, groups, keep)
    message = "its length is {value}; a response that counts has at least one token. Reject the row with keep."
    refuse(Fault(kept & ~((lengths > 0) & lengths.isfinite()), message, lengths, "row"))
    lengths = torch.where(kept, lengths.to(rewards.dtype), 0)
    above, total = above_lowest(rewards, index, kept), group_sum(lengths, index)
    baseline = group_sum(lengths * above, index) / torch.where(total > 0, total, 1)
    return torch.where(kept, above - baseline, 0)


def remax_advantages(
    rewards: Shaped[Tensor, " batch"],
    greedy_rewards: Shaped[Tensor, " batch"],
    *,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """Reward above that of the greedy response to the same prompt (ReMax, arXiv:2310.10505).

        A_i = r_i - r_greedy

    Args:
        greedy_rewards: for each row, the reward of the response that decoding without sampling gives to its prompt.
        rewards, keep: as in `grpo_advantages`.

    Raises:
        ValueError: as `grpo_advantages` does, for both rewards.

    >>> remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25]))
    tensor([ 0.7500, -0.2500])
    """
    check_row_column("greedy_rewards", greedy_rewards, rewards)
    rewards, kept = check_rewards(rewards, keep)
    return rewards - check_rewards(greedy_rewards, kept, name="greedy reward")[0]


def gdpo_advantages(
    rewards: Shaped[Tensor, "batch objectives"],
    groups: Int[Tensor, " batch"],
    *,
    weights: Float[Tensor, " objectives"] | None = None,
    eps: float | Tensor = 1e-6,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """Several rewards, each normalised in its group before they are added up (GDPO, arXiv:2601.05242).

        a_i = Σ_k w_k · (r_ik - mean_k of the group) / (std_k of the group + eps)        A_i = a_i / (std of a + eps)

    So no reward drowns out another because its numbers are larger, and responses that are good at different things stay
    apart where their rewards have the same sum. The last division is over the batch. The paper subtracts the mean of a
    over the batch, too: it is 0.

    Args:
        rewards: one a response and objective.
        weights: w, one an objective; None for 1 each.
        groups, eps, keep: as in `grpo_advantages`. A rejected response is rejected for all objectives.

    Raises:
        ValueError: as `grpo_advantages` does, or there is not one finite weight an objective.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 8.0], [1.0, 8.0]])
    >>> gdpo_advantages(rewards, torch.tensor([0, 0, 0, 0]))
    tensor([-0.2061, -1.3321,  0.7691,  0.7691])
    """
    check_scale(group_std, eps)
    check_tensor("rewards", rewards)
    if rewards.dim() != 2 or not rewards.shape[1]:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it needs [batch, objectives]. Stack the rewards.")
    weights = torch.ones(rewards.shape[1], device=rewards.device) if weights is None else weights
    check_tensor("weights", weights)
    if weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}; rewards has {rewards.shape[1]} objectives. Give each a weight."
        )
    check_number("weights", weights, remedy="Use 1 for each objective.")
    _, index, kept = grouped(rewards[:, 0], groups, keep)
    total = torch.zeros((), device=rewards.device)
    for weight, column in zip(weights, rewards.unbind(1), strict=True):
        column, _ = check_rewards(column, kept)
        total = total + weight * scaled(
            group_centred(column, index, kept), column, index, kept, scale=group_std, eps=eps
        )
    return total / (root(total.square().sum() / (kept.sum() - 1).clamp(min=1)) + eps)


def check_scale(scale: Any, eps: float | Tensor) -> None:
    """Raise a `ValueError` where they are not as in `grpo_advantages`."""
    if not (scale is None or callable(scale)):
        raise ValueError(f"scale is {scale!r}; it must be a function or None. Use group_std, batch_std or None.")
    check_hyper("eps", eps, above=0, remedy="It keeps a division by 0 away, such as 1e-6.")


def scaled(
    values: Tensor, rewards: Tensor, index: Tensor, kept: Tensor, *, scale: Scale | None, eps: float | Tensor
) -> Float[Tensor, " batch"]:
    """values / (scale + eps), or the values where there is no scale."""
    if scale is None:
        return values
    std = scale(rewards, index, kept)
    if tuple(std.shape) not in ((), tuple(values.shape)):  # it would be broadcast
        raise ValueError(
            f"scale gave shape {tuple(std.shape)} for {values.numel()} rows. Give one number a row, or one."
        )
    return values / (std + eps)
