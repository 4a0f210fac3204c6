"""Bytes on one GPU while an update runs: what stays, what a micro-batch adds, and when it is most.

The update is `train_step` with `adamw` and `donate=True`. On several GPUs parameters, gradients and moments are sharded over
all of them (FSDP), layer by layer; embeddings, final norm and head are one unit, which stays gathered for a micro-batch.
A group of `ulysses` GPUs shares the tokens of a micro-batch: each has its part of the tokens, and in attention all tokens of its part of the heads.
"""

import math
from typing import NamedTuple

import torch

from fnppo.arguments import check_count
from fnppo.logit_chunks import precise, targets_per_block, targets_per_chunk
from fnppo.plan.shape import Layer, Shape


class Layout(NamedTuple):
    """How the GPUs are used. Their number is `fsdp` · `ulysses`, and parameters are sharded over all of them."""

    fsdp: int = 1
    """Groups of GPUs, each with its own micro-batches."""
    ulysses: int = 1
    """GPUs of a group, which share the tokens of a micro-batch."""
    remat: bool = False
    """Whether layers are computed again in the backward."""
    offload: bool = False
    """Whether parameters, gradients and moments live in the host's memory, and the optimizer runs there."""

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.fsdp * self.ulysses

    @property
    def sharded(self) -> bool:
        """Whether layers are gathered one by one."""
        return self.gpus > 1 or self.offload


def check_layout(layout: Layout) -> None:
    """A `ValueError` unless both of its numbers count."""
    for name in ("fsdp", "ulysses"):
        check_count(name, getattr(layout, name), least=1, remedy="1 is for none.")


class Memory(NamedTuple):
    """Bytes on one GPU. The first four stay; the others come and go within an update."""

    params: int
    grads: int
    """Sums over micro-batches, in float32 or better."""
    moments: int
    """Both of AdamW's."""
    gathered: int
    """Parameters in the dtype of the layers: two layers and all that is in none; on one GPU what `cast` makes."""
    activations: int
    """What the forward keeps for the backward."""
    layer: int
    """What the backward of a layer needs above that: its work and the gradients of its parameters."""
    head: int
    """Chunks of logits and the gradients of the head and of hidden states."""
    ends: int
    """Gradients of embeddings and head at the end of a backward."""
    updates: int
    """What the optimizer makes beside its state."""
    host: int
    """Bytes in the host's memory for each GPU, where parameters, gradients and moments are offloaded."""

    @property
    def stages(self) -> dict[str, int]:
        """Bytes in use at each point where they may be most."""
        state = self.params + self.grads + self.moments
        forward = state + self.gathered + self.activations
        return {
            "head": forward + self.head,
            "layers": forward + self.layer,
            "embeddings": state + self.gathered + self.ends,
            "optimizer": state + self.updates,
        }

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(self.stages.values())


def memory_of(
    shape: Shape,
    layout: Layout,
    *,
    tokens: int,
    targets: int | None = None,
    master: torch.dtype = torch.float32,
    device: str = "cuda",
) -> Memory:
    """Memory of one GPU.

    Args:
        shape: from `shape_of`, in the dtype that the layers compute in.
        layout: how the GPUs are used.
        tokens: of a micro-batch; the GPUs of a group share them.
        targets: learned tokens of a micro-batch, all by default.
        master: dtype of parameters and moments.
        device: its type, on which the size of the head's chunks depends.

    Raises:
        ValueError: a number of tokens, targets or GPUs is below its least.

    >>> from fnppo.plan import empty_model, shape_of
    >>> memory = memory_of(shape_of(empty_model("qwen2.5-0.5b")), Layout(fsdp=8, remat=True), tokens=8192)
    >>> memory.params == memory.grads == 4 * 494032768 // 8
    True
    """
    check_count("tokens", tokens, least=1, remedy="Give the tokens of a micro-batch.")
    if targets is not None:
        check_count("targets", targets, least=0, remedy="None takes every token for a target.")
    check_layout(layout)
    share = math.ceil(shape.parameters / layout.gpus)
    compute, wide = shape.dtype.itemsize, precise(master).itemsize
    tokens = math.ceil(tokens / layout.ulysses)
    targets = tokens if targets is None else math.ceil(targets / layout.ulysses)
    state = share * master.itemsize, share * wide, 2 * share * master.itemsize
    updates = share * master.itemsize
    activations, work = _activations(shape, layout, tokens)
    head, ends = shape.vocabulary * shape.hidden, _ends(shape, layout, master)
    waiting = head * compute if layout.sharded or shape.tied else 0  # the head's gradient, until the backward ends
    return Memory(
        *((0, 0, 0) if layout.offload else state),
        gathered=_gathered(shape, layout, master),
        activations=activations + targets * shape.hidden * compute,
        layer=work + _layer_gradients(shape, layout, master) + waiting,
        head=_head(shape, targets, torch.device(device)),
        ends=ends,
        updates=0 if layout.offload else updates,
        host=sum(state) + updates if layout.offload else 0,
    )


