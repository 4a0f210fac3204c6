"""Off-policy corrections."""

import math
from functools import partial

import ours
from batches import Columns

from differences.difference import ALL, BUG, CLAMP, MEANING, OLD, RECENT, Call, Difference, tokens
from fnppo.corrections import inside, off_policy_diagnostics, token_ratios


def sampled(old: list[list[float]], sampler: list[list[float]], mask: list[list[float]] | None = None) -> Columns:
    """A batch for a correction."""
    return tokens(old, mask, old_log_prob=old, rollout_log_prob=sampler)


RATIO_3 = sampled([[math.log(0.6), math.log(0.1)]], [[math.log(0.2), math.log(0.3)]])

RATIO_9 = sampled([[math.log(0.9), math.log(0.5)]], [[math.log(0.1), math.log(0.5)]])

CORRECTIONS = [
    Difference(
        "inverted",
        "Bounds of `token_k1`, `seq_sum_k1` and `seq_mean_k1` are those of the inverse ratio",
        BUG,
        RECENT,
        "The bounds are documented as those of the ratio, π_train / π_rollout as everywhere in that file and as in 0.7.0. What "
        "is compared is -log of it, so a ratio passes if 1 / high <= ratio <= 1 / low. With low = 1 / high there is no "
        "difference.",
        "two tokens with ratios 3 and 1/3, `token_k1`, bounds 0.5 to 5; what is kept",
        [
            Call(
                "kept",
                "value",
                "rejection_mask",
                {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5.0"},
                RATIO_3,
                partial(ours.correction, function=lambda batch: inside(token_ratios(batch), low=0.5, high=5.0)),
            )
        ],
        {"kept": [1.0, 0.0]},
        absent=OLD,
    ),
    Difference(
        "ess",
        "The effective sample size is that of other weights",
        CLAMP,
        ALL,
        "verl clamps weights to [1 / threshold, threshold] before it counts. (Σ w)² / (N Σ w²) of the ratios says how far "
        "apart the policies are; `effective_share` takes the weights that are used.",
        "two tokens with ratios 9 and 1, threshold 2",
        [
            Call(
                "share",
                "effective_sample_size",
                "correction_weights",
                {"metrics": True, "rollout_is": "token", "rollout_is_threshold": 2.0},
                RATIO_9,
                lambda columns: {
                    "effective_sample_size": off_policy_diagnostics(ours.from_sampler(columns))["ess_token"]
                },
            )
        ],
        {"share": [100 / (2 * 82)]},
    ),
    Difference(
        "empty-diagnostics",
        "Rows without a learned token are in the means over rows",
        MEANING,
        ALL,
        "They have perplexity 1 and ratio 1, so filtering makes the policies look closer.",
        "two rows of one token with probability 1/4, one of them masked; the trainer's perplexity",
        [
            Call(
                "perplexity",
                "training_ppl",
                "diagnostics",
                {},
                sampled([[math.log(0.25)]] * 2, [[math.log(0.25)]] * 2, [[1.0], [0.0]]),
                ours.diagnostics,
            )
        ],
        {"perplexity": [4.0]},
    ),
]
