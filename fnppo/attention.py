"""Causal attention within segments: one contract and four backends.

A backend is a function

    backend(query, key, value, segments, *, scaling, window, softcap, sinks, dropout) -> output

with query [batch, heads, tokens, head_dim], key and value [batch, kv_heads, tokens, head_dim], output
[batch, heads, tokens, head_dim]. A query sees the keys of its own segment (and of those that it continues), up to its own
position:

    visible(q, k) = k in the segment of q or in an ancestor of it, and 0 <= position(q) - position(k) < window

`math_attention` is that sentence as a mask, and the reference for the others. `sdpa_attention` loops over segments and
is fast on CPUs. `varlen_attention` (torch) and `flash_attention` (flash-attn) are single kernels for CUDA.
`choose_attention` picks one; a backend that is forced and cannot do what the model asks says so.
"""

import importlib
import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_count, check_floating, check_type
from fnppo.segments import Segments
from fnppo.transforms import derivative_order, inside_forward_mode, inside_transform
from fnppo.tree_attention import can_walk, tree_attention

Attention: TypeAlias = Callable[..., Tensor]


def choose_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, **asked: Any) -> Tensor:
    """The fastest backend that can do what is asked; the default.

    Inside a torch.func transform: math, the only one with all derivatives. On CUDA in half precision, packed: flash-attn
    where it is installed, else torch's varlen kernel. Else: SDPA, segment by segment.
    """
    _check(query, key, value, segments, asked.get("window"))
    if inside_transform() or inside_forward_mode():
        return math_attention(query, key, value, segments, **asked)
    for backend in (flash_attention, varlen_attention):
        if _why_not(backend, query, key, value, segments, **asked) is None:
            return backend(query, key, value, segments, **asked)
    return sdpa_attention(query, key, value, segments, **asked)


def math_attention(
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch kv_heads tokens dim"],
    value: Float[Tensor, "batch kv_heads tokens value_dim"],
    segments: Segments,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads tokens value_dim"]:
    """The definition: an explicit mask, quadratic in the number of tokens. Supports every transform, to any order."""
    _check(query, key, value, segments, window)
    visible = rearrange(_visible(segments, window), "batch q k -> batch 1 q k")
    return _explicit(query, key, value, visible, scaling=scaling, softcap=softcap, sinks=sinks, dropout=dropout)


def sdpa_attention(
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch kv_heads tokens dim"],
    value: Float[Tensor, "batch kv_heads tokens value_dim"],
    segments: Segments,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads tokens value_dim"]:
    """torch's `scaled_dot_product_attention`, one call a packed segment, so the cost is Σ length², not (Σ length)².

    On a CPU, segments that continue others go part by part through its kernel (`fnppo.tree_attention`).

    SDPA has no softcap and no sinks; segments of models that have them use the explicit formula, one at a time.
    """
    _check(query, key, value, segments, window)
    _require(sdpa_attention, query, key, value, segments)
    special = softcap is not None or sinks is not None
    explicit = partial(_explicit, scaling=scaling, softcap=softcap, sinks=sinks, dropout=dropout)
    fused = partial(F.scaled_dot_product_attention, scale=scaling, dropout_p=dropout)
    if segments.packed is None:
        visible = rearrange(_visible(segments, window), "batch q k -> batch 1 q k")
        if special:
            return explicit(query, key, value, visible)
        return fused(query, key, value, attn_mask=visible, enable_gqa=query.shape[1] != key.shape[1])

    outputs = []
    queries, keys, gather, _ = segments.packed
    if gather is not None:
        seen = window is None or window >= max(keys)
        if (
            seen
            and not special
            and dropout == 0
            and not inside_transform()
            and can_walk(query, key, value, segments.packed)
        ):
            return tree_attention(query, key, value, segments.packed, scaling=scaling)
        key, value = (x.index_select(2, gather) for x in (key, value))
    walk = zip(query.split(queries, dim=2), key.split(keys, dim=2), value.split(keys, dim=2), strict=True)
    for q, k, v in walk:
        length, seen = q.shape[2], k.shape[2]
        grouped = q.shape[1] != k.shape[1]
        if length == 0:
            continue
        if not special and length == seen and (window is None or window >= length):
            outputs.append(fused(q, k, v, is_causal=True, enable_gqa=grouped))
            continue
        visible = _causal(length, seen, window, device=query.device)
        outputs.append(explicit(q, k, v, visible) if special else fused(q, k, v, attn_mask=visible, enable_gqa=grouped))
    return torch.cat(outputs, dim=2)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float,
    window: int | None = None,
    **asked: Any,
) -> Tensor:
    """torch's varlen kernel: all packed segments in one call, on CUDA, in half precision."""
    _check(query, key, value, segments, window)
    _require(varlen_attention, query, key, value, segments, **asked)
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (rearrange(x, "1 heads tokens dim -> tokens heads dim") for x in (query, key, value))
    k, v, cu_q, cu_k, longest_q, longest_k = _boundaries(k, v, segments)
    output: Any = varlen_attn(
        q, k, v, cu_q, cu_k, longest_q, longest_k,
        scale=scaling, window_size=_window(window), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return rearrange(output, "tokens heads dim -> 1 heads tokens dim")


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **asked: Any,
) -> Tensor:
    """flash-attn's varlen kernel: all packed segments in one call, on CUDA, in half precision, with softcap."""
    _check(query, key, value, segments, window)
    _require(flash_attention, query, key, value, segments, **asked)
    from flash_attn import flash_attn_varlen_func

    q, k, v = (rearrange(x, "1 heads tokens dim -> tokens heads dim") for x in (query, key, value))
    k, v, cu_q, cu_k, longest_q, longest_k = _boundaries(k, v, segments)
    output = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, longest_q, longest_k,
        dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=_window(window), softcap=softcap or 0.0,
    )  # fmt: skip
    return rearrange(output, "tokens heads dim -> 1 heads tokens dim")


