"""Recomputation of layers in the backward (gradient checkpointing) that is right for pure functions.

torch's checkpoint and `functional_call` together are silently wrong: the layer runs again after `functional_call` has
put the module's own weights back, and its gradient is that of other parameters than the forward's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fnppo.transforms import inside_transform
from fnppo.types import Params


def rematerialize(skeleton: nn.Module) -> None:
    """Give each layer a forward that saves its inputs only, and runs again when its gradient is asked for.

    The layer's current parameters are captured when it first runs, and put in place for the second run. Under a
    torch.func transform, which knows no recomputation, the layer runs as it is: only the memory differs.

    Args:
        skeleton: a model from transformers, which is changed: its layers get another `forward`.

    Raises:
        ValueError: transformers does not mark the model's layers as ones that can be recomputed.
    """
    layers = layers_of(skeleton)
    if not layers:
        raise ValueError(f"{type(skeleton).__name__} has no layers that can be recomputed. Use remat=False.")
    for layer in layers:
        runner = _Layer(layer, layer.forward)
        layer.forward = partial(_recomputed, runner)
        # What is run again is compiled; around it, torch.compile would see no recomputation.
        layer.compile = runner.compile  # type: ignore[method-assign]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model from transformers, in order, which marks them as what can be recomputed; maybe none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [child for child in model.modules() if isinstance(child, GradientCheckpointingLayer)]


def _recomputed(runner: "_Layer", *args: Any, **kwargs: Any) -> Any:
    if inside_transform() or not torch.is_grad_enabled():
        return runner(*args, **kwargs)
    current = dict(runner.named_parameters(remove_duplicate=False)) | dict(runner.named_buffers())

    def run(current: Params, *args: Any) -> Any:
        return functional_call(runner, current, args, kwargs)

    return checkpoint(run, current, *args, use_reentrant=False)


class _Layer(nn.Module):
    """A layer under its original forward, for `functional_call`."""

    def __init__(self, layer: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.original = layer, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)
