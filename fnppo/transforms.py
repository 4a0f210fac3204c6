"""Questions about where the code runs: inside a torch.func transform, in forward mode, under how many derivatives.

Some fast kernels know neither. The attention and the head ask here and then take a form that every transform understands.
"""

import torch
from torch.autograd import forward_ad


def inside_transform() -> bool:
    """True inside `torch.func.grad`, `vjp`, `jvp`, `vmap` and whatever is built from them, and while `torch.compile`
    reads the code: where no tensor's value can be asked for.

    >>> inside_transform()
    False
    >>> torch.func.vmap(lambda x: x * inside_transform())(torch.ones(2))
    tensor([1., 1.])
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def derivative_order() -> int:
    """How many derivatives are being taken by the torch.func transforms around the code.

    >>> torch.func.grad(torch.func.grad(lambda x: x**2 * derivative_order()))(torch.tensor(1.0))
    tensor(4.)
    """
    return _count("Grad") + forward_order()


def forward_order() -> int:
    """How many of them are `torch.func.jvp`."""
    return _count("Jvp")


def _count(kind: str) -> int:
    wanted = getattr(torch._C._functorch.TransformType, kind)
    return sum(interpreter.key() == wanted for interpreter in torch._C._functorch.get_interpreter_stack() or ())


def inside_forward_mode() -> bool:
    """True inside `torch.func.jvp` and under `torch.autograd.forward_ad.dual_level`."""
    return bool(forward_ad._current_level >= 0)
