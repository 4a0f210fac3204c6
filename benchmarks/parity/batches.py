"""Random batches in float64, the same for every side: name -> tensor, response columns only, as verl names them."""

from typing import NamedTuple

import torch
from torch import Tensor

Columns = dict[str, Tensor]


class Shape(NamedTuple):
    """What a batch looks like. `turns` > 1: tool output between the turns; `spread`: of the log-ratios."""

    rows: int
    width: int
    turns: int = 1
    spread: float = 0.1


SHAPES = [
    Shape(rows=4, width=5),
    Shape(rows=6, width=12, spread=0.6),
    Shape(rows=8, width=17, turns=3, spread=0.3),
    Shape(rows=16, width=64, turns=4, spread=0.6),
    Shape(rows=12, width=1, spread=0.6),
]
SEEDS = 3


def random_batch(shape: Shape, seed: int) -> Columns:
    """Each group of prompts has three rows or more, not side by side, and each row one learned token or more."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rows, width, turns, spread = shape
    cells = (rows, width)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    if turns > 1:
        # A turn of the tool begins where the number of the turn, counted by random boundaries, is odd.
        boundaries = uniform(rows, width).argsort(1).argsort(1) < 2 * (turns - 1)
        mask = mask & (boundaries.cumsum(1) % 2 == 0) | (torch.arange(width) == 0)
    mask = mask.double()

    old = -0.05 - 3 * uniform(*cells)

    def near(log_prob: Tensor) -> Tensor:
        return (log_prob + (spread * normal(*cells)).clamp(-2, 2)).clamp(max=-0.01)

    last = width - 1 - mask.flip(1).argmax(1)
    outcome = torch.zeros(cells, dtype=torch.float64)
    outcome[torch.arange(rows), last] = torch.randint(0, 3, (rows,), generator=generator).double() + 0.1 * normal(rows)
    values = normal(*cells)
    return {
        "response_mask": mask,
        "log_prob": near(old),
        "old_log_prob": old,
        "ref_log_prob": near(old),
        "rollout_log_prob": near(old),
        "correction": 0.5 + uniform(*cells),
        "advantages": normal(*cells),
        "loss_mat": normal(*cells),
        "token_level_rewards": (0.1 * normal(*cells) + outcome) * mask,
        "values": values,
        "vpreds": values + 0.3 * normal(*cells),
        "returns": values + normal(*cells),
        "reward_baselines": normal(rows),
        "index": torch.arange(rows) % (rows // 3),
        "sum_pi_squared": old.exp() ** 2 + (1 - old.exp()) ** 2 * uniform(*cells),
        "entropy": (2 * uniform(*cells)).float().double(),  # TRL compares it with a quantile in float32
        "accuracy": torch.randint(0, 2, (rows,), generator=generator).double() + 0.1 * uniform(rows),
        "format": uniform(rows),
        "logits": 3 * normal(*cells, 7),
        "labels": torch.randint(0, 7, cells, generator=generator),
        "kl": 0.05 + 0.1 * uniform(5),
    }


def row_advantages(columns: Columns) -> Columns:
    """One advantage a row, as sequence-level losses are written for."""
    advantages = columns["advantages"][:, :1].expand_as(columns["advantages"])
    return columns | {"advantages": advantages.contiguous()}


def with_correction(columns: Columns) -> Columns:
    """With the importance weights of an off-policy correction: what the others leave out."""
    return columns | {"rollout_is_weights": columns["correction"]}


def outcome_rewards(columns: Columns) -> Columns:
    """The reward of a row on its last learned token, and nothing before."""
    rewards, mask = columns["token_level_rewards"], columns["response_mask"]
    last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) * mask
    return columns | {"token_level_rewards": rewards.sum(1, keepdim=True) * last}


def one_turn(columns: Columns) -> Columns:
    """As many learned tokens in each row, without a tool between them."""
    mask = columns["response_mask"]
    together = (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)).to(mask.dtype)
    return columns | {"response_mask": together, "token_level_rewards": columns["token_level_rewards"] * together}
