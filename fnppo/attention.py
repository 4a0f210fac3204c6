"""Causal attention within segments: one contract, four backends, registered with transformers' attention interface.

A backend is a function

    backend(query, key, value, segments, *, scaling, window, softcap, sinks, dropout) -> output

with query [batch, heads, tokens, head_dim], key and value [batch, kv_heads, tokens, head_dim], output
[batch, heads, tokens, head_dim]. A query sees the keys of its own segment, up to its own position:

    visible(q, k) = same segment and 0 <= position(q) - position(k) < window

`math_attention` is that sentence as a mask, and the reference for the others. `sdpa_attention` loops over segments and
is fast on CPUs. `varlen_attention` (torch) and `flash_attention` (flash-attn) are single kernels for CUDA.
`choose_attention` picks one; a backend that is forced and cannot do what the model asks says so.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnppo.transforms import inside_forward_mode, inside_transform
from fnppo.types import PackedInputs, PaddedInputs

Attention: TypeAlias = Callable[..., Tensor]


class Segments(NamedTuple):
    """Which tokens belong together. `cu_seqlens` is there when the tokens are packed (then batch is 1).

    Attributes:
        ids: segment of each token, numbered within its row of the attention batch; -1 for padding.
        positions: position of each token in its segment.
        cu_seqlens: boundaries of the packed segments, and the same as Python numbers in `bounds`.
    """

    ids: Int[Tensor, "batch tokens"]
    positions: Int[Tensor, "batch tokens"]
    cu_seqlens: Int[Tensor, " boundaries"] | None = None
    bounds: tuple[int, ...] = ()


def segments_of(inputs: PackedInputs | PaddedInputs) -> Segments:
    """The segments of a batch, on the [batch, tokens] axes that the model sees."""
    if isinstance(inputs, PaddedInputs):
        return Segments(torch.where(inputs.attention_mask, 0, -1), inputs.position_ids)
    cu_seqlens = inputs.cu_seqlens
    index = torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device)
    ids = index.repeat_interleave(cu_seqlens.diff(), output_size=inputs.input_ids.numel())
    return Segments(ids[None], inputs.position_ids[None], cu_seqlens, tuple(cu_seqlens.tolist()))


def choose_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, **asked: Any) -> Tensor:
    """The fastest backend that can do what is asked; the default.

    Inside a torch.func transform: math, the only one with all derivatives. On CUDA in half precision, packed: flash-attn
    where it is installed, else torch's varlen kernel. Else: SDPA, segment by segment.
    """
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

    SDPA has no softcap and no sinks; segments of models that have them use the explicit formula, one at a time.
    """
    special = softcap is not None or sinks is not None
    explicit = partial(_explicit, scaling=scaling, softcap=softcap, sinks=sinks, dropout=dropout)
    fused = partial(F.scaled_dot_product_attention, scale=scaling, dropout_p=dropout)
    if segments.cu_seqlens is None:
        visible = rearrange(_visible(segments, window), "batch q k -> batch 1 q k")
        if special:
            return explicit(query, key, value, visible)
        return fused(query, key, value, attn_mask=visible, enable_gqa=query.shape[1] != key.shape[1])

    outputs = []
    lengths = [end - start for start, end in zip(segments.bounds[:-1], segments.bounds[1:], strict=True)]
    for q, k, v, length in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), lengths, strict=True):
        if length == 0:
            continue
        if not special and (window is None or window >= length):
            outputs.append(fused(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]))
            continue
        visible = _causal(length, window, device=query.device)
        outputs.append(
            explicit(q, k, v, visible)
            if special
            else fused(q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
        )
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
    _require(varlen_attention, query, key, value, segments, **asked)
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (rearrange(x, "1 heads tokens dim -> tokens heads dim") for x in (query, key, value))
    cu_seqlens, longest = _nonempty(segments)
    output: Any = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest,
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
    _require(flash_attention, query, key, value, segments, **asked)
    from flash_attn import flash_attn_varlen_func

    q, k, v = (rearrange(x, "1 heads tokens dim -> tokens heads dim") for x in (query, key, value))
    cu_seqlens, longest = _nonempty(segments)
    output = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest,
        dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=_window(window), softcap=softcap or 0.0,
    )  # fmt: skip
    return rearrange(output, "tokens heads dim -> 1 heads tokens dim")