def _visible(segments: Segments, window: int | None) -> Bool[Tensor, "batch q k"]:
    """The sentence at the head of this file. Padding sees itself alone, so no row of the softmax is empty."""
    q, k = segments.ids[:, :, None], segments.ids[:, None, :]
    reads = (q == k) & (q >= 0) if segments.ancestors is None else segments.ancestors[q, k]
    behind = segments.positions[:, :, None] - segments.positions[:, None, :]
    visible = reads & (behind >= 0) & (behind < (math.inf if window is None else window))
    return visible | torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)


def _causal(length: int, seen: int, window: int | None, *, device: torch.device) -> Bool[Tensor, "q k"]:
    """The same for one segment, whose queries are the last `length` of the `seen` tokens of its line."""
    behind = torch.arange(seen - length, seen, device=device)[:, None] - torch.arange(seen, device=device)
    return (behind >= 0) & (behind < (math.inf if window is None else window))


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Bool[Tensor, "*batch q k"],
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """softmax(softcap · tanh(q kᵀ scaling / softcap)) v over the visible keys; a sink is one more key with no value."""
    groups = query.shape[1] // key.shape[1]
    key, value = (repeat(x, "batch kv tokens dim -> batch (kv groups) tokens dim", groups=groups) for x in (key, value))
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, -math.inf)
    if sinks is not None:
        sink = repeat(sinks.to(scores.dtype), "heads -> batch heads q 1", batch=scores.shape[0], q=scores.shape[2])
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def _check(query: Any, key: Any, value: Any, segments: Any, window: int | None) -> None:
    """Raise a `ValueError` where shapes or dtypes do not fit, or would be broadcast."""
    check_type("segments", segments, Segments, "Use fnppo.segments.segments_of(inputs).")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x)
        if x.dim() != 4 or (x.shape[0], x.shape[2]) != tuple(segments.ids.shape):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, segments {tuple(segments.ids.shape)}; they need [batch, heads, tokens, "
                "dim] and [batch, tokens]. Make the segments from the inputs of this forward."
            )
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, query {query.dtype} on {query.device}. Give both the same of each."
            )
    if not (key.shape[1] == value.shape[1] and key.shape[1] and query.shape[1] % key.shape[1] == 0):
        raise ValueError(
            f"there are {query.shape[1]} query heads, {key.shape[1]} of keys and {value.shape[1]} of values; keys and values "
            "need as many heads, and queries a multiple of them. Repeat the heads of keys and values."
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"queries have {query.shape[3]} dims, keys {key.shape[3]}; a score is their product. Give both as many."
        )
    if window is not None:
        check_count("window", window, least=1, remedy="A token sees at least itself; None is no window.")


