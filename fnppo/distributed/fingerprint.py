"""A number for the bits of a tensor, the same however it is sharded: to tell whether two runs have the same frozen weights."""

import torch
from torch import Tensor

from fnppo.dtensor import whole

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PART = 2**20


def fingerprint(tensor: Tensor) -> int:
    """Σ bits · weight modulo 2⁶⁴: each element's bits as an integer, times an odd number made of its place.

    Every rank that has a part of the tensor calls it, since it is gathered.

    >>> values = torch.tensor([1.0, 2.0, 3.0])
    >>> fingerprint(values) == fingerprint(values.clone()), fingerprint(values) == fingerprint(values.flip(0))
    (True, False)
    """
    bits = whole(tensor.detach()).contiguous().view(INTEGERS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, part in enumerate(bits.split(PART)):
        place = torch.arange(part.numel(), device=bits.device) + number * PART
        total += (part.long() * (place * 6364136223846793005 + 1442695040888963407).bitwise_or(1)).sum()
    return int(total)
