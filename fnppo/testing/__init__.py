"""Tools to test trainers with: assertions, hypothesis strategies, a naive float64 oracle, tiny models of every architecture.

Needs `pip install fnppo[testing]`.
"""

from fnppo.live_bytes import LiveBytes
from fnppo.testing.architectures import causal_lms, tiny_causal_lm
from fnppo.testing.equivalence import (
    assert_layout_invariant,
    assert_masked_values_unread,
    assert_microbatch_invariant,
    assert_rows_independent,
    everyday_batches,
)
from fnppo.testing.models import tiny_llama
from fnppo.testing.oracle import (
    float64_everywhere,
    oracle_gae_advantages,
    oracle_grpo_advantages,
    oracle_loss,
    oracle_loss_and_grads,
    oracle_stats,
)
from fnppo.testing.strategies import branching_batches, padded_batches, splits, tiny_models

__all__ = [
    "LiveBytes",
    "assert_layout_invariant",
    "assert_masked_values_unread",
    "assert_microbatch_invariant",
    "assert_rows_independent",
    "branching_batches",
    "causal_lms",
    "everyday_batches",
    "float64_everywhere",
    "oracle_gae_advantages",
    "oracle_grpo_advantages",
    "oracle_loss",
    "oracle_loss_and_grads",
    "oracle_stats",
    "padded_batches",
    "splits",
    "tiny_causal_lm",
    "tiny_llama",
    "tiny_models",
]
