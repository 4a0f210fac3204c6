"""The chunked head against the definition: values, gradients, transforms, chunks, -inf, precision, memory counts."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jvp, vjp, vmap
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fnppo
from fnppo import logit_chunks
from fnppo.head import chunked_logprobs, logits_to_stats

F64 = torch.float64
HEADS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "scale and softcap": {"scale": 1.7, "softcap": 1.5},
}


def head_inputs(targets=5, vocab=7, hidden=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)
    temperature = torch.rand(targets, generator=g, dtype=F64) + 0.5
    return (
        draw(targets, hidden),
        draw(vocab, hidden),
        draw(vocab),
        torch.randint(vocab, (targets,), generator=g),
        temperature,
    )


def both(options, ids, temperature, chunk_size, bias=True):
    """The same scalar of log-probs and entropies, by the library and by the definition."""

    def combine(stats):
        return (stats.logprobs.square() + stats.entropy.sin()).sum()

    def ours(hidden, weight, bias_):
        return combine(
            chunked_logprobs(
                hidden,
                ids,
                weight=weight,
                bias=bias_ if bias else None,
                temperature=temperature,
                chunk_size=chunk_size,
                **options,
            )
        )

    def definition(hidden, weight, bias_):
        logits = (hidden @ weight.T + (bias_ if bias else 0)) * options.get("scale", 1.0)
        if cap := options.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        z = logits / temperature[:, None]
        p = z.softmax(-1)
        logp = z - z.logsumexp(-1, keepdim=True)
        return combine(fnppo.TokenStats(logp.gather(1, ids[:, None])[:, 0], -(p * logp).sum(-1)))

    return ours, definition


TRANSFORMS = {
    "value": lambda f, x, t: f(*x),
    "grad": lambda f, x, t: grad(f, (0, 1, 2))(*x),
    "vjp": lambda f, x, t: vjp(f, *x)[1](torch.tensor(2.0, dtype=F64)),
    "jvp": lambda f, x, t: jvp(f, x, t),
    "vmap": lambda f, x, t: vmap(f)(*(torch.stack([a, b]) for a, b in zip(x, t, strict=True))),
    "vmap over hidden": lambda f, x, t: vmap(f, (0, None, None))(torch.stack([x[0], t[0]]), *x[1:]),
    "vmap of grad": lambda f, x, t: vmap(grad(f, (0, 1, 2)))(*(torch.stack([a, b]) for a, b in zip(x, t, strict=True))),
    "grad of grad": lambda f, x, t: grad(lambda *y: sum((g**2).sum() for g in grad(f, (0, 1, 2))(*y)), (0, 1, 2))(*x),
    "hessian": lambda f, x, t: hessian(f)(*x),
    "Hessian-vector": lambda f, x, t: jvp(grad(f, (0, 1, 2)), x, t),
    "jvp of jvp": lambda f, x, t: jvp(lambda *y: jvp(f, y, t)[1], x, t),
    "vmap of jvp": lambda f, x, t: vmap(lambda *y: jvp(f, y, t)[1])(
        *(torch.stack([a, b]) for a, b in zip(x, t, strict=True))
    ),
    "grad of jvp": lambda f, x, t: grad(lambda *y: jvp(f, y, t)[1], (0, 1, 2))(*x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("head", HEADS)
def test_transforms(head, transform):
    """G1: under every transform, and twice."""
    hidden, weight, bias, ids, temperature = head_inputs()
    tangents = head_inputs(seed=1)[:3]
    ours, definition = both(HEADS[head], ids, temperature, chunk_size=2)
    run = TRANSFORMS[transform]
    x = (hidden, weight, bias)
    assert_close(run(ours, x, tangents), run(definition, x, tangents), rtol=1e-10, atol=1e-10)


CHILD = """
import torch
from fnppo.head import LinearHead, chunked_logprobs
from fnppo.kl_exact import chunked_kl
from test_head import HEADS, assert_close, head_inputs
hidden, weight, bias, ids, temperature = head_inputs()
ref_hidden, ref_weight, ref_bias, *_ = head_inputs(seed=1)
for options in (HEADS["plain"], HEADS["scale and softcap"]):
    ref = LinearHead(ref_weight, ref_bias, **options)
    common = {"temperature": temperature, "chunk_size": 2}
    for run in (
        lambda h, w, b: sum(x.sum() for x in chunked_logprobs(h, ids, weight=w, bias=b, **options, **common)),
        lambda h, w, b: chunked_kl(h, LinearHead(w, b, **options), ref_hidden, ref, **common).sum(),
    ):
        for f in (run, torch.func.grad_and_value(run, (0, 1, 2))):
            torch.compiler.reset()
            compiled = torch.compile(f, fullgraph=True, backend="eager")(hidden, weight, bias)
            assert_close(compiled, f(hidden, weight, bias), rtol=1e-12, atol=1e-12)
