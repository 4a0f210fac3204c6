"""How far two results are apart: tensors, or trees of them."""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor


class Difference(NamedTuple):
    """The place where two trees differ most."""

    size: float
    """In units of the leaf's largest number where that is above 1; infinite where a value is not finite."""
    path: str
    place: tuple[int, ...]
    here: float
    there: float

    @property
    def where(self) -> str:
        """The leaf in words, empty for a tree that is one number."""
        words = f"{self.path}{list(self.place)}" if self.place else self.path
        return f" (at {words})" if words else ""


def largest_difference(here: Any, there: Any, keep: Tensor | None = None) -> Difference:
    """Where `here` and `there` differ most; leaves of `keep`'s shape are compared where it is set.

    Raises:
        ValueError: the trees or the shapes of their leaves differ.

    >>> largest_difference({"loss": torch.tensor([1.0, 4.0])}, {"loss": torch.tensor([1.0, 2.0])})
    Difference(size=1.0, path="['loss']", place=(1,), here=4.0, there=2.0)
    """
    paths, leaves, structure = optree.tree_flatten_with_path(here)
    others, other_structure = optree.tree_flatten(there)
    if structure != other_structure:
        raise ValueError(f"the results have other structures: {structure} and {other_structure}.")
    worst = Difference(0.0, "", (), 0.0, 0.0)
    for path, a, b in zip(paths, leaves, others, strict=True):
        a, b = (torch.as_tensor(x).detach().double().cpu() for x in (a, b))
        if a.shape != b.shape:
            raise ValueError(f"the results have other shapes: {tuple(a.shape)} and {tuple(b.shape)}.")
        read = keep if keep is not None and keep.shape == a.shape else torch.ones_like(a, dtype=torch.bool)
        if not bool(read.any()):
            continue
        scale = torch.where(read & b.isfinite(), b.abs(), 0).max().clamp(min=1)
        apart = torch.where(read, (a - b).abs() / scale, 0).nan_to_num(nan=float("inf"))
        if float(apart.max()) > worst.size:
            place = tuple((apart == apart.max()).nonzero()[0].tolist())
            worst = Difference(
                float(apart.max()), "".join(f"[{key!r}]" for key in path), place, float(a[place]), float(b[place])
            )
    return worst
