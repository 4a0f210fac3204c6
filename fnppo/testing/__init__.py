"""Tools to test trainers with: a naive float64 oracle and hypothesis strategies. Needs `pip install fnppo[testing]`."""

from fnppo.testing.models import tiny_llama
from fnppo.testing.oracle import float64_everywhere, oracle_loss, oracle_stats
from fnppo.testing.strategies import padded_batches, splits

__all__ = ["float64_everywhere", "oracle_loss", "oracle_stats", "padded_batches", "splits", "tiny_llama"]
