"""A count of the bytes that are alive."""

import math
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class LiveBytes(TorchDispatchMode):
    """While it is on, `now` is the number of bytes in storages made since it began and not yet freed, `peak` the most of it.

    `flops` counts the arithmetic of matrix products, as the shapes have it. Only shapes are looked at, so tensors without
    data (`FakeTensorMode`) count as well as any.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     x = torch.zeros(1000)
    ...     y = (x + 1) * 2  # while y is made, x + 1 is alive
    >>> live.now, live.peak
    (8000, 12000)
    >>> del y
    >>> live.now
    4000
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):  # it was there before: a view of it is nothing new
            self._known.add(tensor.untyped_storage())
        output = func(*args, **kwargs)
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        self.flops += _flops(func, args, kwargs, output)
        return output

    def _free(self, size: int) -> None:
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    operation = func._overloadpacket
    if "grouped_mm" in str(operation):  # experts: each row of the first goes through one matrix of the second
        return 2 * math.prod(args[0].shape) * int(args[1].shape[-1])
    count = flop_registry.get(operation)
    return 0 if count is None else int(count(*args, **kwargs, out_val=output))
