"""Whitening and REINFORCE++: hand-computed values, and statistics of a plain list of numbers."""

import statistics
import warnings
from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import tensor

from fnppo.advantages.outcome import dr_grpo_advantages
from fnppo.advantages.whitening import reinforce_plus_plus_advantages, reinforce_plus_plus_baseline_advantages, whiten

NAN = float("nan")
NUMBER = st.integers(-128, 128).map(lambda n: n / 64)
# Rows of four tokens: (is it learned, value).
ROWS = st.lists(st.lists(st.tuples(st.booleans(), NUMBER), min_size=4, max_size=4), min_size=1, max_size=4)


def columns(rows):
    mask = tensor([[m for m, _ in row] for row in rows])
    return torch.where(mask, tensor([[v for _, v in row] for row in rows], dtype=torch.float64), NAN), mask


def whitened(numbers, eps=1e-8):
    """Mean 0 and standard deviation 1 of a list; as they are below two numbers."""
    if len(numbers) < 2:
        return numbers
    mean, std = statistics.fmean(numbers), statistics.stdev(numbers) if len(set(numbers)) > 1 else 0.0
    return [(number - mean) / (std + eps) if std else 0.0 for number in numbers]


def test_one_learned_token_is_left_as_it_is():
    """H10: it has no standard deviation; torch.var is NaN."""
    assert whiten(tensor([[3.0]]), tensor([[1]])).tolist() == [[3.0]]
    assert whiten(tensor([[NAN, 3.0]]), tensor([[0, 1]])).tolist() == [[0.0, 3.0]]
    assert whiten(tensor([[3.0]]), tensor([[0]])).tolist() == [[0.0]]
    assert whiten(torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)


def test_masked_values_are_zero_afterwards():
    """H11: (0 - mean) / std would stand there."""
    r = 0.5**0.5
    found = whiten(tensor([[1.0, 3.0, 0.0]]), tensor([[1, 1, 0]]))
    assert found.tolist()[0] == pytest.approx([-r, r, 0.0], abs=1e-6)
    assert found[0, 2] == 0.0


def test_equal_values_become_exactly_zero():
    """H1: in float32 the mean of seven 0.7 is not 0.7."""
    for value, n in ((0.7, 7), (0.1, 8), (-0.7, 7)):
        assert not whiten(torch.full((1, n), value), torch.ones(1, n)).any()


@pytest.mark.core
@given(ROWS)
def test_against_a_list_of_numbers(rows):
    values, mask = columns(rows)
    found = whiten(values, mask)
    assert found[mask].tolist() == pytest.approx(whitened(values[mask].tolist()), rel=1e-9, abs=1e-9)
    assert not found[~mask].any()
    order = torch.arange(len(rows)).flip(0)
    assert whiten(values[order], mask[order])[order].tolist() == [
        pytest.approx(row, rel=1e-9, abs=1e-9) for row in found.tolist()
    ]


@pytest.mark.core
@given(ROWS, st.floats(0, 1))
def test_reinforce_plus_plus(rows, gamma):
    """Returns by the recursion, and then statistics over all of them."""
    rewards, mask = columns(rows)
    returns = []
    for row in rows:
        following, of_row = 0.0, []
        for learned, reward in reversed(row):
            if learned:
                following = reward + gamma * following
                of_row.insert(0, following)
        returns += of_row
    assume(len(set(returns)) < 2 or statistics.stdev(returns) > 1e-3)  # their rounding is divided by it
    found = reinforce_plus_plus_advantages(rewards, mask, gamma=gamma)
    assert found[mask].tolist() == pytest.approx(whitened(returns), rel=1e-8, abs=1e-8)
    assert not found[~mask].any()


@pytest.mark.core
@given(ROWS, st.data())
def test_reinforce_plus_plus_baseline(rows, data):
    """Group means, and then statistics over all learned tokens of rows that are kept."""
    _, mask = columns(rows)
    draw = lambda what: data.draw(st.lists(what, min_size=len(rows), max_size=len(rows)))
    keep, groups = tensor(draw(st.booleans() | st.just(True))), tensor(draw(st.sampled_from([7, -7])))
    rewards = torch.where(keep, tensor(draw(NUMBER), dtype=torch.float64), NAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        centred = dr_grpo_advantages(rewards, groups, keep=keep)
        found = reinforce_plus_plus_baseline_advantages(rewards, groups, mask, keep=keep)
    learned = mask & keep[:, None]
    numbers = [a for a, of_row in zip(centred.tolist(), learned.tolist(), strict=True) for m in of_row if m]
    assume(len(set(numbers)) < 2 or statistics.stdev(numbers) > 1e-3)  # their rounding is divided by it
    assert found[learned].tolist() == pytest.approx(whitened(numbers), rel=1e-8, abs=1e-8)
    assert not found[~learned].any()


def test_bad_columns():
    mask = torch.ones(1, 2)
    for run in (whiten, reinforce_plus_plus_advantages):
        with pytest.raises(ValueError, match="row 0, column 1: .* is nan at a learned token"):
            run(tensor([[0.0, NAN]]), mask)
        with pytest.raises(ValueError, match="eps is 0; it must be a finite number above 0"):
            run(torch.zeros(1, 2), mask, eps=0)
    with pytest.raises(ValueError, match=r"shapes differ or are not .batch, seq.: values \(1, 3\), loss_mask \(1, 2\)"):
        unwrap(whiten)(torch.zeros(1, 3), mask)
    with pytest.raises(ValueError, match="gamma is 2; it must be a finite number of at least 0 and of at most 1"):
        reinforce_plus_plus_advantages(torch.zeros(1, 2), mask, gamma=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    mask = torch.ones(64, 64, dtype=torch.bool)
    assert not bool(whiten(torch.full((64, 64), 0.7, dtype=dtype), mask).any())
    values = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    torch.testing.assert_close(whiten(values, mask), whiten(values.float(), mask))
