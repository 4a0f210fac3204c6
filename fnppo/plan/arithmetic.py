"""Floating point operations of an update, as its matrix products have them."""

from typing import NamedTuple

from fnppo.plan.shape import Shape


class Flops(NamedTuple):
    """Operations a token. Those of attention grow with the length of its row."""

    matrices: float
    """Products with parameters: forward, and twice that backward; with remat, the layers' forward once more."""
    attention: float
    """Scores and their products with values, a token for each token of its row, over causal pairs only."""

    def update(self, tokens: int, *, length: int) -> float:
        """All of an update, of rows of `length` tokens. Over peak operations a second · your MFU · GPUs it is a time."""
        return tokens * (self.matrices + self.attention * length)


def flops_per_token(shape: Shape, *, remat: bool) -> Flops:
    """Arithmetic of one learned token. The head computes its logits a second time in the backward.

    >>> from fnppo.plan import empty_model, shape_of
    >>> shape = shape_of(empty_model("qwen2.5-7b"))
    >>> matrices, _ = flops_per_token(shape, remat=False)
    >>> embedding = shape.vocabulary * shape.hidden
    >>> round(matrices / (6 * (shape.parameters - embedding) + 2 * embedding), 2)
    1.0
    """
    layers = sum(layer.times * layer.flops for layer in shape.layers)
    pairs = sum(
        layer.times * heads.queries * (heads.dim + heads.value_dim)
        for layer in shape.layers
        for heads in layer.attention
    )
    head = 2 * shape.vocabulary * shape.hidden
    # A query sees half of its row, two operations a product. The backward of a fused kernel is five products to two.
    return Flops((4 if remat else 3) * layers + 4 * head, (4.5 if remat else 3.5) * pairs)
