"""Advantages of tokens, normalised over all learned tokens of the batch: whitening, and REINFORCE++ which is built on it.

These are statistics of a whole batch: compute them before it is split. A rejected row is one whose loss mask is clear.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fnppo.advantages.gae import discounted_returns
from fnppo.advantages.groups import root
from fnppo.advantages.outcome import dr_grpo_advantages
from fnppo.advantages.token_columns import learned_columns, on_every_token
from fnppo.arguments import check_hyper


def whiten(
    values: Float[Tensor, "batch seq"], loss_mask: Shaped[Tensor, "batch seq"], *, eps: float | Tensor = 1e-8
) -> Float[Tensor, "batch seq"]:
    """Values of the learned tokens with mean 0 and standard deviation 1; 0 where loss_mask is clear.

        (x - mean) / (std + eps)        over the learned tokens of the batch, n - 1 in the denominator of the variance

    Fewer than two learned tokens have no standard deviation, and are returned as they are. Equal values become exactly 0.

    Args:
        eps: is added to the standard deviation.

    Raises:
        ValueError: the shapes differ, a value is not finite at a learned token, or eps is not above 0.

    >>> whiten(torch.tensor([[1.0, 3.0, 7.0]]), torch.tensor([[True, True, False]]))
    tensor([[-0.7071,  0.7071,  0.0000]])
    """
    check_hyper("eps", eps, above=0, remedy="It keeps a division by 0 away, such as 1e-8.")
    learned, (values,) = learned_columns(loss_mask, values=values)
    if not values.numel():
        return values
    count = learned.sum()
    lowest = torch.where(learned, values.detach(), torch.inf).amin()
    above = torch.where(learned, values - lowest, 0)  # equal values are exactly 0, and so is their mean
    centred = torch.where(learned, above - above.sum() / count.clamp(min=1), 0)
    std = root(centred.square().sum() / (count - 1).clamp(min=1))
    return torch.where(count < 2, values, centred / (std + eps))


def reinforce_plus_plus_advantages(
    rewards: Float[Tensor, "batch seq"],
    loss_mask: Shaped[Tensor, "batch seq"],
    *,
    gamma: float | Tensor = 1.0,
    eps: float | Tensor = 1e-8,
) -> Float[Tensor, "batch seq"]:
    """Returns of tokens, normalised over the batch: REINFORCE++ (arXiv:2501.03262), which needs no groups.

        A_t = (G_t - mean) / (std + eps)        G_t = r_t + gamma G_{t+1}

    Args:
        rewards: one a token, usually with the KL in it (see `kl_in_reward`).

    Raises:
        ValueError: as `discounted_returns` and `whiten` do.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> reinforce_plus_plus_advantages(rewards, mask)
    tensor([[ 0.8660,  0.8660],
            [-0.8660, -0.8660]])
    """
    return whiten(discounted_returns(rewards, loss_mask, gamma=gamma), loss_mask, eps=eps)


def reinforce_plus_plus_baseline_advantages(
    rewards: Shaped[Tensor, " batch"],
    groups: Int[Tensor, " batch"],
    loss_mask: Shaped[Tensor, "batch seq"],
    *,
    eps: float | Tensor = 1e-8,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch seq"]:
    """Reward minus the mean of the group, normalised over the batch: REINFORCE++ with baseline (arXiv:2501.03262).

        A_t = (a_t - mean) / (std + eps)        a_t = r - mean of the group

    Mean and std are over the learned tokens of the batch, so that longer responses count more. That mean is not 0, so
    neither are the advantages of a group whose rewards are equal.

    Args:
        rewards, groups, keep: one a response, as in `grpo_advantages`. Rejected responses are in no mean and no std.

    Raises:
        ValueError: as `grpo_advantages` and `whiten` do.

    >>> rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    >>> reinforce_plus_plus_baseline_advantages(rewards, groups, torch.tensor([[True, True], [True, False]]))
    tensor([[ 0.5774,  0.5774],
            [-1.1547,  0.0000]])
    """
    advantages = dr_grpo_advantages(rewards, groups, keep=keep)
    column = on_every_token(advantages, loss_mask)
    return whiten(column, loss_mask if keep is None else (loss_mask != 0) & (keep != 0)[:, None], eps=eps)
