"""value_and_grad and accumulate_gradients against torch.func, finite differences and each other."""

import gc
import weakref
from functools import cache

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, tiny
from torch import nn, tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fnppo
from fnppo import Metrics, accumulate_gradients, value_and_grad
from fnppo.testing import float64_everywhere, padded_batches

F64 = torch.float64


def toy(seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)
    params = {"b": {"weight": draw(3, 2)}, "a": [draw(2), draw(3)]}

    def loss_fn(params, x):
        y = torch.tanh(x @ params["b"]["weight"].T + params["a"][1])
        loss = y.square().sum() + (x @ params["a"][0]).sin().sum()
        return loss, Metrics(per_token={"y": y.detach().sum()}, totals={"tokens": tensor(len(x))})

    return params, loss_fn, draw


@pytest.mark.core
@given(st.integers(0, 2**32 - 1))
def test_value_and_grad_against_torch_func(seed):
    params, loss_fn, draw = toy(seed)
    x = draw(4, 2)
    (loss, metrics), grads = value_and_grad(loss_fn)(params, x)
    expected, (value, aux) = torch.func.grad_and_value(loss_fn, has_aux=True)(params, x)
    assert_close(loss, value, rtol=1e-12, atol=1e-12)
    assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    assert_close(metrics.per_token, aux.per_token)
    assert not loss.requires_grad


def test_value_and_grad_of_a_whole_update_against_torch_func_and_finite_differences():
    with float64_everywhere():
        policy, params = fnppo.functional_policy(tiny("llama"), attention=fnppo.math_attention)
        batch = fnppo.padded_batch(
            [[1, 2], [3]], [[4, 5], [6]], advantages=[1.0, -1.0], old_logprobs=[[-2.0, -3.0], [-2.0]]
        )
        batch = fnppo.pack_sequences(fnppo.token_mean(batch))

        def loss_fn(params, batch):
            stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=0.9)
            return fnppo.ppo_loss(stats, batch.targets, entropy_coef=0.1)

        (loss, _), grads = value_and_grad(loss_fn)(params, batch)
        expected, (value, _) = torch.func.grad_and_value(loss_fn, has_aux=True)(params, batch)
        assert_close(loss, value, rtol=0, atol=1e-12)
        assert_close(grads, expected, rtol=0, atol=1e-11)
        g = torch.Generator().manual_seed(0)
        direction = {name: torch.randn(p.shape, generator=g, dtype=F64) for name, p in params.items()}
        step = 1e-5
        up, down = ({n: p + s * step * direction[n] for n, p in params.items()} for s in (1, -1))
        slope = (loss_fn(up, batch)[0] - loss_fn(down, batch)[0]) / (2 * step)
        assert_close(slope, sum((grads[n] * direction[n]).sum() for n in params), rtol=1e-6, atol=1e-8)


def test_inside_transforms():
    params, loss_fn, draw = toy()
    x = draw(4, 2)
    run = lambda params, x: value_and_grad(loss_fn)(params, x)[1]
    plain = lambda params, x: grad(lambda p, x: loss_fn(p, x)[0])(params, x)
    stacked = optree.tree_map(lambda p: torch.stack([p, p + 1]), params)
    assert_close(vmap(run, (0, None))(stacked, x), vmap(plain, (0, None))(stacked, x))
    tangent = optree.tree_map(torch.ones_like, params)
    hvp = lambda f: jvp(lambda p: f(p, x), (params,), (tangent,))[1]
    assert_close(hvp(run), hvp(plain))
    second = lambda f: grad(lambda p: sum(g.square().sum() for g in optree.tree_leaves(f(p, x))))(params)
    assert_close(second(run), second(plain))
    both = lambda params: accumulate_gradients(loss_fn, params, [x[:1], x[1:]])[1]
    assert_close(vmap(both)(stacked), vmap(plain, (0, None))(stacked, x))


@pytest.mark.core
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_accumulation_is_addition(seed, sizes):
    """A1, D5."""
    params, loss_fn, draw = toy(seed)
    x = draw(sum(sizes), 2)
    (loss, metrics), grads = accumulate_gradients(loss_fn, params, iter(x.split(sizes)))
    (whole, whole_metrics), whole_grads = value_and_grad(loss_fn)(params, x)
    assert_close(loss, whole, rtol=1e-12, atol=1e-12)
    assert_close(grads, whole_grads, rtol=1e-12, atol=1e-12)
    assert_close(metrics.totals, whole_metrics.totals)
    with pytest.raises(
        ValueError,
        match=r"^there is no micro-batch to take a gradient of\. Give at least one; a generator is used up once\.$",
    ):
        accumulate_gradients(loss_fn, params, [])


