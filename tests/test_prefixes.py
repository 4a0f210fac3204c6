"""The tree of rows: what any two of them share, whatever else is there, and where a row has its tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from trees import tree_of

import fnppo
from fnppo.prefixes import check_tree, tree_of_rows
from fnppo.testing import branching_batches


def in_common(a, b):
    """Token by token."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def rows_of(batch):
    return [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


def check(tree, rows, least):
    """Each row is found in its stretches, and any two share what they have in common, if that is enough."""
    check_tree(tree)
    lines = [tree.lines()[end] for end in tree.ends]
    for row, line in zip(rows, lines, strict=True):
        assert [token for s in line for token in rows[tree.rows[s]][tree.starts[s] : tree.stops[s]]] == row
    for i, a in enumerate(lines):
        for j, b in enumerate(lines[:i]):
            shared = sum(tree.stops[s] - tree.starts[s] for s in set(a) & set(b))
            common = in_common(rows[i], rows[j])
            assert shared == (common if common >= least else 0)
    # A stretch without tokens is a row without any; every other ends where rows part or end.
    assert [tree.stops[s] for s, start in enumerate(tree.starts) if start == tree.stops[s]] == [0] * rows.count([])
    for s in range(len(tree.stops)):
        assert tree.parents.count(s) > 1 or s in tree.ends
    # numbered as the rows come to them, each with the first row that does
    assert tree.rows == sorted(tree.rows)
    assert tree.rows == [min(row for row, line in enumerate(lines) if s in line) for s in range(len(tree.stops))]


@pytest.mark.core
@given(batch=branching_batches(vocab_size=3, max_rows=8), least=st.integers(1, 4))
def test_any_two_rows_share_what_they_have_in_common(batch, least):
    rows = rows_of(batch)
    check(fnppo.prefix_tree(batch, least_shared=least), rows, least)
    check(tree_of_rows([tensor(row).int() for row in [[], *rows, []]], least_shared=least), [[], *rows, []], least)


@pytest.mark.core
@given(batch=branching_batches(vocab_size=3, max_rows=8), least=st.integers(1, 4), data=st.data())
def test_what_rows_share_does_not_depend_on_the_others(batch, least, data):
    """So a plan that is made from the whole counts what is laid in each part."""
    part = data.draw(st.lists(st.integers(0, len(batch.input_ids) - 1), unique=True))
    whole = fnppo.prefix_tree(batch, least_shared=least)
    tree = fnppo.prefix_tree(fnppo.select_rows(batch, part), least_shared=least)
    through = {stretch for row in part for stretch in whole.lines()[whole.ends[row]]}
    tokens = sum(whole.stops[s] - whole.starts[s] for s in through)
    assert tokens == sum(tree.stops) - sum(tree.starts)


def test_by_hand():
    """A fork in a response, a further turn, the same row twice, a row that nothing shares, and one without tokens."""
    rows = [[7, 8, 5, 5, 6], [7, 8, 5, 5, 9, 4], [], [7, 8, 5, 5, 9, 4, 3, 3], [1, 2], [7, 8, 5, 5, 9, 4]]
    tree = tree_of(rows)
    assert tree.parents == [-1, 0, 0, -1, 2, -1]
    assert tree.starts == [0, 4, 4, 0, 6, 0]
    assert tree.stops == [4, 5, 6, 0, 8, 2]
    assert tree.rows == [0, 0, 1, 2, 3, 4]
    assert tree.ends == [1, 2, 3, 4, 5, 2]
    assert tree.lines() == [[0], [0, 1], [0, 2], [3], [0, 2, 4], [5]]
    assert tree_of([]) == fnppo.PrefixTree([], [], [], [], [])
    # a fork above a fork that was found before it, and the trunk itself as the last row
    assert tree_of([[1, 2, 3], [1, 2, 4], [1, 5], [1]]).parents == [-1, 0, 1, 1, 0]
    assert tree_of([[1, 2, 3], [1, 2, 4], [1, 5], [1]]).ends == [2, 3, 4, 0]


def test_the_least_that_is_shared():
    rows = [tensor([1, 2, 3, n]) for n in range(2)] + [tensor([1, 2, 4])]
    assert tree_of_rows(rows, least_shared=3)._asdict() == {
        "parents": [-1, 0, 0, -1], "starts": [0, 3, 3, 0], "stops": [3, 4, 4, 3], "rows": [0, 0, 1, 2], "ends": [1, 2, 3],
    }  # fmt: skip
    assert tree_of_rows(rows, least_shared=4).parents == [-1, -1, -1]
    least = fnppo.prefixes.LEAST_SHARED
    for common, parents in ((least - 1, [-1, -1]), (least, [-1, 0, 0])):
        batch = fnppo.padded_batch([[5] * common] * 2, [[6], [7]])
        assert fnppo.prefix_tree(batch).parents == tree_of_rows(list(batch.input_ids)).parents == parents
    for wrong in (0, -1):
        with pytest.raises(
            ValueError, match=f"least_shared is {wrong}; it must be a whole number of at least 1. Use 1 to share"
        ):
            tree_of_rows(rows, least_shared=wrong)


def test_bytes_of_ids_are_no_digits():
    """256 and 1 begin with the same byte or end with it; neither is a common token, in either width of the ids."""
    for dtype in (torch.int32, torch.int64):
        for rows in ([[256, 1], [1, 256], [257]], [[0], [0, 0], [0, 0, 0], [65536, 0]]):
            check(tree_of_rows([tensor(row, dtype=dtype) for row in rows], least_shared=1), rows, 1)


def test_many_turns():
    """Deeper than Python recurses."""
    rows = [list(range(n)) for n in range(1, 1500)]
    tree = tree_of(rows)
    assert tree.parents == list(range(-1, 1498))
    assert fnppo.plan_shared_microbatches(tree, max_tokens=1499) == [list(range(1499))]


def test_padding_is_no_token():
    batch = fnppo.padded_batch([[1, 2], [2]], [[3], [3, 4]])
    garbage = batch._replace(input_ids=torch.where(batch.attention_mask, batch.input_ids, 1))
    assert fnppo.prefix_tree(garbage, least_shared=1).parents == [-1, -1]


def test_trees_made_by_hand_are_checked():
    good = tree_of([[1, 2], [1, 3]])
    check_tree(good)
    for wrong, named in (
        (good._replace(parents=[-1, 0, 2]), r"stretch 2 lies between 1 and 2, after stretch 2\. Use prefix_tree"),
        (good._replace(parents=[-2, 0, 0]), r"stretch 0 lies between 0 and 1, after stretch -2"),
        (good._replace(starts=[0, 0, 1]), "stretch 1 lies between 0 and 2, after stretch 0"),
        (good._replace(starts=[1, 1, 1]), "stretch 0 lies between 1 and 1, after stretch -1"),
        (good._replace(stops=[1, 2, 0]), "stretch 2 lies between 1 and 0, after stretch 0"),
        (good._replace(ends=[1, 3]), r"row 1 ends at stretch 3 of 3\. Use prefix_tree"),
        (good._replace(ends=[-1, 1]), "row 0 ends at stretch -1 of 3"),
    ):
        with pytest.raises(ValueError, match=named):
            fnppo.plan_shared_microbatches(wrong, max_tokens=9)
