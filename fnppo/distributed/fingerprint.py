"""A number for the bits of a tensor, the same however it is sharded: to tell whether two runs have the same frozen weights."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from fnppo.dtensor import local, whole

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """The sum of all elements, whose bits are read as integers, modulo 2⁶⁴. Every rank that has a part of it calls it.

    Integers add to the same number in any order, so another mesh gives the same.

    >>> fingerprint(torch.tensor([1.0, 2.0])), fingerprint(torch.tensor([1.0, 2.0000002]))
    (2139095040, 2139095041)
    """
    bits = local(tensor.detach()).contiguous().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
    if isinstance(tensor, DTensor):
        placements = [Partial() if place.is_shard() else Replicate() for place in tensor.placements]
        bits = whole(DTensor.from_local(bits, tensor.device_mesh, placements))
    return int(bits)
