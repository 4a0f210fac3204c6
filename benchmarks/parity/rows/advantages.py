"""Advantage estimators."""

from collections.abc import Callable
from functools import partial
from typing import Any

import ours
from batches import Columns, one_turn, outcome_rewards

from fnppo.advantages import (
    best_response_advantages,
    dr_grpo_advantages,
    gae_advantages,
    gpg_advantages,
    grpo_advantages,
    opo_advantages,
    otb_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    whiten,
)
from rows.row import BEFORE_091, OLD, Row


def responses(
    estimator: str, name: str, function: Callable[..., Any], options: dict[str, Any] | None = None, **fields: Any
) -> Row:
    """The line of an estimator that needs rewards and groups."""
    call = {"estimator": estimator} | (options or {})
    return Row(f"`{estimator}`", name, "advantage", call, partial(ours.of_responses, function), **fields)


def gae(columns: Columns) -> Columns:
    """verl whitens the advantages, not the returns."""
    mask = columns["response_mask"]
    advantages, returns = gae_advantages(columns["token_level_rewards"], columns["values"], mask, gamma=0.98, lam=0.95)
    return {"value": whiten(advantages, mask), "returns": returns}


def opo(columns: Columns) -> Columns:
    """Lengths are numbers of learned tokens."""
    lengths = columns["response_mask"].sum(1)
    return ours.of_responses(partial(opo_advantages, lengths=lengths), columns)


def remax(columns: Columns) -> Columns:
    """The baselines are the rewards of greedy responses."""
    return ours.of_responses(lambda rewards, _: remax_advantages(rewards, columns["reward_baselines"]), columns)


def otb(columns: Columns) -> Columns:
    """With verl's `handle_zero_tail`, the end of the longest response keeps its return."""
    return {
        "value": otb_advantages(
            columns["token_level_rewards"],
            columns["index"],
            columns["response_mask"],
            logprobs=columns["old_log_prob"],
            sum_squared_probs=columns["sum_pi_squared"],
            lone_baseline=0.0,
        )
    }


def plus_plus(columns: Columns) -> Columns:
    """Returns, whitened."""
    mask = columns["response_mask"]
    return {"value": reinforce_plus_plus_advantages(columns["token_level_rewards"], mask, gamma=0.98)}


def plus_plus_baseline(columns: Columns) -> Columns:
    """Centred in groups, whitened over tokens."""
    rewards, mask = columns["token_level_rewards"].sum(1), columns["response_mask"]
    return {"value": reinforce_plus_plus_baseline_advantages(rewards, columns["index"], mask)}


ADVANTAGES = [
    Row("`gae`", "`gae_advantages`, `whiten`", "advantage", {"estimator": "gae", "gamma": 0.98, "lam": 0.95}, gae),
    responses("grpo", "`grpo_advantages`", grpo_advantages),
    responses("grpo", "`dr_grpo_advantages`", dr_grpo_advantages, {"norm_adv_by_std_in_grpo": False}),
    responses(
        "grpo_vectorized",
        "`grpo_advantages`",
        grpo_advantages,
        differs={"0.7.0": "vectorized-floor", "0.8.0": "squares", "0.9.1": "squares"},
    ),
    responses("rloo", "`rloo_advantages`", rloo_advantages),
    responses("rloo_vectorized", "`rloo_advantages`", rloo_advantages),
    responses(
        "grpo_passk",
        "`best_response_advantages(scale=None)`",
        best_response_advantages,
        {"config": {"norm_adv_by_std_in_grpo": False}},
    ),
    Row("`opo`", "`opo_advantages`", "advantage", {"estimator": "opo"}, opo),
    Row("`remax`", "`remax_advantages`", "advantage", {"estimator": "remax"}, remax, outcome_rewards),
    responses("gpg", "`gpg_advantages`", gpg_advantages),
    Row(
        "`reinforce_plus_plus`",
        "`reinforce_plus_plus_advantages`",
        "advantage",
        {"estimator": "reinforce_plus_plus", "config": {"gamma": 0.98}},
        plus_plus,
        differs=dict.fromkeys(BEFORE_091, "observations"),
    ),
    Row(
        "`reinforce_plus_plus`, one turn",
        "`reinforce_plus_plus_advantages`",
        "advantage",
        {"estimator": "reinforce_plus_plus", "config": {"gamma": 0.98}},
        plus_plus,
        one_turn,
    ),
    Row(
        "`reinforce_plus_plus_baseline`",
        "`reinforce_plus_plus_baseline_advantages`",
        "advantage",
        {"estimator": "reinforce_plus_plus_baseline"},
        plus_plus_baseline,
    ),
    Row(
        "`optimal_token_baseline`",
        "`otb_advantages(lone_baseline=0)`",
        "advantage",
        {"estimator": "optimal_token_baseline"},
        otb,
        one_turn,
        absent=OLD,
    ),
    Row(
        "`tir_optimal_token_baseline`",
        "`otb_advantages(lone_baseline=0)`",
        "advantage",
        {"estimator": "tir_optimal_token_baseline"},
        otb,
        absent=OLD,
    ),
]
