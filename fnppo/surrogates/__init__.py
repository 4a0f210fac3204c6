"""Policy-gradient surrogates: one loss a target, from the current log-probs and the columns of the batch.

A surrogate is a function `(stats, targets, *, its own numbers) -> (losses, clips)`:

    losses   one a target, unreduced; `ppo_loss` sums them with the weights of the mini-batch
    clips    name -> 1 where that clip has removed or bounded the gradient of a target's loss, else 0; no two at one
             target

Its numbers are keyword-only; each is a number or a tensor of one, so that it can be differentiated and batched. In the
formulas, ρ_t = π(token_t) / π_old(token_t), A_t is the advantage, and sg stops the gradient. Where a ratio overflows but no
gradient comes from it (a clip has removed it, or A_t = 0), loss and gradient are what they are for any large ratio.

    clipped            PPO's
    decoupled          PPO's with two old policies
    policy_gradients   log-probs times a weight that has no gradient: gpg, reinforce, cispo
    trust_regions      a soft gate, a divergence, a penalty instead of a clip: sapo, dppo_tv, dppo_kl, dro
    sequences          one ratio for a whole sequence: gspo, gspo_token, luspo, gmpo, vespo
    selective          some tokens left out, penalised or weighted: clip_cov, kl_cov, selected, weighted
    selection          rules that choose those tokens, over the whole mini-batch, before it is split
    columns, per_row   what a surrogate of your own needs, too
"""

from fnppo.surrogates.clipped import clip_ratio, clipped_surrogate, ratio_loss
from fnppo.surrogates.columns import (
    PerTarget,
    Surrogate,
    as_floats,
    check_clips,
    column,
    log_ratio,
    one_a_target,
)
from fnppo.surrogates.decoupled import decoupled_surrogate
from fnppo.surrogates.per_row import row_mean, row_sum
from fnppo.surrogates.policy_gradients import capped_weight, cispo, gpg, reinforce, score_loss
from fnppo.surrogates.selection import select_clip_cov, select_kl_cov, select_top_entropy
from fnppo.surrogates.selective import clip_cov, kl_cov, selected, weighted
from fnppo.surrogates.sequences import gmpo, gspo, gspo_token, luspo, vespo
from fnppo.surrogates.trust_regions import dppo_kl, dppo_tv, dro, sapo

__all__ = [
    "PerTarget",
    "Surrogate",
    "as_floats",
    "capped_weight",
    "check_clips",
    "cispo",
    "clip_cov",
    "clip_ratio",
    "clipped_surrogate",
    "column",
    "decoupled_surrogate",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gpg",
    "gspo",
    "gspo_token",
    "kl_cov",
    "log_ratio",
    "luspo",
    "one_a_target",
    "ratio_loss",
    "reinforce",
    "row_mean",
    "row_sum",
    "sapo",
    "score_loss",
    "select_clip_cov",
    "select_kl_cov",
    "select_top_entropy",
    "selected",
    "vespo",
    "weighted",
]
