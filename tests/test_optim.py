"""Optimizers against torch.optim, donation, clipping, skipping, and transforms."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.func import vmap
from torch.testing import assert_close

from fnppo import (
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    constant,
    global_norm,
    linear,
    sgd,
    skip_nonfinite,
)

F64 = torch.float64


def tree(seed, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 2, generator=g, dtype=dtype), "b": [torch.randn(4, generator=g, dtype=dtype)]}


def run(optimizer, params, gradients, **options):
    state = optimizer.init(params)
    for grads in gradients:
        updates, state = optimizer.update(grads, state, params, **options)
        params = apply_updates(params, updates, **options)
    return params, state


@pytest.mark.core
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: adamw(1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
        (
            lambda: adamw(3e-2, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.3),
            lambda p: torch.optim.AdamW(p, lr=3e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
        ),
        (lambda: adamw(1e-2, weight_decay=1.0), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1.0)),
        (lambda: adamw(1e-2, weight_decay=0.0), lambda p: torch.optim.Adam(p, lr=1e-2)),
        (lambda: sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (lambda: sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 8))
def test_the_same_steps_as_torch(ours, theirs, seed, steps):
    gradients = [tree(seed + i + 1) for i in range(steps)]
    params, _ = run(ours(), tree(seed), gradients)
    expected = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(tree(seed))]
    optimizer = theirs(expected)
    for grads in gradients:
        for leaf, g in zip(expected, optree.tree_leaves(grads), strict=True):
            leaf.grad = g.clone()
        optimizer.step()
    for a, b in zip(optree.tree_leaves(params), expected, strict=True):
        assert_close(a, b.detach(), rtol=1e-12, atol=1e-13)


def test_schedules_and_clipping_against_torch():
    params = tree(0)
    gradients = [optree.tree_map(lambda x: 3 * x, tree(i)) for i in range(1, 6)]
    optimizer = chain(clip_by_global_norm(1.0), adamw(linear(1e-1, 0.0, steps=4)))
    ours, state = run(optimizer, params, gradients)
    expected = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(params)]
    theirs = torch.optim.AdamW(expected, lr=1e-1)
    for i, grads in enumerate(gradients):
        for leaf, g in zip(expected, optree.tree_leaves(grads), strict=True):
            leaf.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(expected, 1.0)
        theirs.param_groups[0]["lr"] = 1e-1 * max(0.0, 1 - i / 4)
        theirs.step()
    for a, b in zip(optree.tree_leaves(ours), expected, strict=True):
        assert_close(a, b.detach(), rtol=1e-12, atol=1e-13)
    assert int(state[1].step) == 5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_counts_its_steps_for_the_schedule(momentum):
    optimizer = sgd(linear(1.0, 0.0, steps=4), momentum=momentum)
    params, state = {"w": tensor(0.0)}, optimizer.init({"w": tensor(0.0)})
    assert state.momentum == ({"w": tensor(0.0)} if momentum else ())
    sizes = []
    for _ in range(4):
        updates, state = optimizer.update({"w": tensor(1.0)}, state, params)
        sizes.append(updates["w"].item())
    rates, buffers = [1.0, 0.75, 0.5, 0.25], [sum(momentum**i for i in range(n)) for n in (1, 2, 3, 4)]
    assert sizes == pytest.approx([-rate * buffer for rate, buffer in zip(rates, buffers, strict=True)])
    assert int(state.step) == 4
    assert (state.momentum == ()) is (momentum == 0.0)


OPTIMIZERS = {
    "adamw": lambda: adamw(constant(1e-2)),
    "sgd": lambda: sgd(0.1),
    "momentum": lambda: sgd(0.1, momentum=0.9),
    "clip": lambda: clip_by_global_norm(0.5),
    "chain": lambda: chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    "all": lambda: skip_nonfinite(chain(clip_by_global_norm(0.5), adamw(1e-2))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_donation_changes_no_bit(name, dtype):
    gradients = lambda: [tree(i, dtype) for i in range(1, 4)]
    kept = run(OPTIMIZERS[name](), tree(0, dtype), gradients())
    donated = run(OPTIMIZERS[name](), tree(0, dtype), gradients(), donate=True)
    for a, b in zip(optree.tree_leaves(kept), optree.tree_leaves(donated), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_changed_unless_donated(name):
    params, grads, optimizer = tree(0), tree(1), OPTIMIZERS[name]()
    state = optimizer.init(params)
    before = optree.tree_map(torch.clone, (params, grads, state))
    updates, _ = optimizer.update(grads, state, params)
    apply_updates(params, updates)
    for a, b in zip(optree.tree_leaves((params, grads, state)), optree.tree_leaves(before), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "momentum", "all"])
def test_donation_reuses_the_memory(name):
    params, optimizer = tree(0), OPTIMIZERS[name]()
    state = optimizer.init(params)
    places = {leaf.data_ptr() for leaf in optree.tree_leaves((params, state)) if leaf.dim()}
    updates, state = optimizer.update(tree(1), state, params, donate=True)
    params = apply_updates(params, updates, donate=True)
    assert {leaf.data_ptr() for leaf in optree.tree_leaves((params, state)) if leaf.dim()} == places
    grads, clip = tree(1), clip_by_global_norm(0.5)
    clipped, _ = clip.update(grads, clip.init(params), params, donate=True)
    assert [g.data_ptr() for g in optree.tree_leaves(clipped)] == [g.data_ptr() for g in optree.tree_leaves(grads)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("donate", [False, True])
def test_a_nonfinite_gradient_is_skipped(bad, donate):
    """G8, G9: params, moments, step count and schedule untouched; counted."""
    optimizer = skip_nonfinite(chain(clip_by_global_norm(1.0), adamw(linear(0.1, 0.0, steps=4))))
    params, state = run(optimizer, tree(0), [tree(1)])
    params["a"][0, 0] = -0.0
    before = optree.tree_map(torch.clone, (params, state.inner))
    for count in (1, 2, 3):
        grads = tree(2)
        grads["b"][0][1] = bad
        updates, state = optimizer.update(grads, state, params, donate=donate)
        params = apply_updates(params, updates, donate=donate)
        assert int(state.skipped) == count
    for a, b in zip(optree.tree_leaves((params, state.inner)), optree.tree_leaves(before), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(torch.signbit(a.double()), torch.signbit(b.double()))
    updates, state = optimizer.update(tree(3), state, params)
    assert int(state.skipped) == 3
    assert int(state.inner[1].step) == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_at_once(name):
    """vmap over params, gradients and state is a loop over them."""
    optimizer = OPTIMIZERS[name]()
    stack = lambda *trees: optree.tree_map(lambda *x: torch.stack(x), *trees)
    params, grads = [tree(0), tree(1)], [tree(2), tree(3)]
    grads[1]["a"][0] *= torch.nan if name == "all" else 1.0

    def step(params, grads):
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        return apply_updates(params, updates), state

    expected = stack(*(step(p, g) for p, g in zip(params, grads, strict=True)))
    found = vmap(step)(stack(*params), stack(*grads))
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True):
        assert_close(a, b.squeeze(), rtol=1e-12, atol=1e-13, check_dtype=False) if a.dim() == b.dim() else assert_close(
            a, b
        )


def test_half_precision_parameters_keep_their_dtype():
    for name in OPTIMIZERS:
        params, state = run(OPTIMIZERS[name](), tree(0, torch.bfloat16), [tree(1, torch.bfloat16)])
        assert {leaf.dtype for leaf in optree.tree_leaves(params)} == {torch.bfloat16}
        assert {leaf.dtype for leaf in optree.tree_leaves(state)} <= {torch.bfloat16, torch.int64}


def test_the_first_step_moves():
    """G14."""
    for schedule in (constant(0.1, warmup=10), linear(0.1, 0.0, steps=5, warmup=3)):
        params, _ = run(adamw(schedule), {"w": tensor(1.0)}, [{"w": tensor(1.0)}])
        assert params["w"].item() < 1.0


def test_global_norm():
    assert global_norm({"a": tensor([3.0]), "b": [tensor([[4.0]])]}).item() == 5.0
    assert global_norm({}).item() == 0.0
    assert int(adamw(0.1).init({}).step) == 0
    assert global_norm({"a": tensor([300.0, 400.0], dtype=torch.float16)}).item() == 500.0
    assert global_norm({"a": torch.full((100000,), 256.0, dtype=torch.float16)}).isfinite()  # in float32, not in half


def test_a_norm_below_the_limit_is_left_as_it_is():
    clip = clip_by_global_norm(1.0)
    for norm, expected in ((0.0, 0.0), (0.1, 0.1), (0.6, 0.6), (0.9, 0.9), (3.0, 1.0)):
        clipped, _ = clip.update({"w": tensor([norm, 0.0])}, clip.init({}), {})
        assert clipped["w"].tolist() == pytest.approx([expected, 0.0])


def test_gradients_of_another_structure_are_refused():
    params, optimizer = {"a": tensor(1.0), "b": tensor(2.0)}, adamw(0.1)
    with pytest.raises(ValueError, match="b"):
        optimizer.update({"a": tensor(1.0)}, optimizer.init(params), params)
    for both, states in ((chain(optimizer, optimizer), 1), (chain(optimizer), 2)):
        with pytest.raises(ValueError, match="not one state for each of"):
            both.update(params, (optimizer.init(params),) * states, params)


def test_updates_of_another_dtype():
    """bfloat16 parameters and float32 updates: added in float32, rounded once, donated or not."""
    params = {"w": torch.tensor([1.0, 3.0], dtype=torch.bfloat16)}
    updates = {"w": tensor([0.001, 0.02])}
    kept = apply_updates(params, updates)
    assert kept["w"].dtype == torch.bfloat16
    donated = apply_updates({"w": params["w"].clone()}, updates, donate=True)
    assert torch.equal(kept["w"], donated["w"])


def test_an_eps_that_is_zero_in_the_dtype_is_refused():
    with pytest.raises(ValueError, match=r"^eps = 1e-08 is 0 in torch\.float16, .* or raise eps\.$"):
        adamw(0.1).init({"w": torch.zeros(2, dtype=torch.float16)})
    adamw(0.1, eps=1e-4).init({"w": torch.zeros(2, dtype=torch.float16)})


def test_finite():
    from fnppo import all_finite

    assert bool(all_finite({}))
    assert all_finite({}).dtype == all_finite({"a": tensor(1.0)}).dtype == torch.bool
    assert not bool(all_finite({"a": tensor(1.0), "b": tensor([1.0, float("inf")])}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_default_device_is_not_used(name):
    """State and updates are where the parameters are. On `meta`, the default here, tensors have no values."""
    params, grads = tree(0), [tree(1), tree(2)]
    expected = run(OPTIMIZERS[name](), params, grads)
    with torch.device("meta"):
        found = run(OPTIMIZERS[name](), params, grads)
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True):
        assert_close(a, b, rtol=0, atol=0)
