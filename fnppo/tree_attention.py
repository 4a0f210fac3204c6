"""Attention over segments that continue others, on a CPU: without masks, gathered keys or copies.

What a segment sees is itself, up to each query's position, and its ancestors, as a whole. So the work is a causal triangle
for each segment and, for each segment with descendants, a full rectangle of their queries and its keys:

                keys    prompt   a     b
    prompt               ◣
    a (after prompt)     ■      ◣
    b (after prompt)     ■             ◣

Each part is one call of torch's fused kernel, which also returns L = log Σ exp(score) of each query. Two parts o₁, o₂ of
one query are joined by their L (Milakov and Gimelshein, 2018; Liu et al., 2023, section 3):

    L = log(exp L₁ + exp L₂)        o = exp(L₁ - L) o₁ + exp(L₂ - L) o₂

The kernel's backward needs the o and L of a query over all its keys, so each part is given the joined ones.
"""

from typing import Any

import torch
from torch import Tensor

from fnppo.segments import PackedSegments, Part

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, *, scaling: float) -> Tensor:
    """Causal attention of the segments of `packed`, which has `parts`. Shapes as in `fnppo.attention`; first order only."""
    output: Tensor = _TreeAttention.apply(query, key, value, packed.parts, scaling)
    return output


def can_walk(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments) -> bool:
    """Whether the kernel takes these tensors, and the segments are parts of trees."""
    same = query.shape[-1] == value.shape[-1] and query.dtype == key.dtype == value.dtype
    # The kernel reads the numbers of a head as neighbours, and does not look whether they are.
    neighbours = all(x.stride(-1) == 1 for x in (query, key, value))
    return packed.parts is not None and query.device.type == "cpu" and same and neighbours


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: tuple[Part, ...], scaling: float) -> Tensor:
        # What parts are added up in: rounded at every ancestor, a long dialogue would lose a bit each few turns.
        precise = torch.promote_types(query.dtype, torch.float32)
        output = torch.empty_like(query, dtype=precise)
        log_sum = torch.full(query.shape[:3], -torch.inf, dtype=precise, device=query.device)
        for q, k, causal in parts:
            o, own = _forward(query[:, :, q], key[:, :, k], value[:, :, k], 0.0, causal, scale=scaling)
            if causal:  # the first part of its queries
                output[:, :, q], log_sum[:, :, q] = o, own
                continue
            before = log_sum[:, :, q]
            joined = torch.logaddexp(before, own)
            old, new = (torch.exp(x - joined)[..., None] for x in (before, own))
            output[:, :, q] = output[:, :, q] * old + o * new
            log_sum[:, :, q] = joined
        output = output.to(query.dtype)
        ctx.parts, ctx.scaling = parts, scaling
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        grads = [torch.empty_like(x, dtype=log_sum.dtype) for x in (query, key, value)]
        for q, k, causal in ctx.parts:
            found = _backward(
                grad[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k], output[:, :, q], log_sum[:, :, q],
                0.0, causal, scale=ctx.scaling,
            )  # fmt: skip
            for total, own, place in zip(grads, found, (q, k, k), strict=True):
                if causal:
                    total[:, :, place] = own
                else:
                    total[:, :, place] += own
        return (*(total.to(query.dtype) for total in grads), None, None)
