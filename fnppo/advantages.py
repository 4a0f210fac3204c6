"""Advantages from rewards: group-relative (GRPO) and generalized advantage estimation (GAE)."""

import warnings

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fnppo.arguments import check_device, check_number, check_tensor, check_whole
from fnppo.faults import Fault, not_a_mask, not_finite, refuse


def grpo_advantages(
    rewards: Shaped[Tensor, " batch"], groups: Int[Tensor, " batch"], *, normalize: bool = True, eps: float = 1e-6
) -> Float[Tensor, " batch"]:
    """Reward relative to the other responses of the same prompt (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

        A_i = (r_i - mean of the group) / (std of the group + eps)

    Args:
        rewards: one a response, finite; integers and booleans count as float32.
        groups: prompt group of each response; members need not stand together.
        normalize: False leaves out the division (Dr. GRPO, arXiv:2503.20783).
        eps: floor of the standard deviation (with n - 1 in its denominator).

    Returns:
        One advantage a response, exactly 0 where all rewards of a group are equal. A response alone in its group has
        nothing to be compared with: it gets 0, with a warning, as lone groups usually mean wrong group ids.

    Raises:
        ValueError: a reward is not finite or so large that its square is not, the shapes differ, or eps is not above 0.

    >>> grpo_advantages(torch.tensor([1.0, 0.0, 10.0, 8.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.7071, -0.7071,  0.7071, -0.7071])
    """
    check_tensor("rewards", rewards)
    check_tensor("groups", groups)
    check_number("eps", eps, above=0, remedy="It keeps a division by 0 away, such as 1e-6.")
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}, groups {tuple(groups.shape)}. Both need one value a row."
        )
    check_device("groups", groups, "rewards", rewards)
    check_whole("groups", groups)
    if rewards.is_complex():
        raise ValueError(f"rewards has dtype {rewards.dtype}; a reward is a real number. Call .real on it.")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    rewards = rewards.to(torch.promote_types(dtype, torch.float32))  # a mean of integers would be cut off
    limit = torch.finfo(rewards.dtype).max ** 0.5 / 1e3
    refuse(
        Fault(~rewards.isfinite(), "the reward is {value}. Mend it or drop the row.", rewards, "row"),
        Fault(
            rewards.abs() > limit,
            f"the reward is {{value}}, and squares of rewards above {limit:.1e} overflow. Scale the rewards.",
            rewards,
            "row",
        ),
    )
    if rewards.numel() == 0:
        return rewards.to(dtype, copy=True)
    group, counts = groups.unique(return_inverse=True, return_counts=True)[1:]
    if bool((counts == 1).any()):
        row = int((counts[group] == 1).nonzero()[0])
        warnings.warn(
            f"row {row} is alone in group {groups[row].item()}: its advantage is 0. Check the group ids.", stacklevel=2
        )

    def over_group(values: Tensor, how: str) -> Tensor:
        empty = values.new_zeros(counts.numel())
        return empty.scatter_reduce(0, group, values, how, include_self=False)[group]

    centred = rewards - over_group(rewards, "mean")
    if normalize:
        variance = over_group(centred.square(), "sum") / (counts[group] - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    # Rounding of the mean would leave a residue in a group of equal rewards, and the division would blow it up.
    equal = over_group(rewards, "amax") == over_group(rewards, "amin")
    return torch.where(equal, 0.0, centred).to(dtype)


def gae_advantages(
    rewards: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    loss_mask: Shaped[Tensor, "batch seq"],
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, "batch seq"]]:
    """Generalized advantage estimation over the learned tokens of each row (arXiv:1506.02438, eq. 16).

        δ_t = r_t + gamma V_{t+1} - V_t        A_t = δ_t + gamma lam A_{t+1}        return_t = A_t + V_t

    where t + 1 is the next learned token of the row, and V and A are 0 after the last. Tokens between (observations,
    tool output) and padding are skipped: their rewards and values are never read.

    Args:
        rewards: r_t, received for token t.
        values: V_t, the value before token t is chosen.

    Returns:
        (advantages, returns), 0 where `loss_mask` is clear.

    Raises:
        ValueError: the shapes differ, a reward or value is not finite at a learned token, or gamma or lam is not in [0, 1].

    >>> mask = torch.tensor([[True, True, False]])
    >>> gae_advantages(torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([[0.5, 1.0, 40.0]]), mask, lam=0.5)[0]
    tensor([[1., 1., 0.]])
    """
    columns = {"rewards": rewards, "values": values, "loss_mask": loss_mask}
    for name, column in columns.items():
        check_tensor(name, column)
        check_device(name, column, "rewards", rewards)
        if name != "loss_mask" and not column.is_floating_point():
            raise ValueError(f"{name} has dtype {column.dtype}; it needs floating point. Call .float() on it.")
    if not (rewards.shape == values.shape == loss_mask.shape) or rewards.dim() != 2:
        raise ValueError(
            f"shapes differ or are not [batch, seq]: rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, "
            f"loss_mask {tuple(loss_mask.shape)}. Every column is token-aligned."
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        check_number(name, number, least=0, most=1, remedy="It discounts, and 1 does not.")
    learned = loss_mask != 0
    refuse(
        not_a_mask("loss_mask", loss_mask),
        not_finite("rewards", rewards, learned),
        not_finite("values", values, learned),
    )
    loss_mask = loss_mask != 0
    rewards, values = (torch.where(loss_mask, column, 0) for column in (rewards, values))
    next_value = next_advantage = values.new_zeros(values.shape[0])
    advantages: list[Tensor] = []
    for t in reversed(range(values.shape[1])):
        here = loss_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages.append(torch.where(here, advantage, 0))
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    stacked = torch.stack(advantages[::-1], dim=1) if advantages else values
    return stacked, torch.where(loss_mask, stacked + values, 0)
