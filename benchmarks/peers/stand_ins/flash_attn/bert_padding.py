"""The index helpers of flash-attn that verl's remove-padding imports: plain indexing, so that it runs on a CPU."""

import torch
from einops import rearrange
from torch import Tensor

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    return values.index_select(0, indices)


def unpad_input(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """[batch, seq, ...] -> the existing ones, their flat indices, boundaries, the longest row, the length of each."""
    counts = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero()[:, 0]
    boundaries = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return values.flatten(0, 1)[indices], indices, boundaries, int(counts.max()), counts


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Back to [batch, seq, ...], 0 where nothing exists."""
    flat = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return flat.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
