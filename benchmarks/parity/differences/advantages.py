"""Advantage estimators."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ours
import torch
from batches import Columns
from torch import Tensor

from differences.difference import (
    ALL,
    BEFORE_091,
    BUG,
    CLAMP,
    MEANING,
    OLD,
    RECENT,
    ROUNDING,
    Call,
    Difference,
    matrix,
)
from fnppo.advantages import (
    discounted_returns,
    gae_advantages,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    opo_advantages,
    remax_advantages,
    rloo_advantages,
    whiten,
)


def rewards(values: list[float], groups: list[int], dtype: torch.dtype = torch.float64, width: int = 1) -> Columns:
    """Responses of one token, or of `width` with the reward on the last."""
    column = torch.zeros(len(values), width, dtype=dtype)
    column[:, -1] = torch.tensor(values, dtype=dtype)
    return {
        "token_level_rewards": column,
        "response_mask": torch.ones_like(column),
        "index": torch.tensor(groups),
        "old_log_prob": torch.zeros_like(column),
    }


def advantage(
    estimator: str, columns: Columns, function: Callable[..., Tensor], label: str = "advantages", **options: Any
) -> Call:
    """Advantages of responses."""
    return Call(
        label, "value", "advantage", {"estimator": estimator} | options, columns, partial(ours.of_responses, function)
    )


def per_token_returns(columns: Columns) -> Columns:
    """Returns without whitening."""
    return {"returns": discounted_returns(columns["token_level_rewards"], columns["response_mask"])}


def gae(columns: Columns) -> Columns:
    """Whitened advantages of GAE."""
    mask = columns["response_mask"]
    return {"value": whiten(gae_advantages(columns["token_level_rewards"], columns["values"], mask)[0], mask)}


def gdpo(columns: Columns) -> Columns:
    """Two rewards."""
    both_rewards = torch.stack([columns["accuracy"], columns["format"]], 1)
    return ours.of_responses(lambda _, groups: gdpo_advantages(both_rewards, groups), columns)


def opo(columns: Columns) -> Columns:
    """Lengths are numbers of learned tokens."""
    return ours.of_responses(partial(opo_advantages, lengths=columns["response_mask"].sum(1)), columns)


ADVANTAGES = [
    Difference(
        "lone",
        "A response alone in its group gets its raw reward",
        BUG,
        ALL,
        "With nothing to compare with, verl takes 0 as the mean and 1 as the standard deviation. Wrong group ids make every "
        "group one of one response, and the run goes on without a baseline. fnppo gives 0, and warns. So it is in "
        "`reinforce_plus_plus_baseline` and `grpo_vectorized`, too; `rloo_vectorized` alone gives 0.",
        "one response, reward 0.9",
        [
            advantage("grpo", rewards([0.9], [0]), grpo_advantages, "grpo"),
            advantage("rloo", rewards([0.9], [0]), rloo_advantages, "rloo"),
            Call("opo", "value", "advantage", {"estimator": "opo"}, rewards([0.9], [0]), opo),
            advantage("gpg", rewards([0.9], [0]), gpg_advantages, "gpg"),
        ],
        {"grpo": [0.0], "rloo": [0.0], "opo": [0.0], "gpg": [0.0]},
    ),
    Difference(
        "residue",
        "Equal rewards do not give 0",
        ROUNDING,
        ALL,
        "The mean of equal float32 numbers is not always that number. What is left is divided by a standard deviation of "
        "nearly 0. In fnppo such a group is exactly 0.",
        "seven responses, all with reward 0.7 in float32",
        [advantage("grpo", rewards([0.7] * 7, [0] * 7, torch.float32), grpo_advantages)],
        {"advantages": [0.0] * 7},
    ),
    Difference(
        "squares",
        "`grpo_vectorized` computes variances as a difference of squares in float32",
        ROUNDING,
        ALL,
        "Σr² - (Σr)²/n loses all digits where rewards are large and close. GRPO's standard deviation is that of the rewards "
        "(arXiv:2402.03300, section 4.1.2).",
        "one group, rewards 100 and 100.1",
        [advantage("grpo_vectorized", rewards([100.0, 100.1], [0, 0]), grpo_advantages)],
        {"advantages": [-0.05 / (0.1 / math.sqrt(2) + 1e-6), 0.05 / (0.1 / math.sqrt(2) + 1e-6)]},
    ),
    Difference(
        "vectorized-floor",
        "`grpo_vectorized` has a floor under the variance",
        CLAMP,
        OLD,
        "The variance is at least 1e-6, hence the standard deviation at least 1e-3. `grpo` has no such floor.",
        "one group, rewards 0 and 0.0001",
        [advantage("grpo_vectorized", rewards([0.0, 1e-4], [0, 0]), grpo_advantages)],
        {"advantages": [-5e-5 / (1e-4 / math.sqrt(2) + 1e-6), 5e-5 / (1e-4 / math.sqrt(2) + 1e-6)]},
    ),
    Difference(
        "vectorized-device",
        "`grpo_vectorized` runs under pytest only",
        BUG,
        OLD,
        "It takes a module such as `torch.cuda` for a device, except where an environment variable says that pytest is running "
        "or `VERL_FORCE_DEVICE` is set. The other numbers of `grpo_vectorized` are made with the latter.",
        "one group, rewards 0 and 1",
        [advantage("grpo_vectorized", rewards([0.0, 1.0], [0, 0]), grpo_advantages, force_device=False)],
        {"advantages": [-0.5 / (math.sqrt(0.5) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)]},
    ),
    Difference(
        "gpg-alpha",
        "The factor of `gpg` counts rewards that are not 0",
        BUG,
        ALL,
        "GPG (arXiv:2504.02546, AGE) divides by the share of prompts that give a gradient: those whose rewards differ. verl "
        "divides by the share of responses whose reward is not 0.",
        "two groups, rewards 1, 0 and 1, 1",
        [advantage("gpg", rewards([1, 0, 1, 1], [0, 0, 1, 1]), gpg_advantages)],
        {"advantages": [1.0, -1.0, 0.0, 0.0]},
    ),
    Difference(
        "observations",
        "`reinforce_plus_plus` loses the reward at the output of a tool",
        BUG,
        BEFORE_091,
        "G_t = r_t + γ G_{t+1} over the tokens of the policy. verl sets G to 0 at each token that is not learned, so turns "
        "before the last learn nothing from the outcome. Mended in 0.9.1.",
        "one row, mask 1, 0, 1, reward 1 on the last token, γ = 1; the returns",
        [
            Call(
                "returns",
                "returns",
                "advantage",
                {"estimator": "reinforce_plus_plus", "config": {"gamma": 1.0}},
                {
                    "token_level_rewards": matrix([0, 0, 1]),
                    "response_mask": matrix([1, 0, 1]),
                    "index": torch.zeros(1),
                    "old_log_prob": matrix([0, 0, 0]),
                },
                per_token_returns,
            )
        ],
        {"returns": [1.0, 0.0, 1.0]},
    ),
    Difference(
        "remax",
        "`remax` subtracts the baseline of the response from the return of the token",
        MEANING,
        ALL,
        "ReMax (arXiv:2310.10505, section 3) has r(x, y) - r(x, greedy) at every token. The same where the reward is on the "
        "last token; with rewards on earlier ones (a KL in the reward) verl's baseline is not that of what is left.",
        "one row of two tokens with rewards 0.5 and 1, baseline 1",
        [
            Call(
                "advantages",
                "value",
                "advantage",
                {"estimator": "remax"},
                {
                    "token_level_rewards": matrix([0.5, 1]),
                    "response_mask": matrix([1, 1]),
                    "index": torch.zeros(1),
                    "old_log_prob": matrix([0, 0]),
                    "reward_baselines": torch.ones(1, dtype=torch.float64),
                },
                lambda columns: ours.of_responses(
                    lambda r, _: remax_advantages(r, columns["reward_baselines"]), columns
                ),
            )
        ],
        {"advantages": [0.5, 0.5]},
    ),
    Difference(
        "whiten-one",
        "One learned token cannot be whitened",
        BUG,
        ALL,
        "verl raises an error. In fnppo fewer than two tokens are returned as they are.",
        "advantage 3 on one token",
        [
            Call(
                "whitened",
                "value",
                "whiten",
                {},
                {"advantages": matrix([3]), "response_mask": matrix([1])},
                lambda columns: {"value": whiten(columns["advantages"], columns["response_mask"])},
            )
        ],
        {"whitened": [3.0]},
    ),
    Difference(
        "gae-masked",
        "Advantages of `gae` are not 0 at masked tokens",
        MEANING,
        ALL,
        "They are carried over observations, then whitened with the rest. No loss reads them there, but a mean over the "
        "column does.",
        "one row, mask 1, 1, 0, rewards 1, 0, 0, values 0, γ = λ = 1",
        [
            Call(
                "all three places",
                "value",
                "advantage",
                {"estimator": "gae", "gamma": 1.0, "lam": 1.0},
                {
                    "token_level_rewards": matrix([1, 0, 0]),
                    "values": matrix([0, 0, 0]),
                    "response_mask": matrix([1, 1, 0]),
                    "index": torch.zeros(1),
                    "old_log_prob": matrix([0, 0, 0]),
                },
                gae,
            )
        ],
        {"all three places": [math.sqrt(0.5), -math.sqrt(0.5), 0.0]},
    ),
    Difference(
        "gdpo",
        "`gdpo` whitens over tokens, so longer responses count more",
        MEANING,
        RECENT,
        "The last step of GDPO (arXiv:2601.05242) normalises the sum of the advantages over the responses of the batch.",
        "one group, responses of 1 and 3 tokens, rewards (1, 1) and (0, 0)",
        [
            Call(
                "advantages",
                "value",
                "advantage",
                {"estimator": "gdpo", "config": {"gdpo_reward_keys": ["accuracy", "format"]}},
                {
                    "token_level_rewards": matrix([2, 0, 0], [0, 0, 0]),
                    "response_mask": matrix([1, 0, 0], [1, 1, 1]),
                    "index": torch.zeros(2, dtype=torch.long),
                    "old_log_prob": matrix([0, 0, 0], [0, 0, 0]),
                    "accuracy": torch.tensor([1.0, 0.0], dtype=torch.float64),
                    "format": torch.tensor([1.0, 0.0], dtype=torch.float64),
                },
                gdpo,
            )
        ],
        {"advantages": [math.sqrt(0.5), 0, 0, -math.sqrt(0.5), -math.sqrt(0.5), -math.sqrt(0.5)]},
        absent=OLD,
    ),
]
