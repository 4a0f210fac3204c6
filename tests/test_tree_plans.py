"""Plans of trees: the cap is strict on what is really laid, what fits stays together, forks are where trees are cut."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefixes import rows_of
from trees import plan_prompts, tokens_once, tree_of

import fnppo
from fnppo import plan_shared_microbatches
from fnppo.layouts import sharing
from fnppo.testing import branching_batches


@pytest.mark.core
@given(
    batch=branching_batches(vocab_size=3, max_rows=12),
    spare=st.integers(0, 12),
    least=st.integers(1, 4),
    groups=st.integers(0, 6),
)
def test_every_row_once_under_the_cap(batch, spare, least, groups):
    """E1, on what the packing lays."""
    rows = rows_of(batch)
    cap = max(map(len, rows)) + spare
    plan = plan_shared_microbatches(
        fnppo.prefix_tree(batch, least_shared=least), max_tokens=max(cap, 1), min_groups=groups
    )
    assert sorted(row for group in plan for row in group) == list(range(len(rows)))
    assert len([group for group in plan if group]) >= min(groups, len(rows))
    assert len(plan) >= groups
    for group in plan:
        assert group == sorted(group)
        laid = fnppo.pack_sequences(fnppo.select_rows(batch, group), share_prefixes=True, least_shared=least)
        assert laid.inputs.input_ids.numel() <= max(cap, 1)
        if least == 1:
            assert tokens_once([rows[row] for row in group]) <= cap
    if groups == 0:
        assert plan == sorted(plan)
        assert all(plan)
        assert plan == sharing(least_shared=least).plan(batch, max(cap, 1))


@pytest.mark.core
@given(batch=branching_batches(vocab_size=3, max_rows=12), spare=st.integers(0, 12))
def test_what_fits_together_stays_together(batch, spare):
    """Rows that go on from one fork, where the longest way to it and all that is after it are under the cap."""
    rows = rows_of(batch)
    cap = max(max(map(len, rows)) + spare, 1)
    plan = plan_shared_microbatches(tree_of(rows), max_tokens=cap)
    group_of = {row: number for number, group in enumerate(plan) for row in group}
    for trunk in {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}:
        below = [number for number, row in enumerate(rows) if tuple(row[: len(trunk)]) == trunk]
        if tokens_once([rows[row] for row in below]) <= cap:
            assert len({group_of[row] for row in below}) == 1


def test_a_tree_is_cut_at_its_branches():
    """A trunk of 2, two branches of 1 + 2 · 2 tokens: all is 12, a branch with the trunk 7, with one of its leaves less 5."""
    rows = [[1, 2, branch, 10 * branch + leaf, 5] for branch in (3, 4) for leaf in (1, 2)]
    plan = partial(plan_shared_microbatches, tree_of(rows))
    assert tokens_once(rows) == 12
    assert plan(max_tokens=12) == [[0, 1, 2, 3]]
    assert plan(max_tokens=11) == plan(max_tokens=7) == [[0, 1], [2, 3]]
    assert plan(max_tokens=6) == plan(max_tokens=5) == [[0], [1], [2], [3]]
    # two answers of each branch fit with what leads to them, 2 + 1 + 2 · 2; the two that are left go together: 2 + 2 · (1 + 2)
    more = [*rows, [1, 2, 3, 9, 9], [1, 2, 4, 9, 9]]
    assert plan_shared_microbatches(tree_of(more), max_tokens=8) == [[0, 1], [2, 3], [4, 5]]


def test_turns_of_a_dialogue():
    """Each row goes on where the one before ends, so that all of them are as long as the last."""
    rows = [list(range(5 * turn)) for turn in (1, 2, 3)]
    assert plan_shared_microbatches(tree_of(rows), max_tokens=15) == [[0, 1, 2]]
    with pytest.raises(ValueError, match="row 2 has 15 tokens, max_tokens is 14. Raise max_tokens to at least 15"):
        plan_shared_microbatches(tree_of(rows), max_tokens=14)
    with_fork = [*rows, [*range(5), 7, 7]]
    assert plan_shared_microbatches(tree_of(with_fork), max_tokens=17) == [[0, 1, 2, 3]]
    assert plan_shared_microbatches(tree_of(with_fork), max_tokens=16) == [[0, 3], [1, 2]]


def test_one_beginning_of_all_rows_leaves_prompts_together_and_work_balanced():
    """A template of 10 tokens, eight prompts of 5, four answers of 20 to each: 85 tokens a prompt after the template."""
    answers = iter(range(100, 10_000))
    prompts = [[*range(10), *[50 + prompt] * 5] for prompt in range(8)]
    rows = [[*prompt, *(next(answers) for _ in range(20))] for prompt in prompts for _ in range(4)]
    plan = plan_shared_microbatches(tree_of(rows), max_tokens=10 + 3 * 85)
    assert sorted(map(len, plan)) == [8, 12, 12]
    plan = plan_shared_microbatches(tree_of(rows), max_tokens=10 + 5 * 85)
    assert sorted(map(len, plan)) == [16, 16]  # not 20 and 12
    for group in plan:
        assert len({row // 4 for row in group}) == len(group) / 4


def test_parts_are_halved_at_their_first_branch():
    """Two prompts below a template: each half has one, and is computed once."""
    rows = [[1, 2, prompt, prompt, answer] for prompt in (3, 4) for answer in (5, 6, 7)]
    plan = partial(plan_shared_microbatches, tree_of(rows), max_tokens=99)
    assert plan(min_groups=2) == [[0, 1, 2], [3, 4, 5]]
    assert plan(min_groups=3) == [[0, 2], [1], [3, 4, 5]]
    assert plan(min_groups=6) == [[0], [1], [2], [3], [4], [5]]
    assert plan(min_groups=7) == [[0], [1], [2], [3], [4], [5], []]
    assert plan_shared_microbatches(tree_of([[1, 2]] * 3), max_tokens=2) == [[0, 1, 2]]
    assert plan_shared_microbatches(tree_of([[1, 2]] * 3), max_tokens=2, min_groups=2) == [[0, 2], [1]]
    # a row that ends at the branch is a half by itself
    assert plan_shared_microbatches(tree_of([[1, 2], [1, 2, 3]]), max_tokens=3, min_groups=2) == [[0], [1]]
    # what all rows of a part go through is no work that a half would save
    plan = plan_prompts([41, 41, 11, 11], {tuple([1] * 40): [0, 1], (2,): [2, 3]}, max_tokens=99, min_groups=3)
    assert plan == [[0, 1], [2], [3]]


def test_no_rows_and_rows_without_tokens():
    assert plan_shared_microbatches(tree_of([]), max_tokens=9) == []
    assert plan_shared_microbatches(tree_of([]), max_tokens=9, min_groups=2) == [[], []]
    assert plan_shared_microbatches(tree_of([[], [1], []]), max_tokens=1) == [[0, 1, 2]]
    assert plan_shared_microbatches(tree_of([[], [1], []]), max_tokens=1, min_groups=3) == [[0], [1], [2]]
