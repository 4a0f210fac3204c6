"""Attention over trees without masks: its parts by hand, what it calls, and half precision. Values and gradients on all
kinds of trees stand in test_attention.py."""

import pytest
import torch
from test_attention import run, tensors, tree
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from fnppo import math_attention, sdpa_attention
from fnppo.segments import segments_of
from fnppo.types import PackedInputs


def calls(run):
    """Names of the operators that `run` calls, and what it returns."""
    names = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Record():
        result = run()
    return names, result


def test_parts_by_hand():
    """A prompt at 0:2, responses at 2:5 and 5:6 and an empty one, a branch at 6:8 of the first response, a row at 8:10."""
    parts = [((q.start, q.stop), (k.start, k.stop), causal) for q, k, causal in segments_of(tree()[0]).packed.parts]
    assert parts[:5] == [((a, b), (a, b), True) for a, b in ((0, 2), (2, 5), (5, 6), (6, 8), (8, 10))]
    assert parts[5:] == [((2, 8), (0, 2), False), ((6, 8), (2, 5), False)]


def test_descendants_that_do_not_stand_together():
    inputs = tree()[0]
    inputs = inputs._replace(parents=torch.tensor([-1, 0, -1, -1, 0, 1]))
    parts = segments_of(inputs).packed.parts
    assert [(q, k) for q, k, causal in parts if not causal] == [
        (slice(2, 5), slice(0, 2)),
        (slice(6, 10), slice(0, 2)),
        (slice(8, 10), slice(2, 5)),
    ]


def test_no_keys_are_gathered_and_no_mask_is_made():
    segments, qkv = segments_of(tree()[0]), [x.requires_grad_() for x in tensors(4, 2, 10, value_dim=4)]
    names, output = calls(lambda: sdpa_attention(*qkv, segments, scaling=0.5))
    assert names.count("_scaled_dot_product_flash_attention_for_cpu") == 7
    assert not {"index_select", "index", "masked_fill", "where", "bitwise_and"} & set(names)
    names, _ = calls(lambda: torch.autograd.grad(output.sum(), qkv))
    assert names.count("_scaled_dot_product_flash_attention_for_cpu_backward") == 7


def test_first_order_only():
    inputs, qkv = tree()[0], [x.requires_grad_() for x in tensors(4, 2, 10, value_dim=4)]
    grads = torch.autograd.grad(run(sdpa_attention, qkv, inputs, scaling=0.5).square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grads[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_rounding_of_the_definition(dtype):
    inputs, qkv = tree()[0], [x.requires_grad_() for x in tensors(4, 2, 10, value_dim=4)]
    low = [x.detach().to(dtype).requires_grad_() for x in qkv]
    found = []
    for backend, leaves in ((math_attention, qkv), (sdpa_attention, low)):
        output = run(backend, leaves, inputs, scaling=0.5)
        assert output.dtype == leaves[0].dtype
        found.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for exact, rounded in zip(*found, strict=True):
        assert_close(rounded.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps * exact.abs().max().item())


def test_numbers_of_a_head_that_are_no_neighbours():
    """The kernel would read beside them."""
    inputs, qkv = tree()[0], tensors(4, 2, 10, value_dim=4)
    apart = [x.mT.contiguous().mT.requires_grad_() for x in qkv]
    assert all(x.stride(-1) != 1 for x in apart)
    found, expected = (run(backend, apart, inputs, scaling=0.5) for backend in (sdpa_attention, math_attention))
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad(x.square().sum(), apart) for x in (found, expected)]
    assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_long_dialogues_in_half_precision():
    """Sums over ancestors are not rounded at each: 200 turns are as exact as one segment of their tokens."""
    turns, each = 200, 3
    tokens = turns * each
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 2, tokens, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    qkv = [x.bfloat16() for x in qkv]
    one = PackedInputs(torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), torch.tensor([0, tokens]))
    bounds = torch.arange(0, tokens + 1, each)
    many = one._replace(cu_seqlens=bounds, parents=torch.arange(-1, turns - 1))
    exact = run(math_attention, [x.double() for x in qkv], one, scaling=0.35)
    errors = [(run(sdpa_attention, qkv, inputs, scaling=0.35).double() - exact).norm() for inputs in (one, many)]
    assert errors[1] <= 1.5 * errors[0]
