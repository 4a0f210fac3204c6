"""What is asked of a tensor that may be a DTensor, without the second that it takes to import what DTensors are made of."""

from typing import Any

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is on this rank; a plain tensor as it is."""
    part: Any = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor, the same on all ranks, which take part in it; a plain tensor as it is.

    Until then a number made of DTensors is, on each rank, that of its own shards, and a rank that acts on it is alone.
    """
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