def _why_not(
    backend: Attention, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **asked: Any
) -> str | None:
    """Why `backend` cannot do what is asked; None if it can. Math can do everything."""
    if derivative_order() > 1 or inside_forward_mode():
        return "inside jvp or a second derivative its kernel has no rule"
    if backend is sdpa_attention:
        return None
    if inside_transform():
        return "torch.func transforms do not know its kernel"
    if segments.packed is None:
        return "the batch is padded, and it needs packed segments: use pack_sequences"
    if query.device.type != "cuda":
        return f"the model is on {query.device.type}, and it runs on CUDA only"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the model is in {query.dtype}, and it needs float16 or bfloat16"
    if value.shape[-1] != query.shape[-1]:
        return f"values have {value.shape[-1]} dimensions and queries {query.shape[-1]}, and it needs them equal"
    if query.shape[-1] > 256:
        return f"heads have {query.shape[-1]} dimensions, and it takes at most 256"
    if asked.get("sinks") is not None:
        return "the model has attention sinks, which it has not"
    if backend is varlen_attention:
        if asked.get("softcap") is not None:
            return "the model caps its attention scores, which it cannot"
        if asked.get("dropout", 0.0) > 0:
            return "attention dropout is on, which it has not"
    elif not _has_flash_attn():
        return "flash-attn is not installed, or cannot be imported: pip install fnppo[flash]"
    return None


def _require(backend: Attention, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **asked: Any) -> None:
    reason = _why_not(backend, query, key, value, segments, **asked)
    if reason is not None:
        raise ValueError(
            f"{backend.__name__} cannot be used: {reason}. choose_attention and math_attention always work."
        )


@cache
def _has_flash_attn() -> bool:
    from importlib.util import find_spec

    if find_spec("flash_attn") is None:
        return False
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # built for another torch, say
        warnings.warn(
            f"flash-attn is installed but cannot be imported ({error}): torch's varlen kernel or SDPA is used in its place. "
            "Build it for this torch, or uninstall it.",
            stacklevel=2,
        )
        return False
    return True


def _boundaries(
    key: Float[Tensor, "tokens heads dim"], value: Float[Tensor, "tokens heads value_dim"], segments: Segments
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Keys, values and the boundaries of queries and keys for the CUDA kernels, which align causality at the end of a
    segment. Segments without queries are left out, since the kernels do not all bear them.
    """
    assert segments.packed is not None
    queries, keys, gather, _ = segments.packed
    kept = [i for i, length in enumerate(queries) if length > 0]
    if gather is not None:
        starts = [0, *accumulate(keys)]
        places = [torch.arange(starts[i], starts[i] + keys[i], device=key.device) for i in kept]
        key, value = (x.index_select(0, gather[torch.cat(places)]) for x in (key, value))
    cu_q, cu_k = (
        torch.tensor([0, *(lengths[i] for i in kept)], device=key.device).cumsum(0).to(torch.int32)
        for lengths in (queries, keys)
    )
    return key, value, cu_q, cu_k, max(queries[i] for i in kept), max(keys[i] for i in kept)


def _window(window: int | None) -> tuple[int, int]:
    """The kernels count the tokens to the left of a query; -1 is without limit, and 0 to the right is causal."""
    return (-1 if window is None else window - 1, 0)
