"""The KL over the vocabulary against plain Python: values, gradients, chunks, transforms, -inf, memory, models."""

import math
from inspect import unwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_head import HEADS, TRANSFORMS, Operations
from tiny import tiny
from torch.func import grad, vmap
from torch.testing import assert_close

import fnppo
from fnppo import Targets, TokenStats, functional_policy, pack_sequences, pad_sequences, padded_batch, ppo_loss
from fnppo.head import LinearHead
from fnppo.kl import importance_corrected, kl_k1, kl_k3
from fnppo.kl_exact import chunked_kl, exact_kl

F64 = torch.float64


def oracle_kl(logits, ref_logits):
    """Σ p log(p / q) over lists of numbers, where 0 log 0 = 0."""
    logs = []
    for z in (logits, ref_logits):
        top = max(z)
        total = top + math.log(math.fsum(math.exp(x - top) for x in z))
        logs.append([x - total for x in z])
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(*logs, strict=True) if math.exp(a) > 0)


def inputs(targets=5, vocab=7, sizes=(4, 3), seed=0, dtype=F64):
    """((hidden, weight, bias) of the policy, the same of the reference, temperatures)."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64).to(dtype)
    sides = [(draw(targets, size), draw(vocab, size), draw(vocab)) for size in sizes]
    return *sides, torch.rand(targets, generator=g, dtype=F64).to(dtype) + 0.5


def ours(side, ref, temperature, options, ref_options=None, **kwargs):
    ref_options = options if ref_options is None else ref_options
    heads = LinearHead(*side[1:], **options), LinearHead(*ref[1:], **ref_options)
    return chunked_kl(side[0], heads[0], ref[0], heads[1], temperature=temperature, **kwargs)


def definition(side, ref, temperature, options, ref_options=None):
    logs = []
    for (hidden, weight, bias), choice in ((side, options), (ref, options if ref_options is None else ref_options)):
        logits = (hidden @ weight.T + (0 if bias is None else bias)) * choice.get("scale", 1.0)
        if cap := choice.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        logs.append((logits / temperature[:, None]).log_softmax(-1))
    return (logs[0].exp() * (logs[0] - logs[1])).sum(-1)


@pytest.mark.core
@pytest.mark.parametrize("head", HEADS)
@given(
    targets=st.integers(0, 6),
    chunk_size=st.sampled_from([None, 1, 2, 5, 100]),
    bias=st.booleans(),
    ref_head=st.sampled_from(sorted(HEADS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_and_gradients(head, targets, chunk_size, bias, ref_head, seed):
    """D1: in any chunks, also with a ragged tail, above the number of targets, and without targets."""
    side, ref, temperature = inputs(targets, seed=seed)
    leaves = [x.requires_grad_() for x in (side if bias else side[:2])]
    side = (*leaves, None)[:3]
    options = HEADS[head], HEADS[ref_head]
    kl = ours(side, ref, temperature, *options, chunk_size=chunk_size)
    expected = definition(side, ref, temperature, *options)
    assert kl.shape == (targets,)
    assert_close(kl, expected, rtol=1e-11, atol=1e-11)
    upstream = torch.linspace(-1, 2, targets, dtype=F64)
    found = torch.autograd.grad((upstream * kl).sum(), leaves, materialize_grads=True)
    assert_close(found, torch.autograd.grad((upstream * expected).sum(), leaves, materialize_grads=True))


@pytest.mark.core
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3), st.integers(1, 5))
def test_against_plain_python(seed, temperature, vocab):
    (hidden, weight, bias), ref, _ = inputs(3, vocab, seed=seed)
    kl = ours((hidden, weight, bias), ref, temperature, {}, chunk_size=2)
    logits, ref_logits = ((h @ w.T + b) / temperature for h, w, b in ((hidden, weight, bias), ref))
    expected = [oracle_kl(*pair) for pair in zip(logits.tolist(), ref_logits.tolist(), strict=True)]
    assert kl.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert min(kl.tolist()) >= -1e-12


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("head", ["plain", "scale and softcap"])
def test_transforms(head, transform):
    (*side, tangents), (ref, other) = [*inputs()[:1], inputs(seed=1)[0]], (inputs()[1], inputs(seed=2)[1])
    temperature = inputs()[2]
    results = []
    for kl in (lambda *x: ours(*x, chunk_size=2), definition):
        f = lambda *x, kl=kl: kl(x, ref, temperature, HEADS[head]).square().sum()
        results.append(TRANSFORMS[transform](f, side[0], tangents))
    assert_close(*results, rtol=1e-10, atol=1e-10)
    both = torch.stack([ref[0], other[0]])
    batched = vmap(lambda h: ours(side[0], (h, *ref[1:]), temperature, HEADS[head], chunk_size=2))(both)
    assert_close(batched, torch.stack([definition(side[0], (h, *ref[1:]), temperature, HEADS[head]) for h in both]))


def test_the_gradient_can_be_differentiated():
    side, ref, temperature = inputs()
    second = []
    for kl in (lambda *x: ours(*x, chunk_size=2), definition):
        leaves = [x.clone().requires_grad_() for x in side]
        loss = kl(leaves, ref, temperature, HEADS["scale and softcap"]).square().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    assert_close(*second, rtol=1e-10, atol=1e-10)


def test_no_gradient_flows_to_the_reference():
    side, ref, temperature = inputs()
    leaves = [x.clone().requires_grad_() for x in (*side, *ref)]
    kl = ours(leaves[:3], leaves[3:], temperature, {}).sum()
    found = torch.autograd.grad(kl, leaves, allow_unused=True)
    assert all(g is not None for g in found[:3])
    assert found[3:] == (None, None, None)
    frozen = ours([x.detach() for x in leaves[:3]], leaves[3:], temperature, {})
    assert not frozen.requires_grad
    slopes = grad(lambda ref: ours(side, ref, temperature, {}).sum())(ref)
    assert all(bool((g == 0).all()) for g in slopes)


def by_bias(logits):
    """A head whose logits are its bias."""
    logits = torch.tensor(logits, dtype=F64)
    return torch.zeros(1, 2, dtype=F64), torch.zeros(len(logits), 2, dtype=F64), logits


INF = math.inf
PATHS = {
    "formula": lambda f, x: torch.autograd.grad(f(x), x)[0],
    "differentiable": lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0],
    "grad": lambda f, x: grad(f)(x.detach()),
    "vmap of grad": lambda f, x: vmap(grad(f))(x.detach()[None])[0],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("logits", "ref"),
    [
        ([1, 0, -INF], [0.5, 0.2, 0.1]),  # the policy cannot
        ([1, 0, -INF], [0.5, 0.2, -INF]),  # neither can
        ([1, 0, -2000], [0.5, 0.2, -INF]),  # p is 0, its logarithm is not -inf
    ],
)
def test_impossible_tokens_add_nothing(logits, ref, path):
    """C1, C2 of the KL: value and gradient are those of the vocabulary without the token."""
    value = oracle_kl(logits[:2], ref[:2]) + (
        0 if ref[2] == -INF else math.log(sum(map(math.exp, ref)) / sum(map(math.exp, ref[:2])))
    )
    hidden, weight, bias = by_bias(logits)
    f = lambda bias: ours((hidden, weight, bias), by_bias(ref), 1.0, {}).sum()
    leaf = bias.clone().requires_grad_()
    assert f(leaf).item() == pytest.approx(value, abs=1e-12)
    slopes = PATHS[path](f, leaf)
    p = [math.exp(x) / (math.e + 1) for x in logits[:2]]
    log_q = [x - math.log(math.fsum(math.exp(y) for y in ref)) for x in ref[:2]]
    expected = [a * (math.log(a) - b - value) for a, b in zip(p, log_q, strict=True)]
    assert slopes.tolist() == pytest.approx([*expected, 0.0], abs=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_what_only_the_policy_can_choose_is_infinitely_far(path):
    """And a cap takes it out with gradient 0, not NaN, while other targets keep theirs."""
    bias = by_bias([1, 0, 0.5])[2].requires_grad_()
    hidden, weight, _ = by_bias([0, 0, 0])
    far, near = by_bias([0.5, 0.2, -INF]), by_bias([0.5, 0.2, 0.1])
    assert ours((hidden, weight, bias), far, 1.0, {}).item() == INF
    index = torch.arange(1)
    one = torch.ones(1, dtype=F64)
    targets = Targets(index, index, index, index, one, one, one)

    def loss(bias, refs=(far, near)):
        terms = [ours((hidden, weight, bias), ref, 1.0, {}) for ref in refs]
        return sum(ppo_loss(TokenStats(one), targets, kl=kl, kl_coef=1.0, kl_cap=5.0)[0] for kl in terms)

    assert_close(PATHS[path](loss, bias), PATHS[path](lambda x: loss(x, (near,)), bias))


def test_c16():
    """The table of C16, from the head: logits [.3, -.2], uniform reference."""
    hidden, weight, bias = by_bias([0.3, -0.2])
    bias = bias.requires_grad_()
    kl = ours((hidden, weight, bias), by_bias([0, 0]), 1.0, {})
    assert kl.item() == pytest.approx(0.0303, abs=1e-4)
    assert torch.autograd.grad(kl, bias)[0].tolist() == pytest.approx([0.117502, -0.117502], abs=1e-6)


@pytest.mark.core
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3))
def test_it_is_the_expectation_of_the_estimators(seed, temperature):
    """E[k1] = E[k3] = KL, and under another sampler with the importance correction, gradients too."""
    (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias), _ = inputs(1, seed=seed)
    leaf = bias.requires_grad_()
    kl = ours((hidden, weight, leaf), (ref_hidden, ref_weight, ref_bias), temperature, {})
    slopes = torch.autograd.grad(kl.sum(), leaf)[0]
    logp, logq = (
        ((h @ w.T + b) / temperature).log_softmax(-1)[0]
        for h, w, b in ((hidden, weight, leaf), (ref_hidden, ref_weight, ref_bias))
    )
    sampler = inputs(1, seed=seed + 1)[0][2].log_softmax(-1)
    for estimator in (kl_k1, kl_k3):
        assert (logp.exp() * estimator(logp, logq)).sum().item() == pytest.approx(kl.item(), rel=1e-9, abs=1e-12)
        corrected = (sampler.exp() * importance_corrected(estimator, sampler)(logp, logq)).sum()
        assert corrected.item() == pytest.approx(kl.item(), rel=1e-9, abs=1e-12)
        assert_close(torch.autograd.grad(corrected, leaf, retain_graph=True)[0], slopes, rtol=1e-8, atol=1e-10)


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    """D2: forward and backward, at top level and inside torch.func.grad."""
    side, ref, temperature = inputs(64, 500, (2, 2))
    run = lambda side: ours(side, ref, temperature, {}, chunk_size=3).sum()
    leaves = tuple(x.requires_grad_() for x in side)
    with Operations() as operations:
        torch.autograd.grad(run(leaves), leaves)
    assert operations.largest <= 3 * 500
    with Operations() as operations:
        grad(run)(tuple(x.detach() for x in side))
    assert operations.largest <= 3 * 500


def test_what_is_saved_grows_neither_with_chunks_nor_with_the_logits():
    """D3: inputs and one KL a target are saved; no logits."""

    def saved(targets, vocab, chunk_size):
        side, ref, temperature = inputs(targets, vocab)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            ours([x.requires_grad_() for x in side], ref, temperature, {}, chunk_size=chunk_size)
        return sum(sizes)

    assert saved(24, 50, 24) == saved(24, 50, 6) == saved(24, 50, 1)
    # one more target: two hidden states, a temperature and a KL; one more entry: a row of each head and two biases
    assert saved(25, 50, 6) - saved(24, 50, 6) == 4 + 3 + 1 + 1
    assert saved(24, 51, 6) - saved(24, 50, 6) == 4 + 3 + 1 + 1


def test_float32_is_as_near_as_plain_torch():
    exact = None
    for dtype in (F64, torch.float32):
        sides = [tuple(x.to(dtype) for x in side) for side in inputs(8, 20_000, (16, 16), dtype=torch.float32)[:2]]
        results = []
        for kl in (ours, definition):
            leaves = [x.clone().requires_grad_() for x in sides[0]]
            value = kl(leaves, sides[1], torch.ones(8, dtype=dtype), {})
            results.append([value.detach(), *torch.autograd.grad(value.sum(), leaves)])
        if exact is None:
            exact = results[1]
    for a, b, wide in zip(*results, exact, strict=True):
        assert (a - wide).abs().max() <= 4 * (b - wide).abs().max()


def test_half_precision_is_computed_in_float32():
    """C3, C4."""
    side, ref, _ = inputs(dtype=torch.bfloat16)
    kl = ours(side, ref, 0.7, {})
    assert kl.dtype == torch.float32
    logits, ref_logits = ((h @ w.T).float() + b for h, w, b in (side, ref))
    expected = [oracle_kl(*p) for p in zip((logits / 0.7).tolist(), (ref_logits / 0.7).tolist(), strict=True)]
    assert kl.tolist() == pytest.approx(expected, rel=1e-4)
    mixed = ours([x.double() for x in side], ref, 0.7, {})
    assert mixed.dtype == F64
    assert mixed.tolist() == pytest.approx(expected, rel=0.05)


def test_what_does_not_fit_is_refused():
    side, ref, temperature = inputs()
    with pytest.raises(ValueError, match="the reference has 6 logits, the policy 7"):
        ours(side, (ref[0], ref[1][:6], ref[2][:6]), temperature, {})
    with pytest.raises(ValueError, match="ref_hidden has 4 rows, hidden 5"):
        unwrap(chunked_kl)(side[0], LinearHead(*side[1:]), ref[0][:4], LinearHead(*ref[1:]), temperature=1.0)
    with pytest.raises(ValueError, match=r"ref_bias has shape \(3,\); ref_weight has 7 rows"):
        ours(side, (*ref[:2], ref[2][:3]), temperature, {})
    with pytest.raises(ValueError, match="temperature is 0"):
        ours(side, ref, 0, {})
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ours(side, ref, temperature, {}, chunk_size=0)


BATCH = padded_batch([[3, 1, 4], [1], [5, 9]], [[2, 6, 5], [3, 5, 8, 9], []])


@pytest.mark.parametrize("layout", [pack_sequences, pad_sequences])
@pytest.mark.parametrize("families", [("llama", "llama"), ("phi", "gpt2")])
def test_of_two_models_is_that_of_their_logits(families, layout):
    """Row by row, at a temperature, from whole logits; gradients by autograd through them."""
    (policy, params), (ref_policy, ref_params) = (functional_policy(tiny(family)) for family in families)
    params = {name: (value * 1.3).requires_grad_() for name, value in params.items()}
    kl = exact_kl(
        params, ref_params, layout(BATCH), policy=policy, ref_policy=ref_policy, temperature=0.7, chunk_size=2
    )
    expected = []
    for row in range(3):
        inputs = pad_sequences(fnppo.select_rows(BATCH, [row])).inputs
        logs = [
            (head.head.bind(tree).logits(head.hidden_states(tree, inputs)) / 0.7).log_softmax(-1)
            for head, tree in ((policy, params), (ref_policy, ref_params))
        ]
        for place in BATCH.loss_mask[row][BATCH.attention_mask[row]].nonzero()[:, 0]:
            expected.append((logs[0].exp() * (logs[0] - logs[1]))[place - 1].sum())
    expected = torch.stack(expected)
    assert_close(kl, expected, rtol=1e-9, atol=1e-9)
    leaves = list(params.values())
    found, wanted = (torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True) for x in (kl, expected))
    assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    assert kl.shape == (7,)


def test_of_a_model_to_itself_is_zero_and_the_loss_takes_it():
    policy, params = functional_policy(tiny("llama"))
    mb = pack_sequences(fnppo.token_mean(BATCH._replace(advantages=torch.zeros_like(BATCH.input_ids, dtype=F64))))
    mb = mb._replace(targets=mb.targets._replace(old_logprobs=torch.zeros(7, dtype=F64)))

    def loss_fn(params, mb):
        stats = fnppo.forward_logprobs(params, mb, policy=policy, temperature=1.0)
        kl = exact_kl(params, ref, mb, policy=policy, temperature=1.0)
        return ppo_loss(stats, mb.targets, kl=kl, kl_coef=1.0)

    ref = params
    (loss, _), grads = fnppo.value_and_grad(loss_fn)(params, mb)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert max(g.abs().max().item() for g in grads.values()) < 1e-12
    ref = {name: value * 1.2 for name, value in params.items()}
    (loss, metrics), grads = fnppo.value_and_grad(loss_fn)(params, mb)
    assert loss.item() == pytest.approx(fnppo.summarize(metrics)["kl"])
    assert loss.item() > 1e-3
    inside = torch.func.grad(lambda p: loss_fn(p, mb)[0])(params)
    assert_close(inside, grads, rtol=1e-9, atol=1e-12)


def test_dropout_is_not_given_to_the_reference():
    policy, params = functional_policy(tiny("llama"))
    random = policy.with_dropout_seed(0)
    with pytest.raises(ValueError, match="the policy draws dropout"):
        exact_kl(params, params, pack_sequences(BATCH), policy=random, temperature=1.0)
    assert exact_kl(params, params, pack_sequences(BATCH), policy=random, ref_policy=policy, temperature=1.0).shape == (
        7,
    )
