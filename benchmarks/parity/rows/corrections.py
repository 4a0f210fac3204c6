"""Off-policy corrections."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ours

from fnppo.corrections import (
    geometric_ratios,
    inside,
    mask_outside,
    near_sampler,
    sequence_normalized,
    sequence_ratios,
    token_normalized,
    token_ratios,
    truncate,
    whole_rows,
)
from fnppo.kl import kl_k2
from fnppo.surrogates import reinforce
from rows.row import OLD, RECENT, Row


def weights_row(theirs: str, name: str, options: dict[str, Any], function: Callable[..., Any], **fields: Any) -> Row:
    """The line of importance weights."""
    return Row(theirs, name, "correction_weights", options, partial(ours.correction, function=function), **fields)


def mask_row(theirs: str, name: str, options: dict[str, Any], function: Callable[..., Any], **fields: Any) -> Row:
    """The line of a mask."""
    return Row(theirs, name, "rejection_mask", options, partial(ours.correction, function=function), **fields)


HALF_TO_TWO = {"low": 0.5, "high": 2.0}

OLD_BOUNDS = {"rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.5}

CORRECTIONS = [
    weights_row(
        "`rollout_is=token`",
        "`truncate(token_ratios(batch), at=1.5)`",
        {"rollout_is": "token", "rollout_is_threshold": 1.5},
        lambda batch: truncate(token_ratios(batch), at=1.5),
    ),
    weights_row(
        "`rollout_is=sequence`",
        "`truncate(sequence_ratios(batch), at=5.0)`",
        {"rollout_is": "sequence", "rollout_is_threshold": 5.0},
        lambda batch: truncate(sequence_ratios(batch), at=5.0),
    ),
    weights_row(
        "`rollout_is=token`, `rollout_is_threshold=0.5_2.0`",
        "`mask_outside(token_ratios(batch), low=.5, high=2.0)`",
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        lambda batch: mask_outside(token_ratios(batch), **HALF_TO_TWO),
        absent=OLD,
    ),
    weights_row(
        "`rollout_is=token`, `rollout_is_batch_normalize`",
        "`token_normalized(truncate(token_ratios(batch), at=1.5), batch)`",
        {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
        lambda batch: token_normalized(truncate(token_ratios(batch), at=1.5), batch),
    ),
    weights_row(
        "`rollout_is=sequence`, `rollout_is_batch_normalize`",
        "`sequence_normalized(truncate(sequence_ratios(batch), at=5.0), batch)`",
        {"rollout_is": "sequence", "rollout_is_threshold": 5.0, "rollout_is_batch_normalize": True},
        lambda batch: sequence_normalized(truncate(sequence_ratios(batch), at=5.0), batch),
    ),
    *[
        mask_row(
            f"`rollout_rs={name}`",
            f"`inside({ratios.__name__}(batch), low=.5, high=2.0)`",
            {"rollout_rs": name} | options,
            lambda batch, ratios=ratios: inside(ratios(batch), **HALF_TO_TWO),
            absent=absent,
        )
        for name, ratios, options, absent in [
            ("token", token_ratios, OLD_BOUNDS, RECENT),
            ("sequence", sequence_ratios, OLD_BOUNDS, RECENT),
            ("geometric", geometric_ratios, OLD_BOUNDS, RECENT),
            ("token_k1", token_ratios, {"rollout_rs_threshold": "0.5_2.0"}, OLD),
            ("seq_sum_k1", sequence_ratios, {"rollout_rs_threshold": "0.5_2.0"}, OLD),
            ("seq_mean_k1", geometric_ratios, {"rollout_rs_threshold": "0.5_2.0"}, OLD),
        ]
    ],
    mask_row(
        "`rollout_rs=seq_mean_k2`",
        "`near_sampler(batch, most=.1, kl=kl_k2)`",
        {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.1},
        lambda batch: near_sampler(batch, most=0.1, kl=kl_k2),
        absent=OLD,
    ),
    mask_row(
        "`rollout_rs=seq_mean_k3`",
        "`near_sampler(batch, most=.1)`",
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1},
        lambda batch: near_sampler(batch, most=0.1),
        absent=OLD,
    ),
    Row(
        "`rollout_token_veto_threshold=.4`",
        "`whole_rows(inside(token_ratios(batch), low=.4, high=math.inf), batch)`",
        "veto_mask",
        {"threshold": 0.4},
        partial(
            ours.correction,
            function=lambda batch: whole_rows(inside(token_ratios(batch), low=0.4, high=math.inf), batch),
        ),
        absent=RECENT,
    ),
    Row("`compute_offpolicy_metrics`", "`off_policy_diagnostics`", "diagnostics", {}, ours.diagnostics),
    Row(
        "`bypass_mode`, `loss_type=reinforce`",
        "`reinforce(weight_cap=2)`",
        "policy_loss",
        {
            "mode": "bypass_mode",
            "policy_loss": {
                "rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
            },
        },
        partial(ours.loss, surrogate=reinforce, weight_cap=2.0),
        absent=OLD,  # there it is set by the trainer, not by the configuration
    ),
]
