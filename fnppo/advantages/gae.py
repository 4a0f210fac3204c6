"""Advantages of tokens from rewards of tokens: generalized advantage estimation, and returns.

Tokens between learned ones (observations, tool output) and padding are skipped: the next token is the next learned one, and
what stands elsewhere is never read. A rejected row is one whose loss mask is clear (see `mask_rows`). Outcome rewards
become rewards of tokens with `on_last_token`.
"""

from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from fnppo.advantages.token_columns import learned_columns, learned_first, moved, moved_back
from fnppo.arguments import check_hyper


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

    where t + 1 is the next learned token of the row, and V and A are 0 after the last.

    Args:
        rewards: r_t, received for token t.
        values: V_t, the value before token t is chosen.

    Returns:
        (advantages, returns), 0 where `loss_mask` is clear.

    Raises:
        ValueError: the shapes differ, a reward or value is not finite at a learned token, or gamma or lam is not in [0, 1].

    >>> import torch
    >>> mask = torch.tensor([[True, True, False]])
    >>> gae_advantages(torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([[0.5, 1.0, 40.0]]), mask, lam=0.5)[0]
    tensor([[1., 1., 0.]])
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        check_hyper(name, number, least=0, most=1, remedy="It discounts, and 1 does not.")
    learned, (rewards, values) = learned_columns(loss_mask, rewards=rewards, values=values)
    places = learned_first(learned)
    in_order = moved(values, places)
    deltas = moved(rewards, places) + gamma * pad(in_order[:, 1:], (0, 1)) - in_order  # 0 after the last learned token
    advantages = moved_back(discounted_sum(deltas, gamma * lam), places)
    return advantages, advantages + values


def discounted_returns(
    rewards: Float[Tensor, "batch seq"], loss_mask: Shaped[Tensor, "batch seq"], *, gamma: float | Tensor = 1.0
) -> Float[Tensor, "batch seq"]:
    """What is still to come: G_t = r_t + gamma G_{t+1} over the learned tokens of each row, 0 where loss_mask is clear.

    Raises:
        ValueError: the shapes differ, a reward is not finite at a learned token, or gamma is not in [0, 1].

    >>> import torch
    >>> mask = torch.tensor([[True, False, True]])
    >>> discounted_returns(torch.tensor([[1.0, 9.0, 4.0]]), mask, gamma=0.5)
    tensor([[3., 0., 4.]])
    """
    check_hyper("gamma", gamma, least=0, most=1, remedy="It discounts, and 1 does not.")
    learned, (rewards,) = learned_columns(loss_mask, rewards=rewards)
    places = learned_first(learned)
    return moved_back(discounted_sum(moved(rewards, places), gamma), places)


def discounted_sum(values: Float[Tensor, "batch seq"], discount: float | Tensor) -> Float[Tensor, "batch seq"]:
    """Σ_k discount^k · values[:, t + k], to the end of the row.

    After n rounds each sum has 2^n terms, so that a row of 8192 tokens takes 13 rounds, not 8192 steps.

    >>> import torch
    >>> discounted_sum(torch.ones(1, 4), 0.5)
    tensor([[1.8750, 1.7500, 1.5000, 1.0000]])
    """
    terms = 1
    while terms < values.shape[1]:
        values = values + discount * pad(values[:, terms:], (0, terms))
        discount, terms = discount * discount, 2 * terms
    return values
