"""From an nn.Module to pure functions of its parameters.

`functional_policy(module)` returns a `Policy`, which holds the architecture and no weights, and the parameters as a
plain dict. The architecture is a copy of the module on the meta device: a parameter that is missing is an error, never
a silent use of the module's own weights, and the module that the caller holds is not touched.
"""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fnppo import attention as attention_module
from fnppo.attention import Attention, choose_attention, segments_of
from fnppo.transforms import inside_transform
from fnppo.types import PackedInputs, PaddedInputs, Params


def functional_policy(
    module: nn.Module,
    *,
    attention: Attention = choose_attention,
    remat: bool = False,
    train: bool = False,
    dropout_seed: int | None = None,
) -> tuple["Policy", Params]:
    """A causal LM from transformers as a pure policy and its parameters.

    Args:
        module: any causal LM whose attention goes through transformers' attention interface.
        attention: a backend from `fnppo.attention`; the default chooses by device, dtype and what the model asks.
        remat: recompute each layer in the backward (gradient checkpointing), so that memory grows with one layer's
            activations and not with all of them. The numbers stay the same.
        train: run the module in training mode. False turns dropout off.
        dropout_seed: where training mode has dropout, the seed from which each forward draws it. The same seed gives
            the same masks; pass another one each step (`policy.with_dropout_seed`).

    Returns:
        The policy, and its parameters, which share memory with the module's. Tied weights are in it once.

    Raises:
        ValueError: the model is no causal LM, keeps its attention to itself, lets packed sequences see each other, has
            a head that is not linear (up to bias, scale and softcap), or has dropout in training mode and no seed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> policy, params = functional_policy(LlamaForCausalLM(config))
    >>> policy.head.weight, params[policy.head.weight].shape
    ('lm_head.weight', torch.Size([11, 8]))
    """
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    skeleton = _skeleton(module).train(train)
    if train and dropout_seed is None and (where := _dropout(skeleton)):
        raise ValueError(
            f"{type(module).__name__} has dropout in training mode ({where}), and old and new log-probs would differ by "
            "chance. Pass dropout_seed, or leave train=False."
        )
    if remat:
        _rematerialize(skeleton)
    own_attention = str(module.config._attn_implementation)  # type: ignore[union-attr]
    policy = Policy(skeleton, _describe_head(module), attention, dropout_seed, own_attention)
    # Whether the description is right has nothing to do with remat and dropout.
    _check_against(module, dataclasses.replace(policy, skeleton=_skeleton(module).eval(), dropout_seed=None), params)
    return policy, params


@dataclasses.dataclass(frozen=True)
class Policy:
    """An architecture without weights. Its methods are pure functions of `params` and `inputs`."""

    skeleton: nn.Module
    head: "Head"
    attention: Attention = choose_attention
    dropout_seed: int | None = None
    sampling_attention: str = "eager"
    """transformers' name of the attention that the module came with, used when it samples with a cache."""

    def hidden_states(self, params: Params, inputs: PackedInputs | PaddedInputs) -> Float[Tensor, "tokens hidden"]:
        """Last hidden state of every position, after the final norm; padded inputs come out flattened, row by row."""
        add_batch = slice(None) if isinstance(inputs, PaddedInputs) else None
        arguments = {
            "input_ids": inputs.input_ids[add_batch],
            "position_ids": inputs.position_ids[add_batch],
            "attention_mask": inputs.attention_mask if isinstance(inputs, PaddedInputs) else None,
            "use_cache": False,
            "attend": partial(_attend, self.attention, segments_of(inputs)),
        }
        prefix, backbone = _backbone(self.skeleton)
        own = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
        if missing := sorted(dict(backbone.named_parameters()).keys() - own.keys()):
            raise ValueError(f"params lacks {prefix}{missing[0]}. Give the whole tree that functional_policy returned.")
        device = inputs.input_ids.device
        own |= {name: buffer.to(device) for name, buffer in backbone.named_buffers()}
        if self.dropout_seed is None:
            hidden = functional_call(backbone, own, kwargs=arguments).last_hidden_state
        else:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(self.dropout_seed)
                hidden = functional_call(backbone, own, kwargs=arguments).last_hidden_state
        return rearrange(hidden, "batch seq hidden -> (batch seq) hidden")

    def with_dropout_seed(self, seed: int) -> "Policy":
        """The same policy with other dropout masks."""
        return dataclasses.replace(self, dropout_seed=seed)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.skeleton.get_parameter(self.head.weight).shape[0])


class Head(NamedTuple):
    """logits = cap(scale · (hidden weightᵀ + bias)), cap(x) = softcap · tanh(x / softcap): the names of its parameters."""

    weight: str
    bias: str | None
    scale: float
    softcap: float | None

    def bind(self, params: Params) -> "BoundHead":
        """The head with its tensors."""
        if missing := [name for name in (self.weight, self.bias) if name is not None and name not in params]:
            raise ValueError(f"params lacks {missing[0]}. Give the whole tree that functional_policy returned.")
        return BoundHead(params[self.weight], params[self.bias] if self.bias else None, self.scale, self.softcap)


