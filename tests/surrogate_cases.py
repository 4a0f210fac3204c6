"""Every surrogate by name, with the numbers that it takes, and columns for all that they read."""

from typing import NamedTuple

import torch

from fnppo.surrogates import (
    Surrogate,
    cispo,
    clip_cov,
    clipped_surrogate,
    decoupled_surrogate,
    dppo_kl,
    dppo_tv,
    dro,
    gmpo,
    gpg,
    gspo,
    gspo_token,
    kl_cov,
    luspo,
    reinforce,
    sapo,
    selected,
    vespo,
    weighted,
)
from fnppo.types import Targets


class Case(NamedTuple):
    surrogate: Surrogate
    numbers: dict[str, float]


CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
SEQUENCE_CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
CASES = {
    "clipped": Case(clipped_surrogate, CLIPS | {"dual_clip": 1.6}),
    "decoupled": Case(decoupled_surrogate, CLIPS | {"dual_clip": 1.6, "weight_cap": 1.4}),
    "gpg": Case(gpg, {}),
    "reinforce": Case(reinforce, {"weight_cap": 1.3}),
    "cispo": Case(cispo, {"clip_low": 0.5, "clip_high": 0.3}),
    "sapo": Case(sapo, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "dppo_tv": Case(dppo_tv, {"clip_low": 0.05, "clip_high": 0.04, "weight_cap": 1.5}),
    "dppo_kl": Case(dppo_kl, {"clip_low": 0.02, "clip_high": 0.03, "weight_cap": 1.5}),
    "dro": Case(dro, {"beta": 0.05}),
    "gspo": Case(gspo, SEQUENCE_CLIPS),
    "gspo_token": Case(gspo_token, SEQUENCE_CLIPS),
    "luspo": Case(luspo, SEQUENCE_CLIPS),
    "gmpo": Case(gmpo, {"clip_low": 0.2, "clip_high": 0.25}),
    "vespo": Case(vespo, {"c1_pos": 2.0, "c2_pos": 3.0, "c1_neg": 3.0, "c2_neg": 2.0}),
    "clip_cov": Case(clip_cov, CLIPS | {"dual_clip": 1.6}),
    "kl_cov": Case(kl_cov, {"kl_cov_coef": 0.7}),
    "selected": Case(selected(clipped_surrogate), CLIPS),
    "selected_gspo": Case(selected(gspo), SEQUENCE_CLIPS),
    "weighted": Case(weighted(sapo), {"tau_pos": 1.0, "tau_neg": 1.05}),
    "weighted_gmpo": Case(weighted(gmpo), {"clip_low": 0.2, "clip_high": 0.25}),
}
SEQUENCE = {"gspo", "gspo_token", "luspo", "gmpo", "vespo", "selected_gspo", "weighted_gmpo"}
"""Those in which the targets of a row are not independent."""

EXTRA = ("sampler_logprobs", "clip_cov", "kl_cov", "selected", "importance_weights")


def targets_of(old, advantages, *, rows=None, dtype=torch.float64, **extra):
    """Targets from lists; a column of `extra` that is not given is 1 (0 for the log-probs of the sampler)."""
    n = len(advantages)
    index, column = torch.arange(n), lambda values: torch.tensor(values, dtype=dtype)
    extra = {name: [0.0 if name == "sampler_logprobs" else 1.0] * n for name in EXTRA} | extra
    return Targets(
        token_ids=index,
        predictors=index,
        rows=torch.zeros(n, dtype=torch.long) if rows is None else torch.tensor(rows),
        columns=index,
        loss_weights=column([1.0] * n),
        old_logprobs=column(old),
        advantages=column(advantages),
        extra={name: column(values) for name, values in extra.items()},
    )
