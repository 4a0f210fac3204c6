"""fnppo: the policy update of RL for language models, as pure functions over parameter and optimizer-state pytrees.

The files, in the order in which data flows through them: `types`, `checks`, `rows`, `prefixes`, `packing`, `weights`,
`batching`, `grouping`, `tree_plans`, `layouts`; `segments`, `attention`, `tree_attention`, `attention_interface`, `remat`,
`functional`, `self_checks`, `policy`; `linear_head`, `logit_chunks`, `head`, `head_gradients`, `one_pass`, `logprobs`,
`squared_probs`; `kl`, `kl_exact`, `surrogates`, `losses`, `metrics`; `critic`, `values`; `partition`, `gradients`, `foreach`,
`schedules`, `optim`, `precision`, `train`. Before them stand `rollout`, `corrections` and `advantages`, after them
`checkpoint`, `distributed` and `interop`, beside them `transforms`, `testing`, `verify` and `plan`.

Rules of which there are many have a name space each: `fnppo.surrogates`, `fnppo.advantages`, `fnppo.corrections`.
"""

from fnppo import advantages, corrections, surrogates
from fnppo.advantages.gae import gae_advantages
from fnppo.advantages.outcome import grpo_advantages
from fnppo.attention import choose_attention, flash_attention, math_attention, sdpa_attention, varlen_attention
from fnppo.batching import plan_microbatches, plan_minibatches
from fnppo.critic import Critic, functional_actor_critic, functional_critic
from fnppo.functional import functional_policy
from fnppo.gradients import accumulate_gradients, value_and_grad
from fnppo.head import LinearHead, chunked_logprobs, logits_to_stats
from fnppo.kl import importance_corrected, kl_abs, kl_k1, kl_k2, kl_k3, straight_through
from fnppo.kl_exact import chunked_kl, exact_kl
from fnppo.layouts import Layout, packed, padded, shared
from fnppo.logprobs import compute_logprobs, forward_logprobs
from fnppo.losses import add_losses, on_policy, ppo_loss
from fnppo.metrics import Metrics, merge_metrics, summarize
from fnppo.optim import (
    Optimizer,
    adamw,
    all_finite,
    apply_updates,
    chain,
    clip_by_global_norm,
    global_norm,
    sgd,
    skip_nonfinite,
)
from fnppo.packing import pack_sequences, pad_sequences, unpack_targets
from fnppo.partition import combine, partition
from fnppo.policy import Policy
from fnppo.precision import cast, dynamic_loss_scale
from fnppo.prefixes import PrefixTree, prefix_tree
from fnppo.rows import lengths, padded_batch, prompt_groups, select_rows
from fnppo.schedules import constant, cosine, linear, warmup_stable_decay
from fnppo.squared_probs import compute_sum_squared_probs
from fnppo.surrogates import clipped_surrogate
from fnppo.train import describe_update, train_step, update_policy
from fnppo.tree_plans import plan_shared_microbatches
from fnppo.types import ModelBatch, PackedInputs, PaddedBatch, PaddedInputs, Params, Targets, TokenStats
from fnppo.values import (
    compute_values,
    explained_variance,
    forward_logprobs_and_values,
    forward_values,
    value_loss,
)
from fnppo.weights import constant_norm, group_token_mean, sequence_mean, sequence_sum, token_mean, token_sum

__version__ = "0.1.0"

__all__ = [
    "Critic",
    "Layout",
    "LinearHead",
    "Metrics",
    "ModelBatch",
    "Optimizer",
    "PackedInputs",
    "PaddedBatch",
    "PaddedInputs",
    "Params",
    "Policy",
    "PrefixTree",
    "Targets",
    "TokenStats",
    "accumulate_gradients",
    "adamw",
    "add_losses",
    "advantages",
    "all_finite",
    "apply_updates",
    "cast",
    "chain",
    "choose_attention",
    "chunked_kl",
    "chunked_logprobs",
    "clip_by_global_norm",
    "clipped_surrogate",
    "combine",
    "compute_logprobs",
    "compute_sum_squared_probs",
    "compute_values",
    "constant",
    "constant_norm",
    "corrections",
    "cosine",
    "describe_update",
    "dynamic_loss_scale",
    "exact_kl",
    "explained_variance",
    "flash_attention",
    "forward_logprobs",
    "forward_logprobs_and_values",
    "forward_values",
    "functional_actor_critic",
    "functional_critic",
    "functional_policy",
    "gae_advantages",
    "global_norm",
    "group_token_mean",
    "grpo_advantages",
    "importance_corrected",
    "kl_abs",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "lengths",
    "linear",
    "logits_to_stats",
    "math_attention",
    "merge_metrics",
    "on_policy",
    "pack_sequences",
    "packed",
    "pad_sequences",
    "padded",
    "padded_batch",
    "partition",
    "plan_microbatches",
    "plan_minibatches",
    "plan_shared_microbatches",
    "ppo_loss",
    "prefix_tree",
    "prompt_groups",
    "sdpa_attention",
    "select_rows",
    "sequence_mean",
    "sequence_sum",
    "sgd",
    "shared",
    "skip_nonfinite",
    "straight_through",
    "summarize",
    "surrogates",
    "token_mean",
    "token_sum",
    "train_step",
    "unpack_targets",
    "update_policy",
    "value_and_grad",
    "value_loss",
    "varlen_attention",
    "warmup_stable_decay",
]
