"""The optimal token baseline: hand-computed values, and loops over groups and the tokens of a group."""

import math
import warnings
from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from fnppo.advantages.token_baseline import otb_advantages

NAN = float("nan")
# One token: (is it learned, reward, probability, what other tokens have, importance weight); rows of five.
TOKEN = st.tuples(st.booleans(), *[st.integers(0, 64).map(lambda n: n / 64)] * 4)
ROWS = st.lists(st.tuples(st.lists(TOKEN, min_size=5, max_size=5), st.sampled_from([7, -7])), min_size=1, max_size=5)


def columns(rows):
    mask = tensor([[token[0] for token in row] for row, _ in rows])
    column = lambda n: torch.where(mask, tensor([[t[n] for t in row] for row, _ in rows], dtype=torch.float64), NAN)
    rewards, probs, others, weights = map(column, (1, 2, 3, 4))
    probs = probs.clamp(min=1 / 64)
    squares = probs.square() + (1 - probs).square() * others  # the rest of the mass, spread or not
    options = {"logprobs": probs.log(), "sum_squared_probs": squares, "importance_weights": weights}
    return rewards, tensor([group for _, group in rows]), mask, options


def oracle(rewards, groups, mask, *, logprobs, sum_squared_probs, importance_weights, lone_baseline):
    """One token after the other: what the others of the group have at the same place among their learned tokens."""
    tokens = []  # for each row its learned tokens: (column, return, cumulative energy)
    for row in range(len(groups)):
        places = [c for c in range(len(mask[row])) if mask[row][c]]
        energy, of_row = 0.0, []
        for n, c in enumerate(places):
            energy += importance_weights[row][c] ** 2 * (1 - 2 * math.exp(logprobs[row][c]) + sum_squared_probs[row][c])
            of_row.append((c, sum(rewards[row][later] for later in places[n:]), energy))
        tokens.append(of_row)
    advantages = [[0.0] * len(row) for row in mask]
    for row, of_row in enumerate(tokens):
        for n, (column, own, _) in enumerate(of_row):
            there = [tokens[r][n] for r in range(len(groups)) if groups[r] == groups[row] and len(tokens[r]) > n]
            total = sum(w for _, _, w in there)
            if len(there) == 1:
                baseline = own if lone_baseline is None else lone_baseline
            elif total > 0:
                baseline = sum(g * w for _, g, w in there) / total
            else:
                baseline = sum(g for _, g, _ in there) / len(there)
            advantages[row][column] = own - baseline
    return advantages


