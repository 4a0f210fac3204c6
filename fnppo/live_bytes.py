"""How much memory tensors take, counted and not timed: the same number on every run and every machine."""

import weakref
from typing import Any

import optree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is on, until they are gone.

    Backward passes and recomputed layers count, and what autograd holds. What was there before does not, nor what a kernel
    makes and frees inside itself, nor what an allocator keeps. Use it outside of torch.func transforms and torch.compile.

    Attributes:
        live: bytes that are there now.
        peak: the most that were there at once; set it to `live` to begin anew.

    >>> import torch
    >>> with LiveBytes() as memory:
    ...     a = torch.zeros(1000)
    ...     b = a.view(10, 100).exp()  # the view is no memory, the exponentials are
    ...     del a
    >>> memory.live, memory.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(results):
            self._count(tensor.untyped_storage(), known)
        self.peak = max(self.peak, self.live)
        return results

    def _count(self, storage: Any, known: set[int]) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in known or place in self._storages:  # a view, or a change in place, also of what was there before
            return

        def gone(_: Any) -> None:
            del self._storages[place]
            self.live -= size

        self._storages[place] = weakref.ref(storage, gone)
        self.live += size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
