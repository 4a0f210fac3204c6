"""KL estimators, aggregation, policy losses, entropy."""

import math
from functools import partial

import ours
import torch
from batches import Columns

import fnppo
from differences.difference import (
    ALL,
    BUG,
    CLAMP,
    DEFAULT,
    MEANING,
    OLD,
    RECENT,
    ROUNDING,
    SELECTION,
    SPLIT,
    Call,
    Difference,
    both,
    matrix,
    tokens,
)
from fnppo.kl import kl_k3, straight_through
from fnppo.surrogates import clip_cov, dppo_tv, gmpo, gspo_token, kl_cov, sapo, select_clip_cov, select_kl_cov

A1 = {
    "loss_mat": matrix([1, 2, 3], [10, 0, 0]),
    "response_mask": matrix([1, 1, 1], [1, 0, 0]),
}

WIDER = {name: torch.nn.functional.pad(column, (0, 4)) for name, column in A1.items()}

NAN = {"loss_mat": matrix([1, math.nan]), "response_mask": matrix([1, 0])}

norm_3 = partial(fnppo.constant_norm, horizon=3)

d_minus_3 = tokens([[-3.0]], ref_log_prob=[[0.0]])

d_minus_half = tokens([[-0.5]], ref_log_prob=[[0.0]])

KL = [
    Difference(
        "k3-cap",
        "k3 is capped at 10",
        CLAMP,
        ALL,
        "verl clamps log π_ref - log π to ±20 and k3 itself to 10. Above that the gradient is 0: from a log-ratio of -2.6 "
        "on, the policy is no longer pulled back to the reference, and it is pulled back least where it is farthest. The "
        "estimator is k3 = exp(-d) - 1 + d (GRPO, arXiv:2402.03300, eq. 4). In fnppo no estimator has a cap; "
        "`ppo_loss(kl_cap=10)` asks for one, and counts the tokens at it.",
        "one token, log π - log π_ref = -3",
        both("kl_penalty", {"kind": "k3"}, d_minus_3, partial(ours.kl, estimator=kl_k3)),
        {"value": [math.exp(3) - 4], "gradient": [1 - math.exp(3)]},
    ),
    Difference(
        "plus",
        "`k1+`, `abs+` and `k3+` are not implemented",
        BUG,
        OLD,
        "`kl_penalty` hands the name with its `+` to a function that knows the name without it. Meant is the value of k3 "
        "with the gradient of k2, which in expectation is that of the KL.",
        "one token, log π - log π_ref = -0.5",
        both("kl_penalty", {"kind": "k3+"}, d_minus_half, partial(ours.kl, estimator=straight_through(kl_k3))),
        {"value": [math.exp(0.5) - 1.5], "gradient": [-0.5]},
    ),
]

AGGREGATION = [
    Difference(
        "norm",
        "`seq-mean-token-sum-norm` has no mean over sequences",
        BUG,
        OLD,
        "Dr. GRPO (arXiv:2503.20783, section 3.2) divides the sum of the tokens by a constant, and takes the mean over "
        "sequences. verl 0.7.0 leaves out the mean: the loss grows with the size of the batch.",
        "losses [[1, 2, 3], [10]], constant 3",
        both(
            "agg_loss",
            {"mode": "seq-mean-token-sum-norm", "loss_scale_factor": 3},
            A1,
            partial(ours.aggregate, weights=norm_3),
        )[:1],
        {"value": [16 / 2 / 3]},
    ),
    Difference(
        "norm-width",
        "The constant of `seq-mean-token-sum-norm` is the width of the batch",
        DEFAULT,
        ALL,
        "Without `loss_scale_factor`, verl divides by the padded length of the response, so more padding makes the loss "
        "smaller. fnppo's `constant_norm` has no default.",
        "losses [[1, 2, 3], [10]] padded to 7 columns; the sampler allows 3 tokens",
        both("agg_loss", {"mode": "seq-mean-token-sum-norm"}, WIDER, partial(ours.aggregate, weights=norm_3))[:1],
        {"value": [16 / 2 / 3]},
    ),
    Difference(
        "masked-nan",
        "Masked places are read in the sequence modes",
        BUG,
        ALL,
        "The loss is multiplied by the mask, and NaN · 0 is NaN. `token-mean` selects before it adds. fnppo never reads a "
        "masked place.",
        "losses [[1, NaN]], the second masked",
        both("agg_loss", {"mode": "seq-mean-token-mean"}, NAN, partial(ours.aggregate, weights=fnppo.sequence_mean))[
            :1
        ],
        {"value": [1.0]},
    ),
    Difference(
        "empty-rows",
        "With global counts, rows without a learned token are in the divisor",
        MEANING,
        ALL,
        "Without them, `seq-mean-token-mean` leaves out rows that a filter has emptied; with `global_batch_size`, as the "
        "trainers of 0.8.0 and 0.9.1 give it, they count. In fnppo they never count: what has been taken out of a batch is "
        "in no divisor.",
        "ratios 1, advantages -1; two rows of which one is masked; `global_batch_size=2`",
        both(
            "split_policy_loss",
            {"mode": "vanilla", "agg": "seq-mean-token-mean", "parts": 1},
            tokens([[0.0], [0.0]], mask=[[1.0], [0.0]], advantages=[[-1.0], [-1.0]]),
            partial(ours.loss, weights=fnppo.sequence_mean),
        ),
        {"value": [1.0], "gradient": [1.0, 0.0]},
    ),
]