def quiet(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return otb_advantages(*args, **options)


@pytest.mark.core
@given(ROWS, st.sampled_from([None, 0.0, 0.5]))
def test_against_loops(rows, lone_baseline):
    rewards, groups, mask, options = columns(rows)
    found = quiet(rewards, groups, mask, **options, lone_baseline=lone_baseline)
    lists = {name: column.tolist() for name, column in options.items()}
    expected = oracle(rewards.tolist(), groups.tolist(), mask.tolist(), **lists, lone_baseline=lone_baseline)
    assert found.tolist() == [pytest.approx(row, rel=1e-9, abs=1e-9) for row in expected]


def test_by_hand():
    """w = 1/2 and 9/8 for the two rows; the second token of the first row has nothing to be compared with."""
    rewards, mask = tensor([[0.0, 1.0], [0.0, 0.0]]), tensor([[True, True], [True, False]])
    options = {
        "logprobs": tensor([[0.5, 0.5], [0.25, NAN]]).log(),
        "sum_squared_probs": tensor([[0.5, 0.5], [0.625, NAN]]),
    }
    baseline = 0.5 / (0.5 + 1.125)
    for lone, last in ((None, 0.0), (0.0, 1.0), (0.25, 0.75)):
        found = otb_advantages(rewards, tensor([3, 3]), mask, **options, lone_baseline=lone)
        assert found.flatten().tolist() == pytest.approx([1 - baseline, last, -baseline, 0.0])
    doubled = {"importance_weights": tensor([[3.0, 1.0], [1.0, NAN]])}
    found = otb_advantages(rewards, tensor([3, 3]), mask, **options, **doubled)
    assert found[0, 0].item() == pytest.approx(1 - 4.5 / (4.5 + 1.125))


def test_equal_returns_are_exactly_zero():
    """H1: in float32, with energies that do not round well, and where the policy is sure of every token."""
    shape = (7, 3)
    mask, rewards = torch.ones(shape), torch.zeros(shape).index_fill(1, tensor([2]), 0.7)
    g = torch.Generator().manual_seed(0)
    for logprobs, squares in (
        (-torch.rand(shape, generator=g), torch.rand(shape, generator=g)),
        (torch.zeros(shape), torch.ones(shape)),
    ):
        groups = torch.zeros(7, dtype=torch.long)
        assert not otb_advantages(rewards, groups, mask, logprobs=logprobs, sum_squared_probs=squares).any()


def test_energies_of_zero():
    """Where the policy is sure of all tokens the baseline is the plain mean; what rounding pushed below 0 counts as 0."""
    rewards, mask = tensor([[1.0], [0.0]]), torch.ones(2, 1)
    run = lambda squares: otb_advantages(
        rewards, tensor([3, 3]), mask, logprobs=torch.zeros(2, 1), sum_squared_probs=tensor(squares)
    )
    assert run([[1.0], [1.0]]).flatten().tolist() == [0.5, -0.5]
    assert run([[1 - 2**-20], [1.25]]).flatten().tolist() == [1.0, 0.0]


def test_a_lone_response():
    """H3: 0, or its return where that is asked for; a row without learned tokens is rejected."""
    rewards, mask = tensor([[1.0, 2.0]]), torch.ones(1, 2)
    options = {"logprobs": torch.full((1, 2), -1.0), "sum_squared_probs": torch.full((1, 2), 0.5)}
    for lone, expected in ((None, [0.0, 0.0]), (0.0, [3.0, 2.0])):
        with pytest.warns(UserWarning, match="row 0 is alone in group 5"):
            found = otb_advantages(rewards, tensor([5]), mask, **options, lone_baseline=lone)
        assert found.tolist() == [expected]
    two = {name: column.expand(2, 2) for name, column in options.items()}
    rejected = otb_advantages(rewards.expand(2, 2), tensor([5, 5]), tensor([[1, 1], [0, 0]]), **two)
    assert not rejected.any()


def test_bad_columns():
    good = {"logprobs": torch.zeros(2, 2), "sum_squared_probs": torch.ones(2, 2)}
    rewards, groups, mask = torch.zeros(2, 2), tensor([0, 0]), torch.ones(2, 2)
    run = unwrap(otb_advantages)
    for name in (*good, "importance_weights"):
        with pytest.raises(ValueError, match=f"row 0, column 1: {name} is nan at a learned token"):
            run(rewards, groups, mask, **good | {name: tensor([[0.0, NAN], [0.0, 0.0]])})
        with pytest.raises(ValueError, match=rf"shapes differ .*{name} \(2, 1\)"):
            run(rewards, groups, mask, **good | {name: torch.ones(2, 1)})
    with pytest.raises(ValueError, match=r"groups has shape \(3,\); there are 2 rows"):
        run(rewards, tensor([0, 0, 0]), mask, **good)
    with pytest.raises(ValueError, match="groups has dtype torch.float32; it needs integers"):
        run(rewards, torch.zeros(2), mask, **good)
    with pytest.raises(ValueError, match="lone_baseline is nan; it must be a finite number"):
        run(rewards, groups, mask, **good, lone_baseline=NAN)


def test_weights_whose_squares_overflow():
    """The baseline is a ratio: a weight of 1e20 leaves the other response without influence, and nothing is NaN."""
    mask, ones = torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1)
    found = otb_advantages(
        torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]), mask,
        logprobs=-ones, sum_squared_probs=0.5 * ones, importance_weights=torch.tensor([[1e20], [1.0]]),
    )  # fmt: skip
    torch.testing.assert_close(found, torch.tensor([[0.0], [-1.0]]))
