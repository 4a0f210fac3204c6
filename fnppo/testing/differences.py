"""How far two results are apart: tensors, or trees of them."""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor


class Difference(NamedTuple):
    """The place where two trees differ most."""

    size: float
    """Relative, see `largest_difference`; infinite where a value is not finite."""
    path: str
    place: tuple[int, ...]
    here: float
    there: float

    @property
    def where(self) -> str:
        """The leaf in words, empty for a tree that is one number."""
        words = f"{self.path}{list(self.place)}" if self.place else self.path
        return f" (at {words})" if words else ""


def largest_difference(
    here: Any, there: Any, keep: Tensor | None = None, *, floor: float | None = None, finite: bool = True
) -> Difference:
    """Where `here` and `there` differ most.

    A difference is relative to its leaf's largest number in `there`. Where all of a leaf is below a thousandth of the
    tree's largest number it is relative to that, as what is left of a sum that cancels is rounding only.

    Args:
        keep: for a result that is one tensor of this shape: compare where it is set.
        floor: measure nothing in units smaller than this; 1.0 for log-probs, whose differences count in nats.
        finite: count what is NaN or infinite in both as a difference.

    Raises:
        ValueError: the trees or the shapes of their leaves differ.

    >>> largest_difference({"loss": torch.tensor([1.0, 4.0])}, {"loss": torch.tensor([1.0, 2.0])})
    Difference(size=1.0, path="['loss']", place=(1,), here=4.0, there=2.0)
    """
    paths, leaves, structure = optree.tree_flatten_with_path(here)
    others, other_structure = optree.tree_flatten(there)
    if structure != other_structure:
        raise ValueError(f"the results have other structures: {structure} and {other_structure}.")
    pairs = [[torch.as_tensor(x).detach().double().cpu() for x in pair] for pair in zip(leaves, others, strict=True)]
    for a, b in pairs:
        if a.shape != b.shape:
            raise ValueError(f"the results have other shapes: {tuple(a.shape)} and {tuple(b.shape)}.")
    if keep is not None and paths == [()] and keep.shape == pairs[0][0].shape:
        pairs = [[torch.where(keep, x, 0) for x in pairs[0]]]
    sizes = [float(torch.where(b.isfinite(), b.abs(), 0).max()) if b.numel() else 0.0 for _, b in pairs]
    smallest = max(1e-3 * max(sizes, default=0.0), 1e-8) if floor is None else floor
    worst = Difference(0.0, "", (), 0.0, 0.0)
    for path, (a, b), size in zip(paths, pairs, sizes, strict=True):
        apart = ((a - b).abs() / max(size, smallest)).nan_to_num(nan=float("inf"))
        if not finite:
            apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0, apart)
        if apart.numel() and float(apart.max()) > worst.size:
            place = tuple((apart == apart.max()).nonzero()[0].tolist())
            words = "".join(f"[{key!r}]" for key in path)
            worst = Difference(float(apart.max()), words, place, float(a[place]), float(b[place]))
    return worst