def test_gradients_that_share_memory_are_not_added_twice():
    """For (a + b).sum() autograd hands the same tensor, and an expanded one, to both leaves."""
    params = {"a": torch.zeros(3, dtype=F64), "b": torch.zeros(3, dtype=F64)}
    loss_fn = lambda params, scale: (((params["a"] + params["b"]) * scale).sum(), Metrics())
    _, grads = accumulate_gradients(loss_fn, params, [1.0, 10.0, 100.0])
    assert grads["a"].tolist() == grads["b"].tolist() == [111.0] * 3


def test_gradients_of_their_own_are_not_copied():
    seen = []

    def loss_fn(params, x):
        params["w"].register_hook(lambda grad: seen.append(grad.data_ptr()))
        return (params["w"] * x).square().sum(), Metrics()

    _, grads = value_and_grad(loss_fn)({"w": torch.ones(3)}, torch.ones(3))
    assert grads["w"].data_ptr() == seen[0]


def test_unused_parameters_and_constant_losses_have_zero_gradients():
    params = {"used": torch.ones(2), "unused": torch.ones(3)}
    for run in (lambda f: value_and_grad(f)(params, 1.0)[1], lambda f: accumulate_gradients(f, params, [1.0, 2.0])[1]):
        assert run(lambda p, x: (p["used"].sum(), Metrics()))["unused"].tolist() == [0.0] * 3
        assert run(lambda p, x: (torch.zeros(()), Metrics()))["used"].tolist() == [0.0] * 2


def test_callers_tensors_keep_their_grad_and_flags():
    params = {"w": torch.ones(2, requires_grad=True)}
    params["w"].grad = torch.full((2,), 5.0)
    loss_fn = lambda p, x: ((p["w"] * x).sum(), Metrics())
    accumulate_gradients(loss_fn, params, [1.0])
    value_and_grad(loss_fn)(params, 1.0)
    assert params["w"].grad.tolist() == [5.0, 5.0]
    assert params["w"].requires_grad
    other = torch.ones(2, requires_grad=True)  # what the loss reads besides its parameters
    accumulate_gradients(lambda p, x: ((p["w"] * other).sum(), Metrics()), params, [1.0])
    value_and_grad(lambda p, x: ((p["w"] * other).sum(), Metrics()))(params, 1.0)
    assert other.grad is None
    frozen = {"w": torch.ones(2)}
    accumulate_gradients(loss_fn, frozen, [1.0])
    assert not frozen["w"].requires_grad
    assert frozen["w"].grad is None


def test_a_micro_batch_is_gone_before_the_next_begins():
    """D5: neither its activations nor what its metrics were made of."""
    alive = []

    def loss_fn(params, x):
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)
        logits = params["w"] * x
        alive.append(weakref.ref(logits))
        return logits.sum(), Metrics(per_token={"careless": logits.sum()})

    (_, metrics), _ = accumulate_gradients(loss_fn, {"w": torch.ones(3)}, [torch.ones(3), torch.ones(3), torch.ones(3)])
    assert len(alive) == 3
    assert not metrics.per_token["careless"].requires_grad


class _OldStyleSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def test_old_style_functions():
    """G1: kernels without setup_context, which torch.func.grad refuses."""
    loss_fn = lambda p, x: (_OldStyleSquare.apply(p["w"]).sum(), Metrics())
    _, grads = value_and_grad(loss_fn)({"w": tensor([3.0])}, None)
    assert grads["w"].item() == 6.0
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda p: loss_fn(p, None)[0])({"w": tensor([3.0])})


def test_recomputation():
    """G2: checkpointed sin(sin(x)) at 1."""
    loss_fn = lambda p, x: (checkpoint(lambda y: y.sin().sin(), p["x"], use_reentrant=False), Metrics())
    _, grads = value_and_grad(loss_fn)({"x": tensor(1.0)}, None)
    assert grads["x"].item() == pytest.approx(0.3600, abs=1e-4)


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(tensor(2.0, dtype=F64))

    def forward(self, x):
        return checkpoint(lambda y: self.w * (self.w * y).sin(), x, use_reentrant=False)


