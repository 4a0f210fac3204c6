"""KL estimators, aggregation, policy and value losses, entropy and log-probs of logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import ours
import torch
from batches import row_advantages, with_correction
from ours import Weights

import fnppo
from fnppo.kl import kl_abs, kl_k1, kl_k2, kl_k3, straight_through
from fnppo.surrogates import (
    cispo,
    clip_cov,
    clipped_surrogate,
    dppo_kl,
    dppo_tv,
    dro,
    gmpo,
    gpg,
    gspo,
    gspo_token,
    kl_cov,
    sapo,
    select_clip_cov,
    select_kl_cov,
    weighted,
)
from rows.row import BEFORE_091, OLD, Row, norm_10

KL = [
    Row(f"`{kind}`", name, "kl_penalty", {"kind": kind}, partial(ours.kl, estimator=estimator), differs=differs)
    for kind, name, estimator, differs in [
        ("k1", "`kl_k1`", kl_k1, {}),
        ("kl", "`kl_k1`", kl_k1, {}),
        ("abs", "`kl_abs`", kl_abs, {}),
        ("k2", "`kl_k2`", kl_k2, {}),
        ("mse", "`kl_k2`", kl_k2, {}),
        ("k3", "`kl_k3`", kl_k3, {}),
        ("low_var_kl", "`kl_k3`", kl_k3, {}),
        ("k1+", "`straight_through(kl_k1)`", straight_through(kl_k1), {"0.7.0": "plus"}),
        ("abs+", "`straight_through(kl_abs)`", straight_through(kl_abs), {"0.7.0": "plus"}),
        ("k3+", "`straight_through(kl_k3)`", straight_through(kl_k3), {"0.7.0": "plus"}),
    ]
]

AGGREGATION = [
    Row(
        f"`{mode}`",
        name,
        "agg_loss",
        {"mode": mode} | options,
        partial(ours.aggregate, weights=weights),
        absent=absent,
        differs=differs,
    )
    for mode, name, weights, options, absent, differs in [
        ("token-mean", "`token_mean`", fnppo.token_mean, {}, (), {}),
        ("token-sum", "`token_sum`", fnppo.token_sum, {}, BEFORE_091, {}),
        ("seq-mean-token-sum", "`sequence_sum`", fnppo.sequence_sum, {}, (), {}),
        ("seq-mean-token-mean", "`sequence_mean`", fnppo.sequence_mean, {}, (), {}),
        (
            "seq-mean-token-sum-norm",
            "`constant_norm(horizon=10)`",
            norm_10,
            {"loss_scale_factor": 10},
            (),
            {"0.7.0": "norm"},
        ),
    ]
]

CLIPS = {"pg_clipfrac": ["clip_low", "clip_high"], "pg_clipfrac_lower": ["dual_clip"]}

WIDE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}

CORRECTION = {"extra": {"importance_weights": "rollout_is_weights"}}

OURS_WIDE = {"clip_low": 0.2, "clip_high": 0.28}


def policy(
    mode: str,
    name: str,
    surrogate: Callable[..., Any],
    *,
    agg: str = "token-mean",
    weights: Weights = fnppo.token_mean,
    options: dict[str, Any] | None = None,
    numbers: dict[str, Any] | None = None,
    note: str = "",
    **fields: Any,
) -> Row:
    """The line of a `loss_mode`."""
    compute = partial(ours.loss, surrogate=surrogate, weights=weights, **numbers or {})
    call = {"mode": mode, "agg": agg} | (options or {})
    return Row(f"`{mode}`{note}", name, "policy_loss", call, compute, **fields)


choose_clip_cov = partial(select_clip_cov, generator=torch.Generator().manual_seed(0), fraction=1.0, low=0.5, high=5.0)

POLICY = [
    policy("vanilla", "`clipped_surrogate`", clipped_surrogate, numbers={"shares": CLIPS}),
    policy(
        "vanilla",
        "`clipped_surrogate(clip_low=.2, clip_high=.28)`",
        clipped_surrogate,
        options=WIDE,
        numbers=OURS_WIDE | {"shares": CLIPS},
        note=", `clip_ratio_high=.28`",
    ),
    policy(
        "vanilla",
        "`clipped_surrogate(dual_clip=1.5)`",
        clipped_surrogate,
        options={"clip_ratio_c": 1.5},
        numbers={"dual_clip": 1.5, "shares": CLIPS},
        note=", `clip_ratio_c=1.5`",
    ),
    policy(
        "vanilla",
        "`clipped_surrogate`, `sequence_mean`",
        clipped_surrogate,
        agg="seq-mean-token-mean",
        weights=fnppo.sequence_mean,
        note=", `seq-mean-token-mean`",
    ),
    policy(
        "vanilla",
        "`weighted(clipped_surrogate)`",
        weighted(clipped_surrogate),
        numbers=CORRECTION,
        prepare=with_correction,
        note=", with `rollout_is_weights`",
    ),
    policy(
        "gspo",
        "`gspo_token`, `sequence_mean`",
        gspo_token,
        agg="seq-mean-token-mean",
        weights=fnppo.sequence_mean,
        options=WIDE,
        numbers=OURS_WIDE,
    ),
    policy(
        "gspo",
        "`gspo`, `sequence_mean`",
        gspo,
        agg="seq-mean-token-mean",
        weights=fnppo.sequence_mean,
        options=WIDE,
        numbers=OURS_WIDE,
        prepare=row_advantages,
        note=", one advantage a row",
    ),
    policy(
        "gspo",
        "`gspo_token`, `token_mean`",
        gspo_token,
        options=WIDE,
        numbers=OURS_WIDE,
        note=", `token-mean`",
        differs=dict.fromkeys(BEFORE_091, "forced"),
    ),
    policy(
        "sapo",
        "`sapo`, `sequence_mean`",
        sapo,
        agg="seq-mean-token-mean",
        weights=fnppo.sequence_mean,
        options={"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    policy(
        "sapo",
        "`sapo`, `token_mean`",
        sapo,
        note=", `token-mean`",
        differs=dict.fromkeys(("0.7.0", "0.8.0", "0.9.1"), "forced"),
    ),
    policy("gpg", "`gpg`", gpg),
    policy(
        "gpg",
        "`weighted(gpg)`",
        weighted(gpg),
        numbers=CORRECTION,
        prepare=with_correction,
        note=", with `rollout_is_weights`",
    ),
    policy("cispo", "`cispo(clip_low=.2, clip_high=.28)`", cispo, options=WIDE, numbers=OURS_WIDE),
    policy(
        "geo_mean",
        "`gmpo`, `sequence_mean`",
        gmpo,
        weights=fnppo.sequence_mean,
        options={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
        prepare=row_advantages,
        note=", one advantage a row",
    ),
    policy(
        "dppo_tv",
        "`dppo_tv(weight_cap=3)`",
        dppo_tv,
        options={"clip_ratio_low": 0.15, "clip_ratio_high": 0.15},
        numbers={"weight_cap": 3.0},
        absent=OLD,
    ),
    policy(
        "dppo_kl",
        "`dppo_kl(weight_cap=3)`",
        dppo_kl,
        options={"clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
        numbers={"weight_cap": 3.0},
        absent=OLD,
    ),
    policy(
        "kl_cov",
        "`kl_cov`, `select_kl_cov(fraction=.1)`",
        kl_cov,
        options={"policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}},
        numbers={"kl_cov_coef": 0.5, "choose": partial(select_kl_cov, fraction=0.1)},
    ),
    policy(
        "clip_cov",
        "`clip_cov`, `select_clip_cov(fraction=1)`, no clip",
        clip_cov,
        options={
            "clip_ratio_low": 99.0,
            "clip_ratio_high": 99.0,
            "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 5.0},
        },
        numbers={"clip_low": 99.0, "clip_high": 99.0, "choose": choose_clip_cov},
        note=", all candidates, no clip",
    ),
    policy(
        "dro",
        "`dro(beta=.1)`",
        dro,
        options={"policy_loss": {"dro_beta": 0.1}},
        numbers={"beta": 0.1},
        absent=BEFORE_091,
    ),
]

WHOLE = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}


def split(mode: str, name: str, surrogate: Callable[..., Any], agg: str, weights: Weights, **numbers: Any) -> Row:
    """A loss in three micro-batches that are given the counts of the whole, beside ours of the whole."""
    compute = partial(ours.loss, surrogate=surrogate, weights=weights, **numbers)
    options = {"mode": mode, "agg": agg, "parts": 3}
    return Row(f"`{mode}`, `{agg}`", name, "split_policy_loss", options | WIDE, compute)


def whole_loss(agg: str, name: str, weights: Weights) -> Row:
    """`verl.workers.utils.losses.ppo_loss`, which 0.7.0 has, too, but does not use."""
    numbers = {"entropy_coef": 0.01, "kl_coef": 0.1, "weights": weights}
    compute = partial(ours.loss, **numbers)
    return Row(f"`ppo_loss`, `{agg}`", name, "ppo_loss", {"agg": agg, "parts": 3} | WHOLE, compute, absent=OLD)


SPLITS = [
    split("vanilla", "`clipped_surrogate`", clipped_surrogate, "token-mean", fnppo.token_mean, **OURS_WIDE),
    split(
        "vanilla",
        "`clipped_surrogate`, `sequence_mean`",
        clipped_surrogate,
        "seq-mean-token-mean",
        fnppo.sequence_mean,
        **OURS_WIDE,
    ),
    split("cispo", "`cispo`, `sequence_sum`", cispo, "seq-mean-token-sum", fnppo.sequence_sum, **OURS_WIDE),
    whole_loss("token-mean", "`ppo_loss(entropy_coef=.01, kl_coef=.1)`", fnppo.token_mean),
    whole_loss("seq-mean-token-mean", "the same with `sequence_mean`", fnppo.sequence_mean),
]


def value_row(agg: str, weights: Weights, name: str) -> Row:
    """The line of the value loss with one aggregation."""
    compute = partial(ours.value_loss, clip=0.2, weights=weights)
    return Row(f"`compute_value_loss`, `{agg}`", name, "value_loss", {"cliprange_value": 0.2, "agg": agg}, compute)


VALUE = [
    value_row("token-mean", fnppo.token_mean, "`value_loss(clip=.2)`"),
    value_row("seq-mean-token-mean", fnppo.sequence_mean, "`value_loss(clip=.2)`, `sequence_mean`"),
]

VOCABULARY = [
    Row(f"`{function}`", name, "vocabulary", {"function": function}, compute, differs=differs)
    for function, name, compute, differs in [
        ("logprobs_from_logits_naive", "`logits_to_stats(...).logprobs`", ours.logprobs, {}),
        ("logprobs_from_logits_v2", "`logits_to_stats(...).logprobs`", ours.logprobs, {}),
        ("entropy_from_logits", "`logits_to_stats(...).entropy`", ours.entropy, {}),
        (
            "entropy_from_logits_with_chunking",
            "`logits_to_stats(...).entropy`",
            ours.entropy,
            dict.fromkeys(("0.7.0", "0.8.0", "0.9.1"), "entropy-float32"),
        ),
    ]
]
