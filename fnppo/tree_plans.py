"""Trees of rows into micro-batches: what rows have in common is counted once, as a packed layout lays it."""

from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import NamedTuple

from fnppo.batching import check_min_groups, checked_limit, refuse_over, work_of
from fnppo.grouping import fewest_groups, group_items, in_order, split_groups
from fnppo.prefixes import PrefixTree, check_tree


def plan_shared_microbatches(
    tree: PrefixTree, *, max_tokens: int, min_groups: int = 0, hidden_size: int = 2048
) -> list[list[int]]:
    """`plan_microbatches` for a layout in which rows share what they have in common: it counts once in each group.

    What fits together stays together. A tree over the limit is cut at its branches into as few parts as best fit finds,
    each with all tokens that lead to it; the parts are then planned as if they were rows. Where there are fewer parts than
    `min_groups`, those with the most work are halved at their first branch.

    Args:
        tree: of the rows, from `fnppo.prefix_tree(batch)`.
        max_tokens: the limit, never exceeded.
        min_groups, hidden_size: as in `plan_microbatches`.

    Returns, raises: as `plan_microbatches`.

    >>> from fnppo import padded_batch, prefix_tree
    >>> batch = padded_batch([[7, 8, 9, 7]] * 3 + [[1, 2, 3]], [[5], [6], [7], [8]])
    >>> plan_shared_microbatches(prefix_tree(batch, least_shared=1), max_tokens=7)
    [[0, 1, 2], [3]]
    """
    check_tree(tree)
    limit = checked_limit(max_tokens)
    work = work_of(hidden_size)
    check_min_groups(min_groups)
    lengths = [tree.stops[end] for end in tree.ends]
    if lengths:
        refuse_over(longest := max(range(len(lengths)), key=lengths.__getitem__), lengths[longest], limit)
    sizes = [stop - start for start, stop in zip(tree.starts, tree.stops, strict=True)]
    works = [work(stop) - work(start) for start, stop in zip(tree.starts, tree.stops, strict=True)]
    lines = tree.lines()
    parts = in_order(_halved(_parts(tree, sizes, works, limit), tree, lines, works, min_groups))
    laid = [{stretch for row in part for stretch in lines[tree.ends[row]]} for part in parts]
    plan = group_items(
        [sum(sizes[stretch] for stretch in part) for part in laid],
        [sum(works[stretch] for stretch in part) for part in laid],
        limit=limit,
        min_groups=min_groups,
    )
    return in_order([row for part in group for row in parts[part]] for group in plan)


class _Part(NamedTuple):
    """Rows that stay together, with the tokens and the work that they need after the stretch that they go on from."""

    rows: list[int]
    size: int
    work: int


def _parts(tree: PrefixTree, sizes: list[int], works: list[int], limit: int) -> list[list[int]]:
    """The rows below each root in as few parts as best fit finds, stretch by stretch, from the ends to the roots.

    A small part that is left over goes with those of other roots. Where there is one root, no other is there to take it, so
    the parts are balanced.
    """
    after: list[list[_Part]] = [[] for _ in range(len(sizes) + 1)]  # the last, which is number -1, is for the roots
    for row, end in enumerate(tree.ends):
        after[end].append(_Part([row], 0, 0))
    one_root = tree.parents.count(-1) == 1
    for stretch in reversed(range(len(sizes))):
        parts, parent, room = sorted(after[stretch]), tree.parents[stretch], limit - tree.stops[stretch]
        needed = [part.size for part in parts]
        if sum(needed) <= room:
            groups = [list(range(len(parts)))]
        elif parent >= 0 or not one_root:
            groups = fewest_groups(needed, limit=room)
        else:
            groups = group_items(needed, [part.work for part in parts], limit=room)
        for group in groups:
            rows = [row for i in group for row in parts[i].rows]
            size = sizes[stretch] + sum(parts[i].size for i in group)
            after[parent].append(_Part(rows, size, works[stretch] + sum(parts[i].work for i in group)))
    return [part.rows for part in after[-1]]


def _halved(
    parts: list[list[int]], tree: PrefixTree, lines: list[list[int]], works: list[int], count: int
) -> list[list[int]]:
    """Halve the part with the most work after its first branch until there are `count`, or no part has two rows."""
    if len(parts) >= count:
        return parts

    def work_after(common: int, rows: list[int]) -> int:
        return sum(
            works[stretch] for stretch in {stretch for row in rows for stretch in lines[tree.ends[row]][common:]}
        )

    def entry(rows: list[int]) -> tuple[int, list[int], int]:
        common = _common([lines[tree.ends[row]] for row in rows])
        return -work_after(common, rows), rows, common

    whole = [rows for rows in parts if len(rows) == 1]
    heap = [entry(rows) for rows in parts if len(rows) > 1]
    heapify(heap)
    while heap and len(whole) + len(heap) < count:
        _, rows, common = heappop(heap)
        branches: dict[tuple[int, ...], list[int]] = {}
        for row in rows:  # one that ends before the branch is a branch by itself
            line = lines[tree.ends[row]]
            branches.setdefault((line[common],) if len(line) > common else (-1, row), []).append(row)
        together = list(branches.values())
        for half in split_groups([list(range(len(together)))], [work_after(common, branch) for branch in together], 2):
            rows = [row for branch in half for row in together[branch]]
            if len(rows) == 1:
                whole.append(rows)
            else:
                heappush(heap, entry(rows))
    return [*whole, *(rows for _, rows, _ in heap)]


def _common(lines: list[list[int]]) -> int:
    """Number of stretches that all rows of a part go through."""
    return len(list(takewhile(lambda abreast: len(set(abreast)) == 1, zip(*lines, strict=False))))
