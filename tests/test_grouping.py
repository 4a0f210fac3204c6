"""Groups under a limit: strict, near the lower bound, of like work, in a stable order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import plan_prompts

from fnppo import plan_microbatches
from fnppo.grouping import fewest_groups, group_items, in_rounds, one_by_one, split_groups

LIMIT = 16_384


def lengths_of(name, rows, seed=0):
    """Row lengths as the field has them."""
    g = torch.Generator().manual_seed(seed)
    long, short = torch.randint(4096, 8193, (rows,), generator=g), torch.randint(50, 600, (rows,), generator=g)
    return {
        "skewed": (torch.randn(rows, generator=g) * 0.8 + 6.5).exp().clamp(1, 8192).long(),
        "even": torch.randint(1, 2049, (rows,), generator=g),
        "mostly short": torch.where(torch.rand(rows, generator=g) < 0.1, long, short),
        "long": torch.randint(1000, LIMIT // 2 + 1, (rows,), generator=g),
    }[name].tolist()


def work(length, hidden_size=2048):
    return length + length**2 / (12 * hidden_size)


@pytest.mark.parametrize("rows", [300, 5_000])
@pytest.mark.parametrize("name", ["skewed", "even", "mostly short", "long"])
def test_within_two_percent_of_the_lower_bound_and_balanced(name, rows):
    lengths = lengths_of(name, rows)
    groups = plan_microbatches(lengths, max_tokens=LIMIT)
    assert sorted(row for group in groups for row in group) == list(range(rows))
    tokens = [sum(lengths[row] for row in group) for group in groups]
    assert max(tokens) <= LIMIT
    assert len(groups) <= 1.02 * -(-sum(lengths) // LIMIT)
    works = [sum(work(lengths[row]) for row in group) for group in groups]
    assert max(works) <= 1.15 * sum(works) / len(works)


@pytest.mark.core
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(20, 60), st.integers(0, 12))
def test_at_least_so_many_groups(lengths, limit, least):
    """All that is asked for, and no more than that or than would be without; only the last are empty."""
    groups = plan_microbatches(lengths, max_tokens=limit, min_groups=least)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in group) <= limit for group in groups)
    without = len(plan_microbatches(lengths, max_tokens=limit))
    assert least <= len(groups) <= max(least, without)
    full = [group for group in groups if group]
    assert groups == sorted(full) + [[]] * (len(groups) - len(full))
    assert len(full) >= min(least, len(lengths))


@pytest.mark.core
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20), st.integers(14, 40), st.integers(0, 9))
def test_at_least_so_many_groups_of_shared_prompts(rows, limit, least):
    """No group is empty while another could have given it a row, and none is over the limit, prompts counted once."""
    lengths = [2 + prompt + own for prompt, own in rows]
    prompts: dict[tuple[int, ...], list[int]] = {}
    for row, (prompt, _) in enumerate(rows):
        prompts.setdefault((prompt,) * (2 + prompt), []).append(row)
    groups = plan_prompts(lengths, prompts, max_tokens=limit, min_groups=least)
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))
    assert sum(map(bool, groups)) >= min(least, len(rows))
    assert len(groups) >= least
    for group in groups:
        once = {rows[row][0] for row in group}
        assert sum(2 + prompt for prompt in once) + sum(rows[row][1] for row in group) <= limit


@pytest.mark.core
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=40), st.integers(20, 60), st.integers(1, 9))
def test_rounds_are_the_loop(items, limit, count):
    """A million rows are dealt in rounds, a hundred one by one: each to the group with the least work, the first of those."""
    size, work = np.array(sorted(items, reverse=True), np.int64).reshape(-1, 2).T
    dealt, room, done = [], [limit] * count, [0] * count
    for each, own in zip(size.tolist(), work.tolist(), strict=True):
        group = done.index(min(done))
        if each > room[group]:
            break
        dealt.append(group)
        room[group] -= each
        done[group] += own + 1
    for deal in (one_by_one, in_rounds):
        groups, left = deal(size, work, limit, count)
        assert (groups.tolist(), left.tolist()) == (dealt, room)


@pytest.mark.core
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 90))
def test_best_fit_is_the_loop(sizes, limit):
    """Each to the fullest group with room, or to a new one: as many groups, as full, as one item after the other gives."""
    full: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [tokens for tokens in full if tokens + size <= limit]
        if fits:
            full.remove(max(fits))
        full.append(max(fits, default=0) + size)
    groups = fewest_groups(sizes, limit=limit)
    assert sorted(item for group in groups for item in group) == list(range(len(sizes)))
    assert sorted(sum(sizes[item] for item in group) for group in groups) == sorted(full)


@pytest.mark.parametrize("name", ["skewed", "mostly short"])
def test_many_rows(name):
    """Hundreds of groups are dealt in rounds; rows without tokens slow them no more than others."""
    lengths = lengths_of(name, 60_000) + [0] * 20_000
    groups = plan_microbatches(lengths, max_tokens=LIMIT)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert max(sum(lengths[row] for row in group) for group in groups) <= LIMIT
    assert len(groups) <= 1.02 * -(-sum(lengths) // LIMIT)
    assert groups == plan_microbatches(lengths, max_tokens=LIMIT)


def test_numbers_of_any_size():
    """Work that 64 bits do not hold is counted all the same, and so is a limit."""
    lengths = [2, 1, 3, 2, 1] * 40
    for options in (
        {"max_tokens": 6},
        {"max_tokens": 10**30, "min_groups": 70},
        {"max_tokens": 10**30, "min_groups": 3},
    ):
        assert plan_microbatches(lengths, **options) == plan_microbatches(lengths, **options, hidden_size=10**30)
    assert plan_microbatches([10**20, 10**20, 1], max_tokens=10**20) == [[0], [1], [2]]


def test_best_fit_leaves_none_of_the_groups_asked_for_empty():
    """With the least work first there would be 9 groups, by best fit alone 7; 8 are asked for."""
    lengths = [8, 11, 11, 15, 7, 11, 19, 15, 7, 7, 17, 16, 19, 13, 8, 13, 12]
    groups = plan_microbatches(lengths, max_tokens=30, min_groups=8)
    assert len(groups) == 8
    assert all(groups)
    assert plan_microbatches([0, 0, 0], max_tokens=30, min_groups=3) == [[0], [1], [2]]


def test_as_few_groups_where_prompts_are_shared():
    """A prompt over the limit is cut so that a small part is left, which goes with those of others."""
    prompts = {(i,) * 10: list(range(13 * i, 13 * i + 13)) for i in range(2)}
    assert len(plan_prompts([20] * 26, prompts, max_tokens=100)) == 3
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        sizes = torch.randint(100, 801, (16,), generator=g).tolist()
        own = torch.randint(50, 1025, (16, 8), generator=g).tolist()
        prompts = {(i,) * sizes[i]: list(range(8 * i, 8 * i + 8)) for i in range(16)}
        lengths = [sizes[i] + own[i][j] for i in range(16) for j in range(8)]
        groups = plan_prompts(lengths, prompts, max_tokens=4096)
        once = [sum(sizes[i] for i in {row // 8 for row in group}) for group in groups]
        tokens = [p + sum(own[row // 8][row % 8] for row in group) for p, group in zip(once, groups, strict=True)]
        assert max(tokens) <= 4096
        assert len(groups) <= 1.1 * -(-sum(tokens) // 4096)


def test_work_is_spread_over_the_groups_asked_for():
    assert plan_microbatches([4, 3, 2, 1], max_tokens=100) == [[0, 1, 2, 3]]
    assert plan_microbatches([4, 3, 2, 1], max_tokens=100, min_groups=2) == [[0, 3], [1, 2]]
    assert plan_microbatches([4, 3], max_tokens=100, min_groups=4) == [[0], [1], [], []]
    assert plan_microbatches([], max_tokens=100, min_groups=2) == [[], []]
    prompts = {(1, 2): [0, 1], (3,): [2]}
    assert plan_prompts([4, 3, 3], prompts, max_tokens=100, min_groups=2) == [[0, 1], [2]]
    assert plan_prompts([4, 3, 3], prompts, max_tokens=100, min_groups=3) == [[0], [1], [2]]
    assert plan_prompts([4] * 8, {(1, 2): list(range(8))}, max_tokens=100, min_groups=3) == [
        [0, 4], [1, 3, 5, 7], [2, 6],
    ]  # fmt: skip


def test_attention_counts_for_more_in_a_small_model():
    """One row of 40 is the work of 40 · (12 + 40) = 2080 at hidden size 1, and of six rows of 10 (220 each) 1320."""
    lengths = [40, *[10] * 9]
    assert plan_microbatches(lengths, max_tokens=100, min_groups=2, hidden_size=1)[0] == [0]
    assert len(plan_microbatches(lengths, max_tokens=100, min_groups=2, hidden_size=4096)[0]) == 3  # 60 tokens, and 70


def test_shared_prompts_are_balanced_by_work_too():
    """At hidden size 1, 10 tokens after 40 are 50 · 62 = 3100 with their prompt, and twice 10 after 10 are 1060."""
    prompts = {tuple([1] * 40): [0], **{tuple([n] * 10): [2 * n - 3, 2 * n - 2] for n in (2, 3, 4)}}
    plan = lambda hidden_size: plan_prompts(
        [50, *[20] * 6], prompts, max_tokens=100, min_groups=2, hidden_size=hidden_size
    )
    assert plan(1) == [[0], [1, 2, 3, 4, 5, 6]]
    assert plan(4096) == [[0, 5, 6], [1, 2, 3, 4]]  # 80 tokens, and 60


def test_known_groups():
    """By hand. The last two: with the least work first there would be 3 groups; best fit alone finds 2."""
    assert group_items([5, 4, 3, 3], [25, 16, 9, 9], limit=9) == [[0, 3], [1, 2]]
    assert group_items([3, 3, 3], [1, 1, 1], limit=9) == [[0, 1, 2]]
    assert group_items([5, 5, 5], [1, 1, 1], limit=9) == [[0], [1], [2]]
    assert group_items([0, 0], [0, 0], limit=9) == [[0, 1]]
    assert group_items([5, 5, 4, 3, 3], [5, 5, 4, 3, 3], limit=10) == [[0, 1], [2, 3, 4]]
    assert group_items([3, 3, 4, 5, 5], [3, 3, 4, 5, 5], limit=10) == [[0, 1, 2], [3, 4]]


def test_to_the_unit_of_work():
    """At hidden size 2048 a row of 1240 is 3 units more than rows of 1230 and 11, at 2049 it is 9 less.

    One unit a row is added, so that rows of no tokens are dealt out too: in the last, 10 + 1 is more than 7 + 3.
    """
    lengths = [1240, 1230, 11, 5]
    alone = {(row,): [row] for row in range(4)}
    for plan in (plan_microbatches, lambda lengths, **options: plan_prompts(lengths, alone, **options)):
        assert plan(lengths, max_tokens=10_000, min_groups=2) == [[0], [1, 2, 3]]
        assert plan(lengths, max_tokens=10_000, min_groups=2, hidden_size=2049) == [[0, 3], [1, 2]]
    assert group_items([9, 8, 7, 6, 5], [10, 3, 2, 2, 1], limit=100, min_groups=2) == [[0], [1, 2, 3, 4]]


def test_what_the_plan_begins_with():
    """Three rows above half the limit need three groups: the fourth goes to the first of them, not to the last."""
    assert group_items([5, 5, 5, 1], [5, 5, 5, 1], limit=9) == [[0, 3], [1], [2]]
    assert group_items([], [], limit=9) == plan_prompts([], {}, max_tokens=9) == []
    # two groups by best fit alone, though the three are first in the order of lists
    assert group_items([5, 3, 4, 5, 4], [8, 8, 2, 9, 7], limit=11) == [[0, 3], [1, 2, 4]]


def test_groups_are_halved_by_work():
    """The group with the most work first, and within it from the item with the most work on."""
    assert split_groups([[0, 1, 2, 3, 4]], [8, 1, 8, 5, 6], 2) == [[0, 4], [1, 2, 3]]
    assert split_groups([[0, 1, 2, 3]], [1, 1, 1, 1], 4) == [[0], [1], [2], [3]]
    assert split_groups([[0, 1, 2, 3], [4, 5]], [8, 8, 8, 8, 3, 3], 4) == [[0], [1, 3], [2], [4, 5]]
    assert split_groups([[0], [1, 2]], [9, 1, 1], 5) == [[0], [1], [2], [], []]
    assert split_groups([[0, 1], [2]], [1, 1, 1], 2) == [[0, 1], [2]]
    # a prompt is computed once, so that of a long one is no work that a half would save
    prompts = {tuple([1] * 40): [0, 1], (2,): [2, 3]}
    assert plan_prompts([41, 41, 11, 11], prompts, max_tokens=99, min_groups=3) == [[0, 1], [2], [3]]


def test_equal_rows_keep_their_order():
    assert plan_microbatches([2, 2, 2, 2], max_tokens=4) == [[0, 2], [1, 3]]
    assert plan_microbatches([2, 2, 2, 2], max_tokens=4) == plan_microbatches([2, 2, 2, 2], max_tokens=4)


def test_numbers_are_checked():
    for plan in (plan_microbatches, lambda lengths, **kwargs: plan_prompts(lengths, {(): [0]}, **kwargs)):
        with pytest.raises(ValueError, match=r"min_groups is -1; it must be a whole number of at least 0\. Leave"):
            plan([1], max_tokens=2, min_groups=-1)
        with pytest.raises(ValueError, match=r"hidden_size is 0; it must be a whole number of at least 1\. Use config"):
            plan([1], max_tokens=2, hidden_size=0)
