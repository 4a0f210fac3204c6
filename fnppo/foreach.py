"""One elementwise operation on a list of tensors."""

from typing import Any

import torch
from torch import Tensor

from fnppo.transforms import inside_transform


def foreach(name: str, tensors: list[Tensor], *others: Any, **constants: float) -> list[Tensor]:
    """`name` ("mul", "add_", ...) on each tensor: `torch._foreach_*`, a few kernels for all of them.

    torch.func transforms do not know the foreach kernels. Inside one the operation runs tensor by tensor, and out of
    place, since a transform may not let a captured tensor be changed; so always use what is returned. Lists among
    `others` are taken tensor by tensor, anything else is given to each.

    >>> foreach("mul", [torch.tensor(2.0), torch.tensor(3.0)], 10.0)
    [tensor(20.), tensor(30.)]
    """
    if not tensors:
        return []
    if inside_transform():
        operation = getattr(Tensor, name.removesuffix("_"))
        columns = [other if isinstance(other, list) else [other] * len(tensors) for other in others]
        return [operation(*row, **constants) for row in zip(tensors, *columns, strict=True)]
    with torch.no_grad():  # an update is not part of any graph, also where the parameters ask for gradients
        changed = getattr(torch, f"_foreach_{name}")(tensors, *others, **constants)
    return tensors if name.endswith("_") else list(changed)
