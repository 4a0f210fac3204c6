"""The radix tree of rows: which of them begin with the same tokens, and for how long.

Rows that begin alike go the same way from the root until they differ. A stretch is a part of that way on which nothing
branches off and no row ends; each row is the stretches from the root to its end:

    row 0    7 8 5 5 6                           ┌─ 6        stretch 1, of row 0
    row 1    7 8 5 5 9 4          7 8 5 5 ───────┤
    row 2    7 8 5 5 9 4 3 3      stretch 0      └─ 9 4 ───── 3 3
    row 3    1 2                                 stretch 2    stretch 3
                                  1 2     stretch 4, of row 3 alone

Row 2 goes on where row 1 ends, as the next turn of a dialogue does; rows 0 and 1 fork inside of a response, as rollouts of
a tree search do. A packed layout computes each stretch once for all rows that go through it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fnppo.arguments import check_count, check_ids, check_tensor, check_type
from fnppo.checks import check_batch
from fnppo.types import PaddedBatch

LEAST_SHARED = 8
"""Tokens that two rows must have in common at their beginning to share them.

A fork costs a call of the attention kernel for each of its parts; what it saves grows with the tokens that are shared. So a
first token that all rows begin with is not worth it. After the first fork there is no least number.
"""


class PrefixTree(NamedTuple):
    """Stretches, each after its parent, in the order in which the rows first come to them.

    Attributes:
        parents: number of the stretch that each goes on from; -1 where it begins a row.
        starts, stops: positions in its rows between which each stretch lies.
        rows: the first row that goes through each stretch.
        ends: of each row, the stretch at whose end it ends.
    """

    parents: list[int]
    starts: list[int]
    stops: list[int]
    rows: list[int]
    ends: list[int]

    def lines(self) -> list[list[int]]:
        """Of each stretch, those from the root to it, itself included."""
        lines: list[list[int]] = []
        for stretch, parent in enumerate(self.parents):
            lines.append([*(lines[parent] if parent >= 0 else []), stretch])
        return lines


def prefix_tree(batch: PaddedBatch, *, least_shared: int = LEAST_SHARED) -> PrefixTree:
    """The tree of the existing tokens of a batch, whatever is learned of them.

    Two rows share all tokens that they have in common at their beginning, if those are at least `least_shared`. So what
    rows share does not depend on the other rows of the batch: the tree of some of the rows is that part of the whole tree
    through which they go, and a plan made from the whole counts what the micro-batches will hold.

    Args:
        batch: the rollouts.
        least_shared: 1 shares whatever can be shared. The numbers of an update do not depend on it. A row that shares
            costs the gathering of keys, and keeps attention from its fastest path, so a single token that all rows
            begin with is not worth it.

    Raises:
        ValueError: the batch is malformed, or `least_shared` is no whole number of at least 1.

    >>> from fnppo import padded_batch
    >>> tree = prefix_tree(padded_batch([[7, 8], [7, 8], [5]], [[6], [9, 4], [6]]), least_shared=1)
    >>> tree.parents, tree.starts, tree.stops
    ([-1, 0, 0, -1], [0, 2, 2, 0], [2, 3, 4, 2])
    """
    batch = check_batch(batch)
    mask = batch.attention_mask.cpu()
    return tree_of_rows(batch.input_ids.cpu()[mask].split(mask.sum(1).tolist()), least_shared=least_shared)


def check_least_shared(least_shared: int) -> None:
    """A `ValueError` unless it counts."""
    check_count("least_shared", least_shared, least=1, remedy="Use 1 to share whatever can be shared.")


def tree_of_rows(rows: Sequence[Tensor], *, least_shared: int = LEAST_SHARED) -> PrefixTree:
    """`prefix_tree` of rows of token ids, [tokens] each.

    The rows are sorted, after which every row shares most with one of its two neighbours, and the tree is read off the
    lengths of what neighbours have in common (Kasai et al., CPM 2001). The sort compares bytes, so its order is not that
    of the ids; any order in which a row comes before those that continue it will do.

    >>> from torch import tensor
    >>> tree_of_rows([tensor([7, 8, 5, 6]), tensor([7, 8, 5]), tensor([7, 8, 9])], least_shared=2)._asdict()
    {'parents': [-1, 0, 1, 0], 'starts': [0, 2, 3, 2], 'stops': [2, 3, 4, 3], 'rows': [0, 0, 0, 2], 'ends': [2, 1, 3]}
    """
    check_least_shared(least_shared)
    for ids in rows:
        check_tensor("a row", ids)
        check_ids("a row", ids)
        if ids.dim() != 1:
            raise ValueError(f"a row has shape {tuple(ids.shape)}; it needs [tokens]. Give one row at a time.")
    tokens = [ids.cpu().numpy() for ids in rows]
    order = sorted(range(len(rows)), key=[ids.tobytes() for ids in tokens].__getitem__)
    parents: list[int] = []
    stops: list[int] = []
    ends = [0] * len(rows)
    line: list[int] = []  # the stretches of the row before, from its root on

    def add(parent: int, stop: int) -> int:
        parents.append(parent)
        stops.append(stop)
        return len(stops) - 1

    for place, row in enumerate(order):
        common = _common(tokens[order[place - 1]], tokens[row]) if place else 0
        if common < least_shared:  # it begins a tree of its own
            common, line = 0, []
        beyond = -1  # the stretch of the line that has the fork inside, or at its beginning
        while line and stops[line[-1]] > common:
            beyond = line.pop()
        if common > (stops[line[-1]] if line else 0):  # inside: the part before the fork becomes a stretch by itself
            parents[beyond] = add(line[-1] if line else -1, common)
            line.append(parents[beyond])
        if not line or len(tokens[row]) > common:
            line.append(add(line[-1] if line else -1, len(tokens[row])))
        ends[row] = line[-1]
    return _in_order_of_rows(parents, stops, ends)


def _common(a: Any, b: Any) -> int:
    """How many tokens two rows have in common at their beginning."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _in_order_of_rows(parents: list[int], stops: list[int], ends: list[int]) -> PrefixTree:
    """Stretches numbered as the rows, one after the other, first come to them."""
    rows = [len(ends)] * len(stops)
    for row in reversed(range(len(ends))):
        rows[ends[row]] = row
    for stretch in sorted(range(len(stops)), key=stops.__getitem__, reverse=True):  # before its parent
        if (parent := parents[stretch]) >= 0:
            rows[parent] = min(rows[parent], rows[stretch])
    order = sorted(range(len(stops)), key=lambda stretch: (rows[stretch], stops[stretch]))
    number = {stretch: place for place, stretch in enumerate(order)} | {-1: -1}
    return PrefixTree(
        parents=[number[parents[stretch]] for stretch in order],
        starts=[stops[parents[stretch]] if parents[stretch] >= 0 else 0 for stretch in order],
        stops=[stops[stretch] for stretch in order],
        rows=[rows[stretch] for stretch in order],
        ends=[number[end] for end in ends],
    )


def check_tree(tree: PrefixTree) -> None:
    """Raise a `ValueError` where the stretches of a tree that was made by hand do not fit together."""
    check_type("tree", tree, PrefixTree, "Use prefix_tree(batch).")
    counts = [len(column) for column in (tree.parents, tree.starts, tree.stops, tree.rows)]
    if len(set(counts)) > 1:
        raise ValueError(
            "parents, starts, stops and rows have {}, {}, {} and {} entries; each has one a stretch. Use "
            "prefix_tree(batch).".format(*counts)
        )
    for stretch, (parent, start, stop) in enumerate(zip(tree.parents, tree.starts, tree.stops, strict=True)):
        if not (-1 <= parent < stretch and start == (tree.stops[parent] if parent >= 0 else 0) and start <= stop):
            raise ValueError(
                f"stretch {stretch} lies between {start} and {stop}, after stretch {parent}. Use prefix_tree(batch)."
            )
    for row, end in enumerate(tree.ends):
        if not 0 <= end < len(tree.stops):
            raise ValueError(f"row {row} ends at stretch {end} of {len(tree.stops)}. Use prefix_tree(batch).")
