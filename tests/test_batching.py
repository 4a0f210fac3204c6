"""Plans: the cap is strict, every row is somewhere once, sizes are real."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import plan_prompts

from fnppo import plan_microbatches, plan_minibatches


@pytest.mark.core
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(20, 60))
def test_every_row_once_under_the_cap(lengths, cap):
    """E1."""
    groups = plan_microbatches(lengths, max_tokens=cap)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in group) <= cap for group in groups)
    assert all(group == sorted(group) and group for group in groups)
    assert groups == sorted(groups)
    # Two groups that fit into one would have been one.
    loads = sorted(sum(lengths[row] for row in group) for group in groups)
    assert len(loads) < 2 or loads[0] + loads[1] > cap


@pytest.mark.core
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20), st.integers(12, 40))
def test_shared_plans(rows, cap):
    """Every row once; with the prompt counted once, no group is over the cap."""
    prompt_lengths = [2 + 2 * prompt for prompt, _ in rows]
    lengths = [min(p + own, cap) for p, (_, own) in zip(prompt_lengths, rows, strict=True)]
    prompts: dict[tuple[int, ...], list[int]] = {}
    for row, (prompt, _) in enumerate(rows):
        prompts.setdefault((prompt,) * prompt_lengths[row], []).append(row)
    groups = plan_prompts(lengths, prompts, max_tokens=cap)
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))
    for group in groups:
        once = {rows[row][0]: prompt_lengths[row] for row in group}
        assert sum(once.values()) + sum(lengths[row] - prompt_lengths[row] for row in group) <= cap
    # a prompt whose rows fit together is not split
    for prompt in {prompt for prompt, _ in rows}:
        own = [row for row in range(len(rows)) if rows[row][0] == prompt]
        if prompt_lengths[own[0]] + sum(lengths[row] - prompt_lengths[row] for row in own) <= cap:
            assert sum(any(row in group for row in own) for group in groups) == 1


def test_a_prompt_that_leaves_room_for_one_token():
    assert plan_prompts([3, 3, 2], {(1, 2): [0, 1, 2]}, max_tokens=3) == [[0, 2], [1]]


def test_shared_plans_name_the_row_that_is_over():
    """E3."""
    with pytest.raises(ValueError, match="row 1 has 12 tokens, max_tokens is 8"):
        plan_prompts([3, 12], {(1, 1): [0, 1]}, max_tokens=8)


def test_known_plans():
    """E1."""
    assert len(plan_microbatches([5] * 6, max_tokens=9)) == 6
    assert plan_microbatches([6, 6, 2, 2], max_tokens=8) == [[0, 2], [1, 3]]
    assert plan_microbatches([3, 4], max_tokens=8) == [[0, 1]]  # E2: real lengths, not the padded width
    assert plan_microbatches([], max_tokens=8) == []


@given(st.lists(st.lists(st.integers(1, 19), max_size=6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_as_few_groups_as_promised(cuts, random):
    """Groups that were full to the last token, shuffled: the plan needs at most 11/9 of them (and 6/9 of one)."""
    full = [sorted({0, 20, *places}) for places in cuts]
    lengths = [stop - start for places in full for start, stop in zip(places, places[1:], strict=False)]
    random.shuffle(lengths)
    assert len(plan_microbatches(lengths, max_tokens=20)) <= (11 * len(full) + 6) / 9
    assert len(plan_microbatches([2, 2, 6, 6], max_tokens=8)) == 2


def test_a_row_over_the_cap():
    """E3."""
    with pytest.raises(
        ValueError,
        match=r"^row 1 has 12 tokens, max_tokens is 8\. Raise max_tokens to at least 12, or shorten or drop the row\.$",
    ):
        plan_microbatches([3, 12], max_tokens=8)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_checked(size):
    """E9."""
    with pytest.raises(ValueError, match=f"max_tokens is {size}"):
        plan_microbatches([1], max_tokens=size)
    with pytest.raises(ValueError, match=f"mini_batch_size is {size}"):
        plan_minibatches(3, mini_batch_size=size)
    with pytest.raises(ValueError, match=f"num_epochs is {size}"):
        plan_minibatches(3, mini_batch_size=1, num_epochs=size)


def test_minibatches():
    """A12, J1: 10 rows in mini-batches of 4 over 2 epochs are 6 steps, with a short one at each end."""
    steps = plan_minibatches(10, mini_batch_size=4, num_epochs=2, seed=3)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    for epoch in (steps[:3], steps[3:]):
        assert sorted(row for step in epoch for row in step) == list(range(10))
    assert steps[:3] != steps[3:]
    assert plan_minibatches(10, mini_batch_size=4) == plan_minibatches(10, mini_batch_size=4, num_epochs=1, seed=0)
    assert steps == plan_minibatches(10, mini_batch_size=4, num_epochs=2, seed=3)
    assert steps != plan_minibatches(10, mini_batch_size=4, num_epochs=2, seed=4)
