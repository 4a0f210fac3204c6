"""Segment attention: every backend against one query at a time, and what each refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.testing import assert_close

from fnppo import attention as module
from fnppo.attention import choose_attention, flash_attention, math_attention, sdpa_attention, varlen_attention
from fnppo.segments import chunks_of, segments_of
from fnppo.types import PackedInputs, PaddedInputs

F64 = torch.float64


def packed(lengths):
    total = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]) if total else torch.zeros(0, dtype=torch.long)
    return PackedInputs(torch.zeros(total, dtype=torch.long), positions, tensor([0, *lengths]).cumsum(0).int())


def tensors(heads, kv_heads, tokens, batch=1, seed=0, value_dim=3):
    g = torch.Generator().manual_seed(seed)
    draw = lambda h, d: torch.randn(batch, h, tokens, d, generator=g, dtype=F64)
    return draw(heads, 4), draw(kv_heads, 4), draw(kv_heads, value_dim)


def one_query_at_a_time(query, key, value, sequences, *, scaling, window=None, chunk=None, softcap=None, sinks=None):
    """`sequences`: for each row of the batch, lists of the places that belong together, in order."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=F64)
    groups = query.shape[1] // key.shape[1]
    for b, rows in enumerate(sequences):
        for places in rows:
            for i, q in enumerate(places):
                first = max(0, i - window + 1 if window else 0, i // chunk * chunk if chunk else 0)
                seen = places[first : i + 1]
                for h in range(query.shape[1]):
                    scores = [(query[b, h, q] @ key[b, h // groups, k]).item() * scaling for k in seen]
                    if softcap:
                        scores = [softcap * math.tanh(s / softcap) for s in scores]
                    total = sum(map(math.exp, scores)) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                    for s, k in zip(scores, seen, strict=True):
                        output[b, h, q] += math.exp(s) / total * value[b, h // groups, k]
    return output


ASKED = st.fixed_dictionaries(
    {
        "scaling": st.sampled_from([0.5, 1.0]),
        "window": st.sampled_from([None, 1, 2, 3, 50]),
        "chunk": st.sampled_from([None, 1, 2, 3, 50]),
        "softcap": st.sampled_from([None, 1.5]),
        "sinks": st.sampled_from([None, "some"]),
    }
)


def run(backend, qkv, inputs, *, chunk=None, **asked):
    segments = segments_of(inputs)
    return backend(*qkv, segments if chunk is None else chunks_of(segments, chunk), **asked)


@pytest.mark.core
@pytest.mark.parametrize("backend", [math_attention, sdpa_attention, choose_attention])
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(sum), grouped=st.booleans(), asked=ASKED)
def test_packed(backend, lengths, grouped, asked):
    """B3, B10, B13: segments of any length, also 0 and 1; windows, softcap, sinks, scaling, grouped queries."""
    if asked["sinks"]:
        asked = asked | {"sinks": torch.linspace(-1, 1, 4, dtype=F64)}
    inputs = packed(lengths)
    qkv = [x.requires_grad_() for x in tensors(4, 2 if grouped else 4, sum(lengths))]
    bounds = inputs.cu_seqlens.tolist()
    places = [[list(range(a, b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]]
    output = run(backend, qkv, inputs, **asked)
    assert_close(output, one_query_at_a_time(*qkv, places, **asked), rtol=1e-10, atol=1e-10)
    if backend is not math_attention:  # gradients against the definition
        seed = torch.randn(output.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
        ours = torch.autograd.grad((output * seed).sum(), qkv)
        reference = torch.autograd.grad((run(math_attention, qkv, inputs, **asked) * seed).sum(), qkv)
        assert_close(ours, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.core
@pytest.mark.parametrize("backend", [math_attention, sdpa_attention, choose_attention])
@given(mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3), asked=ASKED)
def test_padded_with_holes(backend, mask, asked):
    """B7: a window counts existing tokens; padding holds NaN-free garbage that nobody reads."""
    if asked["sinks"]:
        asked = asked | {"sinks": torch.linspace(-1, 1, 4, dtype=F64)}
    mask = tensor(mask)
    inputs = PaddedInputs(torch.zeros(mask.shape, dtype=torch.long), (mask.cumsum(1) - 1).clamp(min=0), mask)
    qkv = tensors(4, 2, 5, batch=mask.shape[0])
    output = run(backend, qkv, inputs, **asked)
    expected = one_query_at_a_time(*qkv, [[row.nonzero()[:, 0].tolist()] for row in mask], **asked)
    real = mask[:, None, :, None].expand_as(output)
    assert_close(output[real], expected[real], rtol=1e-10, atol=1e-10)
    assert output.isfinite().all()


def test_a_segment_cannot_see_another():
    """B3: replacing every token of A changes nothing in B, to the bit."""
    segments = segments_of(packed([3, 4]))
    q, k, v = tensors(2, 2, 7)
    for backend in (math_attention, sdpa_attention):
        before = backend(q, k, v, segments, scaling=0.5)
        changed = [torch.cat([x[:, :, :3] + 1.0, x[:, :, 3:]], 2) for x in (q, k, v)]
        after = backend(*changed, segments, scaling=0.5)
        assert torch.equal(before[:, :, 3:], after[:, :, 3:])
        assert not torch.equal(before[:, :, :3], after[:, :, :3])


def test_every_transform_takes_the_math_backend():
    segments = segments_of(packed([3, 2]))
    q, k, v = tensors(2, 1, 5)
    ours = lambda q: choose_attention(q, k, v, segments, scaling=0.5).sin().sum()
    reference = lambda q: math_attention(q, k, v, segments, scaling=0.5).sin().sum()
    for run in (
        lambda f: grad(f)(q),
        lambda f: grad(lambda q: grad(f)(q).square().sum())(q),
        lambda f: jvp(grad(f), (q,), (q + 1,))[1],
        lambda f: vmap(grad(f))(torch.stack([q, q + 1])),
    ):
        assert_close(run(ours), run(reference), rtol=1e-12, atol=1e-12)


def test_sdpa_does_not_build_a_mask_over_all_tokens():
    """One call a segment, with no mask of (Σ length)² entries."""
    from test_head import Operations

    lengths = [10] * 40
    qkv = tensors(1, 1, sum(lengths))
    with Operations() as operations:
        sdpa_attention(*qkv, segments_of(packed(lengths)), scaling=0.5)
    assert operations.largest <= 4 * sum(lengths)


@pytest.mark.parametrize("backend", [varlen_attention, flash_attention])
def test_a_forced_backend_says_why_not(backend):
    """J3, J5."""
    q, k, v = tensors(2, 2, 3)
    with pytest.raises(
        ValueError, match=f"{backend.__name__} cannot be used: the model is on cpu, and it runs on CUDA only"
    ):
        backend(q, k, v, segments_of(packed([3])), scaling=0.5)
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="the batch is padded, and it needs packed segments"):
        backend(q, k, v, segments_of(PaddedInputs(mask.long(), mask.long(), mask)), scaling=0.5)


def on_cuda(dim=64, dtype=torch.bfloat16):
    """A tensor that says it is on a GPU, so that a machine without one can ask what a backend would answer."""
    with FakeTensorMode():
        return torch.empty(1, 2, 3, dim, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("backend", "dim", "value_dim", "dtype", "asked", "reason"),
    [
        (varlen_attention, 64, 64, torch.float32, {}, "needs float16 or bfloat16"),
        (varlen_attention, 64, 32, torch.bfloat16, {}, "needs them equal"),
        (varlen_attention, 512, 512, torch.bfloat16, {}, "at most 256"),
        (varlen_attention, 64, 64, torch.bfloat16, {"sinks": 1}, "attention sinks"),
        (varlen_attention, 64, 64, torch.bfloat16, {"softcap": 1.0}, "caps its attention scores"),
        (varlen_attention, 64, 64, torch.bfloat16, {"dropout": 0.1}, "dropout"),
        (varlen_attention, 64, 64, torch.bfloat16, {"window": 4}, None),
        (flash_attention, 64, 64, torch.bfloat16, {"softcap": 1.0}, "flash-attn is not installed"),
        (sdpa_attention, 64, 64, torch.float32, {"softcap": 1.0, "sinks": 1}, None),
    ],
)
def test_reasons(backend, dim, value_dim, dtype, asked, reason):
    query, value = on_cuda(dim, dtype), on_cuda(value_dim, dtype)
    answer = module._why_not(backend, query, query, value, segments_of(packed([3])), **asked)
    assert answer is None if reason is None else reason in answer


def test_flash_attn_is_used_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(module, "_has_flash_attn", lambda: True)
    query = on_cuda()
    assert module._why_not(flash_attention, query, query, query, segments_of(packed([3])), softcap=1.0) is None


def test_flash_attn_that_cannot_be_imported(monkeypatch, tmp_path):
    """J5: the cause is said, with what is used in its place; not swallowed, and no ImportError in the middle of a step."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    module._has_flash_attn.cache_clear()
    with pytest.warns(UserWarning, match=r"undefined symbol: _ZN3c10\): torch's varlen kernel or SDPA is used"):
        reason = module._why_not(flash_attention, *[on_cuda()] * 3, segments_of(packed([3])))
    assert "not installed, or cannot be imported" in reason
    module._has_flash_attn.cache_clear()


def test_the_cuda_kernels_get_no_empty_segment():
    """B10."""
    k, v = torch.arange(5.0)[:, None, None], torch.arange(5.0)[:, None, None]
    key, _, cu_q, cu_k, longest_q, longest_k = module._boundaries(k, v, segments_of(packed([3, 0, 2])))
    assert cu_q.tolist() == cu_k.tolist() == [0, 3, 5]
    assert longest_q == longest_k == 3
    assert key is k


def tree():
    """A prompt of 2, its responses of 3 and 1, an empty one, a branch of 2 from the first response, a lone row of 2."""
    lengths, parents = [2, 3, 1, 0, 2, 2], [-1, 0, 0, 0, 1, -1]
    starts = [0, 2, 2, 2, 5, 0]
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    inputs = PackedInputs(torch.zeros(10).long(), positions, tensor([0, *lengths]).cumsum(0).int(), tensor(parents))
    places = [[0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 2, 3, 4, 6, 7], [8, 9]]  # each line from its root
    return inputs, places


@pytest.mark.core
@pytest.mark.parametrize("backend", [math_attention, sdpa_attention, choose_attention])
@given(asked=ASKED)
def test_segments_that_continue_others(backend, asked):
    """A tree of prompts, responses and branches, in value and gradient."""
    if asked["sinks"]:
        asked = asked | {"sinks": torch.linspace(-1, 1, 4, dtype=F64)}
    inputs, places = tree()
    qkv = [x.requires_grad_() for x in tensors(4, 2, 10)]
    output = run(backend, qkv, inputs, **asked)
    for line in places:
        expected = one_query_at_a_time(*qkv, [[line]], **asked)
        assert_close(output[:, :, line], expected[:, :, line], rtol=1e-10, atol=1e-10)
    seed = torch.randn(output.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * seed).sum(), qkv)
    reference = torch.autograd.grad((run(math_attention, qkv, inputs, **asked) * seed).sum(), qkv)
    assert_close(ours, reference, rtol=1e-10, atol=1e-10)


@st.composite
def trees(draw):
    """Segments of 0 to 3 tokens, each a root or the child of any before it, and the places of each line from its root."""
    lengths, parents, starts, lines = [], [], [], []
    for segment in range(draw(st.integers(1, 7))):
        parents.append(draw(st.integers(-1, segment - 1)))
        line = lines[parents[-1]] if parents[-1] >= 0 else []
        lengths.append(draw(st.integers(0 if segment else 1, 3)))
        starts.append(len(line))
        lines.append([*line, *range(sum(lengths[:-1]), sum(lengths))])
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    tokens = sum(lengths)
    cu_seqlens = tensor([0, *lengths]).cumsum(0).int()
    return PackedInputs(torch.zeros(tokens).long(), positions, cu_seqlens, tensor(parents)), lines


@pytest.mark.core
@pytest.mark.parametrize("backend", [math_attention, sdpa_attention, choose_attention])
@given(tree=trees(), asked=ASKED, value_dim=st.sampled_from([3, 4]))
def test_trees_of_segments(backend, tree, asked, value_dim):
    """Nested to any depth, with empty segments anywhere, in value and gradient; queries and values of one size or two."""
    if asked["sinks"]:
        asked = asked | {"sinks": torch.linspace(-1, 1, 4, dtype=F64)}
    inputs, lines = tree
    qkv = [x.requires_grad_() for x in tensors(4, 2, inputs.input_ids.numel(), value_dim=value_dim)]
    output = run(backend, qkv, inputs, **asked)
    for line in lines:
        expected = one_query_at_a_time(*qkv, [[line]], **asked)
        assert_close(output[:, :, line], expected[:, :, line], rtol=1e-10, atol=1e-10)
    seed = torch.randn(output.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * seed).sum(), qkv)
    reference = torch.autograd.grad((run(math_attention, qkv, inputs, **asked) * seed).sum(), qkv)
    assert_close(ours, reference, rtol=1e-10, atol=1e-10)


def test_the_boundaries_of_many_segments_take_linear_time():
    """They are made anew in each layer."""

    class Length(int):
        """A length that counts how often it is added."""

        additions = 0

        def __add__(self, other):
            Length.additions += 1
            return Length(int(self) + int(other))

        __radd__ = __add__

    n = 100
    lengths = tuple(Length(1) for _ in range(n))
    segments = segments_of(packed([1] * n))
    segments = segments._replace(packed=segments.packed._replace(keys=lengths, gather=torch.arange(n)))
    places = torch.arange(float(n))[:, None, None]
    key, _, _, cu_k, _, _ = module._boundaries(places, places, segments)
    assert torch.equal(key, places)
    assert cu_k.tolist() == list(range(n + 1))
    assert Length.additions <= 4 * n


@pytest.mark.parametrize("chunk", [None, 2, 3])
def test_the_cuda_kernels_get_the_keys_of_the_whole_line(chunk):
    """What they are given, walked through by hand: causality aligned at the end of a segment gives the definition."""
    inputs, _ = tree()
    segments = segments_of(inputs) if chunk is None else chunks_of(segments_of(inputs), chunk)
    q, k, v = tensors(2, 2, 10)
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    key, value, cu_q, cu_k, longest_q, longest_k = module._boundaries(flat[1], flat[2], segments)
    assert (longest_q, longest_k) == {None: (3, 7), 2: (2, 2), 3: (2, 3)}[chunk]
    expected = math_attention(q, k, v, segments, scaling=0.5)[0].transpose(0, 1)
    assert_close(as_the_kernels_walk(flat[0], key, value, cu_q, cu_k), expected, rtol=1e-10, atol=1e-10)


def as_the_kernels_walk(query, key, value, cu_q, cu_k, window=None):
    """Segment by segment, causality and windows aligned at the end of each, which is all that the CUDA kernels know."""
    outputs = []
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        n, m = int(q1 - q0), int(k1 - k0)
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * 0.5
        scores = scores.masked_fill((behind < 0) | (behind >= (window or math.inf)), -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[k0:k1]))
    return torch.cat(outputs)


@pytest.mark.core
@given(tree=trees(), chunk=st.sampled_from([None, 1, 2, 3]), window=st.sampled_from([None, 1, 2, 3]))
def test_the_cuda_kernels_on_trees(tree, chunk, window):
    """Boundaries and gathered keys of trees nested to any depth, and no segment without queries among them."""
    inputs, _ = tree
    segments = segments_of(inputs) if chunk is None else chunks_of(segments_of(inputs), chunk)
    q, k, v = tensors(2, 2, inputs.input_ids.numel())
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    key, value, cu_q, cu_k, longest_q, longest_k = module._boundaries(flat[1], flat[2], segments)
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert bool((cu_q.diff() > 0).all())
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert (int(cu_q[-1]), int(cu_k[-1])) == (q.shape[2], key.shape[0])
    expected = math_attention(q, k, v, segments, scaling=0.5, window=window)[0].transpose(0, 1)
    assert_close(as_the_kernels_walk(flat[0], key, value, cu_q, cu_k, window), expected, rtol=1e-10, atol=1e-10)


def test_a_forced_sdpa_says_that_it_has_no_second_derivative():
    """J3: instead of torch's own NotImplementedError; one derivative is fine."""
    segments = segments_of(packed([3]))
    q, k, v = tensors(2, 2, 3)
    f = lambda q: sdpa_attention(q, k, v, segments, scaling=0.5).sin().sum()
    assert grad(f)(q).isfinite().all()
    for run in (
        lambda: jvp(f, (q,), (q,)),
        lambda: grad(lambda q: grad(f)(q).sum())(q),
        lambda: jvp(grad(f), (q,), (q,)),
    ):
        with pytest.raises(ValueError, match="sdpa_attention cannot be used: inside jvp or a second derivative"):
            run()
