"""Items into groups under a limit: bin packing that also balances.

From the largest item to the smallest, each goes to the group with the least work, as long as that has room (Graham, 1969).
From the first on for which it has none, each goes to the fullest group with room, or to a new one (best fit). The number
of groups at the start is a lower bound. Where the plan has over 2% more than that, best fit alone is tried too, which needs
at most 11/9 of the fewest possible groups and a constant (Johnson et al., 1974).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace


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
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    fewest = max(-(-sum(sizes) // limit), sum(2 * size > limit for size in sizes), min(len(sizes), 1))
    groups = _balanced(order, sizes, works, limit, max(fewest, min_groups))
    if len(groups) > max(1.02 * fewest, min_groups):
        groups = min(groups, split_groups(fewest_groups(sizes, limit=limit), works, min_groups), key=len)
    return in_order(groups)


def fewest_groups(sizes: list[int], *, limit: int) -> list[list[int]]:
    """As few groups as best fit finds, from the largest item to the smallest, whatever their work.

    >>> fewest_groups([3, 3, 3, 3, 3], limit=9)
    [[0, 1, 2], [3, 4]]
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    return in_order(_best_fit(order, sizes, limit, [], []))


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
        order = sorted(group, key=works.__getitem__, reverse=True)
        for half in _balanced(order, works, works, -most, 2):
            if len(half) < 2:
                whole.append(half)
            else:
                heappush(heap, (-sum(works[item] for item in half), half))
    split = [*whole, *(group for _, group in heap)]
    return in_order([*split, *([] for _ in range(count - len(split)))])


def _balanced(order: list[int], sizes: list[int], works: list[int], limit: int, count: int) -> list[list[int]]:
    """Each item to the group with the least work, and from the first on for which that has no room, best fit."""
    groups: list[list[int]] = [[] for _ in range(count)]
    room = [limit] * count
    heap = list(range(count))  # work · count + group: one number, which compares faster than a pair
    for place, item in enumerate(order):
        least = heap[0]
        group = least % count
        if sizes[item] > room[group]:
            return _best_fit(order[place:], sizes, limit, groups, room)
        groups[group].append(item)
        room[group] -= sizes[item]
        heapreplace(heap, least + (works[item] + 1) * count)  # + 1: items without work go around, too
    return groups


def _best_fit(
    order: list[int], sizes: list[int], limit: int, groups: list[list[int]], room: list[int]
) -> list[list[int]]:
    """Each item to the fullest group that has room for it, or to a new one. `groups` grows in place."""
    with_room: dict[int, list[int]] = {}
    for group, free in enumerate(room):
        with_room.setdefault(free, []).append(group)
    rooms = sorted(with_room)  # all that groups have, once each: few, however many groups there are
    for item in order:
        size = sizes[item]
        place = bisect_left(rooms, size)
        if place == len(rooms):
            free, group = limit, len(groups)
            groups.append([])
        else:
            free = rooms[place]
            group = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], rooms[place]
        groups[group].append(item)
        if free - size not in with_room:
            with_room[free - size] = []
            insort(rooms, free - size)
        with_room[free - size].append(group)
    return groups


def in_order(groups: Iterable[list[int]]) -> list[list[int]]:
    """Items ascending, groups by their first item, empty ones last."""
    return sorted(map(sorted, groups), key=lambda group: group[0] if group else math.inf)
