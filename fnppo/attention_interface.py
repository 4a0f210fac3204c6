"""The door to transformers: how its models come to use our attention.

transformers lets a model's attention function be chosen by name, and most models pass unknown keyword arguments of
their forward on to it. `Policy.hidden_states` passes `attend`, a backend with the batch's segments in it, so what a layer
computes depends on its arguments alone. It is still right when the layer is run again for its backward.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Shaped
from torch import Tensor

from fnppo.attention import Attention

NAME = "fnppo"
IGNORED = {
    "position_ids", "position_embeddings", "use_cache", "cache", "cache_position", "past_key_values", "is_causal",
    "output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "output_router_logits",
    "layer_idx", "token_type_ids", "inputs_embeds", "input_ids",
}  # fmt: skip
"""Arguments that models pass along and that say nothing which the segments do not say."""

UNDERSTOOD = {
    "causal_mask_function", "sliding_window_overlay", "chunked_overlay", "and_masks", "padding_mask_function",
    "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip
"""Parts of a mask that the segments and the mark say."""


class Impossible(ValueError):
    """A reason that holds for every layout, also with the model's own attention."""


def register() -> None:
    """Make the attention known to transformers under `NAME`, with the function that it calls in place of building masks.

    torch.compile leaves the attention out: read as code, it would be the explicit mask, made anew for each list of lengths.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, torch.compiler.disable(attention_forward))
    AttentionMaskInterface.register(NAME, window_mark)


def window_mark(
    *, local_size: int | None = None, mask_function: Any = None, use_vmap: bool = False, **_: Any
) -> Shaped[Tensor, "1 1 1 1"]:
    """In the place of a mask: the window n that the mask would have had as n, chunks of n as -n, and 0 for neither.

    The segments say all else that a causal mask says. The mark goes the way of the mask, through the model's layers to
    `attention_forward`, so a window is known also for models that do not pass it on as a keyword.
    """
    parts = set() if mask_function is None else _parts(mask_function)
    if "bidirectional_mask_function" in parts:
        # For an encoder that is not there. A layer that attends with it is refused.
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device="cpu")
    if use_vmap or parts - UNDERSTOOD:
        raise ValueError("the model lays a pattern of its own over the causal mask, which would be lost.")
    size = local_size or 0
    return torch.full((1, 1, 1, 1), -size if "chunked_overlay" in parts else size, device="cpu")


def _parts(mask_function: Any) -> set[str]:
    """Names of the functions of transformers.masking_utils of which a mask function is composed, by closures."""
    held = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    inner = [part for content in held for part in (content if isinstance(content, tuple) else (content,))]
    name = mask_function.__qualname__.split(".")[0]
    return {name}.union(*(_parts(part) for part in inner if hasattr(part, "__closure__")))


def attention_forward(
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
    """What transformers calls in each layer. Whatever a model asks for is done or refused by name, never ignored."""
    name = type(module).__name__
    if attend is None:
        raise ValueError(
            f"{name} does not forward keyword arguments to its attention, so it cannot be told where sequences end."
        )
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise ValueError(f"{name} is bidirectional; only causal attention defines the probability of the next token.")
    unknown = sorted(key for key, given in others.items() if given is not None and key not in IGNORED)
    if unknown:
        raise ValueError(f"{name} asks its attention for {', '.join(unknown)}, which no backend has.")
    window, chunk = _window(name, attention_mask, sliding_window)
    output = attend(
        query,
        key,
        value,
        chunk=chunk,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return rearrange(output, "batch heads tokens dim -> batch tokens heads dim").contiguous(), None


def _window(name: str, attention_mask: Tensor | None, sliding_window: int | None) -> tuple[int | None, int | None]:
    """(window, chunk) of a layer, from the mark and from the keyword, which must not contradict each other."""
    if attention_mask is None or attention_mask.dim() == 2:  # the model makes no mask; 2-D is the padding as it came
        return sliding_window, None
    if attention_mask.shape != (1, 1, 1, 1) or attention_mask.dtype != torch.long:
        raise ValueError(
            f"{name} brings a mask of its own, of shape {tuple(attention_mask.shape)}, which would be lost."
        )
    mark = int(attention_mask)
    window, chunk = (mark if mark > 0 else None), (-mark if mark < 0 else None)
    if sliding_window is not None and sliding_window != window:
        raise Impossible(
            f"{name} asks for a window of {sliding_window} by keyword and of {window} in its mask, so transformers' own "
            "backends disagree about it. Set sliding_window in the config to None."
        )
    return window, chunk
