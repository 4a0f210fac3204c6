"""Advantages for a policy that may try several times: what counts is the best of k responses."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fnppo.advantages.groups import above_lowest, group_count, group_max, root
from fnppo.advantages.outcome import Scale, check_scale, scaled
from fnppo.advantages.rewards import grouped
from fnppo.arguments import check_count
from fnppo.faults import Fault, refuse


def pass_at_k_advantages(
    rewards: Shaped[Tensor, " batch"],
    groups: Int[Tensor, " batch"],
    *,
    k: int,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """The reward of a subset of k responses is 1 if one of them is right; a response gets the mean of its subsets.

        fail  = C(wrong, k) / C(n, k)        σ = √(fail · (1 - fail))
        right:  A = fail / σ
        wrong:  A = (fail - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / σ

    for the n responses of a group of which some are wrong: the mean over all subsets, in closed form (pass@k training,
    arXiv:2508.10751). Where fail is 0 or 1, A is 0. For k = 1 it is GRPO's with n in its standard deviation.

    Args:
        rewards: 1 for a right response, 0 for a wrong one.
        k: how many responses are tried; at most as many as a group has.
        groups, keep: as in `grpo_advantages`.

    Raises:
        ValueError: as `grpo_advantages` does, a reward is neither 0 nor 1, or a group has fewer than k responses.

    >>> pass_at_k_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]), k=2)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    k = check_count("k", k, least=1, remedy="It is a number of tries.")
    rewards, index, kept = grouped(rewards, groups, keep)
    count, wrong = group_count(index, kept), group_count(index, kept & (rewards == 0))
    refuse(
        Fault(
            kept & (rewards != 0) & (rewards != 1),
            "the reward is {value}; pass@k is about right and wrong responses. Give 1 or 0.",
            rewards,
            "row",
        ),
        Fault(
            kept & (count < k),
            f"its group has {{value}} responses that count, and k is {k}. Lower k, or reject the group with keep.",
            count,
            "row",
        ),
    )
    count, wrong = count.to(rewards.dtype), wrong.to(rewards.dtype)
    others = torch.arange(1, k, device=rewards.device)
    fail_with_it = ((wrong[:, None] - others) / (count[:, None] - others).clamp(min=1)).prod(1)
    fail = fail_with_it * wrong / count.clamp(min=1)
    sigma = root(fail * (1 - fail))
    gain = torch.where(rewards == 0, fail - fail_with_it, fail) / torch.where(sigma > 0, sigma, 1)
    return torch.where(kept, gain, 0)


def best_response_advantages(
    rewards: Shaped[Tensor, " batch"],
    groups: Int[Tensor, " batch"],
    *,
    scale: Scale | None = None,
    eps: float | Tensor = 1e-6,
    keep: Shaped[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """What the best response of a group adds to the best of the others (arXiv:2503.19595, leave-one-out baseline).

        A_i = max of the group - max of the group without i

    So it is not 0 for one response at most: pass@k for rewards of any kind, where k is the size of the group.

    Args:
        scale, eps: divide by the standard deviation, as in `grpo_advantages`; the paper does not.
        rewards, groups, keep: as in `grpo_advantages`.

    Raises:
        ValueError: as `grpo_advantages` does.

    >>> best_response_advantages(torch.tensor([1.0, 0.25, 0.0]), torch.tensor([0, 0, 0]))
    tensor([0.7500, 0.0000, 0.0000])
    """
    check_scale(scale, eps)
    rewards, index, kept = grouped(rewards, groups, keep)
    above = above_lowest(rewards, index, kept)
    best = kept & (above == group_max(above, index))
    others = kept & ~best
    alone_at_the_top = best & (group_count(index, best) == 1) & (group_count(index, others) > 0)
    runner_up = torch.where(alone_at_the_top, group_max(torch.where(others, above, -torch.inf), index), 0)
    gain = torch.where(alone_at_the_top, above - runner_up, 0)
    return scaled(gain, rewards, index, kept, scale=scale, eps=eps)
