"""The three layouts as values: how rows are planned into micro-batches, and how a micro-batch is laid out.

All give the same numbers. `packed` spends nothing on padding; `shared` also computes a prompt once for all responses to
it, which is much less work where prompts are long and groups are large; `padded` is there to compare with, and for
models that cannot read packed sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fnppo.batching import plan_microbatches, plan_shared_microbatches
from fnppo.packing import lengths, pack_sequences, pad_sequences, prompt_groups
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
    prompt_of = {row: prompt for prompt, rows in prompt_groups(batch).items() for row in rows}
    prompts = [prompt_of[row] for row in range(len(prompt_of))]
    return plan_shared_microbatches(lengths(batch), prompts, list(map(len, prompts)), max_tokens=max_tokens)


packed = Layout(plan_rows, pack_sequences)
padded = Layout(plan_rows, pad_sequences)
shared = Layout(plan_prompts, partial(pack_sequences, share_prefixes=True))