print("compiled")
"""


def test_both_heads_compile_without_graph_breaks():
    """Values and gradients, in a process of its own: torch.compile cannot read the run-time checker of the tests."""
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert child.stdout == "compiled\n", child.stderr[-2000:]


@pytest.mark.core
@pytest.mark.parametrize("head", HEADS)
@given(
    targets=st.integers(0, 6),
    chunk_size=st.sampled_from([None, 1, 2, 5, 100]),
    bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_and_gradients(head, targets, chunk_size, bias, seed):
    """D1, C8: any chunk size, also with a ragged tail, above the number of targets, and without targets."""
    hidden, weight, bias_, ids, temperature = head_inputs(targets=targets, seed=seed)
    ours, definition = both(HEADS[head], ids, temperature, chunk_size, bias)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias_)]
    value, expected = ours(*inputs), definition(*inputs)
    assert_close(value, expected, rtol=1e-11, atol=1e-11)
    grads = torch.autograd.grad(value, inputs, materialize_grads=True)
    assert_close(grads, torch.autograd.grad(expected, inputs, materialize_grads=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("head", HEADS)
def test_double_backward(head):
    hidden, weight, bias, ids, temperature = head_inputs()
    ours, definition = both(HEADS[head], ids, temperature, chunk_size=2)
    second = []
    for f in (ours, definition):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        grads = torch.autograd.grad(f(*inputs), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))
    assert_close(*second, rtol=1e-10, atol=1e-10)


def through_head(logits, ids, **options):
    """The chunked head as a function of logits: an identity matrix is the weight."""
    return chunked_logprobs(logits, ids, weight=torch.eye(logits.shape[1], dtype=logits.dtype), **options)


@pytest.mark.parametrize(
    ("logits", "entropy"),
    [([1, 0, -math.inf], 0.582203), ([0, 0, 0, -math.inf], 1.098612)],
)
def test_impossible_tokens_add_no_entropy(logits, entropy):
    """C1, D10."""
    stats = logits_to_stats(torch.tensor([logits], dtype=F64), torch.tensor([0]))
    assert stats.entropy.item() == pytest.approx(entropy, abs=1e-6)


def test_entropy_where_half_precision_overflows():
    """C1: in fp16 the log-softmax reaches -inf."""
    stats = logits_to_stats(torch.tensor([[60000.0, -60000.0]], dtype=torch.float16), torch.tensor([0]))
    assert stats.entropy.item() == 0.0
    assert stats.entropy.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("upstream", [1.0, -3.0, 1e-3, 2.0, 1e6])
def test_gradient_of_entropy_at_impossible_tokens(upstream, dtype):
    """C2, D10: dH/dz is finite for any loss, through the definition and through the formulas of the fast path."""
    expected = upstream * torch.tensor([-0.196612, 0.196612, 0.0], dtype=dtype)
    tolerance = {"atol": 1e-5 * abs(upstream), "rtol": 1e-4}
    logits = torch.tensor([[1, 0, -math.inf]], dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(upstream * logits_to_stats(logits, torch.tensor([0])).entropy.sum(), logits)
    assert_close(gradient[0], expected, **tolerance)
    bias = torch.tensor([1, 0, -math.inf], dtype=dtype, requires_grad=True)
    hidden, weight = (
        torch.zeros(1, 2, dtype=dtype, requires_grad=True),
        torch.zeros(3, 2, dtype=dtype, requires_grad=True),
    )
    stats = chunked_logprobs(hidden, torch.tensor([0]), weight=weight, bias=bias)
    assert stats.entropy.item() == pytest.approx(0.582203, abs=1e-5)
    gradients = torch.autograd.grad(upstream * stats.entropy.sum() + 0 * stats.logprobs.sum(), (bias, hidden, weight))
    assert_close(gradients[0], expected, **tolerance)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_log_softmax_is_not_computed_in_half_precision():
    """C3."""
    logits = torch.zeros(2, 1000, dtype=torch.bfloat16)
    logits[:, 0] = 5.0
    for stats in (logits_to_stats(logits, torch.tensor([0, 1])), through_head(logits, torch.tensor([0, 1]))):
        assert stats.logprobs.dtype == torch.float32
        assert stats.logprobs.tolist() == pytest.approx([-2.045265, -7.045265], abs=1e-5)


def test_temperature_divides_in_full_precision():
    """C4: 10 / 0.7 is 14.285714, and 14.3125 in bfloat16."""
    logits = torch.tensor([[10.0, 0.0]], dtype=torch.bfloat16)
    for run in (logits_to_stats, through_head):
        logprob = run(logits, torch.tensor([1]), temperature=0.7).logprobs.item()
        assert logprob == pytest.approx(-14.285714 - math.log1p(math.exp(-14.285714)), abs=1e-6)


@pytest.mark.parametrize(
    ("t", "logprob", "entropy"), [(0.5, -0.020581, 0.106921), (2, -0.464369, 0.905959), (1, -0.169846, 0.524267)]
)
def test_temperature_reaches_logprob_and_entropy(t, logprob, entropy):
    """C5, and a temperature per target."""
    logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=F64)
    for temperature in (t, torch.tensor([float(t)], dtype=F64)):
        stats = through_head(logits, torch.tensor([0]), temperature=temperature)
        assert stats.logprobs.item() == pytest.approx(logprob, abs=1e-6)
        assert stats.entropy.item() == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0, 1.0])])
def test_temperature_must_be_above_zero(temperature):
    """C6."""
    with pytest.raises(ValueError, match="temperature is"):
        through_head(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), temperature=temperature)


def test_temperature_is_required():
    """J4."""
    with pytest.raises(TypeError, match="missing .*argument.*temperature"):
        fnppo.forward_logprobs({}, None, policy=None)


def test_other_bad_arguments():
    hidden, ids = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        through_head(hidden, ids, chunk_size=0)
    with pytest.raises(ValueError, match=r"temperature has shape \(2,\)"):
        through_head(hidden, ids, temperature=torch.ones(2))
    with pytest.raises(ValueError, match="none flows to it"):
        through_head(hidden, ids, temperature=torch.ones(3, requires_grad=True))


def test_gradient_of_logprob_and_entropy_together():
    """C8: L = -lp - H at z = [1, 2, 3]; the logits passed in are unchanged (C7)."""
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=F64, requires_grad=True)
    before = logits.detach().clone()
    stats = through_head(logits, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(-stats.logprobs.sum() - stats.entropy.sum(), logits)
    assert_close(gradient[0], torch.tensor([-1.051786, 0.103958, 0.947828], dtype=F64), atol=1e-6, rtol=0)
    assert torch.equal(logits, before)


def test_works_on_a_view_from_a_custom_function():
    """C7: nothing is divided in place."""

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g

    logits = torch.randn(2, 3, dtype=F64, requires_grad=True)
    logits_to_stats(View.apply(logits), torch.tensor([0, 1]), temperature=0.5).logprobs.sum().backward()
    assert logits.grad.isfinite().all()


def test_entropy_is_skipped_unless_asked(monkeypatch):
    """D6: no entropy is computed, and log-probs and gradients are the same."""
    calls, original = [], logit_chunks._finite
    monkeypatch.setattr(logit_chunks, "_finite", lambda z, **to: calls.append(1) or original(z, **to))
    hidden, weight, _, ids, _ = head_inputs()
    counts, grads = [], []
    for entropy in (True, False):
        w = weight.clone().requires_grad_()
        with Operations() as operations:
            stats = chunked_logprobs(hidden, ids, weight=w, entropy=entropy)
            grads.append(torch.autograd.grad(stats.logprobs.sum(), w))
        counts.append(sum(operations.counts.values()))
        assert bool(calls) is entropy
        calls.clear()
        assert (stats.entropy is None) is not entropy
    assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert counts[1] < counts[0]


class Operations(TorchDispatchMode):
    """Counts operations, and remembers the largest tensor that any of them made."""

    def __init__(self):
        super().__init__()
        self.counts, self.largest = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[func] = self.counts.get(func, 0) + 1
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    """D2, D8 (there are no logits that could be gathered): neither in the forward nor in the backward, at first order at top level or inside torch.func.grad."""
    targets, vocab, hidden_size, chunk = 64, 500, 2, 3
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(targets, hidden_size, generator=g), torch.randn(vocab, hidden_size, generator=g)
    ids = torch.randint(vocab, (targets,), generator=g)
    limit = chunk * vocab

    def loss(hidden, weight):
        stats = chunked_logprobs(hidden, ids, weight=weight, chunk_size=chunk)
        return (stats.logprobs + stats.entropy).sum()

    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with Operations() as operations:
        torch.autograd.grad(loss(*leaves), leaves)
    assert operations.largest <= limit
    with Operations() as operations:
        grad(loss, (0, 1))(hidden.detach(), weight.detach())
    assert operations.largest <= limit


def test_what_is_saved_does_not_grow_with_the_number_of_chunks():
    """D3: the backward computes each chunk again."""
    hidden, weight, _, ids, _ = head_inputs(targets=24, vocab=50)
    sizes = []
    for chunk_size in (24, 6, 1):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            chunked_logprobs(hidden.requires_grad_(), ids, weight=weight.requires_grad_(), chunk_size=chunk_size)
        sizes.append(sum(saved))
    assert len(set(sizes)) == 1
    assert sizes[0] < 24 * 50


def test_frozen_head_has_no_gradient():
    hidden, weight, _, ids, _ = head_inputs()
    stats = chunked_logprobs(hidden.requires_grad_(), ids, weight=weight)
    stats.logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad.isfinite().all()


def test_half_precision_gradients_are_accumulated_in_float32():
    """A bfloat16 head over many chunks is as accurate as bfloat16 inputs allow."""
    hidden, weight, _, ids, _ = head_inputs(targets=400, vocab=11)
    exact = torch.autograd.grad(
        chunked_logprobs(
            hidden.bfloat16().double(), ids, weight=(w := weight.bfloat16().double().requires_grad_())
        ).logprobs.sum(),
        w,
    )[0]
    w16 = weight.bfloat16().requires_grad_()
    rough = torch.autograd.grad(chunked_logprobs(hidden.bfloat16(), ids, weight=w16, chunk_size=1).logprobs.sum(), w16)[
        0
    ]
    assert rough.dtype == torch.bfloat16
    assert ((rough.double() - exact).abs().max() / exact.abs().max()).item() < 0.02


def test_float32_over_a_large_vocabulary():
    """As near to float64 as plain torch is, up to a few roundings, where a dot product would lose 3e-4 of the entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (8, 50_000))
    ids = torch.randint(50_000, (8,), generator=generator)

    def plain(hidden, weight):
        logp = (hidden @ weight.T).log_softmax(-1)
        return logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def ours(hidden, weight):
        return tuple(chunked_logprobs(hidden, ids, weight=weight, temperature=1.0))

    def numbers(fn, dtype):
        h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        logprobs, entropy = fn(h, w)
        return [x.detach() for x in (logprobs, entropy, *torch.autograd.grad(logprobs.sum() + entropy.sum(), (h, w)))]

    exact = numbers(plain, torch.float64)
    for a, b, wide in zip(numbers(ours, torch.float32), numbers(plain, torch.float32), exact, strict=True):
        assert (a - wide).abs().max() <= 4 * (b - wide).abs().max()
