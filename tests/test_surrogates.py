"""Surrogates of single tokens: values, slopes and clips against loops, hand-computed numbers, ratios that overflow."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from surrogate_cases import CASES, SEQUENCE, targets_of
from torch import tensor
from torch.func import grad, vmap
from torch.testing import assert_close

import fnppo
from fnppo import TokenStats, pack_sequences, padded_batch, ppo_loss, summarize, token_mean
from fnppo.surrogates import (
    cispo,
    clip_cov,
    clipped_surrogate,
    decoupled_surrogate,
    dppo_kl,
    dppo_tv,
    dro,
    gpg,
    gspo,
    kl_cov,
    reinforce,
    sapo,
    selected,
    weighted,
)

F64 = torch.float64
TOKEN = sorted(CASES.keys() - SEQUENCE)


def exp(x):
    return math.inf if x > 709.7 else math.exp(x)


def times(*factors):
    """A product in which 0 wins over infinity."""
    return 0.0 if 0.0 in factors else math.prod(factors)


def clip(ratio, A, weight_ratio, weight, clip_low, clip_high, dual_clip=None):
    """(loss, slope, name of the clip) of max(-Aρ, -A clip(ρ)); weight_ratio is weight · ρ."""
    if A > 0 and ratio > 1 + clip_high:
        return -A * weight * (1 + clip_high), 0.0, "clip_high"
    if A < 0 and ratio < 1 - clip_low:
        return -A * weight * (1 - clip_low), 0.0, "clip_low"
    if A < 0 and dual_clip is not None and ratio > dual_clip:
        return -A * weight * dual_clip, 0.0, "dual_clip"
    return times(-A, weight_ratio), times(-A, weight_ratio), None


def binary_kl(p, q):
    """KL of two coins."""
    return sum(a * math.log(a / b) if b > 0 else math.inf for a, b in ((q, p), (1 - q, 1 - p)) if a > 0)


def oracle(name, lp, old, A, extra, numbers):
    """(loss, its slope in lp, the clip that acts), in plain floats and from the formulas in the docstrings."""
    lr = lp - old
    ratio = exp(lr)
    if name == "clipped":
        return clip(ratio, A, ratio, 1.0, **numbers)
    if name == "decoupled":
        cap = numbers["weight_cap"]
        log_w = min(old - extra["sampler_logprobs"], math.log(cap))
        rest = {key: value for key, value in numbers.items() if key != "weight_cap"}
        loss, slope, which = clip(ratio, A, exp(lr + log_w), exp(log_w), **rest)
        at_cap = A != 0 and which is None and old - extra["sampler_logprobs"] > math.log(cap)
        return loss, slope, "weight_cap" if at_cap else which
    if name == "gpg":
        return -A * lp, -A, None
    if name == "reinforce":
        over = ratio > numbers["weight_cap"]
        w = min(ratio, numbers["weight_cap"])
        return -w * A * lp, -w * A, "weight_cap" if over and A else None
    if name == "cispo":
        low, high = 1 - numbers["clip_low"], 1 + numbers["clip_high"]
        which = ("clip_low" if ratio < low else "clip_high" if ratio > high else None) if A else None
        w = min(max(ratio, low), high)
        return -w * A * lp, -w * A, which
    if name in ("sapo", "weighted"):
        tau = numbers["tau_pos" if A > 0 else "tau_neg"]
        gate = 1 / (1 + exp(-tau * (ratio - 1)))
        w = extra["importance_weights"] if name == "weighted" else 1.0
        return -w * A * 4 / tau * gate, -w * A * 4 * times(gate * (1 - gate), ratio), None
    if name in ("dppo_tv", "dppo_kl"):
        p, q = exp(lp), exp(old)
        far = abs(p - q) if name == "dppo_tv" else binary_kl(p, q)
        if A > 0 and lr > 0 and far > numbers["clip_high"]:
            return 0.0, 0.0, "clip_high"
        if A < 0 and lr < 0 and far > numbers["clip_low"]:
            return 0.0, 0.0, "clip_low"
        return oracle("reinforce", lp, old, A, extra, numbers)
    if name == "dro":
        return -A * lp + numbers["beta"] / 2 * lr**2, -A + numbers["beta"] * lr, None
    if name == "clip_cov":
        return (0.0, 0.0, "clip_cov") if extra["clip_cov"] else clip(ratio, A, ratio, 1.0, **numbers)
    if name == "kl_cov":
        coef = numbers["kl_cov_coef"] * extra["kl_cov"]
        return times(-A, ratio) + coef * abs(lr), times(-A, ratio) + math.copysign(coef, lr) * (lr != 0), None
    if name == "selected":
        return clip(ratio, A, ratio, 1.0, **numbers, dual_clip=3.0) if extra["selected"] else (0.0, 0.0, None)
    raise AssertionError(name)


def near_an_edge(name, lp, old, sampler, numbers):
    """Whether rounding may decide which side of a clip a token is on."""
    ratio, p, q = exp(lp - old), exp(lp), exp(old)
    at = [ratio, abs(p - q), binary_kl(p, q), exp(old - sampler)]
    edges = [1.0, 3.0, *(e for n in numbers.values() for e in (n, 1 - n, 1 + n))]
    return any(abs(a - e) < 1e-9 for a in at for e in edges)


logprob = st.floats(-3, -0.01)
weight = st.sampled_from([0.0, 0.5, 2.0])
flag = st.sampled_from([0.0, 1.0])
advantage = st.floats(-3, 3) | st.just(0.0)
tokens = st.lists(st.tuples(logprob, logprob, advantage, logprob, flag, weight), min_size=1, max_size=6)


@pytest.mark.core
@pytest.mark.parametrize("name", TOKEN)
@given(tokens=tokens)
def test_against_the_formula_one_token_at_a_time(name, tokens):
    """Value, slope and clips, for any log-probs and columns."""
    surrogate, numbers = CASES[name]
    lp, old, A, sampler, flags, weights = (list(values) for values in zip(*tokens, strict=True))
    assume(not any(near_an_edge(name, *t, numbers) for t in zip(lp, old, sampler, strict=True) if t[0] != t[1]))
    extra = {"sampler_logprobs": sampler, "importance_weights": weights}
    extra |= {column: flags for column in ("clip_cov", "kl_cov", "selected")}
    logprobs = tensor(lp, dtype=F64, requires_grad=True)
    losses, clips = surrogate(TokenStats(logprobs), targets_of(old, A, **extra), **numbers)
    expected = [
        oracle(name, *token, {c: v[i] for c, v in extra.items()}, numbers)
        for i, token in enumerate(zip(lp, old, A, strict=True))
    ]
    slopes = torch.autograd.grad(losses.sum(), logprobs)[0]
    assert_close(losses.detach(), tensor([e[0] for e in expected], dtype=F64), rtol=1e-11, atol=1e-11)
    assert_close(slopes, tensor([e[1] for e in expected], dtype=F64), rtol=1e-10, atol=1e-10)
    for clip_name, acts in clips.items():
        assert acts.tolist() == [float(e[2] == clip_name) for e in expected]
    assert {e[2] for e in expected} <= {None, *clips}


FAR = {"up": (-0.5, -1000.5), "down": (-1000.5, -0.5)}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("A", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("way", FAR)
@pytest.mark.parametrize("name", TOKEN)
def test_a_log_ratio_of_1000(name, way, A, dtype):
    """C11: what is finite stays finite, in value and gradient; the rest is infinite, and nothing is NaN."""
    surrogate, numbers = CASES[name]
    lp, old = FAR[way]
    for sampler in (old, lp):  # in the second case the weight of the behaviour policy overflows the other way
        targets = targets_of([old], [A], dtype=dtype, sampler_logprobs=[sampler])
        logprobs = tensor([lp], dtype=dtype, requires_grad=True)
        losses, _ = surrogate(TokenStats(logprobs), targets, **numbers)
        extra = {column: values.item() for column, values in targets.extra.items()}
        loss, slope, _ = oracle(name, lp, old, A, extra, numbers)
        assert losses.item() == pytest.approx(loss, rel=1e-5)
        assert torch.autograd.grad(losses.sum(), logprobs)[0].item() == pytest.approx(slope, rel=1e-5)


def test_a_behaviour_weight_and_a_ratio_that_overflow_against_each_other():
    """Decoupled: w ρ = π / π_behaviour is 1 though one factor is 0 and the other infinite."""
    for lp, old in FAR.values():
        logprobs = tensor([lp], dtype=F64, requires_grad=True)
        targets = targets_of([old], [math.copysign(1.0, old - lp)], sampler_logprobs=[lp])
        losses, _ = decoupled_surrogate(TokenStats(logprobs), targets)
        assert abs(losses.item()) == pytest.approx(1.0)
        assert abs(torch.autograd.grad(losses.sum(), logprobs)[0].item()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", TOKEN)
def test_nan_at_a_valid_token_surfaces(name):
    """C12."""
    surrogate, numbers = CASES[name]
    targets = targets_of([-1.0], [1.0], clip_cov=[0.0])
    assert surrogate(TokenStats(tensor([math.nan], dtype=F64)), targets, **numbers)[0].isnan().all()


def slope_of(surrogate, lp, old, A, **options):
    extra = {key: [options.pop(key)] for key in list(options) if key.endswith("_logprobs")}
    logprobs = tensor([lp], dtype=F64, requires_grad=True)
    losses, clips = surrogate(TokenStats(logprobs), targets_of([old], [A], **extra), **options)
    slope = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)[0]
    return losses.item(), slope.item(), [name for name, acts in clips.items() if acts]


def test_decoupled_by_hand():
    """π_behaviour = 0.2, π_prox = 0.4, π = 0.6: weight 2, ratio 1.5."""
    log = [math.log(p) for p in (0.6, 0.4, 0.2)]
    options = {"sampler_logprobs": log[2]}
    assert slope_of(decoupled_surrogate, *log[:2], 1.0, **options) == (pytest.approx(-2 * 1.2), 0.0, ["clip_high"])
    assert slope_of(decoupled_surrogate, *log[:2], -1.0, **options) == (pytest.approx(3.0), pytest.approx(3.0), [])
    capped = slope_of(decoupled_surrogate, *log[:2], -1.0, weight_cap=1.5, **options)
    assert capped == (pytest.approx(2.25), pytest.approx(2.25), ["weight_cap"])


def test_with_the_sampler_as_proximal_policy_decoupled_is_ppo():
    logprobs, old = tensor([-0.2, -1.5, -0.7], dtype=F64), [-1.0, -0.4, -0.7]
    targets = targets_of(old, [1.0, -1.0, 2.0], sampler_logprobs=old)
    ours = decoupled_surrogate(TokenStats(logprobs), targets)
    assert_close(ours, clipped_surrogate(TokenStats(logprobs), targets, dual_clip=None), rtol=0, atol=0)


def test_on_policy_all_have_the_gradient_of_reinforce():
    """At ρ = 1 every surrogate of the policy gradient has the slope -A."""
    for surrogate in (clipped_surrogate, reinforce, cispo, gpg, sapo, dppo_tv, dppo_kl, gspo):
        for A in (1.5, -0.5):
            assert slope_of(surrogate, -0.7, -0.7, A)[1] == pytest.approx(-A)
    assert slope_of(dro, -0.7, -0.7, 1.5, beta=0.3)[1] == pytest.approx(-1.5)


def test_sapo_by_hand():
    """arXiv:2511.20347: the gradient is weighted with sech²(τ (ρ - 1) / 2), 0.4199743 at ρ = 3, τ = 1."""
    loss, slope, _ = slope_of(sapo, math.log(0.9), math.log(0.3), 1.0)
    assert slope == pytest.approx(-3 * 0.4199743, abs=1e-6)
    assert loss == pytest.approx(-4 / (1 + math.exp(-2)))
    _, slope, _ = slope_of(sapo, math.log(0.9), math.log(0.3), -1.0, tau_neg=1.05)
    assert slope == pytest.approx(3 / math.cosh(1.05) ** 2)


def test_dppo_by_hand():
    """arXiv:2602.04879: a rare token may rise by a factor of 100; 0.99 may not fall to 0.8, by a ratio PPO allows."""
    rare, likely = (math.log(1e-3), math.log(1e-5)), (math.log(0.8), math.log(0.99))
    for surrogate in (dppo_tv, dppo_kl):
        assert slope_of(surrogate, *rare, 1.0)[1:] == (pytest.approx(-100.0), [])
        assert slope_of(surrogate, *likely, -1.0)[1:] == (0.0, ["clip_low"])
        assert slope_of(surrogate, *likely, 1.0)[1:] == (pytest.approx(-0.8 / 0.99), [])  # it may come back
    assert slope_of(clipped_surrogate, *likely, -1.0)[2] == []


def test_dppo_at_the_ends_of_probability():
    """KL is infinite where π is 1 and the old policy was not, and 0 where both are."""
    assert slope_of(dppo_kl, 0.0, -0.5, 1.0)[1:] == (0.0, ["clip_high"])
    assert slope_of(dppo_kl, 0.0, 0.0, 1.0)[1:] == (-1.0, [])
    assert slope_of(dppo_kl, -0.5, 0.0, -1.0)[1:] == (0.0, ["clip_low"])


def test_dro_is_least_where_the_log_ratio_is_advantage_over_beta():
    assert slope_of(dro, -0.5, -1.0, 0.1, beta=0.2)[1] == pytest.approx(0.0)


def test_cispo_keeps_every_gradient():
    """arXiv:2506.13585: PPO drops the token, CISPO bounds its weight."""
    lp, old = math.log(0.9), math.log(0.3)
    assert slope_of(clipped_surrogate, lp, old, 1.0)[1:] == (0.0, ["clip_high"])
    assert slope_of(cispo, lp, old, 1.0, clip_high=0.2)[1:] == (pytest.approx(-1.2), ["clip_high"])
    assert slope_of(cispo, lp, old, 0.0, clip_high=0.2)[1:] == (0.0, [])
    assert slope_of(cispo, old, lp, 1.0, clip_low=0.2)[1:] == (pytest.approx(-0.8), ["clip_low"])


def test_cov_surrogates_by_hand():
    logprobs = tensor([0.5, 0.5], dtype=F64, requires_grad=True)
    targets = targets_of([0.0, 0.0], [-1.0, -1.0], clip_cov=[1.0, 0.0], kl_cov=[1.0, 0.0])
    losses, clips = clip_cov(TokenStats(logprobs), targets)
    assert losses.tolist() == pytest.approx([0.0, math.exp(0.5)])
    assert clips["clip_cov"].tolist() == [1.0, 0.0]
    losses, clips = kl_cov(TokenStats(logprobs), targets, kl_cov_coef=2.0)
    assert losses.tolist() == pytest.approx([math.exp(0.5) + 2 * 0.5, math.exp(0.5)])
    assert torch.autograd.grad(losses.sum(), logprobs)[0].tolist() == pytest.approx([math.exp(0.5) + 2, math.exp(0.5)])


@pytest.mark.parametrize("make", [selected, weighted])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1000.0])
def test_a_weight_of_0_removes_whatever_is_there(make, bad):
    """NaN and infinity in value and gradient, of the log-prob as of the old one; and the clip that has acted there."""
    for lp, old in ((bad, -1.0), (-1.0, -bad), (-1.0, math.nan)):
        logprobs = tensor([lp, -0.5], dtype=F64, requires_grad=True)
        targets = targets_of([old, -0.4], [-1.0, 2.0], column=[0.0, 1.0])
        for surrogate in (clipped_surrogate, reinforce):
            losses, clips = make(surrogate, name="column")(TokenStats(logprobs), targets)
            slopes = torch.autograd.grad(losses.sum(), logprobs)[0]
            alone = slope_of(surrogate, -0.5, -0.4, 2.0)
            assert losses.tolist() == pytest.approx([0.0, alone[0]])
            assert slopes.tolist() == pytest.approx([0.0, alone[1]])
            assert all(acts[0] == 0 for acts in clips.values())


def test_a_nan_weight_surfaces():
    losses, _ = weighted(gpg)(TokenStats(tensor([-1.0])), targets_of([0.0], [1.0], importance_weights=[math.nan]))
    assert losses.isnan().all()


def test_clips_become_metrics():
    batch = padded_batch([[1]], [[2, 3]], advantages=[1.0], old_logprobs=[[-1.0, -1.0]])
    targets = pack_sequences(token_mean(batch)).targets
    stats = TokenStats(tensor([-0.5, -1.0]))
    summary = summarize(ppo_loss(stats, targets, surrogate=reinforce, weight_cap=1.5)[1])
    assert summary["weight_cap_fraction"] == summary["clamped_fraction"] == 0.5
    assert summary["policy_loss"] == pytest.approx((1.5 * 0.5 + 1.0) / 2)


MISSING = {
    "clipped": ["old_logprobs", "advantages"],
    "decoupled": ["old_logprobs", "advantages", "sampler_logprobs"],
    "gpg": ["advantages"],
    "clip_cov": ["clip_cov", "old_logprobs", "advantages"],
    "kl_cov": ["kl_cov", "old_logprobs", "advantages"],
    "selected": ["selected", "old_logprobs", "advantages"],
    "weighted": ["importance_weights", "old_logprobs", "advantages"],
    "weighted_gmpo": ["importance_weights", "old_logprobs", "advantages"],
    "selected_gspo": ["selected", "old_logprobs", "advantages"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_missing_column_is_named(name):
    surrogate, numbers = CASES[name]
    targets, stats = targets_of([-1.0], [1.0]), TokenStats(tensor([-1.0], dtype=F64))
    for missing in MISSING.get(name, ["old_logprobs", "advantages"]):
        gone = {missing: None} if missing in targets._fields else {"extra": {}}
        with pytest.raises(ValueError, match=rf"the loss needs targets\.(extra\[')?{missing}"):
            surrogate(stats, targets._replace(**gone), **numbers)
    with pytest.raises(ValueError, match=r"stats\.logprobs has shape \(2,\); there are 1 targets"):
        surrogate(TokenStats(torch.zeros(2, dtype=F64)), targets, **numbers)
    if name == "gpg":  # it reads no old policy at all
        assert surrogate(stats, targets._replace(old_logprobs=None))[0].item() == 1.0


LEAST = {"dual_clip": 1.0, "weight_cap": 0.0, "beta": 0.0, **dict.fromkeys(["tau_pos", "tau_neg"], 0.0)}
LEAST |= dict.fromkeys(["c1_pos", "c2_pos", "c1_neg", "c2_neg"], 0.0)
NUMBERS = [(name, number) for name, case in CASES.items() for number in case.numbers]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_a_number_out_of_range_is_named(name, number):
    surrogate, numbers = CASES[name]
    targets, stats = targets_of([-1.0], [1.0]), TokenStats(tensor([-1.0], dtype=F64))
    for bad in (LEAST.get(number, -0.1), math.nan):
        with pytest.raises(ValueError, match=rf"^{number} is (nan|{bad}); it must be a (finite )?number"):
            surrogate(stats, targets, **(numbers | {number: bad}))
    with pytest.raises(ValueError, match=rf"^{number} has shape \(3,\); it needs \(\)"):
        surrogate(stats, targets, **(numbers | {number: torch.full((3,), 2.0)}))


def some_targets():
    g = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(7, generator=g, dtype=F64)
    old = (-1 - normal().abs()).tolist()
    targets = targets_of(old, normal().tolist(), rows=[0, 0, 0, 2, 2, 5, 5])
    flags = tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=F64)
    extra = {"sampler_logprobs": targets.old_logprobs + 0.3 * normal(), "importance_weights": flags * 1.7}
    extra |= {name: flags for name in ("clip_cov", "kl_cov", "selected")}
    return targets.old_logprobs + 0.4 * normal(), targets._replace(extra=extra)


@pytest.mark.parametrize("name", CASES)
def test_under_grad_vmap_and_compile(name, unchecked):
    """The plain call's numbers, also with the hyper-parameters as tensors, batched and differentiated."""
    torch.compiler.reset()  # it keeps what it has compiled for the other surrogates, up to a limit
    surrogate, numbers = CASES[name]
    logprobs, targets = some_targets()
    tensors = {key: tensor(value, dtype=F64) for key, value in numbers.items()}

    def loss(logprobs, tensors):
        return ppo_loss(TokenStats(logprobs), targets, surrogate=surrogate, **tensors)[0]

    plain = loss(logprobs, numbers)
    leaf = logprobs.clone().requires_grad_()
    slopes = torch.autograd.grad(loss(leaf, numbers), leaf)[0]
    exactly = {"rtol": 1e-12, "atol": 1e-12}
    assert_close(loss(logprobs, tensors), plain, **exactly)
    assert_close(grad(loss)(logprobs, tensors), slopes, **exactly)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    assert_close(compiled(logprobs, numbers), plain, **exactly)
    if not numbers:
        return
    two = {key: torch.stack([value, 1.1 * value]) for key, value in tensors.items()}
    one_by_one = [{key: value[i] for key, value in two.items()} for i in (0, 1)]
    assert_close(vmap(loss, (None, 0))(logprobs, two), torch.stack([loss(logprobs, n) for n in one_by_one]), **exactly)
    batched = vmap(grad(loss), (None, 0))(logprobs, two)
    assert_close(batched, torch.stack([grad(loss)(logprobs, n) for n in one_by_one]), **exactly)
    for number, slope in grad(loss, 1)(logprobs, tensors).items():
        step = 1e-6
        up, down = (loss(logprobs, tensors | {number: tensors[number] + sign * step}) for sign in (1, -1))
        assert slope.item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-6, abs=1e-7)


def test_no_clip_has_no_gradient_of_nan_in_the_advantages():
    index, one = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    targets = fnppo.Targets(index, index, index, index, old_logprobs=0 * one)
    loss = lambda a: fnppo.clipped_surrogate(
        fnppo.TokenStats(one), targets._replace(advantages=a), clip_low=math.inf, clip_high=math.inf
    )[0].sum()
    assert torch.func.grad(loss)(one).item() == pytest.approx(-math.e)


def test_clips_of_one_a_target_where_there_is_no_target():
    """A micro-batch whose rows are all masked, or the filler of a rank that has none."""
    none, index = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    targets = fnppo.Targets(index, index, index, index, none, none, none)
    numbers = {"clip_low": none, "clip_high": none, "dual_clip": none}
    assert fnppo.ppo_loss(fnppo.TokenStats(none), targets, **numbers)[0] == 0
    with pytest.raises(ValueError, match=r"clip_low is tensor\(\[\]\)"):
        fnppo.ppo_loss(
            fnppo.TokenStats(torch.zeros(1)),
            fnppo.Targets(*(torch.zeros(1, dtype=torch.long),) * 4, *(torch.zeros(1),) * 3),
            clip_low=none,
        )
