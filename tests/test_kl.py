"""KL estimators: values, gradients, and what their gradients are in expectation."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.func import grad, vmap
from torch.testing import assert_close

import fnppo
from fnppo.kl import capped, importance_corrected, kl_abs, kl_k1, kl_k2, kl_k3, straight_through

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
        (kl_abs, -0.5, 0.5, -1.0),
        (kl_abs, 0.5, 0.5, 1.0),
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


def enumerated(seed, vocab=6):
    """(logits, reference, sampler) over a small vocabulary, so that expectations are sums."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(vocab, generator=generator, dtype=F64)
    return draw().requires_grad_(), draw().log_softmax(-1), draw().log_softmax(-1)


def true_kl(logits, ref):
    """Σ p log(p / q), and its gradient p (log(p / q) - KL), in plain Python."""
    weights = [math.exp(z) for z in logits.tolist()]
    p = [w / sum(weights) for w in weights]
    distance = [math.log(a) - b for a, b in zip(p, ref.tolist(), strict=True)]
    kl = sum(a * d for a, d in zip(p, distance, strict=True))
    return kl, [a * (d - kl) for a, d in zip(p, distance, strict=True)]


def expectation(kl, logits, ref, sampler):
    """Mean of an estimator over tokens from `sampler`, and the mean of its gradient."""
    values = kl(logits.log_softmax(-1), ref)
    mean = (sampler.exp().detach() * values).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0].tolist()


@pytest.mark.core
@given(st.integers(0, 2**32 - 1))
def test_expectations_over_a_vocabulary(seed):
    """C16: what each estimator is in the mean over tokens of the policy, value and gradient."""
    logits, ref, _ = enumerated(seed)
    own = logits.detach().log_softmax(-1)
    p = logits.log_softmax(-1)
    value, slopes = true_kl(logits.detach(), ref)
    reverse = torch.autograd.grad((ref.exp() * (ref - p)).sum(), logits, retain_graph=True)[0]
    variation = torch.autograd.grad((p.exp() - ref.exp()).abs().sum(), logits)[0]
    for kl, mean, slope in (
        (kl_k1, value, [0.0] * 6),
        (kl_k3, value, reverse.tolist()),
        (kl_abs, None, variation.tolist()),
        (kl_k2, None, slopes),
        (straight(kl_k1), value, slopes),
        (straight(kl_k3), value, slopes),
    ):
        found, found_slope = expectation(kl, logits, ref, own)
        assert mean is None or found == pytest.approx(mean, rel=1e-9, abs=1e-12)
        assert found_slope == pytest.approx(slope, rel=1e-9, abs=1e-9)
    assert expectation(kl_abs, logits, ref, own)[0] >= value - 1e-12


@pytest.mark.core
@given(st.integers(0, 2**32 - 1))
def test_importance_corrected_has_the_true_value_and_gradient_under_another_sampler(seed):
    """DeepSeek-V3.2's unbiased KL. Without the correction, or with a detached ratio, the gradient is another."""
    logits, ref, sampler = enumerated(seed)
    value, slopes = true_kl(logits.detach(), ref)
    for kl in (kl_k1, kl_k3):
        found, found_slopes = expectation(importance_corrected(kl, sampler), logits, ref, sampler)
        assert found == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert found_slopes == pytest.approx(slopes, rel=1e-8, abs=1e-9)
        frozen = lambda lp, ref, kl=kl: (lp - sampler).exp().detach() * kl(lp, ref)
        for biased in (kl, frozen):
            assert expectation(biased, logits, ref, sampler)[1] != pytest.approx(slopes, abs=1e-4)


def test_importance_corrected_by_hand():
    """ρ = 2, d = -0.5: 2 (e^0.5 - 1.5), with slope 2 k3 + 2 (1 - e^0.5)."""
    logprobs = tensor([-1.0], dtype=F64, requires_grad=True)
    old, ref = tensor([-1.0 - math.log(2)], dtype=F64), tensor([-0.5], dtype=F64)
    value = importance_corrected(kl_k3, old)(logprobs, ref)
    assert value.item() == pytest.approx(2 * 0.148721, abs=1e-6)
    assert torch.autograd.grad(value, logprobs)[0].item() == pytest.approx(2 * (0.148721 - 0.648721), abs=1e-6)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2,\), logprobs \(1,\)"):
        importance_corrected(kl_k3, torch.zeros(2))(torch.zeros(1), torch.zeros(1))


ESTIMATORS = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
    "k3+": straight(kl_k3),
    "corrected": lambda lp, ref: importance_corrected(kl_k3, torch.full_like(ref, -2.0))(lp, ref),
}
distances = st.one_of(st.floats(-30, 30), st.sampled_from([-1000.0, 1000.0]))


