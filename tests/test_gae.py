"""GAE and returns of tokens: hand-computed values, and sums over the learned tokens of each row."""

from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.func import grad

from fnppo import gae_advantages
from fnppo.advantages.gae import discounted_returns
from fnppo.advantages.token_columns import on_every_token, on_last_token
from fnppo.testing import oracle_gae_advantages

NAN = float("nan")
# One token: (is it learned, reward, value). Rows of up to 40 tokens.
ROW = st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), min_size=0, max_size=40)
DISCOUNT = st.floats(0, 1) | st.sampled_from([0.0, 1.0])


def of_row(row):
    """Reward, value and mask of one row, with NaN at all tokens that are not learned."""
    mask = tensor([[m for m, _, _ in row]], dtype=torch.bool)
    rewards = torch.where(mask, tensor([[r for _, r, _ in row]], dtype=torch.float64), NAN)
    return rewards, torch.where(mask, tensor([[v for _, _, v in row]], dtype=torch.float64), NAN), mask


def test_gae_does_not_bootstrap_from_masked_values():
    """H7."""
    mask = tensor([[True, True, False]])
    advantages, returns = gae_advantages(tensor([[0.0, 2, 0]]), tensor([[0.5, 1, 40]]), mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[1, 1, 0]]
    assert returns.tolist() == [[1.5, 2, 0]]


@pytest.mark.core
@given(ROW, DISCOUNT, DISCOUNT)
def test_gae_against_its_sum(row, gamma, lam):
    """A_t = Σ_k (gamma lam)^k δ_{t+k} over learned tokens, with NaN at all others."""
    rewards, values, mask = of_row(row)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    r, v = rewards[mask].tolist(), values[mask].tolist()
    expected = oracle_gae_advantages(r, v, gamma=gamma, lam=lam)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[mask].tolist() == pytest.approx([a + b for a, b in zip(expected, v, strict=True)], abs=1e-9)
    assert bool((advantages[~mask] == 0).all() & (returns[~mask] == 0).all())


@pytest.mark.core
@given(ROW, DISCOUNT)
def test_returns_against_the_recursion(row, gamma):
    """G_t = r_t + gamma G_{t+1} from the last token to the first; observations between two turns are skipped."""
    rewards, _, mask = of_row(row)
    expected, following = [0.0] * len(row), 0.0
    for t in reversed(range(len(row))):
        if row[t][0]:
            expected[t] = following = row[t][1] + gamma * following
    assert discounted_returns(rewards, mask, gamma=gamma)[0].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.core
@given(st.lists(ROW, min_size=2, max_size=3), DISCOUNT, DISCOUNT)
def test_a_row_is_alone(rows, gamma, lam):
    """Rows do not know each other, and padding on either side changes nothing."""
    width = max(map(len, rows)) + 1
    blank = [(False, 0.0, 0.0)]
    padded = [[*blank * (n % width), *row, *blank * width][:width] for n, row in enumerate(rows)]
    padded = [p if sum(m for m, _, _ in p) == sum(m for m, _, _ in row) else [*row, *blank * width][:width]
              for p, row in zip(padded, rows, strict=True)]  # fmt: skip
    together = [torch.cat(column) for column in zip(*map(of_row, padded), strict=True)]
    found, _ = gae_advantages(*together, gamma=gamma, lam=lam)
    for n, row in enumerate(rows):
        alone, _ = gae_advantages(*of_row(row), gamma=gamma, lam=lam)
        of_learned = alone[of_row(row)[2]].tolist()
        assert found[n][together[2][n]].tolist() == pytest.approx(of_learned, abs=1e-12)


def test_a_turn_is_skipped_as_if_it_were_not_there():
    """Two turns with the output of a tool between them, whose reward and value are large."""
    mask = tensor([[False, True, True, False, False, True]])
    rewards, values = tensor([[9.0, 0, 0, 9, 9, 1]]), tensor([[9.0, 0.5, 0.25, 9, 9, 0.5]])
    kept = mask[0]
    found = gae_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    short = gae_advantages(rewards[:, kept], values[:, kept], mask[:, kept], gamma=0.5, lam=0.5)
    assert all(torch.equal(a[:, kept], b) for a, b in zip(found, short, strict=True))


def test_gae_is_differentiable_in_its_numbers():
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = tensor([[0.0, 0, 1]], dtype=torch.float64), tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    slope = grad(lambda lam: gae_advantages(rewards, values, mask, lam=lam)[0].sum())(tensor(0.5, dtype=torch.float64))
    step = 1e-6
    up, down = (gae_advantages(rewards, values, mask, lam=0.5 + s)[0].sum() for s in (step, -step))
    assert slope.item() == pytest.approx(float(up - down) / (2 * step), rel=1e-6)


def test_gae_shapes():
    with pytest.raises(ValueError, match="shapes differ"):
        unwrap(gae_advantages)(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool))


def test_masks_of_numbers_and_empty_batches():
    ones = torch.ones(1, 2)
    assert gae_advantages(ones, ones, tensor([[1, 0]]))[0].tolist() == [[0.0, 0.0]]
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        assert gae_advantages(empty, empty, empty.bool())[0].shape == shape
        assert discounted_returns(empty, empty.bool()).shape == shape
        assert on_last_token(torch.zeros(shape[0]), empty.bool()).shape == shape


@pytest.mark.core
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_one_number_a_row(rows):
    """Given to every learned token, or to the last one; a row without any may have NaN."""
    mask = tensor(rows)
    values = torch.where(mask.any(1), torch.arange(1.0, len(rows) + 1), NAN)
    every, last = on_every_token(values, mask), on_last_token(values, mask)
    for row, learned in enumerate(rows):
        assert every[row].tolist() == [float(row + 1) * m for m in learned]
        places = [place for place, m in enumerate(learned) if m]
        assert last[row].tolist() == [float(row + 1) if places and place == places[-1] else 0.0 for place in range(4)]


def test_bad_row_values():
    mask = tensor([[True], [False]])
    for run in (on_every_token, on_last_token):
        with pytest.raises(ValueError, match="row 0: its value is nan"):
            run(tensor([NAN, NAN]), mask)
        with pytest.raises(ValueError, match=r"values has shape \(3,\) .* loss_mask has 2 rows"):
            unwrap(run)(torch.ones(3), mask)
        with pytest.raises(ValueError, match="row 0, column 0: loss_mask is 2"):
            run(torch.ones(1), tensor([[2]]))
        assert run(tensor([1, 2]), mask).dtype == torch.float32
        assert run(tensor([1.0, 2.0], dtype=torch.float64), mask).dtype == torch.float64
