"""A count of the bytes that are alive, and of the arithmetic that made them."""

import math
from typing import Any

from torch.utils.flop_counter import flop_registry

from fnppo.live_bytes import LiveBytes


class LiveWork(LiveBytes):
    """`LiveBytes` that also counts the arithmetic of matrix products, `flops`, as the shapes have it.

    Only shapes are looked at, so tensors without data (`FakeTensorMode`) count as well as any.

    >>> import torch
    >>> with LiveWork() as work:
    ...     x = torch.zeros(10, 20) @ torch.zeros(20, 5)
    >>> work.flops
    2000
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self.flops += _flops(func, args, kwargs or {}, output)
        return output


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    operation = func._overloadpacket
    if "grouped_mm" in str(operation):  # experts: each row of the first goes through one matrix of the second
        return 2 * math.prod(args[0].shape) * int(args[1].shape[-1])
    count = flop_registry.get(operation)
    return 0 if count is None else int(count(*args, **kwargs, out_val=output))
