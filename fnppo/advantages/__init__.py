"""From rewards to advantages. In the order of reading: `groups`, `rewards`, `outcome` (one number a response), `pass_at_k`;
`token_columns`, `gae`, `whitening`, `token_baseline` (one number a token); `reward_kl`, `row_filters`.
"""

from fnppo.advantages.gae import discounted_returns, gae_advantages
from fnppo.advantages.outcome import (
    Scale,
    batch_std,
    dr_grpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    group_std,
    grpo_advantages,
    opo_advantages,
    remax_advantages,
    rloo_advantages,
)
from fnppo.advantages.pass_at_k import best_response_advantages, pass_at_k_advantages
from fnppo.advantages.reward_kl import AdaptiveKL, adapt_kl, kl_in_reward
from fnppo.advantages.row_filters import mask_rows, rewards_differ
from fnppo.advantages.token_baseline import otb_advantages
from fnppo.advantages.token_columns import on_every_token, on_last_token
from fnppo.advantages.whitening import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    whiten,
)

__all__ = [
    "AdaptiveKL",
    "Scale",
    "adapt_kl",
    "batch_std",
    "best_response_advantages",
    "discounted_returns",
    "dr_grpo_advantages",
    "gae_advantages",
    "gdpo_advantages",
    "gpg_advantages",
    "group_std",
    "grpo_advantages",
    "kl_in_reward",
    "mask_rows",
    "on_every_token",
    "on_last_token",
    "opo_advantages",
    "otb_advantages",
    "pass_at_k_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rewards_differ",
    "rloo_advantages",
    "whiten",
]
