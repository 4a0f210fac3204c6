"""The KL in the reward and its coefficient."""

from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from fnppo import kl_k1, kl_k2, kl_k3
from fnppo.advantages.reward_kl import AdaptiveKL, adapt_kl, kl_in_reward

NAN = float("nan")
TOKEN = st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-3, 0), st.floats(-3, 0))


@pytest.mark.core
@pytest.mark.parametrize("kl", [kl_k1, kl_k2, kl_k3])
@given(rows=st.lists(st.lists(TOKEN, min_size=3, max_size=3), min_size=1, max_size=3), coef=st.floats(0, 2))
def test_against_one_token_at_a_time(kl, rows, coef):
    """r - coef · KL, with NaN where nothing is learned; the KL of a row is the sum over its tokens."""
    mask = tensor([[token[0] for token in row] for row in rows])
    column = lambda n: torch.where(mask, tensor([[t[n] for t in row] for row in rows], dtype=torch.float64), NAN)
    found, of_rows = kl_in_reward(column(1), column(2), column(3), mask, kl_coef=coef, kl=kl)
    for row, tokens in enumerate(rows):
        one = lambda x: tensor([x], dtype=torch.float64)
        kls = [kl(one(logprob), one(ref)).item() if m else 0.0 for m, _, logprob, ref in tokens]
        expected = [r - coef * k if m else 0.0 for (m, r, _, _), k in zip(tokens, kls, strict=True)]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)
        assert of_rows[row].item() == pytest.approx(sum(kls), abs=1e-12)


def test_the_estimator_of_the_paper_is_k1():
    one = lambda *x: tensor([[*x]])
    rewards, of_rows = kl_in_reward(one(0.0, 2), one(-1.0, -1), one(-2.0, -0.5), one(True, True), kl_coef=0.5)
    assert (rewards.tolist(), of_rows.tolist()) == ([[-0.5, 2.25]], [0.5])


def test_an_estimator_gives_one_number_a_token():
    column, mask = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"kl gave shape \(\) for 2 tokens"):
        kl_in_reward(column, column, column, mask, kl_coef=0.5, kl=lambda logprobs, ref: logprobs.sum())


def test_the_coefficient_follows_the_target():
    """arXiv:1909.08593, section 2.2: e = clip(KL / 6 - 1, -0.2, 0.2) and a gain of 0.1; the state is not changed."""
    state = AdaptiveKL(tensor(0.5))
    for kl, factor in ((6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (-3.0, 0.98)):
        assert adapt_kl(state, kl, target=6.0).coef.item() == pytest.approx(0.5 * factor)
        assert adapt_kl(AdaptiveKL(0.5), tensor(kl), target=6.0).coef.item() == pytest.approx(0.5 * factor)
    assert state.coef.item() == 0.5
    twice = adapt_kl(adapt_kl(state, 9.0, target=6.0), 9.0, target=6.0)
    assert twice.coef.item() == pytest.approx(0.5 * 1.02**2)
    other = adapt_kl(state, 9.0, target=6.0, gain=512 / 10_000, max_error=1.0)
    assert other.coef.item() == pytest.approx(0.5 * (1 + 0.5 * 512 / 10_000))


def test_bad_numbers():
    column, mask = torch.zeros(1, 2), torch.ones(1, 2)
    run = unwrap(kl_in_reward)
    for coef in (-0.1, NAN):
        with pytest.raises(ValueError, match="kl_coef is .*; it must be a finite number of at least 0"):
            run(column, column, column, mask, kl_coef=coef)
    for place, name in enumerate(("rewards", "logprobs", "ref_logprobs")):
        bad = [column] * 3
        bad[place] = tensor([[0.0, NAN]])
        with pytest.raises(ValueError, match=f"row 0, column 1: {name} is nan at a learned token"):
            run(*bad, mask, kl_coef=0.1)
        bad[place] = torch.zeros(1, 3)
        with pytest.raises(ValueError, match=rf"shapes differ .*{name} \(1, 3\)"):
            run(*bad, mask, kl_coef=0.1)
    for options in ({"target": 0.0}, {"target": 6.0, "gain": 0.0}, {"target": 6.0, "max_error": -1.0}):
        name, number = list(options.items())[-1]
        with pytest.raises(ValueError, match=f"{name} is {number}; it must be a finite number above 0"):
            adapt_kl(AdaptiveKL(0.5), 1.0, **options)
    with pytest.raises(ValueError, match=r"gain \* max_error is 1\.0; it must be a finite number below 1"):
        adapt_kl(AdaptiveKL(0.5), 1.0, target=6.0, gain=5.0)
    with pytest.raises(ValueError, match="kl is nan; it must be a finite number"):
        adapt_kl(AdaptiveKL(0.5), NAN, target=6.0)
    with pytest.raises(ValueError, match="coef is -1; it must be a finite number of at least 0"):
        adapt_kl(AdaptiveKL(-1), 1.0, target=6.0)
    with pytest.raises(ValueError, match="state is a float; a AdaptiveKL is needed"):
        unwrap(adapt_kl)(0.5, 1.0, target=6.0)


def test_a_coefficient_that_is_a_whole_number():
    """It is a number like others: the KL is not rounded to its dtype."""
    assert adapt_kl(AdaptiveKL(1), 0.9, target=0.5).coef == adapt_kl(AdaptiveKL(1.0), 0.9, target=0.5).coef
