"""Tools to test trainers with: a naive float64 oracle, hypothesis strategies and assertions. Needs `fnppo[testing]`."""

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
from fnppo.testing.strategies import padded_batches, splits

__all__ = [
    "assert_layout_invariant",
    "assert_masked_values_unread",
    "assert_microbatch_invariant",
    "assert_rows_independent",
    "everyday_batches",
    "float64_everywhere",
    "oracle_gae_advantages",
    "oracle_grpo_advantages",
    "oracle_loss",
    "oracle_loss_and_grads",
    "oracle_stats",
    "padded_batches",
    "splits",
    "tiny_llama",
]
