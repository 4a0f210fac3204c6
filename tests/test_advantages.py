"""GRPO and GAE: hand-computed values and naive oracles."""

import warnings
from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.func import grad

from fnppo import gae_advantages, grpo_advantages
from fnppo.testing import oracle_gae_advantages, oracle_grpo_advantages


def test_equal_rewards_give_exactly_zero():
    """H1: in float32 the mean of seven 0.7 is not 0.7."""
    for reward, n in ((0.7, 7), (0.1, 8), (0.3, 3)):
        assert grpo_advantages(tensor([reward] * n), torch.zeros(n, dtype=torch.long)).tolist() == [0.0] * n


def test_a_lone_response():
    """H3."""
    with pytest.warns(UserWarning, match="row 0 is alone in group 5"):
        assert grpo_advantages(tensor([0.9, 1.0, 0.0]), tensor([5, 1, 1]))[0] == 0.0


def test_per_group():
    """H5, H12."""
    r = 0.7071
    rewards, groups = tensor([1.0, 10, 0, 8]), tensor([0, 1, 0, 1])
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx([r, r, -r, -r], abs=1e-4)
    assert grpo_advantages(rewards, groups, normalize=False).tolist() == pytest.approx([0.5, 1, -0.5, -1])
    assert grpo_advantages(tensor([]), tensor([], dtype=torch.long)).shape == (0,)


@pytest.mark.core
@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 2)), min_size=1, max_size=9), st.booleans())
def test_grpo_against_the_oracle(rows, normalize):
    rewards = tensor([r for r, _ in rows], dtype=torch.float64)
    groups = tensor([g for _, g in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = grpo_advantages(rewards, groups, normalize=normalize)
    expected = oracle_grpo_advantages(rewards.tolist(), groups.tolist(), normalize=normalize)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_bad_rewards():
    with pytest.raises(ValueError, match="row 1: the reward is nan"):
        grpo_advantages(tensor([0.0, float("nan")]), tensor([0, 0]))
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), groups \(3,\)"):
        unwrap(grpo_advantages)(torch.zeros(2), torch.zeros(3, dtype=torch.long))


def test_gae_does_not_bootstrap_from_masked_values():
    """H7."""
    mask = tensor([[True, True, False]])
    advantages, returns = gae_advantages(tensor([[0.0, 2, 0]]), tensor([[0.5, 1, 40]]), mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[1, 1, 0]]
    assert returns.tolist() == [[1.5, 2, 0]]


@pytest.mark.core
@given(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), min_size=0, max_size=7),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_against_its_sum(row, gamma, lam):
    """A_t = Σ_k (gamma lam)^k δ_{t+k} over learned tokens, with NaN at all others."""
    nan = float("nan")
    mask = tensor([[m for m, _, _ in row]], dtype=torch.bool)
    rewards = torch.where(mask, tensor([[r for _, r, _ in row]], dtype=torch.float64), nan)
    values = torch.where(mask, tensor([[v for _, _, v in row]], dtype=torch.float64), nan)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    r, v = rewards[mask].tolist(), values[mask].tolist()
    expected = oracle_gae_advantages(r, v, gamma=gamma, lam=lam)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[mask].tolist() == pytest.approx([a + b for a, b in zip(expected, v, strict=True)], abs=1e-9)
    assert bool((advantages[~mask] == 0).all() & (returns[~mask] == 0).all())


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


def test_integer_rewards_and_masks():
    rewards, groups = tensor([1, 0, 1, 1]), torch.zeros(4, dtype=torch.long)
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-5)
    assert grpo_advantages(rewards.bool(), groups, normalize=False).tolist() == [0.25, -0.75, 0.25, 0.25]
    ones = torch.ones(1, 2)
    assert gae_advantages(ones, ones, tensor([[1, 0]]))[0].tolist() == [[0.0, 0.0]]
