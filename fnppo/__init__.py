"""fnppo: the policy update of RL for language models, as pure functions over parameter and optimizer-state pytrees.

The files, in the order in which data flows through them: `types`, `checks`, `packing`, `weights`, `batching`,
`layouts`; `attention`, `attention_interface`, `remat`, `policy`; `head`, `logprobs`; `kl`, `surrogates`, `losses`, `metrics`;
`gradients`, `foreach`, `schedules`, `optim`, `train`. Before them stand `rollout` and `advantages`, after them
`checkpoint`, beside them `transforms` and `testing`.
"""

from fnppo.advantages.gae import gae_advantages
from fnppo.advantages.outcome import grpo_advantages
from fnppo.attention import choose_attention, flash_attention, math_attention, sdpa_attention, varlen_attention
from fnppo.batching import plan_microbatches, plan_minibatches, plan_shared_microbatches
from fnppo.functional import functional_policy
from fnppo.gradients import accumulate_gradients, value_and_grad
from fnppo.head import LinearHead, chunked_logprobs, logits_to_stats
from fnppo.kl import kl_k1, kl_k2, kl_k3, straight_through
from fnppo.layouts import Layout, packed, padded, shared
from fnppo.logprobs import compute_logprobs, forward_logprobs
from fnppo.losses import on_policy, ppo_loss
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
from fnppo.policy import Policy
from fnppo.rows import lengths, padded_batch, prompt_groups, select_rows
from fnppo.schedules import constant, cosine, linear, warmup_stable_decay
from fnppo.surrogates import clipped_surrogate
from fnppo.train import describe_update, train_step, update_policy
from fnppo.types import ModelBatch, PackedInputs, PaddedBatch, PaddedInputs, Params, Targets, TokenStats
from fnppo.weights import constant_norm, group_token_mean, sequence_mean, sequence_sum, token_mean, token_sum

__version__ = "0.1.0"

__all__ = [
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
    "Targets",
    "TokenStats",
    "accumulate_gradients",
    "adamw",
    "all_finite",
    "apply_updates",
    "chain",
    "choose_attention",
    "chunked_logprobs",
    "clip_by_global_norm",
    "clipped_surrogate",
    "compute_logprobs",
    "constant",
    "constant_norm",
    "cosine",
    "describe_update",
    "flash_attention",
    "forward_logprobs",
    "functional_policy",
    "gae_advantages",
    "global_norm",
    "group_token_mean",
    "grpo_advantages",
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
    "plan_microbatches",
    "plan_minibatches",
    "plan_shared_microbatches",
    "ppo_loss",
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
    "token_mean",
    "token_sum",
    "train_step",
    "unpack_targets",
    "update_policy",
    "value_and_grad",
    "varlen_attention",
    "warmup_stable_decay",
]
