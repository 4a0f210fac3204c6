"""The losses of TRL's GRPOTrainer."""

import math
from functools import partial
from typing import Any

import ours
from batches import Columns

import fnppo
from differences.difference import DEFAULT, MEANING, SELECTION, Call, Difference, both, tokens
from fnppo.surrogates import cispo, select_top_entropy, selected

TRL = ("1.16.0",)


def trl_tokens(log_prob: list[list[float]], **columns: Any) -> Columns:
    """A batch for TRL's losses."""
    plain = {"entropy": [[0.0] * len(row) for row in log_prob], "ref_log_prob": log_prob}
    return tokens(log_prob, **plain | columns)


def sure_of(count: int) -> Columns:
    """One row whose entropies are 1 to `count`."""
    return trl_tokens([[0.0] * count], entropy=[[1.0 + i for i in range(count)]])


LOSSES = [
    Difference(
        "trl-empty-rows",
        "Rows without a learned token are in the divisor",
        MEANING,
        TRL,
        "`grpo`, `sapo`, `luspo` and `dr_grpo` take the mean over all rows of the micro-batch, also those whose completion "
        "is masked (`mask_truncated_completions`). In fnppo what has been taken out of a batch is in no divisor.",
        "`grpo`, two rows of which one is masked, ratios 1, advantages -1",
        both(
            "policy_loss",
            {"loss_type": "grpo"},
            trl_tokens([[0.0], [0.0]], mask=[[1.0], [0.0]], advantages=[[-1.0], [-1.0]]),
            partial(ours.loss, weights=fnppo.sequence_mean),
        ),
        {"value": [1.0], "gradient": [1.0, 0.0]},
        peer="trl",
    ),
    Difference(
        "trl-cispo",
        "`epsilon_high` of `cispo` is the bound itself, 0.2 by default",
        DEFAULT,
        TRL,
        "CISPO clips the weight to 1 + ε (arXiv:2506.13585, eq. 5). TRL's ε is the bound; left alone, it is that of the "
        "clipped losses, and every weight above 0.2 becomes 0.2. Shown beside `cispo(clip_high=.2)`.",
        "one token, ratio 1, log-prob -1, advantage 1",
        both(
            "policy_loss",
            {"loss_type": "cispo"},
            trl_tokens([[-1.0]], old_log_prob=[[-1.0]]),
            partial(ours.loss, surrogate=cispo, clip_high=0.2),
        ),
        {"value": [1.0], "gradient": [-1.0]},
        peer="trl",
    ),
    Difference(
        "trl-kl",
        "The KL is multiplied by the ratio unless that is turned off",
        DEFAULT,
        TRL,
        "`use_bias_correction_kl` is on by default (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). In fnppo that is "
        "`kl=importance_corrected(kl_k3, old_logprobs)`; the plain k3 is shown beside it.",
        "one token, advantage 0, ratio e, log π - log π_ref = -1, coefficient 1",
        both(
            "policy_loss",
            {"loss_type": "dapo", "beta": 1.0},
            trl_tokens([[-1.0]], old_log_prob=[[-2.0]], ref_log_prob=[[0.0]], advantages=[[0.0]]),
            partial(ours.loss, kl_coef=1.0),
        ),
        {"value": [math.e - 2], "gradient": [1 - math.e]},
        peer="trl",
    ),
    Difference(
        "trl-entropy",
        "`top_entropy_quantile` takes one token more, of each micro-batch",
        SELECTION,
        TRL,
        "TRL learns from the tokens at or above a quantile of the entropies that stand in the micro-batch: of 11 tokens, 3 "
        "are the top fifth. fnppo's `select_top_entropy` takes floor(0.2 · 11) = 2, over the mini-batch.",
        "eleven tokens in one row, ratios 1, advantages 1; the number of tokens with a gradient",
        [
            Call(
                "tokens",
                "tokens",
                "policy_loss",
                {"loss_type": "dapo", "top_entropy_quantile": 0.2},
                sure_of(11),
                lambda columns: ours.count_learned(
                    ours.loss(
                        columns,
                        selected(fnppo.clipped_surrogate),
                        choose=partial(select_top_entropy, fraction=0.2),
                        chosen_by="entropy",
                    )
                ),
            )
        ],
        {"tokens": [2.0]},
        peer="trl",
    ),
]
