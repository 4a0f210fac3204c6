"""KL estimators: values, gradients, and what their gradients are in expectation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from fnppo.kl import kl_k1, kl_k2, kl_k3, straight_through

F64 = torch.float64


def straight(kl):
    """Made anew for each call."""
    return lambda *logprobs: straight_through(kl)(*logprobs)


def value_and_slope(kl, d):
    ref_logprobs = tensor([-1.25], dtype=F64)
    logprobs = (ref_logprobs + d).requires_grad_()
    value = kl(logprobs, ref_logprobs)
    return value.item(), torch.autograd.grad(value.sum(), logprobs)[0].item()


@pytest.mark.parametrize(
    ("kl", "d", "value", "slope"),
    [
        (kl_k1, -0.5, -0.5, 1.0),
        (kl_k2, -0.5, 0.125, -0.5),
        (kl_k3, -3.0, 16.0855, -19.0855),  # C13
        (kl_k3, -0.5, 0.148721, -0.648721),  # C15
        (kl_k3, 0.5, 0.106531, 0.393469),
        (straight(kl_k3), -0.5, 0.148721, -0.5),
        (straight(kl_k3), 0.5, 0.106531, 0.5),
        (straight(kl_k1), 0.5, 0.5, 0.5),
    ],
)
def test_values_and_gradients(kl, d, value, slope):
    """C13, C15."""
    assert value_and_slope(kl, d) == pytest.approx((value, slope), abs=1e-4)


def test_the_farther_the_stronger_the_pull():
    """C14: no cap takes the gradient away where the policy is farthest from the reference."""
    value, slope = value_and_slope(kl_k3, -25.0)
    assert value > 1e10
    assert slope < -1e10


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (kl_k1, [0.0, 0.0]),
        (kl_k2, [0.117502, -0.117502]),
        (kl_k3, [0.122459, -0.122459]),
        (straight(kl_k3), [0.117502, -0.117502]),
    ],
)
def test_expected_gradients(kl, expected):
    """C16: logits [.3, -.2], uniform reference. The gradient of the true KL is [.117502, -.117502]."""
    logits = tensor([0.3, -0.2], dtype=F64, requires_grad=True)
    logp, ref = logits.log_softmax(-1), tensor([0.5, 0.5], dtype=F64).log()
    expectation = (logp.exp().detach() * kl(logp, ref)).sum()
    assert torch.autograd.grad(expectation, logits)[0].tolist() == pytest.approx(expected, abs=1e-6)
    exact = (logp.exp() * (logp - ref)).sum()
    assert exact.item() == pytest.approx(0.0303, abs=1e-4)


def test_k3_is_accurate_near_zero():
    """expm1: for d = 1e-4 in float32, exp(-d) - 1 + d would be noise; it is d²/2."""
    d = tensor([1e-4], dtype=torch.float32)
    assert kl_k3(d, torch.zeros(1)).item() == pytest.approx(5e-9, rel=0.3)


@pytest.mark.core
@given(st.floats(-30, 30))
def test_estimators_for_any_distance(d):
    """C13-C15: the formulas and their derivatives, without a cap; k3 is never negative."""
    k3, slope = math.exp(-d) - 1 + d, 1 - math.exp(-d)
    assert value_and_slope(kl_k1, d) == pytest.approx((d, 1.0), rel=1e-12)
    assert value_and_slope(kl_k2, d) == pytest.approx((d * d / 2, d), rel=1e-12)
    assert value_and_slope(kl_k3, d) == pytest.approx((k3, slope), rel=1e-9, abs=1e-12)
    assert value_and_slope(straight_through(kl_k3), d) == pytest.approx((k3, d), rel=1e-9, abs=1e-12)
    assert value_and_slope(kl_k3, d)[0] >= 0
