"""Micro-batches of each rank: every one once, as many for each rank, and balanced by work. No process is started."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fnppo
from fnppo.distributed import balanced, in_turn, share_of

WORKS = st.lists(st.integers(0, 100), max_size=20)


@pytest.mark.parametrize("deal", [balanced, in_turn])
@given(works=WORKS, ranks=st.integers(1, 8))
def test_every_micro_batch_goes_to_one_rank(deal, works, ranks):
    """E8: also with fewer micro-batches than ranks."""
    dealt = deal(works, ranks)
    assert len(dealt) == ranks
    assert sorted(group for groups in dealt for group in groups) == list(range(len(works)))
    order = sorted(range(len(works)), key=lambda group: -works[group] if deal is balanced else group)
    assert all(groups == [group for group in order if group in groups] for groups in dealt)  # like ones meet
    counts = [len(groups) for groups in dealt]
    assert max(counts) <= -(-len(works) // ranks)


@given(works=WORKS.filter(bool), ranks=st.integers(1, 8))
def test_work_is_balanced(works, ranks):
    """No rank has more than another by more than the largest micro-batch, unless the other has its number of them."""
    dealt = balanced(works, ranks)
    done = [sum(works[group] for group in groups) for groups in dealt]
    most = -(-len(works) // ranks)
    open_ranks = [total for total, groups in zip(done, dealt, strict=True) if len(groups) < most]
    if open_ranks:
        assert max(done) - min(open_ranks) <= max(works)


def share(lengths, ranks, cap=100):
    batch = fnppo.padded_batch([[1]] * len(lengths), [[2] * (n - 1) for n in lengths])
    return [share_of(fnppo.packed, rank=rank, ranks=ranks).plan(batch, cap) for rank in range(ranks)]


def test_ranks_make_as_many_forwards():
    """E4, E5, E12: rows of 90 fill a micro-batch each, rows of 25 share one; empty ones make up for what is missing."""
    for lengths, ranks, counts in (([90, 90, 90, 25, 25, 25], 2, 2), ([90, 90, 90, 25], 2, 2), ([90, 90, 90], 2, 2)):
        plans = share(lengths, ranks)
        assert [len(plan) for plan in plans] == [counts] * ranks
        assert sorted(row for plan in plans for group in plan for row in group) == list(range(len(lengths)))
    assert share([90], 3) == [[[0]], [[]], [[]]]
    assert share([20] * 5, 4) == [[[0, 4]], [[1]], [[2]], [[3]]]  # one each, where two would do
    assert [len(plan) for plan in share([60] * 5, 2)] == [3, 3]  # five are too few, and not a multiple
    assert share([], 2) == [[[]], [[]]]