class BoundHead(NamedTuple):
    """A `Head` with tensors in the place of names."""

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None
    scale: float
    softcap: float | None

    def logits(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens vocab"]:
        """All logits at once, for small inputs."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _attend(backend: Attention, segments: Any, *arguments: Any, **asked: Any) -> Tensor:
    query, key, value = arguments
    return backend(query, key, value, segments, **asked)


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters are on the meta device, and whose attention is ours."""
    if not hasattr(module, "get_output_embeddings") or not hasattr(module, "base_model"):
        raise ValueError(f"{type(module).__name__} is no causal LM from transformers: it has no output embeddings.")
    attention_module.register()
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    skeleton: Any = copy.deepcopy(module, memo)
    skeleton.config = copy.deepcopy(skeleton.config)
    skeleton.set_attn_implementation(attention_module.NAME)
    if skeleton.config._attn_implementation != attention_module.NAME:
        raise ValueError(
            f"{type(module).__name__} does not take its attention from transformers' attention interface, so sequences "
            "cannot be kept apart in it."
        )
    kinds = set(getattr(skeleton.config.get_text_config(), "layer_types", None) or [])
    if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"{type(module).__name__} has layers of type {', '.join(strange)}, which are not supported yet."
        )
    return skeleton


def _backbone(module: Any) -> tuple[str, nn.Module]:
    """The model below the head, and the prefix of its parameters' names."""
    prefix = module.base_model_prefix
    return f"{prefix}.", getattr(module, prefix)


def _dropout(module: nn.Module) -> str | None:
    """The first place with dropout, in words."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            return f"{name}: p = {child.p}"
        for attribute in ("attention_dropout", "dropout"):
            p = getattr(child, attribute, 0.0)
            if isinstance(p, float) and p > 0:
                return f"{name}.{attribute} = {p}"
    return None


def _describe_head(module: Any) -> Head:
    """Read the head off the module: tied weights get the name under which `named_parameters` knows them."""
    linear = module.get_output_embeddings()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if linear is None or id(getattr(linear, "weight", None)) not in names:
        raise ValueError(f"{type(module).__name__} has no linear output head, so it is no causal LM.")
    config = module.config.get_text_config()
    scale = 1.0
    for name, power in (("logit_scale", 1), ("logits_scaling", -1), ("lm_head_multiplier", 1)):
        scale *= (getattr(config, name, None) or 1.0) ** power
    bias = getattr(linear, "bias", None)
    return Head(
        names[id(linear.weight)],
        None if bias is None else names[id(bias)],
        scale,
        getattr(config, "final_logit_softcapping", None),
    )


def _check_against(module: Any, policy: Policy, params: Params) -> None:
    """Run a few tokens through both. Refuse the model by name where they disagree or where sequences see each other."""
    name = type(module).__name__
    device = next(iter(params.values())).device
    if device.type == "meta":
        return  # nothing to compare: an architecture without weights
    first, other, second = (_probe(module, tokens, device) for tokens in ((1, 2, 3, 4, 5), (9, 8, 7, 6, 5), (3, 1, 2)))
    with torch.no_grad():
        hidden = policy.hidden_states(params, _packed(first, second))
        moved = policy.hidden_states(params, _packed(other, second))
        logits = policy.head.bind(params).logits(hidden)
        training = module.training
        module.eval()
        try:
            expected = torch.cat([module(input_ids=ids[None], use_cache=False).logits[0] for ids in (first, second)])
        finally:
            module.train(training)
    if (moved[first.numel() :] - hidden[first.numel() :]).abs().max() > 16 * torch.finfo(
        hidden.dtype
    ).eps * hidden.abs().max():
        raise ValueError(f"{name} lets sequences of a packed batch see each other. It cannot be used packed.")
    error = (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    tolerance = 1e-4 if torch.finfo(hidden.dtype).eps < 1e-6 else 32 * torch.finfo(hidden.dtype).eps
    if not error <= tolerance:
        raise ValueError(
            f"{name}: packed logits differ from the model's own by {error:.1e} of the largest (limit {tolerance:.0e}). "
            f"Its head or its attention is not what was read off it: {policy.head}."
        )


def _probe(module: Any, tokens: tuple[int, ...], device: torch.device) -> Int[Tensor, " tokens"]:
    return torch.tensor(tokens, device=device) % module.get_input_embeddings().weight.shape[0]


def _packed(*sequences: Int[Tensor, " _"]) -> PackedInputs:
    counts = torch.tensor([0] + [ids.numel() for ids in sequences], device=sequences[0].device)
    positions = torch.cat([torch.arange(ids.numel(), device=ids.device) for ids in sequences])
    return PackedInputs(torch.cat(sequences), positions, counts.cumsum(0).to(torch.int32))


def _rematerialize(skeleton: nn.Module) -> None:
    """Give each layer a forward that saves its inputs only, and runs again when its gradient is asked for.

    `functional_call` has put the module's own weights back by then, so the layer's current parameters are captured when
    it first runs and put in place for the second run. Under a torch.func transform, which knows no recomputation, the
    layer runs as it is: only the memory differs.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [child for child in skeleton.modules() if isinstance(child, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(skeleton).__name__} has no layers that can be recomputed. Use remat=False.")
    for layer in layers:
        layer.forward = partial(_recomputed, _Layer(layer, layer.forward))


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