@pytest.mark.core
@pytest.mark.parametrize("name", ESTIMATORS)
@given(st.lists(distances, min_size=0, max_size=5), st.floats(0.01, 50))
def test_a_cap(name, ds, cap):
    """C13, C14: min(kl, cap); the gradient is the estimator's or 0, never NaN, and every 0 of the cap is counted."""
    kl = ESTIMATORS[name]
    ref = tensor([-1.25] * len(ds), dtype=F64)
    logprobs = (ref + tensor(ds, dtype=F64)).requires_grad_()
    values, over = capped(kl, logprobs, ref, cap=cap)
    slopes = torch.autograd.grad(values.sum(), logprobs)[0]
    for i, value in enumerate(kl(logprobs.detach(), ref).tolist()):
        assert over[i].item() is (value > cap)
        if value > cap:
            assert (values[i].item(), slopes[i].item()) == (cap, 0.0)
        else:
            one = logprobs[i : i + 1].detach().requires_grad_()
            alone = kl(one, ref[i : i + 1])
            assert (values[i].item(), slopes[i].item()) == (value, torch.autograd.grad(alone, one)[0].item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_importance_corrected_keeps_the_dtype(dtype):
    columns = [tensor([x], dtype=dtype) for x in (-1.0, -1.5, -2.0)]
    assert importance_corrected(kl_k3, old_logprobs=columns[2])(*columns[:2]).dtype == dtype


def test_a_cap_hides_no_nan_and_takes_what_overflows():
    """C12: NaN is not above the cap. An infinite k3 is: exp(1000) in float32."""
    logprobs = tensor([math.nan, -1000.0], requires_grad=True)
    values, over = capped(kl_k3, logprobs, torch.zeros(2), cap=10.0)
    assert math.isnan(values[0].item())
    assert (values[1].item(), over.tolist()) == (10.0, [False, True])
    assert torch.autograd.grad(values[1], logprobs)[0][1].item() == 0.0
    exactly = capped(kl_k2, tensor([2.0, -2.0]), torch.zeros(2), cap=2.0)
    assert [column.tolist() for column in exactly] == [[2.0, 2.0], [False, False]]
    said = r"^kl gave shape \(\) for 2 targets; a cap needs one value a target\. Do not reduce in it\.$"
    with pytest.raises(ValueError, match=said):
        capped(lambda a, b: kl_k3(a, b).mean(), torch.zeros(2), torch.zeros(2), cap=1.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_under_transforms(name):
    kl = ESTIMATORS[name]
    ref, logprobs = tensor([-1.0, -2.0], dtype=F64), tensor([[-3.0, -2.5], [-1.5, -0.5]], dtype=F64)
    loss = lambda lp: kl(lp, ref).sum()
    leaf = logprobs.clone().requires_grad_()
    assert_close(vmap(grad(loss))(logprobs), torch.autograd.grad(sum(map(loss, leaf)), leaf)[0])
    caps = tensor([0.1, 3.0], dtype=F64)
    under = lambda lp, cap: capped(kl, lp, ref, cap=cap)[0]
    assert_close(vmap(under, (None, 0))(logprobs[0], caps), torch.stack([under(logprobs[0], cap) for cap in caps]))
    number_over = capped(kl, logprobs[0], ref, cap=0.1)[1].sum().item()
    assert grad(lambda cap: under(logprobs[0], cap).sum())(caps[0]).item() == number_over


CHILD = """
import torch
from fnppo.kl import *
from fnppo import Targets, TokenStats, ppo_loss
from fnppo.head import LinearHead
from fnppo.kl import capped
from fnppo.kl_exact import chunked_kl
lp, ref, cap = torch.tensor([-3.0, -2.5], requires_grad=True), torch.tensor([-1.0, -2.0]), torch.tensor(3.0)
index, one = torch.arange(2), torch.ones(2)
targets = Targets(index, index, index, index, one, -one, one, ref)
weight, other = torch.eye(3)[:, :2], torch.ones(2, 2)
runs = [lambda lp, cap: ppo_loss(TokenStats(lp), targets, kl_coef=0.5, kl_cap=cap)[0]]
runs += [lambda lp, cap: chunked_kl(lp * torch.eye(2), LinearHead(weight), other, LinearHead(weight), temperature=cap)]
for kl in (kl_k1, kl_k2, kl_k3, kl_abs, straight_through(kl_k3), importance_corrected(kl_k3, ref)):
    runs += [lambda lp, cap, kl=kl: kl(lp, ref), lambda lp, cap, kl=kl: capped(kl, lp, ref, cap=cap)[0]]
for number, run in enumerate(runs):
    bits = 0 if number != 1 else 1e-6  # eager, the second walks through chunks in buffers
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    ours, expected = compiled(lp, cap), run(lp, cap)
    torch.testing.assert_close(ours, expected, rtol=bits, atol=bits)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), lp)[0] for x in (ours, expected)), rtol=bits, atol=bits)
print("compiled")
"""


def test_compiled_without_graph_breaks():
    """In a process of its own: torch.compile cannot read the run-time checker of the tests."""
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.stdout == "compiled\n", child.stderr[-2000:]


def test_the_corrected_estimator_where_float32_holds_neither_factor():
    """ρ is 0 and k3 infinite; their product is 1 and no longer moves."""
    logprobs, old = torch.tensor([-100.0], requires_grad=True), torch.tensor([-1.0])
    value = fnppo.importance_corrected(kl_k3, old)(logprobs, old)
    assert (value.item(), torch.autograd.grad(value.sum(), logprobs)[0].item()) == (1.0, pytest.approx(0, abs=1e-30))
