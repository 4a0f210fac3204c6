"""What a model is made of, and what each of its layers keeps for the backward: counted, not derived.

The model's own forward runs on tensors that have shapes and no data (`FakeTensorMode`), with an attention that keeps what a
fused kernel keeps. Each kind of layer runs once by itself, forward and backward, while the bytes that are alive are
counted. So there is no formula for any architecture: what a norm, an activation function, a router or a cast keeps is what
it keeps when it runs. Everything is linear in the number of tokens, since rows do not see each other and a fused attention
stores no scores.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fnppo import attention_interface
from fnppo.attention import Attention
from fnppo.functional import refuse_what_cannot_be_packed, vocabulary_head
from fnppo.plan.live import LiveWork
from fnppo.plan.shape import Heads, Layer, Shape
from fnppo.policy import backbone_of

NAME = "fnppo_plan"


def shape_of(
    module: Any, *, dtype: torch.dtype = torch.bfloat16, tokens: int = 4096, attention: Attention | None = None
) -> Shape:
    """Count a causal LM, which is not changed and may be on the meta device.

    Args:
        module: any causal LM from transformers that can be packed.
        dtype: in which the layers compute.
        tokens: to count with. The result is a token's share.
        attention: what to run in the place of a fused kernel, a backend as in `fnppo.attention` without its segments.

    Raises:
        ValueError: the model cannot be packed, its layers are not marked as such, or its forward looks at numbers.

    >>> from fnppo.testing import tiny_llama
    >>> shape = shape_of(tiny_llama(), dtype=torch.float32)
    >>> shape.parameters, [(layer.times, layer.parameters, layer.input) for layer in shape.layers]
    (1336, [(2, 560, 32.0)])
    """
    head = vocabulary_head(module)
    refuse_what_cannot_be_packed(module)
    skeleton = _without_data(module)
    backbone, visit = backbone_of(skeleton), _Visit(tokens)
    layers = _layers(backbone)
    for layer in layers:
        layer.forward = partial(visit, layer, layer.forward)
    asked: dict[str, Any] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        visit.calls.append(Heads(query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        asked.update({name: True for name, option in options.items() if option is not None})
        if attention is None:
            return _Fused.apply(query, key, value)
        return attention(query, key, value, **options)

    rest = _run(backbone, visit, tokens, dtype, attend)
    weight = module.get_parameter(head.weight)
    return Shape(
        name=type(module).__name__,
        dtype=dtype,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        layers=tuple(layer._replace(times=visit.count[kind]) for kind, layer in visit.found.items()),
        rest=rest,
        vocabulary=weight.shape[0],
        hidden=weight.shape[1],
        tied=weight is module.get_input_embeddings().weight,
        notes=_notes(asked),
    )


def _run(backbone: nn.Module, visit: "_Visit", tokens: int, dtype: torch.dtype, attend: Attention) -> float:
    """The forward, in which each kind of layer is measured; bytes a token that are kept outside of the layers."""
    loud = logging.getLogger("torch._subclasses.fake_tensor")  # it logs what it raises, which is said below
    with patch.object(loud, "disabled", True), FakeTensorMode():

        def empty(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

        params = {name: empty(parameter).requires_grad_() for name, parameter in backbone.named_parameters()}
        buffers = {name: torch.empty(b.shape, dtype=b.dtype) for name, b in backbone.named_buffers()}
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with LiveWork() as visit.live:
            arguments = {"input_ids": ids, "position_ids": ids, "use_cache": False, "attend": attend}
            try:
                output = functional_call(backbone, params | buffers, kwargs=arguments).last_hidden_state
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                known = "BF16" in reason  # what torch says of grouped products, which experts are, without data
                raise ValueError(
                    f"{type(backbone).__name__} cannot be counted in {dtype}: {reason}. "
                    + ("Use bfloat16." if known else "Measure a small update of it instead.")
                ) from error
            edge = get_gradient_edge(output)
            del output
            kept = visit.live.live
            del edge
    return (kept + visit.shared) / tokens


class _Visit:
    """In the place of each layer's forward: the first of its kind is measured, and all hand on what they are given."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.live = LiveWork()
        self.found: dict[Any, Layer] = {}
        self.count: dict[Any, int] = {}
        self.shared = 0
        """Bytes of what all layers are given beside the hidden state."""
        self.calls: list[Heads] = []
        self._others: dict[Any, tuple[Any, ...] | None] = {}

    def __call__(self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = _kind(layer)
        self.count[kind] = self.count.get(kind, 0) + 1
        if kind not in self.found:
            self.calls = []
            self.found[kind], self._others[kind] = self._measure(layer, forward, hidden, args, kwargs)
            given = {
                t.untyped_storage()._cdata: t for t in _floating((args, kwargs)) if not isinstance(t, nn.Parameter)
            }
            self.shared = max(self.shared, sum(tensor.untyped_storage().nbytes() for tensor in given.values()))
        others = self._others[kind]
        return hidden if others is None else (hidden, *others)

    def _measure(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any
    ) -> tuple[Layer, tuple[Any, ...] | None]:
        live, parameters = self.live, list(layer.parameters())
        leaf = torch.empty_like(hidden, requires_grad=True)
        before, flops = live.live, live.flops
        hidden = leaf + 0  # as if another layer had made it, which keeps nothing
        size = live.live - before
        output = forward(hidden, *args, **kwargs)
        flops = live.flops - flops
        output, others = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        edge, gradient = get_gradient_edge(output), torch.empty_like(output)
        incoming = gradient.untyped_storage().nbytes()
        del output
        inner = live.live - before - size - incoming
        del hidden
        held = live.live - before - incoming
        live.peak = live.live
        torch.autograd.grad(edge, leaf, gradient)
        work = live.peak - before - held
        sizes = [parameter.numel() for parameter in parameters]
        counted = Layer(
            times=0,
            parameters=sum(sizes),
            largest=max(sizes, default=0),
            input=size / self.tokens,
            held=held / self.tokens,
            inner=inner / self.tokens,
            work=work / self.tokens,
            flops=flops / self.tokens,
            attention=tuple(self.calls),
        )
        return counted, others


class _Fused(torch.autograd.Function):
    """Attention as far as memory is concerned: a fused kernel keeps its inputs, its output and one number a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens_first = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        output = query.new_empty(tokens_first).transpose(1, 2)
        logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _without_data(module: Any) -> Any:
    """A copy on the meta device whose attention is the estimate's."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_interface.attention_forward)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    skeleton: Any = copy.deepcopy(module, memo).eval()
    skeleton.set_attn_implementation(NAME)
    with suppress(ValueError):  # that it has no experts
        skeleton.set_experts_implementation("grouped_mm")  # the other ways look at the routing, which is a number
    if skeleton.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(module).__name__} does not take its attention from transformers' attention interface, so what it keeps "
            "is not known. Measure a small update of it instead."
        )
    return skeleton


def _layers(backbone: nn.Module) -> Sequence[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [child for child in backbone.modules() if isinstance(child, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"transformers does not mark the layers of {type(backbone).__name__}, so they cannot be counted one by one. "
            "Measure a small update of it instead."
        )
    return layers


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that do the same: classes, sizes, and every number or word in them but their place."""
    parts = []
    for name, child in layer.named_modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, (bool, int, float, str)) and k != "layer_idx"}
        sizes = [tuple(parameter.shape) for parameter in child.parameters(recurse=False)]
        parts.append((name, type(child), tuple(sorted(plain.items())), tuple(sizes)))
    return tuple(parts)


def _floating(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _notes(asked: dict[str, Any]) -> tuple[str, ...]:
    """What a fused kernel does not do."""
    notes = []
    if "sinks" in asked:
        notes.append("attention sinks have no fused kernel: scores, rows x length², are not counted")
    if "softcap" in asked:
        notes.append("capped attention scores need flash-attn: without it scores, rows x length², are not counted")
    return tuple(notes)
