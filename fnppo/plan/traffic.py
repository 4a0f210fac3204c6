"""Bytes that one GPU sends (it receives as many), by collective.

An all-gather or a reduce-scatter of n bytes over N GPUs sends n (N - 1) / N from each. An all-to-all over u GPUs sends
(u - 1) / u of what a GPU has.
"""

import math
from typing import NamedTuple

import torch

from fnppo.arguments import check_count
from fnppo.logit_chunks import precise
from fnppo.plan.memory import Layout, check_layout
from fnppo.plan.shape import Layer, Shape


class Traffic(NamedTuple):
    """Bytes that one GPU sends in a micro-batch, and how many micro-batches it computes in an update."""

    gather_forward: int
    """Parameters, in the dtype of the layers."""
    gather_backward: int
    """Those of the layers again; embeddings and head have stayed."""
    reduce_scatter: int
    """Gradients, in float32 or better."""
    all_to_all: int
    """Queries, keys, values and outputs of attention, forward and backward; with remat, forward once more."""
    host: int
    """Over the bus: sharded parameters twice, gradients once, where they are offloaded."""
    micro_batches: int

    @property
    def micro_batch(self) -> int:
        """All of a micro-batch."""
        return self.gather_forward + self.gather_backward + self.reduce_scatter + self.all_to_all + self.host

    @property
    def update(self) -> int:
        """All of an update."""
        return self.micro_batches * self.micro_batch


def traffic_of(
    shape: Shape, layout: Layout, *, tokens: int, update_tokens: int, master: torch.dtype = torch.float32
) -> Traffic:
    """What an update of `update_tokens` sends, in micro-batches of `tokens`.

    Raises:
        ValueError: a number of tokens or GPUs is below 1.

    >>> from fnppo.plan import empty_model, shape_of
    >>> shape = shape_of(empty_model("qwen2.5-0.5b"))
    >>> traffic = traffic_of(shape, Layout(fsdp=2, ulysses=2), tokens=4096, update_tokens=65536)
    >>> traffic.micro_batches, traffic.gather_forward == 2 * 494032768 * 3 // 4
    (8, True)
    """
    check_count("tokens", tokens, least=1, remedy="Give the tokens of a micro-batch.")
    check_count("update_tokens", update_tokens, least=1, remedy="Give the tokens of a mini-batch.")
    check_layout(layout)
    compute, wide = shape.dtype.itemsize, precise(master).itemsize
    others = (layout.gpus - 1) / layout.gpus
    in_layers = shape.parameters - shape.outside
    per_token = sum(layer.times * _attention(layer, layout.ulysses) for layer in shape.layers) * compute
    passes = 3 if layout.remat else 2
    local = math.ceil(tokens / layout.ulysses)
    shard = math.ceil(shape.parameters / layout.gpus)
    return Traffic(
        gather_forward=math.ceil(others * shape.parameters * compute),
        gather_backward=math.ceil(others * in_layers * compute),
        reduce_scatter=math.ceil(others * shape.parameters * wide),
        all_to_all=math.ceil(passes * local * per_token * (layout.ulysses - 1) / layout.ulysses),
        host=shard * (2 * master.itemsize + wide) if layout.offload else 0,
        micro_batches=math.ceil(update_tokens / (tokens * layout.fsdp)),
    )


def _attention(layer: Layer, ulysses: int) -> int:
    """Numbers a token of queries, outputs, keys and values. Where keys have fewer heads than GPUs, they are copied first."""
    return sum(
        heads.queries * (heads.dim + heads.value_dim) + max(heads.keys, ulysses) * (heads.dim + heads.value_dim)
        for heads in layer.attention
    )
