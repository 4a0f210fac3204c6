"""The head that is told the loss: the same numbers as in two passes, whatever the loss turns out to be."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_head import F64, HEADS, head_inputs
from tiny import tiny
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fnppo
from fnppo import TokenStats, chunked_logprobs, logit_chunks
from fnppo.surrogates import gspo
from fnppo.testing import padded_batches


def products_of(run, vocab):
    """Products with the head's matrix in `run`, and what it returns."""
    counted = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm) and any(
                vocab in shape for shape in shapes
            ):
                counted.append(shapes)
            return func(*args, **kwargs or {})

    with Count():
        result = run()
    return len(counted), result


LOSSES = {
    "of one target": lambda stats, weights: (
        weights[0] * stats.logprobs.exp() + weights[1] * stats.entropy.sin()
    ).sum(),
    "of all targets": lambda stats, weights: (weights[0] * stats.logprobs).sum().square() + stats.entropy.sum().exp(),
    "of none": lambda stats, weights: torch.zeros((), dtype=F64),
    "of log-probs alone": lambda stats, weights: (weights[0] * stats.logprobs.square()).sum(),
    "not finite on a part": lambda stats, weights: (weights[0] * stats.logprobs).sum() / (len(weights[0]) - 2),
}


@pytest.mark.core
@pytest.mark.parametrize("head", HEADS)
@given(
    targets=st.integers(0, 6),
    chunk_size=st.sampled_from([None, 1, 2, 5]),
    block=st.sampled_from([1, 10**6]),
    bias=st.booleans(),
    wanted=st.sampled_from([(True, True, True), (True, False, False), (False, True, True), (False, False, True)]),
    told=st.sampled_from(list(LOSSES)),
    taken=st.sampled_from(list(LOSSES)[:-1]),
    factor=st.sampled_from([1.0, -3.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_numbers_of_two_passes(head, targets, chunk_size, block, bias, wanted, told, taken, factor, seed):
    """Also where another loss is taken than the one told, a multiple of it, or one that does not fall into chunks."""
    hidden, weight, bias_, ids, temperature = head_inputs(targets=targets, seed=seed)
    inputs = [x.requires_grad_(want) for x, want in zip((hidden, weight, bias_), wanted, strict=True)]
    weights = torch.randn(2, targets, dtype=F64, generator=torch.Generator().manual_seed(seed))
    of_chunk = lambda stats, places: LOSSES[told](stats, weights[:, places])
    leaves = [x for x in inputs[: 2 + bias] if x.requires_grad]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_chunks, "ON_CPU", logit_chunks.Budget(chunk=40, block=block))
        for loss in (None, of_chunk):
            stats = chunked_logprobs(
                inputs[0], ids, weight=inputs[1], bias=inputs[2] if bias else None, temperature=temperature,
                chunk_size=chunk_size, loss=loss, **HEADS[head],
            )  # fmt: skip
            value = factor * LOSSES[taken](stats, weights)
            grads = [torch.zeros_like(leaf) for leaf in leaves]
            if value.requires_grad and leaves:
                grads = torch.autograd.grad(value, leaves, materialize_grads=True, allow_unused=True)
            results.append((stats, value, grads))
    assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("told", "taken", "products"), [(False, False, 4), (True, True, 3), (True, False, 5 + 1)])
def test_products_of_the_head(told, taken, products):
    """One for the logits and two for the gradients; two passes need the logits twice, and a wrong hint costs its own."""
    hidden, weight, _, ids, temperature = head_inputs(targets=5, vocab=11)
    loss = lambda stats, places=slice(None): (torch.arange(5.0)[places] * stats.logprobs).sum()
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def run():
        stats = chunked_logprobs(hidden, ids, weight=weight, temperature=temperature, loss=loss if told else None)
        return torch.autograd.grad(loss(stats) if taken or not told else stats.logprobs.exp().sum(), leaves)

    assert products_of(run, 11)[0] == products


@pytest.mark.parametrize("loss", [None, lambda stats, places: stats.logprobs.sum()])
@pytest.mark.parametrize(("frozen", "products"), [("weight", 1), ("hidden", 1)])
def test_what_is_frozen_costs_no_gradient(loss, frozen, products):
    hidden, weight, _, ids, _ = head_inputs(targets=5, vocab=11)
    leaf = {"weight": hidden, "hidden": weight}[frozen].requires_grad_()

    def run():
        stats = chunked_logprobs(hidden, ids, weight=weight, loss=loss)
        return torch.autograd.grad(stats.logprobs.sum(), leaf)

    assert products_of(run, 11)[0] == products + (1 if loss else 2)


def test_backward_twice_and_derivatives_of_gradients():
    hidden, weight, _, ids, _ = head_inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    value = chunked_logprobs(hidden, ids, weight=weight, loss=lambda stats, places: stats.logprobs.sum()).logprobs.sum()
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    assert_close(torch.autograd.grad(value, leaves, retain_graph=True), first, rtol=1e-12, atol=1e-12)
    second = torch.autograd.grad(value, leaves, create_graph=True)
    expected = chunked_logprobs(hidden, ids, weight=weight).logprobs.sum()
    expected = torch.autograd.grad(expected, leaves, create_graph=True)
    assert_close(
        torch.autograd.grad(second[0].square().sum(), leaves), torch.autograd.grad(expected[0].square().sum(), leaves)
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("surrogate", [fnppo.clipped_surrogate, gspo])
@pytest.mark.parametrize("chunk_size", [None, 3])
@given(batch=padded_batches(vocab_size=13))
def test_a_loss_over_a_policy(family, surrogate, chunk_size, batch):
    """ppo_loss is told to forward_logprobs: tokens, and whole rows that chunks cut through."""
    policy, params = fnppo.functional_policy(tiny(family, F64))
    micro_batch = fnppo.pack_sequences(fnppo.token_mean(batch))
    loss = partial(fnppo.ppo_loss, surrogate=surrogate, entropy_coef=0.1)

    def loss_fn(params, batch, told):
        stats = fnppo.forward_logprobs(
            params, batch, policy=policy, temperature=0.7, chunk_size=chunk_size, loss=loss if told else None
        )
        return loss(stats, batch.targets)

    found, expected = (fnppo.value_and_grad(partial(loss_fn, told=told))(params, micro_batch) for told in (True, False))
    assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_float16_and_forwards_without_gradients_are_not_told():
    hidden, weight, _, ids, _ = head_inputs()
    never = lambda stats, places: pytest.fail("the loss was called")
    chunked_logprobs(hidden, ids, weight=weight, loss=never)
    chunked_logprobs(hidden.half().requires_grad_(), ids, weight=weight.half(), loss=never)
    chunked_logprobs(hidden.float().requires_grad_(), ids, weight=weight.half(), loss=never)
    with torch.no_grad():
        chunked_logprobs(hidden.requires_grad_(), ids, weight=weight, loss=never)
    torch.func.grad(lambda x: chunked_logprobs(x, ids, weight=weight, loss=never).logprobs.sum())(hidden.detach())


def test_stats_without_entropy():
    hidden, weight, _, ids, _ = head_inputs()
    loss = lambda stats, places: (
        (stats.logprobs * places).sum() + (0 if stats.entropy is None else pytest.fail("there"))
    )
    found = []
    for told in (loss, None):
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        stats = chunked_logprobs(leaves[0], ids, weight=leaves[1], entropy=False, chunk_size=2, loss=told)
        assert isinstance(stats, TokenStats)
        assert stats.entropy is None
        found.append(torch.autograd.grad((stats.logprobs * torch.arange(5)).sum(), leaves))
    assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1 / 8, 1 / 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_multiple_of_the_loss_that_was_told(dtype, factor):
    """As where the loss is divided by the micro-batches: no worse than two passes, in whose rounding it would drown."""
    hidden, weight, _, ids, _ = head_inputs(targets=40, vocab=50)
    loss = lambda stats, places=slice(None): (torch.arange(40.0, dtype=F64)[places].sin() * stats.logprobs).sum()
    found = []
    for told, kind in ((None, F64), (None, dtype), (loss, dtype)):
        leaves = hidden.detach().to(kind).requires_grad_(), weight.detach().to(kind).requires_grad_()
        stats = chunked_logprobs(leaves[0], ids, weight=leaves[1], loss=told)
        found.append([grad.double() for grad in torch.autograd.grad(factor * loss(stats), leaves)])
    exact, two, one = found
    for right, a, b in zip(exact, two, one, strict=True):
        assert (b - right).norm() <= 1.01 * (a - right).norm()


@pytest.mark.parametrize("temperature", [1e-3, 2e-3, 1e-2])
def test_a_cap_at_low_temperatures(temperature):
    """Logits so far apart that the entropy leaves some of them out: their slope is that of the logit itself."""
    hidden, found = torch.tensor([[30.0, -10.0, 0.0, 0.0]], dtype=F64), []
    loss = lambda stats, places: stats.logprobs.sum() + stats.entropy.sum()
    for told in (None, loss):
        leaf = hidden.clone().requires_grad_()
        stats = chunked_logprobs(
            leaf, torch.tensor([1]), weight=torch.eye(4, dtype=F64), softcap=30.0, temperature=temperature, loss=told
        )
        found.append(torch.autograd.grad(loss(stats, None), leaf)[0])
    assert_close(found[1], found[0], rtol=1e-12, atol=0)
    assert found[0].abs().max() > 1


@pytest.mark.parametrize("wrong", [5, "ppo"])
def test_a_loss_that_is_no_function(wrong, unchecked):
    hidden, weight, _, ids, _ = head_inputs()
    with pytest.raises(ValueError, match=r"a function is needed: \(stats, places\) -> scalar"):
        chunked_logprobs(hidden, ids, weight=weight, loss=wrong)
