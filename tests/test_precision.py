"""Half precision over float32 parameters: casts, the dynamic scale of the loss, and how far from float64 it all is."""

import math

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny
from torch.testing import assert_close

import fnppo
from fnppo import Metrics, adamw, cast, chain, clip_by_global_norm, dynamic_loss_scale, sgd, skip_nonfinite, train_step
from fnppo.precision import loss_scale_of

EXACT = {"rtol": 0, "atol": 0}


def bits(tree):
    return [leaf.detach().clone() for leaf in optree.tree_leaves(tree)]


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


# Casts


def test_a_cast_is_differentiable_and_leaves_the_masters_alone():
    """1 + 2⁻¹⁰ is 1 in bfloat16, and d/dw (half² · 3) = 6 · half comes back in float32."""
    params = {"w": torch.tensor([1 + 2.0**-10, -2.0]), "b": torch.tensor(0.5, dtype=torch.float64)}
    half = cast(params, torch.bfloat16)
    assert [leaf.dtype for leaf in half.values()] == [torch.bfloat16] * 2
    assert half["w"].tolist() == [1.0, -2.0]
    loss_fn = lambda params, x: ((cast(params, torch.bfloat16)["w"].float().square() * x).sum(), Metrics())
    _, grads = fnppo.accumulate_gradients(loss_fn, params, [3.0])
    assert grads["w"].dtype == torch.float32
    assert grads["w"].tolist() == [6.0, -12.0]
    assert grads["b"].dtype == torch.float64
    assert params["w"].tolist() == [1 + 2.0**-10, -2.0]


def test_sums_over_micro_batches_are_in_float32():
    """256 + 1 is 256 in bfloat16."""
    loss_fn = lambda params, x: ((cast(params, torch.bfloat16)["w"] * x).sum(), Metrics())
    _, grads = fnppo.accumulate_gradients(loss_fn, {"w": torch.tensor(0.0)}, [256.0, 1.0, 1.0])
    assert grads["w"].item() == 258.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_cannot_be_cast(dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype}; floating point is needed\. Use torch\.bfloat16"):
        cast({"w": torch.ones(1)}, dtype)
    with pytest.raises(ValueError, match=r"params/layer/w has dtype"):
        cast({"layer": {"w": torch.ones(1, dtype=dtype)}}, torch.bfloat16)


# The scale


@given(
    steps=st.lists(st.booleans(), max_size=25),
    initial=st.sampled_from([1.0, 8.0, 2.0**23, 2.0**24]),
    factor=st.sampled_from([2.0, 4.0]),
    interval=st.integers(1, 4),
    donate=st.booleans(),
)
def test_the_scale_against_plain_python(steps, initial, factor, interval, donate):
    """Finite steps are those of the optimizer inside, to the bit; others change the scale alone."""
    optimizer, plain = dynamic_loss_scale(adamw(0.1), initial=initial, factor=factor, interval=interval), adamw(0.1)
    params = expected = {"w": torch.tensor([1.0, -3.0])}
    state, inner = optimizer.init(params), plain.init(params)
    scale, streak, skipped = initial, 0, 0
    for step, finite in enumerate(steps):
        grads = {"w": torch.tensor([0.3 + step, -0.7])}
        assert loss_scale_of(state).item() == scale
        scaled = {"w": grads["w"] * scale if finite else torch.tensor([1.0, math.inf if step % 2 else math.nan])}
        updates, state = optimizer.update(scaled, state, params, donate=donate)
        params = fnppo.apply_updates(params, updates)
        if finite:
            updates, inner = plain.update(grads, inner, expected)
            expected = fnppo.apply_updates(expected, updates)
            streak += 1
            if streak == interval:
                scale, streak = min(scale * factor, 2.0**24), 0
        else:
            scale, streak, skipped = max(scale / factor, 1.0), 0, skipped + 1
        assert same_bits(params, expected)
        assert same_bits(state.inner.inner, inner)
        assert (state.scale.item(), state.streak.item(), state.inner.skipped.item()) == (scale, streak, skipped)
        assert state.scale.dtype == torch.float32