POLICY = [
    Difference(
        "clip-ratio",
        "`clip_ratio` alone changes nothing",
        DEFAULT,
        ALL,
        "The losses read `clip_ratio_low` and `clip_ratio_high`, and `clip_ratio` only where these are None. Their default "
        "is 0.2.",
        "one token, ratio 1.4, advantage 1, `clip_ratio=0.5`",
        both(
            "policy_loss",
            {"mode": "vanilla", "clip_ratio": 0.5},
            tokens([[math.log(1.4)]]),
            partial(ours.loss, clip_low=0.5, clip_high=0.5),
        ),
        {"value": [-1.4], "gradient": [-1.4]},
    ),
    Difference(
        "forced",
        "`loss_agg_mode` is ignored by `sapo`, and was by `gspo`",
        BUG,
        ALL,
        "Both are always aggregated as `seq-mean-token-mean`, whatever is asked for; `gspo` follows `loss_agg_mode` from "
        "0.9.1 on.",
        "rows of 3 and 1 tokens, ratios 1, advantages -1 and -3, `token-mean`",
        [
            Call(
                mode,
                "value",
                "policy_loss",
                {"mode": mode, "tau_pos": 1.0, "tau_neg": 1.0} if mode == "sapo" else {"mode": mode},
                tokens([[0.0] * 3] * 2, mask=[[1, 1, 1], [1, 0, 0]], advantages=[[-1.0] * 3, [-3.0] * 3]),
                partial(ours.loss, surrogate=surrogate, **numbers),
            )
            for mode, surrogate, numbers in [
                ("sapo", sapo, {"tau_neg": 1.0}),
                ("gspo", gspo_token, {"clip_low": 0.2, "clip_high": 0.2}),
            ]
        ],
        {"sapo": [3.0], "gspo": [1.5]},
    ),
    Difference(
        "ratio-clamp",
        "Log-ratios are clamped to ±20",
        CLAMP,
        ALL,
        "So in `vanilla`, `sapo`, `cispo` and `dppo_*`. Where PPO's own clips do not act first, the gradient is 0 beyond. At "
        "that distance it is below 1e-8 already; the numbers are for the record.",
        "one token, log-ratio -25, advantage 1",
        both("policy_loss", {"mode": "vanilla"}, tokens([[-25.0]]), ours.loss),
        {"value": [-math.exp(-25)], "gradient": [-math.exp(-25)]},
    ),
    Difference(
        "gspo-clamp",
        "The log-ratio of `gspo` is clamped to 10 from above",
        CLAMP,
        ALL,
        "With a negative advantage GSPO has no upper bound (arXiv:2507.18071, eq. 5: the minimum of both terms). verl's "
        "clamp ends the gradient of a response that has become e^10 times more likely and should become less likely.",
        "one token, log-ratio 12, advantage -1",
        both(
            "policy_loss",
            {"mode": "gspo", "agg": "seq-mean-token-mean"},
            tokens([[12.0]], advantages=[[-1.0]]),
            partial(ours.loss, surrogate=gspo_token, weights=fnppo.sequence_mean, clip_low=0.2, clip_high=0.2),
        ),
        {"value": [math.exp(12)], "gradient": [math.exp(12)]},
    ),
    Difference(
        "gmpo-rows",
        "`geo_mean` divides by all rows, of the micro-batch",
        SPLIT,
        ALL,
        "`torch.mean` over the rows of what it is given: rows without a learned token count, global counts and "
        "`loss_agg_mode` are ignored, so the loss of two micro-batches is twice that of one.",
        "two rows, ratios 1, advantages -1, in two micro-batches",
        both(
            "split_policy_loss",
            {"mode": "geo_mean", "parts": 2},
            tokens([[0.0], [0.0]], advantages=[[-1.0], [-1.0]]),
            partial(ours.loss, surrogate=gmpo, weights=fnppo.sequence_mean),
        ),
        {"value": [1.0], "gradient": [0.5, 0.5]},
    ),
    Difference(
        "dppo-cap",
        "The weight of `dppo_*` is capped at 3, not at 20",
        DEFAULT,
        RECENT,
        "Its code asks for `clip_ratio_c` with 20 as default, since a low cap biases the gradient (arXiv:2602.04879, section "
        "5.4); but the option has a default of its own, 3, made for the dual clip. fnppo's `weight_cap` is None unless "
        "given: here 20.",
        "one token, π_old = 0.01, π = 0.1, advantage 1",
        both(
            "policy_loss",
            {"mode": "dppo_tv"},
            tokens([[math.log(0.1)]], old_log_prob=[[math.log(0.01)]]),
            partial(ours.loss, surrogate=dppo_tv, weight_cap=20.0),
        ),
        {"value": [-10 * math.log(0.1)], "gradient": [-10.0]},
        absent=OLD,
    ),
    Difference(
        "kl-cov-split",
        "`kl_cov` and `clip_cov` choose tokens within a micro-batch",
        SELECTION,
        ALL,
        "The rule is over the batch (arXiv:2505.22617, eqs. 10 to 13). Over micro-batches the means are others, each "
        "micro-batch gives at least one token, and so the loss depends on the split even with global counts. In fnppo "
        "`select_kl_cov` and `select_clip_cov` run once per mini-batch, before the split.",
        "four rows of one token, the first and the third in one micro-batch; log-probs -1, -2, -3, -6, advantages 1, 0, 0, "
        "-1, old log-probs 0.1 below; one token of the four, coefficient 1",
        [
            Call(
                "gradient",
                "gradient",
                "split_policy_loss",
                {"mode": "kl_cov", "policy_loss": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 1.0}, "parts": 2},
                tokens(
                    [[-1.0], [-2.0], [-3.0], [-6.0]],
                    old_log_prob=[[-1.1], [-2.1], [-3.1], [-6.1]],
                    advantages=[[1.0], [0.0], [0.0], [-1.0]],
                ),
                partial(ours.loss, surrogate=kl_cov, choose=partial(select_kl_cov, fraction=0.25)),
            )
        ],
        {"gradient": [-math.exp(0.1) / 4, 0.0, 0.0, (math.exp(0.1) + 1) / 4]},
    ),
    Difference(
        "clip-cov-clipped",
        "`clip_cov` draws from tokens that PPO does not clip",
        MEANING,
        ALL,
        "Clip-Cov draws from all tokens whose covariance is in the bounds (arXiv:2505.22617, eq. 11). verl leaves out those "
        "that PPO's clip has taken already, so that others are left out in their place. fnppo does as the paper.",
        "two rows of one token, log-probs -1 and -5, advantages 2 and -2, ratios 1.5 and 1, all candidates drawn",
        both(
            "policy_loss",
            {"mode": "clip_cov", "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}},
            tokens([[-1.0], [-5.0]], old_log_prob=[[-1.0 - math.log(1.5)], [-5.0]], advantages=[[2.0], [-2.0]]),
            partial(
                ours.loss,
                surrogate=clip_cov,
                choose=partial(select_clip_cov, generator=torch.Generator().manual_seed(0), fraction=1.0),
            ),
        ),
        {"value": [0.0], "gradient": [0.0, 0.0]},
    ),
]


