"""The update of verl's `DataParallelPPOActor`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ours
import torch
from batches import Columns
from torch import Tensor

from differences.difference import BUG, MEANING, OLD, RECENT, SPLIT, Call, Difference

VOCAB = 6


def rollouts(advantages: list[list[float]], *, logratio: float = 0.0, **columns: Tensor) -> Columns:
    """A batch for an actor whose model gives all six tokens the same probability; NaN where there is no token."""
    column = torch.tensor(advantages)
    mask = (~column.isnan()).long()
    prompted = torch.nn.functional.pad(mask, (1, 0), value=1)
    return {
        "table": torch.zeros(VOCAB, VOCAB),
        "input_ids": torch.ones_like(prompted),
        "attention_mask": prompted,
        "position_ids": (prompted.cumsum(1) - 1).clamp(min=0),
        "responses": torch.ones_like(mask),
        "response_mask": mask,
        "old_log_probs": torch.full(column.shape, -math.log(VOCAB) - logratio),
        "advantages": column.nan_to_num(),
    } | columns


def actor(columns: Columns, **numbers: Any) -> Columns:
    """`ppo_loss` on the same rollouts, all in one mini-batch."""
    uniform = torch.full(columns["advantages"].shape, -math.log(VOCAB))
    named = {"log_prob": uniform, "old_log_prob": columns["old_log_probs"], "advantages": columns["advantages"]}
    return ours.loss(named | {"response_mask": columns["response_mask"]}, **numbers)


def minibatches_of(rows: int, columns: Columns) -> Columns:
    """The sum of the losses of mini-batches of so many rows; the model stays as it is."""
    parts = [
        {name: value[i : i + rows] for name, value in columns.items()}
        for i in range(0, len(columns["input_ids"]), rows)
    ]
    return {"value": sum((actor(part)["value"] for part in parts), torch.zeros(()))}


def update(
    columns: Columns, compute: Callable[[Columns], Columns], label: str = "pg_loss", **options: Any
) -> list[Call]:
    """The loss that `DataParallelPPOActor.update_policy` reports."""
    return [Call(label, "value", "actor_update", {"learning_rate": 0.0} | options, columns, compute)]


nan = math.nan

ACTOR = [
    Difference(
        "micro",
        "The loss of `dp_actor` depends on the micro-batches",
        SPLIT,
        OLD,
        "A micro-batch's mean over tokens is weighted by its rows, or with `use_dynamic_bsz=False` by one over the number of "
        "micro-batches, not by its tokens. Terms for entropy and KL are treated likewise, and the critic's loss. The mean "
        "over tokens of the mini-batch (DAPO, arXiv:2503.14476, eq. 8) is what one micro-batch gives.",
        "ratios 1, advantages [[-1, -2, -3], [-10]], `ppo_mini_batch_size=2`",
        [
            call
            for label, micro in [("one micro-batch", 2), ("two micro-batches", 1)]
            for call in update(
                rollouts([[-1, -2, -3], [-10, nan, nan]]),
                actor,
                label,
                ppo_mini_batch_size=2,
                ppo_micro_batch_size_per_gpu=micro,
            )
        ],
        {"one micro-batch": [4.0], "two micro-batches": [4.0]},
        absent=RECENT,
    ),
    Difference(
        "floor",
        "The number of micro-batches is rounded down",
        BUG,
        OLD,
        "The divisor is `ppo_mini_batch_size // ppo_micro_batch_size_per_gpu`: 1 for 6 rows in micro-batches of 4 and 2.",
        "six rows of one token, ratios 1, advantages -1, `ppo_mini_batch_size=6`, `ppo_micro_batch_size_per_gpu=4`",
        update(rollouts([[-1.0]] * 6), actor, ppo_mini_batch_size=6, ppo_micro_batch_size_per_gpu=4),
        {"pg_loss": [1.0]},
        absent=RECENT,
    ),
    Difference(
        "short",
        "A short last mini-batch is divided by the size of a full one",
        BUG,
        OLD,
        "The same divisor holds for what is left over. fnppo divides by what is there.",
        "six rows of one token, ratios 1, advantages -1, `ppo_mini_batch_size=4`, `ppo_micro_batch_size_per_gpu=2`; sum over "
        "the two mini-batches, learning rate 0",
        update(
            rollouts([[-1.0]] * 6), partial(minibatches_of, 4), ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2
        ),
        {"pg_loss": [2.0]},
        absent=RECENT,
    ),
    Difference(
        "on-policy",
        "`old_log_probs` are replaced where there is one mini-batch",
        MEANING,
        OLD,
        "With one mini-batch and one epoch verl 0.7.0 takes the current log-probs for the old ones, whatever the batch says: "
        "the ratio is 1. In fnppo that is a step of its own, `on_policy(targets, stats)`.",
        "one token, ratio 1.1, advantage -1",
        update(
            rollouts([[-1.0]], logratio=math.log(1.1)), actor, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1
        ),
        {"pg_loss": [1.1]},
        absent=RECENT,
    ),
    Difference(
        "entropy-in-metric",
        "`actor/pg_loss` contains the entropy bonus",
        BUG,
        OLD,
        "`policy_loss -= ...` changes the tensor that is logged afterwards. fnppo's `policy_loss` has neither entropy nor KL "
        "in it. The gradient is right.",
        "one token, ratio 1, advantage -1, entropy log 6, `entropy_coeff=0.6`",
        update(rollouts([[-1.0]]), actor, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.6),
        {"pg_loss": [1.0]},
        absent=RECENT,
    ),
]
