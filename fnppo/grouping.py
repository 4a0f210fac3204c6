"""Items into groups under a limit: bin packing that also balances.

From the largest item to the smallest, each goes to the group with the least work, as long as that has room (Graham, 1969).
From the first on for which it has none, each goes to the fullest group with room, or to a new one (best fit). The number
of groups at the start is a lower bound. Where the plan has over 2% more than that, best fit alone is tried too, which needs
at most 11/9 of the fewest possible groups and a constant (Johnson et al., 1974).

A million items take about a second, because many are dealt in one step: a round of one each to the groups with the least
work, and for best fit all items of one size to all groups with the same room.
"""

import math
from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[Any]
"""Whole numbers, one an item (the largest first) or one a group."""


def group_items(sizes: list[int], works: list[int], *, limit: int, min_groups: int = 0) -> list[list[int]]:
    """Items into groups whose sizes add up to at most `limit`: few of them, and of like work.

    Args:
        sizes: of each item, in whole numbers from 0 to `limit`, which `fnppo.batching` has seen to.
        works: of each item, in whole numbers.
        min_groups: make at least so many groups, empty where there are fewer items.

    Returns:
        Items of each group, ascending; groups ordered by their first item, empty ones last.

    >>> group_items([5, 4, 3, 3], [25, 16, 9, 9], limit=9)
    [[0, 3], [1, 2]]
    """
    limit = max(min(limit, sum(sizes)), 1)  # beyond that it limits nothing, and need not fit into 64 bits
    order, size, work = _largest_first(sizes, works)
    fewest = max(-(-sum(sizes) // limit), int((2 * size > limit).sum()), min(len(sizes), 1))
    least_work = one_by_one if max(fewest, min_groups) < 64 else in_rounds  # which is faster; the plan is the same
    dealt, room = least_work(size, work, limit, max(fewest, min_groups))
    groups = _lists(order, [*dealt.tolist(), *_best_fit(size[len(dealt) :], room, limit)])
    if len(groups) > max(1.02 * fewest, min_groups):
        groups = min(groups, split_groups(fewest_groups(sizes, limit=limit), works, min_groups), key=len)
    return [*groups, *([] for _ in range(min_groups - len(groups)))]


def fewest_groups(sizes: list[int], *, limit: int) -> list[list[int]]:
    """As few groups as best fit finds, from the largest item to the smallest, whatever their work.

    >>> fewest_groups([3, 3, 3, 3, 3], limit=9)
    [[0, 1, 2], [3, 4]]
    """
    if sizes and sum(sizes) <= limit:
        return [list(range(len(sizes)))]
    order, size, _ = _largest_first(sizes, sizes)
    return _lists(order, _best_fit(size, size[:0], limit))


def split_groups(groups: list[list[int]], works: list[int], count: int) -> list[list[int]]:
    """Halve the group with the most work until there are `count`, or no group has two items. The rest are empty.

    >>> split_groups([[0, 1, 2], [3]], [5, 4, 3, 9], 3)
    [[0], [1, 2], [3]]
    """
    whole = [group for group in groups if len(group) < 2]
    heap = [(-sum(works[item] for item in group), group) for group in groups if len(group) > 1]
    heapify(heap)
    while heap and len(whole) + len(heap) < count:
        most, group = heappop(heap)
        own = [works[item] for item in group]
        order, work, _ = _largest_first(own, own)
        for half in _lists(order, one_by_one(work, work, -most, 2)[0].tolist()):
            if len(half) < 2:
                whole.append([group[place] for place in half])
            else:
                heappush(heap, (-sum(own[place] for place in half), [group[place] for place in half]))
    split = [*whole, *(group for _, group in heap)]
    return in_order([*split, *([] for _ in range(count - len(split)))])


def one_by_one(size: Numbers, work: Numbers, limit: int, count: int) -> tuple[Numbers, Numbers]:
    """Each item to the group with the least work, up to the first for which that has no room.

    Returns:
        (group of each item, room of each group).
    """
    dealt: list[int] = []
    room = [limit] * count
    heap = list(range(count))  # work · count + group: one number, which compares faster than a pair
    for item_size, item_work in zip(size.tolist(), work.tolist(), strict=True):
        group = heap[0] % count
        if item_size > room[group]:
            break
        dealt.append(group)
        room[group] -= item_size
        heapreplace(heap, heap[0] + (item_work + 1) * count)  # + 1: items without work go around, too
    return np.array(dealt, np.int64), np.array(room, size.dtype)


def in_rounds(size: Numbers, work: Numbers, limit: int, count: int) -> tuple[Numbers, Numbers]:
    """The same as `one_by_one`, in rounds: the groups from the least work on, until one that has got an item is the least."""
    done, room = np.zeros(count, work.dtype), np.full(count, limit, size.dtype)
    rounds, start = [np.zeros(0, np.int64)], 0
    while start < len(size):
        low = np.flatnonzero(done <= done.min() + work[start])
        low = low[np.argsort(done[low], kind="stable")][: len(size) - start]
        sizes, before, after = size[start : start + len(low)], done[low], done[low] + work[start : start + len(low)] + 1
        ends = sizes > room[low]
        # its turn comes after that of a group that has got an item in this round
        ends[1:] |= before[1:] >= np.minimum.accumulate(after)[:-1]
        turns = int(ends.argmax()) if ends.any() else len(low)
        if turns == 0:  # no room
            break
        low = low[:turns]
        done[low] = after[:turns]
        room[low] -= sizes[:turns]
        rounds.append(low)
        start += turns
    return np.concatenate(rounds), room


def _best_fit(size: Numbers, room: Numbers, limit: int) -> list[int]:
    """Group of each item, from the largest on: the fullest that has room for it, or a new one, numbered on from `room`.

    Groups with the same room are a range of `order`. Items of one size go to such a range at once, and each of its groups
    takes as many as it has room for.
    """
    order = np.argsort(-room, kind="stable").tolist()
    closed: list[tuple[int, int, int]] = []  # (-room, start, stop) of such ranges: without room for the size at hand
    fitting: list[tuple[int, int, int]] = []  # (room, start, stop): with room for it
    for free, count in Counter(room[order].tolist()).items():
        start = closed[-1][2] if closed else 0
        closed.append((-free, start, start + count))
    dealt: list[int] = []
    for item_size, left in Counter(size.tolist()).items():
        while closed and -closed[0][0] >= item_size:
            free, start, stop = heappop(closed)
            heappush(fitting, (-free, start, stop))
        while left:
            if not fitting:
                new = range(len(order), len(order) + max(left * item_size // limit, 1))
                fitting.append((limit, new.start, new.stop))
                order += new
            free, start, stop = heappop(fitting)
            each = min(free // item_size, left) if item_size else left
            last = min(start + left // each, stop)
            dealt += order[start:last] * each
            left -= (last - start) * each
            if last < stop:
                heappush(fitting, (free, last, stop))
            free -= each * item_size
            if free < item_size:
                heappush(closed, (-free, start, last))
            else:
                heappush(fitting, (free, start, last))
    return dealt


def _largest_first(sizes: list[int], works: list[int]) -> tuple[Numbers, Numbers, Numbers]:
    """(items in that order, their sizes, their works)."""
    dtype = np.int64 if sum(sizes) + sum(works) + len(works) < 2**62 else object  # which holds any number
    size = np.array(sizes, dtype)
    order = np.argsort(-size, kind="stable")
    return order, size[order], np.array(works, dtype)[order]


def _lists(order: Numbers, dealt: list[int]) -> list[list[int]]:
    """Items of each group, ascending; groups by their first item."""
    group_of = np.empty(len(order), np.int64)
    group_of[order] = dealt
    items = np.argsort(group_of, kind="stable")
    starts = np.flatnonzero(np.diff(group_of[items], prepend=-1))
    stops = np.append(starts[1:], len(items))
    by_first = np.argsort(items[starts])
    ascending = items.tolist()
    return [ascending[a:b] for a, b in zip(starts[by_first].tolist(), stops[by_first].tolist(), strict=True)]


def in_order(groups: Iterable[list[int]]) -> list[list[int]]:
    """Items ascending, groups by their first item, empty ones last."""
    return sorted(map(sorted, groups), key=lambda group: group[0] if group else math.inf)
