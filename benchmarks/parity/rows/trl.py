"""The losses of TRL's GRPOTrainer."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ours
from batches import Columns, row_advantages, with_correction

import fnppo
from fnppo.corrections import off_policy_mask
from fnppo.kl import importance_corrected, kl_k3
from fnppo.surrogates import cispo, clipped_surrogate, gspo, luspo, sapo, select_top_entropy, selected, vespo, weighted
from rows.row import Row, norm_10

CORRECTION = {"extra": {"importance_weights": "rollout_is_weights"}}


def trl(theirs: str, name: str, options: dict[str, Any], compute: Callable[..., Columns], **fields: Any) -> Row:
    """The line of a loss of `GRPOTrainer`."""
    return Row(theirs, name, "policy_loss", options, compute, peer="trl", **fields)


def corrected_kl(columns: Columns) -> Columns:
    """k3 times the ratio, in the loss."""
    old = ours.at_targets(
        columns["old_log_prob"], fnppo.pad_sequences(ours.batch_of(columns, fnppo.token_mean)).targets
    )
    return ours.loss(columns, dual_clip=None, kl_coef=0.1, kl=importance_corrected(kl_k3, old))


clipped = partial(ours.loss, dual_clip=None)


def off_policy(columns: Columns) -> Columns:
    """The mask is about the current policy, and its rows stay in the divisor."""
    current = columns | {"old_log_prob": columns["log_prob"]}
    kept = ours.correction(current, partial(off_policy_mask, threshold=0.05))["value"]
    return clipped(columns | {"rollout_is_weights": kept}, weighted(clipped_surrogate), **CORRECTION)


def top_entropy(columns: Columns) -> Columns:
    """TRL's quantile of n entropies lies at (n - 1) · 0.8, counted from 0: what is there or above is learned."""
    tokens = int(columns["response_mask"].sum())
    count = tokens - math.ceil((tokens - 1) * 0.8 - 1e-9)
    choose = partial(select_top_entropy, fraction=count / tokens)
    return clipped(columns, selected(clipped_surrogate), choose=choose, chosen_by="entropy")


TRL = [
    trl(
        "`grpo`",
        "`clipped_surrogate(dual_clip=None)`, `sequence_mean`",
        {"loss_type": "grpo"},
        partial(clipped, weights=fnppo.sequence_mean),
    ),
    trl("`bnpo`", "`clipped_surrogate(dual_clip=None)`, `token_mean`", {"loss_type": "bnpo"}, clipped),
    trl("`dapo`", "`clipped_surrogate(dual_clip=None)`, `token_mean`", {"loss_type": "dapo"}, clipped),
    trl(
        "`dr_grpo`",
        "`clipped_surrogate(dual_clip=None)`, `constant_norm(horizon=10)`",
        {"loss_type": "dr_grpo", "max_completion_length": 10},
        partial(clipped, weights=norm_10),
    ),
    trl(
        "`dapo`, `epsilon_high=.28, delta=1.5`",
        "`clipped_surrogate(clip_high=.28, dual_clip=1.5)`",
        {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5},
        partial(ours.loss, clip_high=0.28, dual_clip=1.5),
    ),
    trl(
        "`dapo`, `beta=.1, use_bias_correction_kl=False`",
        "`ppo_loss(kl_coef=.1)`",
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
        partial(clipped, kl_coef=0.1),
    ),
    trl(
        "`dapo`, `beta=.1, use_bias_correction_kl`",
        "`ppo_loss(kl_coef=.1, kl=importance_corrected(kl_k3, old))`",
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
        corrected_kl,
    ),
    trl(
        "`cispo`, `epsilon_high=5`",
        "`cispo(clip_low=1, clip_high=4)`",
        {"loss_type": "cispo", "epsilon_high": 5.0},
        partial(ours.loss, surrogate=cispo, clip_low=1.0, clip_high=4.0),
    ),
    trl(
        "`sapo`",
        "`sapo`, `sequence_mean`",
        {"loss_type": "sapo"},
        partial(ours.loss, surrogate=sapo, weights=fnppo.sequence_mean),
    ),
    trl(
        "`grpo`, `importance_sampling_level=sequence`",
        "`gspo(clip_low=.2, clip_high=.2)`, `sequence_mean`",
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        partial(ours.loss, surrogate=gspo, clip_low=0.2, clip_high=0.2, weights=fnppo.sequence_mean),
        prepare=row_advantages,
    ),
    trl(
        "`luspo`, `importance_sampling_level=sequence`",
        "`luspo(clip_low=.2, clip_high=.2)`, `sequence_mean`",
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        partial(ours.loss, surrogate=luspo, clip_low=0.2, clip_high=0.2, weights=fnppo.sequence_mean),
        prepare=row_advantages,
    ),
    trl(
        "`vespo`",
        "`vespo`, `token_mean`",
        {"loss_type": "vespo"},
        partial(ours.loss, surrogate=vespo),
        prepare=row_advantages,
    ),
    trl(
        "`dapo`, `top_entropy_quantile=.2`",
        "`selected(clipped_surrogate)(dual_clip=None)`, `select_top_entropy` of as many tokens",
        {"loss_type": "dapo", "top_entropy_quantile": 0.2},
        top_entropy,
    ),
    trl(
        "`dapo`, `off_policy_mask_threshold=.05`",
        "`weighted(clipped_surrogate)(dual_clip=None)` with `off_policy_mask(batch, threshold=.05)`",
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05, "rejects": True},
        off_policy,
        prepare=row_advantages,
    ),
    trl(
        "`dapo`, with vLLM's importance ratios",
        "`weighted(clipped_surrogate)(dual_clip=None)`",
        {"loss_type": "dapo", "corrected": True},
        partial(clipped, surrogate=weighted(clipped_surrogate), **CORRECTION),
        prepare=with_correction,
    ),
]
