"""Two questions about where the code runs: inside a torch.func transform, and in forward mode.

Some fast kernels know neither. The attention and the head ask here and then take a form that every transform understands.
"""

import torch
from torch.autograd import forward_ad


def inside_transform() -> bool:
    """True inside `torch.func.grad`, `vjp`, `jvp`, `vmap` and whatever is built from them.

    >>> inside_transform()
    False
    >>> torch.func.vmap(lambda x: x * inside_transform())(torch.ones(2))
    tensor([1., 1.])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_forward_mode() -> bool:
    """True inside `torch.func.jvp` and under `torch.autograd.forward_ad.dual_level`."""
    return bool(forward_ad._current_level >= 0)
