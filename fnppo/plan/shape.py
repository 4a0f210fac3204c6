"""A model as far as memory, traffic and arithmetic are concerned: what `fnppo.plan.count` finds, and the formulas read."""

from typing import NamedTuple

import torch


class Heads(NamedTuple):
    """One call of attention."""

    queries: int
    keys: int
    """Number of heads of keys and values, which a group of queries shares."""
    dim: int
    value_dim: int


class Layer(NamedTuple):
    """A kind of layer; sizes are bytes a token in the dtype that the model computes in."""

    times: int
    """How many layers are of this kind."""
    parameters: int
    largest: int
    """Entries of its largest parameter."""
    input: float
    """Its hidden state."""
    held: float
    """What it keeps for its backward, its input included where it keeps that."""
    inner: float
    """What it keeps beside its input."""
    work: float
    """What its backward needs above that at its peak, without the gradients of parameters."""
    flops: float
    """Arithmetic of its forward, in matrix products; attention's scores are not in it."""
    attention: tuple[Heads, ...]


class Shape(NamedTuple):
    """A model as far as memory is concerned."""

    name: str
    dtype: torch.dtype
    """In which the layers compute."""
    parameters: int
    """All of them; tied weights count once."""
    layers: tuple[Layer, ...]
    rest: float
    """Bytes a token that are kept outside of the layers: the final norm, tables of positions."""
    vocabulary: int
    hidden: int
    tied: bool
    notes: tuple[str, ...] = ()
    """What the estimate leaves out of this model."""

    @property
    def outside(self) -> int:
        """Parameters that are in no layer: embeddings, head, final norm."""
        return self.parameters - sum(layer.times * layer.parameters for layer in self.layers)
