"""The three layouts as values: how rows are planned into micro-batches, and how a micro-batch is laid out.

All give the same numbers. `packed` spends nothing on padding; `shared` also computes once what rows have in common at
their beginning (a prompt, the turns of a dialogue before the last, the trunk of a tree search), which is much less work
where that is long and many share it; `padded` is there to compare with, and for models that cannot read packed sequences.
The limit of tokens is on real tokens; a padded rectangle may be larger.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import torch

from fnppo.arguments import check_type
from fnppo.batching import plan_microbatches
from fnppo.packing import pack_sequences, pad_sequences, unpack_targets
from fnppo.prefixes import LEAST_SHARED, check_least_shared, prefix_tree
from fnppo.rows import lengths, select_rows
from fnppo.tree_plans import plan_shared_microbatches
from fnppo.types import ModelBatch, PaddedBatch, PyTree


class Layout(NamedTuple):
    """`plan(batch, max_tokens, min_groups=0)` -> at least `min_groups` row groups, of at most `max_tokens` real tokens each;
    `lay(batch)` -> `ModelBatch`.
    """

    plan: Callable[..., list[list[int]]]
    lay: Callable[[PaddedBatch], ModelBatch]


def plan_rows(batch: PaddedBatch, max_tokens: int, *, min_groups: int = 0) -> list[list[int]]:
    """Every row by itself."""
    return plan_microbatches(lengths(batch), max_tokens=max_tokens, min_groups=min_groups)


def plan_trees(
    batch: PaddedBatch, max_tokens: int, *, min_groups: int = 0, least_shared: int = LEAST_SHARED
) -> list[list[int]]:
    """Rows that begin alike together, what they have in common counted once."""
    tree = prefix_tree(batch, least_shared=least_shared)
    return plan_shared_microbatches(tree, max_tokens=max_tokens, min_groups=min_groups)


def sharing(*, least_shared: int = LEAST_SHARED) -> Layout:
    """`shared` with another `least_shared` (see `prefix_tree`), such as 1 to share whatever can be shared.

    >>> from fnppo import padded_batch
    >>> sharing(least_shared=1).plan(padded_batch([[7], [5], [7]], [[6], [6], [9]]), 3)
    [[0, 2], [1]]
    """
    check_least_shared(least_shared)
    lay = partial(pack_sequences, share_prefixes=True, least_shared=least_shared)
    return Layout(partial(plan_trees, least_shared=least_shared), lay)


packed = Layout(plan_rows, pack_sequences)
padded = Layout(plan_rows, pad_sequences)
shared = sharing()


def forward_rows(
    forward: Callable[[ModelBatch], Any], batch: PaddedBatch, *, layout: Layout, max_tokens: int
) -> PyTree:
    """`forward` of every micro-batch, without gradients: its values of targets on [batch, seq], 0 where there is none.

    >>> from fnppo.rows import padded_batch
    >>> forward_rows(
    ...     lambda micro_batch: micro_batch.targets.token_ids.float(), padded_batch([[5], [7, 8]], [[6], [9]]),
    ...     layout=packed, max_tokens=3,
    ... )
    tensor([[0., 0., 6.],
            [0., 0., 9.]])
    """
    check_type("layout", layout, Layout, "Use fnppo.packed, fnppo.shared or fnppo.padded.")
    shape = (batch.input_ids.shape[0], batch.input_ids.shape[1])
    total: Any = None
    for rows in layout.plan(batch, max_tokens) or [[]]:  # without rows, a micro-batch without targets
        micro_batch = layout.lay(select_rows(batch, rows))
        with torch.no_grad():
            values = forward(micro_batch)
        row_of = torch.tensor(rows, dtype=torch.long, device=batch.input_ids.device)
        targets = micro_batch.targets._replace(rows=row_of[micro_batch.targets.rows])
        part = optree.tree_map(partial(unpack_targets, targets=targets, shape=shape), values)
        total = part if total is None else optree.tree_map(torch.add, total, part)
    return total