def test_a_gradient_below_what_float16_holds():
    """1e-9 is 0 in float16; times 2¹⁶ it is there."""
    loss_fn = lambda params, x: ((cast(params, torch.float16)["w"] * x).float().sum() * 1e-9, Metrics())
    results = {}
    for name, optimizer in (("plain", sgd(1.0)), ("scaled", dynamic_loss_scale(sgd(1.0)))):
        params = {"w": torch.tensor(0.0)}
        params, state, metrics = train_step(
            params, optimizer.init(params), [1.0, 1.0], loss_fn=loss_fn, optimizer=optimizer
        )
        results[name] = params["w"].item(), fnppo.summarize(metrics)
    assert results["plain"][0] == 0.0
    assert results["scaled"][0] == pytest.approx(-2e-9, rel=1e-3)
    assert results["scaled"][1]["grad_norm"] == pytest.approx(2e-9, rel=1e-3)
    assert results["scaled"][1]["loss_scale"] == 2.0**16
    assert "loss_scale" not in results["plain"][1]


def test_a_scale_that_is_too_large_comes_down_by_itself():
    """The gradient 10 fits into float16 up to a scale of 4096 (65504 is the largest number): four steps are skipped."""
    loss_fn = lambda params, x: ((cast(params, torch.float16)["w"] * x).float().sum(), Metrics())
    optimizer = dynamic_loss_scale(sgd(0.5), initial=2.0**16)
    params = {"w": torch.tensor(0.0)}
    state, seen = optimizer.init(params), []
    for _ in range(6):
        params, state, _ = train_step(params, state, [10.0], loss_fn=loss_fn, optimizer=optimizer)
        seen.append(params["w"].item())
    assert seen == [0.0, 0.0, 0.0, 0.0, -5.0, -10.0]
    assert (state.scale.item(), state.inner.skipped.item()) == (4096.0, 4)


def test_in_float32_the_scale_changes_no_bit():
    """Loss, gradient norm, clipping, moments: all see the gradients of the loss."""
    inside = lambda: chain(clip_by_global_norm(0.1), adamw(0.01))
    batch = fnppo.padded_batch(
        [[1, 2]] * 3,
        [[4, 5], [6], [7, 8]],
        advantages=[1.0, -1.0, 0.5],
        old_logprobs=[[-2.5, -2.5], [-2.5], [-2.5, -2.5]],
    )
    policy, params = fnppo.functional_policy(tiny("llama", torch.float32))

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets)

    found = []
    for optimizer in (inside(), dynamic_loss_scale(inside(), initial=2.0**10)):
        found.append(
            fnppo.update_policy(
                params, optimizer.init(params), batch, loss_fn=loss_fn, optimizer=optimizer, mini_batch_size=2,
                max_tokens=100, num_epochs=2,
            )
        )  # fmt: skip
    (plain, plain_state, metrics), (scaled, state, scaled_metrics) = found
    assert same_bits(plain, scaled)
    assert same_bits(plain_state, state.inner.inner)
    assert scaled_metrics.pop("loss_scale") == 2.0**10
    assert metrics == scaled_metrics


def test_many_scales_at_once():
    """vmap over gradients and states is one after the other."""
    optimizer = dynamic_loss_scale(sgd(0.5, momentum=0.9), initial=16.0, interval=1)
    params = {"w": torch.zeros(3, 2)}
    grads = {"w": torch.tensor([[1.0, 2.0], [math.inf, 0.0], [3.0, math.nan]])}
    states = [optimizer.init({"w": row}) for row in params["w"]]
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *states)
    together = torch.func.vmap(optimizer.update)(grads, stacked, params)
    for place, state in enumerate(states):
        alone = optimizer.update({"w": grads["w"][place]}, state, {"w": params["w"][place]})
        assert_close(optree.tree_map(lambda x, place=place: x[place], together), alone, **EXACT)


def test_it_goes_around_all_others():
    params, loss_fn = {"w": torch.tensor(1.0)}, lambda params, x: (params["w"] * x, Metrics())
    inner = dynamic_loss_scale(sgd(0.1))
    for wrong in (chain(clip_by_global_norm(1.0), inner), skip_nonfinite(inner), dynamic_loss_scale(inner)):
        with pytest.raises(ValueError, match=r"an optimizer stands around dynamic_loss_scale.* Put dynamic_loss_scale"):
            train_step(params, wrong.init(params), [1.0], loss_fn=loss_fn, optimizer=wrong)


def test_a_loss_that_is_none_is_refused_under_a_scale_too():
    params = {"w": torch.tensor(1.0)}
    for wrong in ((5.0, Metrics()), (torch.tensor(3), Metrics()), (), (None, Metrics()), None):
        for optimizer in (sgd(0.1), dynamic_loss_scale(sgd(0.1))):
            with pytest.raises(ValueError, match="loss_fn gave a"):
                train_step(
                    params, optimizer.init(params), [1.0], loss_fn=lambda *_, wrong=wrong: wrong, optimizer=optimizer
                )