def _activations(shape: Shape, layout: Layout, tokens: int) -> tuple[int, int]:
    """(what all layers keep, what the backward of one needs above that)."""
    compute, ulysses = shape.dtype.itemsize, layout.ulysses

    def repeated(layer: Layer) -> int:  # keys and values are copied until each GPU has a head of them
        return sum(
            (max(1, ulysses // heads.keys) - 1) * heads.keys * (heads.dim + heads.value_dim) * compute
            for heads in layer.attention
        )

    def exchanged(layer: Layer) -> int:  # a tensor as it is sent, and as it arrives
        widest = max((heads.queries * max(heads.dim, heads.value_dim) for heads in layer.attention), default=0)
        return 2 * widest * compute if ulysses > 1 else 0

    if layout.remat:
        kept = sum(layer.times * layer.input for layer in shape.layers)
        work = max(layer.inner + repeated(layer) + layer.work + exchanged(layer) for layer in shape.layers)
    else:
        kept = sum(layer.times * (layer.held + repeated(layer)) for layer in shape.layers)
        work = max(layer.work + exchanged(layer) for layer in shape.layers)
    return math.ceil(tokens * (kept + shape.rest)), math.ceil(tokens * work)


def _gathered(shape: Shape, layout: Layout, master: torch.dtype) -> int:
    """Layers are gathered one ahead, so two at a time. One GPU has all, and a copy where it computes in another dtype."""
    if not layout.sharded:
        embedding = 0 if shape.tied else shape.vocabulary * shape.hidden  # a look-up does not keep its table
        return (shape.parameters - embedding) * shape.dtype.itemsize if shape.dtype != master else 0
    return (shape.outside + 2 * max(layer.parameters for layer in shape.layers)) * shape.dtype.itemsize


def _layer_gradients(shape: Shape, layout: Layout, master: torch.dtype) -> int:
    """Gradients of a layer as the backward makes them, and in float32 while they are reduced.

    On one GPU each parameter's is added to its sum as soon as it is there.
    """
    compute, wide = shape.dtype.itemsize, precise(master).itemsize
    if not layout.sharded:
        return max(layer.largest for layer in shape.layers) * (compute if shape.dtype == master else compute + wide)
    return max(layer.parameters for layer in shape.layers) * (compute + wide)


def _ends(shape: Shape, layout: Layout, master: torch.dtype) -> int:
    """The same for what is in no layer, which is the last to be reduced."""
    compute, wide = shape.dtype.itemsize, precise(master).itemsize
    if layout.sharded:
        return shape.outside * (compute + wide)
    made = shape.vocabulary * shape.hidden * (compute if shape.dtype == master else compute + wide)
    return made + shape.tied * shape.vocabulary * shape.hidden * compute


def _head(shape: Shape, targets: int, device: torch.device) -> int:
    """The head's backward: a chunk of logits, two blocks of it, the gradients of the head, and twice of hidden states."""
    compute, wide = shape.dtype.itemsize, precise(shape.dtype).itemsize
    rows = min(targets_per_chunk(shape.vocabulary, shape.dtype, device), targets)
    of_block = min(targets_per_block(shape.vocabulary, shape.dtype, device), rows)
    narrow = 0 if compute == wide else compute  # a copy of a chunk, and of the gradient, in half precision
    chunk = shape.vocabulary * (rows * (wide + narrow) + 2 * of_block * wide)
    return chunk + shape.vocabulary * shape.hidden * (wide + narrow) + 2 * targets * shape.hidden * compute
