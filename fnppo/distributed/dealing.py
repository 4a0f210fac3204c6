"""Micro-batches to data ranks: as many for each, since every forward of a sharded model is made by all ranks together."""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from fnppo.batching import work_of
from fnppo.layouts import Layout
from fnppo.rows import lengths
from fnppo.types import PaddedBatch

Deal: TypeAlias = Callable[[Sequence[int], int], list[list[int]]]
"""(work of each micro-batch, number of ranks) -> micro-batches of each rank."""


def balanced(works: Sequence[int], ranks: int) -> list[list[int]]:
    """From the most work to the least, each to the rank that has had least, which may have as many as another at most.

    In that order they are run: ranks make each forward together, so those of like work should meet.

    >>> balanced([1, 5, 4, 9], 2)
    [[3, 0], [1, 2]]
    """
    most = -(-len(works) // ranks)
    dealt = list[list[int]]([] for _ in range(ranks))
    heap = [(0, rank) for rank in range(ranks)]
    for group in sorted(range(len(works)), key=lambda group: -works[group]):
        done, rank = heapq.heappop(heap)
        dealt[rank].append(group)
        if len(dealt[rank]) < most:
            heapq.heappush(heap, (done + works[group], rank))
    return dealt


def in_turn(works: Sequence[int], ranks: int) -> list[list[int]]:
    """One after the other, whatever their work.

    >>> in_turn([9, 5, 4, 1], 2)
    [[0, 2], [1, 3]]
    """
    return [list(range(rank, len(works), ranks)) for rank in range(ranks)]


def share_of(layout: Layout, *, rank: int, ranks: int, deal: Deal = balanced) -> Layout:
    """`layout` whose plan gives the micro-batches of one rank: a multiple of `ranks` is planned, and dealt.

    A rank for which there are no rows gets an empty micro-batch. It is laid out as one token without a target, so it adds
    nothing to any sum.

    >>> from fnppo import packed, padded_batch
    >>> batch = padded_batch([[1]] * 4, [[2] * 5, [2] * 4, [2], [2]])
    >>> [share_of(packed, rank=rank, ranks=2).plan(batch, 9) for rank in (0, 1)]
    [[[0, 3]], [[1, 2]]]
    >>> [share_of(packed, rank=rank, ranks=3).plan(padded_batch([[1]], [[2]]), 9) for rank in (0, 1, 2)]
    [[[0]], [[]], [[]]]
    """
    return Layout(partial(_plan, layout, rank, ranks, deal), layout.lay)


def _plan(
    layout: Layout, rank: int, ranks: int, deal: Deal, batch: PaddedBatch, max_tokens: int, *, min_groups: int = 0
) -> list[list[int]]:
    groups = layout.plan(batch, max_tokens, min_groups=max(min_groups, ranks))
    if len(groups) % ranks:
        groups = layout.plan(batch, max_tokens, min_groups=len(groups) + -len(groups) % ranks)
    work, sizes = work_of(2048), lengths(batch)
    dealt = deal([sum(work(sizes[row]) for row in group) for group in groups], ranks)
    most = max(map(len, dealt))
    own = [groups[group] for group in dealt[rank]]
    return own + [[]] * (most - len(own))