def _visible(segments: Segments, window: int | None) -> Bool[Tensor, "batch q k"]:
    """The sentence at the head of this file. Padding sees itself alone, so no row of the softmax is empty."""
    same = (segments.ids[:, :, None] == segments.ids[:, None, :]) & (segments.ids >= 0)[:, :, None]
    behind = segments.positions[:, :, None] - segments.positions[:, None, :]
    visible = same & (behind >= 0) & (behind < (math.inf if window is None else window))
    return visible | torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)


def _causal(length: int, window: int | None, *, device: torch.device) -> Bool[Tensor, "q k"]:
    index = torch.arange(length, device=device)
    behind = index[:, None] - index[None, :]
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


def _why_not(
    backend: Attention, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **asked: Any
) -> str | None:
    """Why `backend` cannot do what is asked; None if it can. SDPA and math can do everything outside a transform."""
    if backend in (sdpa_attention, math_attention):
        return None
    if segments.cu_seqlens is None:
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
        return "flash-attn is not installed: pip install fnppo[flash]"
    return None


def _require(backend: Attention, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **asked: Any) -> None:
    reason = _why_not(backend, query, key, value, segments, **asked)
    if reason is not None:
        raise ValueError(
            f"{backend.__name__} cannot be used: {reason}. choose_attention or math_attention always works."
        )


def _has_flash_attn() -> bool:
    from importlib.util import find_spec

    return find_spec("flash_attn") is not None


def _nonempty(segments: Segments) -> tuple[Tensor, int]:
    """Boundaries without empty segments, which the CUDA kernels do not all bear, and the longest segment."""
    assert segments.cu_seqlens is not None
    longest = max(end - start for start, end in zip(segments.bounds[:-1], segments.bounds[1:], strict=True))
    return segments.cu_seqlens.unique_consecutive().to(torch.int32), longest


def _window(window: int | None) -> tuple[int, int]:
    """The kernels count the tokens to the left of a query; -1 is without limit, and 0 to the right is causal."""
    return (-1 if window is None else window - 1, 0)


# --- the door to transformers -----------------------------------------------------------------------------------------

NAME = "fnppo"
IGNORED = {
    "position_ids", "position_embeddings", "use_cache", "cache", "cache_position", "past_key_values", "is_causal",
    "output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "output_router_logits",
    "layer_idx", "token_type_ids", "inputs_embeds", "input_ids",
}  # fmt: skip
"""Arguments that models pass along and that say nothing which the segments do not say."""


def register() -> None:
    """Make the attention known to transformers under `NAME`. Its models then build no mask of their own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _from_transformers)


def _from_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    attend: Attention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. `attend` is the backend with the batch's segments in it, and comes as a
    keyword argument of the model's forward; captured there, it is still right when a layer is run again for its backward.
    """
    name = type(module).__name__
    if attend is None:
        raise ValueError(
            f"{name} does not forward keyword arguments to its attention, so it cannot be told where sequences end."
        )
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise ValueError(f"{name} is bidirectional; only causal attention defines the probability of the next token.")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"{name} brings a mask of its own, of shape {tuple(attention_mask.shape)}, which would be lost."
        )
    unknown = sorted(key for key, given in others.items() if given is not None and key not in IGNORED)
    if unknown:
        raise ValueError(f"{name} asks its attention for {', '.join(unknown)}, which no backend has.")
    output = attend(
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return rearrange(output, "batch heads tokens dim -> batch tokens heads dim").contiguous(), None