def test_the_trap_that_remat_avoids():
    """G2b: a plain checkpoint inside functional_call sees the module's own weights when it runs again."""
    wrong = value_and_grad(lambda p, x: (functional_call(_Scale(), p, x), Metrics()))(
        {"w": tensor(0.5, dtype=F64)}, tensor(1.0, dtype=F64)
    )[1]
    assert wrong["w"].item() == pytest.approx(0.077004, abs=1e-6)  # right is 0.918217: sin w + w cos w


@cache
def recomputing():
    return fnppo.functional_policy(tiny("gpt2"), remat=True, attention=fnppo.math_attention)


@pytest.mark.core
@given(padded_batches(vocab_size=VOCAB, max_rows=2))
def test_remat_on_other_parameters_than_the_modules(batch):
    """G2b, on a model: the gradient at params far from the module's, against torch.func, which recomputes nothing."""
    policy, params = recomputing()
    params = {name: p + 0.5 for name, p in params.items()}
    batch = fnppo.pack_sequences(fnppo.token_mean(batch))

    def loss_fn(params, batch):
        return fnppo.ppo_loss(fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0), batch.targets)

    expected = torch.func.grad(lambda p: loss_fn(p, batch)[0])(params)
    assert_close(value_and_grad(loss_fn)(params, batch)[1], expected, rtol=1e-6, atol=1e-6)


def test_half_precision_gradients_are_summed_in_float32():
    """1000 micro-batches of gradient 1 are 1000, not the 256 where bfloat16 stops counting."""
    params = {"w": torch.zeros((), dtype=torch.bfloat16)}
    _, grads = accumulate_gradients(lambda p, x: (p["w"] * x, Metrics()), params, [1.0] * 1000)
    assert grads["w"].dtype == torch.bfloat16
    assert grads["w"].item() == 1000.0


def test_aux_carries_no_graph():
    run = value_and_grad(lambda p, x: ((p["w"] * x).sum(), {"kept": p["w"] * 2, "word": "any"}))
    (_, aux), _ = run({"w": torch.ones(2)}, 1.0)
    assert not aux["kept"].requires_grad
    assert aux["word"] == "any"


@pytest.mark.parametrize("donate", [False, True])
def test_parameters_that_ask_for_gradients_grow_no_graph(donate):
    params = {"w": torch.nn.Parameter(torch.ones(2))}
    optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(0.1))
    state = optimizer.init(params)
    for _ in range(3):
        params, state, _ = fnppo.train_step(
            params,
            state,
            [2.0],
            loss_fn=lambda p, x: ((p["w"] * x).sum(), Metrics()),
            optimizer=optimizer,
            donate=donate,
        )
        assert params["w"].grad_fn is None
    assert params["w"].tolist() == pytest.approx([0.697, 0.697], abs=1e-3)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_gradients_that_are_views_of_one_tensor(batches):
    """Two micro-batches are twice one, and donation changes nothing, where autograd hands out views of one gradient."""
    params = {"a": torch.ones(2, 2), "b": torch.ones(2, 2), "c": torch.ones(4)}
    weights = torch.arange(4.0)
    loss_fn = lambda p, _: (((p["a"].view(-1) + p["b"].view(-1) + p["c"]) * weights).sum(), Metrics())
    _, grads = accumulate_gradients(loss_fn, params, [None] * batches)
    assert all(g.flatten().tolist() == (batches * weights).tolist() for g in grads.values())
    optimizer = fnppo.chain(fnppo.clip_by_global_norm(0.1), fnppo.sgd(1.0))
    results = []
    for donate in (False, True):
        fresh = {n: p.clone() for n, p in params.items()}
        results.append(
            fnppo.train_step(
                fresh, optimizer.init(fresh), [None] * batches, loss_fn=loss_fn, optimizer=optimizer, donate=donate
            )[0]
        )
    assert_close(*results, rtol=0, atol=0)
    _, grads = value_and_grad(lambda p, _: (sum(p.values()).sum(), ()))({n: torch.ones(3) for n in "ab"}, None)
    clipped, _ = fnppo.clip_by_global_norm(0.1).update(grads, (), {}, donate=True)
    assert clipped["a"].tolist() == clipped["b"].tolist() == pytest.approx([0.1 / 6**0.5] * 3, rel=1e-4)


def test_half_precision_sums_inside_transforms():
    params = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    run = lambda p: accumulate_gradients(lambda p, x: (p["w"] * x, Metrics()), p, [256.0] + [1.0] * 64)[1]
    grads = vmap(run)(params)["w"]
    assert grads.tolist() == [320.0, 320.0]
    assert grads.dtype == torch.bfloat16
