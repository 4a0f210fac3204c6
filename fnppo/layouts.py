"""The three layouts as values: how rows are planned into micro-batches, and how a micro-batch is laid out.

All give the same numbers. `packed` spends nothing on padding; `shared` also computes a prompt once for all responses to
it, which is much less work where prompts are long and groups are large; `padded` is there to compare with, and for
models that cannot read packed sequences. The limit of tokens is on real tokens; a padded rectangle may be larger.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fnppo.batching import plan_microbatches, plan_shared_microbatches
from fnppo.packing import pack_sequences, pad_sequences
from fnppo.rows import lengths, prompt_groups
from fnppo.types import ModelBatch, PaddedBatch


class Layout(NamedTuple):
    """`plan(batch, max_tokens)` -> row groups, of at most `max_tokens` real tokens each; `lay(batch)` -> `ModelBatch`."""

    plan: Callable[[PaddedBatch, int], list[list[int]]]
    lay: Callable[[PaddedBatch], ModelBatch]


def plan_rows(batch: PaddedBatch, max_tokens: int) -> list[list[int]]:
    """Every row by itself."""
    return plan_microbatches(lengths(batch), max_tokens=max_tokens)


def plan_prompts(batch: PaddedBatch, max_tokens: int) -> list[list[int]]:
    """Rows of one prompt together, its tokens counted once."""
    return plan_shared_microbatches(lengths(batch), prompt_groups(batch), max_tokens=max_tokens)


packed = Layout(plan_rows, pack_sequences)
padded = Layout(plan_rows, pad_sequences)
shared = Layout(plan_prompts, partial(pack_sequences, share_prefixes=True))