def one_token(logits: list[float]) -> Columns:
    """The logits of one token."""
    first = torch.zeros(1, 1, dtype=torch.long)
    return {"logits": matrix(logits)[None], "labels": first, "response_mask": torch.ones(1, 1)}


def entropy_of_two(gap: float) -> float:
    """The entropy of two tokens whose logits are so far apart."""
    p = 1 / (1 + math.exp(-gap))
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


VOCABULARY = [
    Difference(
        "entropy-nan",
        "The entropy is NaN where a token is impossible",
        BUG,
        ALL,
        "H = log Σ exp(z) - Σ p z, and 0 · -∞ is NaN. p log p is 0 at p = 0.",
        "logits 1, 0, -∞",
        [
            Call(
                "entropy",
                "value",
                "vocabulary",
                {"function": "entropy_from_logits"},
                one_token([1, 0, -math.inf]),
                ours.entropy,
            )
        ],
        {"entropy": [entropy_of_two(1.0)]},
    ),
    Difference(
        "entropy-float32",
        "The chunked entropy is that of logits in float32",
        ROUNDING,
        ALL,
        "`entropy_from_logits_with_chunking` rounds logits of any dtype to float32, and takes the difference of two numbers as "
        "large as they are.",
        "logits 10000.3 and 10000 in float64",
        [
            Call(
                "entropy",
                "value",
                "vocabulary",
                {"function": "entropy_from_logits_with_chunking"},
                one_token([10000.3, 10000.0]),
                ours.entropy,
            )
        ],
        {"entropy": [entropy_of_two(0.3)]},
    ),
]
