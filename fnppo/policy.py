"""From an nn.Module to pure functions of its parameters.

`functional_policy(module)` returns a `Policy`, which holds the architecture and no weights, and the parameters as a
plain dict. The architecture is a copy of the module on the meta device: a parameter that is missing is an error, never
a silent use of the module's own weights, and the module that the caller holds is not touched.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from fnppo import attention_interface
from fnppo.attention import Attention, Segments, choose_attention, chunks_of, segments_of
from fnppo.checks import check_device, check_inputs, check_tensor
from fnppo.head import LinearHead
from fnppo.remat import rematerialize
from fnppo.seeding import seeded
from fnppo.transforms import forward_order, inside_transform
from fnppo.types import PackedInputs, PaddedInputs, Params


def functional_policy(
    module: Any,
    *,
    attention: Attention = choose_attention,
    remat: bool = False,
    train: bool = False,
    dropout_seed: int | None = None,
) -> tuple["Policy", Params]:
    """A causal LM from transformers as a pure policy and its parameters.

    A model whose attention goes through transformers' attention interface, and that mixes tokens nowhere else, reads
    packed batches. Any other causal model (a recurrent state, an attention of its own) reads padded ones, with the
    attention it came with: `Policy.padded_only` says why. Which it is, is found by running a few tokens.

    Args:
        module: any causal LM from transformers.
        attention: a backend from `fnppo.attention`; the default chooses by device, dtype and what the model asks.
        remat: recompute each layer in the backward (gradient checkpointing), so that memory grows with one layer's
            activations and not with all of them. The numbers stay the same.
        train: run the module in training mode. False turns dropout off.
        dropout_seed: where training mode has dropout, the seed from which each forward draws it. The same seed and the
            same batch give the same masks; pass another seed each step (`policy.with_dropout_seed`). Masks depend on
            the layout and on the split into micro-batches, so with dropout these do change the numbers.

    Returns:
        The policy, and its parameters, which share memory with the module's. Tied weights are in it once.

    Raises:
        ValueError: the model is no causal LM, reads later tokens, has a head that is not linear (up to bias, scale and
            softcap), has dropout in training mode and no seed, or cannot read what `attention`, if given, is for.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> policy, params = functional_policy(LlamaForCausalLM(config))
    >>> policy.head.weight, params[policy.head.weight].shape
    ('lm_head.weight', torch.Size([11, 8]))
    """
    is_module = isinstance(module, nn.Module)
    if not is_module:
        raise ValueError(
            f"module is a {type(module).__name__}, no causal LM. Load one with AutoModelForCausalLM.from_pretrained(...)."
        )
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    policy = _choose(module, attention, params)
    skeleton = _skeleton(module, packed=policy.padded_only is None).train(train)
    policy = dataclasses.replace(policy, skeleton=skeleton, dropout_seed=dropout_seed)
    if train and dropout_seed is None and _is_random(policy, params):
        raise ValueError(
            f"{type(module).__name__} is random in training mode (dropout, layer drop or jitter), so old and new log-probs "
            "would differ by chance. Pass dropout_seed, or leave train=False."
        )
    if remat:
        rematerialize(policy.skeleton)
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
    padded_only: str | None = None
    """Why it cannot read packed inputs, and reads padded ones with its own attention; None where it reads both."""

    def hidden_states(self, params: Params, inputs: PackedInputs | PaddedInputs) -> Float[Tensor, "tokens hidden"]:
        """Last hidden state of every position, after the final norm; padded inputs come out flattened, row by row."""
        if forward_order() > 1 and any(isinstance(child, nn.LayerNorm) for child in self.skeleton.modules()):
            raise ValueError(
                "jvp of jvp through torch's layer_norm is silently wrong. Take the second derivative with jvp of grad."
            )
        check_inputs(inputs, vocab_size=self.vocab_size, max_positions=self.max_positions)
        arguments = {"use_cache": False} | (self._own if self.padded_only else self._ours)(inputs)
        prefix, backbone = _backbone(self.skeleton)
        own = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
        if missing := sorted(dict(backbone.named_parameters()).keys() - own.keys()):
            raise ValueError(f"params lacks {prefix}{missing[0]}. Give the whole tree that functional_policy returned.")
        _check_params(self.skeleton, params, inputs)
        device = inputs.input_ids.device
        own |= {name: buffer.to(device) for name, buffer in backbone.named_buffers()}
        if self.dropout_seed is None:
            hidden = functional_call(backbone, own, kwargs=arguments).last_hidden_state
        else:
            with seeded(self.dropout_seed, device):
                hidden = functional_call(backbone, own, kwargs=arguments).last_hidden_state
        return rearrange(hidden, "batch seq hidden -> (batch seq) hidden")

    def _ours(self, inputs: PackedInputs | PaddedInputs) -> dict[str, Any]:
        """Arguments of the model's forward under our attention, which knows the segments."""
        segments = segments_of(inputs)
        add_batch = slice(None) if isinstance(inputs, PaddedInputs) else None
        return {
            "input_ids": inputs.input_ids[add_batch],
            "position_ids": inputs.position_ids[add_batch],
            "attention_mask": inputs.attention_mask if isinstance(inputs, PaddedInputs) else None,
            "attend": partial(_attend, self.attention, segments, cache(partial(chunks_of, segments))),
        }

    def _own(self, inputs: PackedInputs | PaddedInputs) -> dict[str, Any]:
        """Arguments under the model's own attention: the tokens alone. It is causal, so what stands on the right of a
        row is not seen, and needs no mask, which the model might read in ways of its own.
        """
        if not isinstance(inputs, PaddedInputs):
            raise ValueError(
                f"the batch is packed, and the model can read padded ones only: {self.padded_only} Use pad_sequences "
                "(layout=padded)."
            )
        mask = inputs.attention_mask
        if not inside_transform() and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError(
                "the batch has padding on the left of a token, which the model would read. pad_sequences has it on the right."
            )
        return {"input_ids": inputs.input_ids}

    def with_dropout_seed(self, seed: int) -> "Policy":
        """The same policy with other dropout masks."""
        return dataclasses.replace(self, dropout_seed=seed)

    @property
    def layout(self) -> str:
        """The layout that it is meant for: packed, or padded where it cannot be packed."""
        return "packed" if self.padded_only is None else "padded"

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.skeleton.get_parameter(self.head.weight).shape[0])

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the model has embeddings for; None where positions are computed, as rotary ones are."""
        longest = getattr(self.skeleton.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[operator, union-attr]
        tables = [m for m in self.skeleton.modules() if isinstance(m, nn.Embedding)]
        # Some tables begin with two entries that are no positions.
        if longest and any(longest <= table.num_embeddings <= longest + 2 for table in tables[1:]):
            return int(longest)
        return None

    def with_own_attention(self) -> nn.Module:
        """The architecture with transformers' own attention, in evaluation mode: to sample with a cache, to compare."""
        model: Any = copy.deepcopy(self.skeleton).eval()
        model.set_attn_implementation(self.sampling_attention)
        return model


class Head(NamedTuple):
    """logits = cap(scale · (hidden weightᵀ + bias)), cap(x) = softcap · tanh(x / softcap): the names of its parameters."""

    weight: str
    bias: str | None
    scale: float
    softcap: float | None

    def bind(self, params: Params) -> LinearHead:
        """The head with its tensors."""
        if missing := [name for name in (self.weight, self.bias) if name is not None and name not in params]:
            raise ValueError(f"params lacks {missing[0]}. Give the whole tree that functional_policy returned.")
        return LinearHead(params[self.weight], params[self.bias] if self.bias else None, self.scale, self.softcap)


def _check_params(skeleton: nn.Module, params: Params, inputs: PackedInputs | PaddedInputs) -> None:
    """Names, shapes and devices: a misspelt name would be ignored in silence, and a vector of one number broadcast."""
    own = dict(skeleton.named_parameters())
    for name, value in params.items():
        check_tensor(f"params[{name!r}]", value)
        if name not in own or value.shape != own[name].shape:
            there = f"is {tuple(own[name].shape)}" if name in own else "does not exist"
            raise ValueError(
                f"params holds {name} of shape {tuple(value.shape)}, which {there} in the model. Give the tree that "
                "functional_policy returned."
            )
        check_device(name, value, "input_ids", inputs.input_ids)


def _attend(
    backend: Attention,
    segments: Segments,
    chunks: Callable[[int], Segments],
    *tensors: Tensor,
    chunk: int | None,
    **asked: Any,
) -> Tensor:
    return backend(*tensors, segments if chunk is None else chunks(chunk), **asked)


def _choose(module: Any, attention: Attention, params: Params) -> Policy:
    """The policy that packs, if the model allows it, else the one that pads; checked against the module itself."""
    head, own = _describe_head(module), getattr(module.config, "_attn_implementation", "eager")
    try:
        policy = Policy(_skeleton(module, packed=True).eval(), head, attention, None, own)
        _check_against(module, policy, params)
        return policy
    except attention_interface.Impossible:
        raise
    except Exception as error:  # a model may fail in any way on what it does not know
        if attention is not choose_attention:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(module).__name__} fails on packed tokens: "
        reason = kind + str(error).strip().split("\n")[0]
    policy = Policy(_skeleton(module, packed=False).eval(), head, attention, None, own, reason)
    try:
        _check_against(module, policy, params)
    except ValueError as error:
        raise ValueError(reason if str(error) == reason else f"{reason} Padded: {error}") from None
    return policy


def _skeleton(module: Any, *, packed: bool) -> nn.Module:
    """A copy of the module whose parameters are on the meta device; to read packed tokens, with our attention."""
    name = type(module).__name__
    if rope := sorted(_rope_types(module) & {"dynamic", "longrope"}):
        raise attention_interface.Impossible(
            f"{name} has {rope[0]} rotary embeddings, which change with the longest row of a batch, so "
            "log-probs would depend on what else is in it. Load it with rope_type 'default', 'linear', 'yarn' or 'llama3'."
        )
    if getattr(module.config, "rescale_every", 0):
        raise attention_interface.Impossible(
            f"{name} divides its weights in place when it runs (rescale_every is {module.config.rescale_every}), and so would "
            "change the parameters. Set rescale_every in its config to 0."
        )
    kinds = set(getattr(module.config.get_text_config(), "layer_types", None) or [])
    if sparse := sorted(kinds & {"indexed_attention", "compressed_sparse_attention", "minimax_m3_sparse"}):
        raise attention_interface.Impossible(
            f"{name} has layers of type {', '.join(sparse)}, which choose a few keys by a score. Among equal scores the "
            "choice changes with the length of the batch's rows, so log-probs would depend on what else is in it."
        )
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    skeleton: Any = copy.deepcopy(module, memo)
    if not packed:
        return skeleton
    attention_interface.register()
    skeleton.set_attn_implementation(attention_interface.NAME)
    if skeleton.config._attn_implementation != attention_interface.NAME:
        raise ValueError(
            f"{name} does not take its attention from transformers' attention interface, so sequences "
            "cannot be kept apart in it."
        )
    # Short probes cannot tell these: a pattern that chooses among many tokens chooses all of a few.
    if strange := sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}):
        raise ValueError(
            f"{name} has layers of type {', '.join(strange)}, which do not know where a packed sequence ends."
        )
    return skeleton


def _rope_types(module: nn.Module) -> set[str]:
    """Kinds of rotary embeddings; some models have one a layer type."""
    kinds = [getattr(child, "rope_type", None) or {} for child in module.modules()]
    return {kind for found in kinds for kind in ([found] if isinstance(found, str) else found.values())}


def _backbone(module: Any) -> tuple[str, nn.Module]:
    """The model below the head, and the prefix of its parameters' names."""
    for name in (module.base_model_prefix, "model"):  # the prefix of a text model may be that of its multimodal parent
        backbone = getattr(module, name, None)
        if isinstance(backbone, nn.Module) and backbone is not module:
            return f"{name}.", backbone
    raise ValueError(f"{type(module).__name__} has no backbone under its head, and is not supported.")


def _is_random(policy: "Policy", params: Params) -> bool:
    """Whether a forward draws random numbers: dropout, layer drop, router jitter."""
    device = next(iter(params.values())).device
    if device.type == "meta":
        return False
    tokens = torch.arange(8, device=device) % policy.vocab_size
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    with torch.no_grad(), seeded(0, device):
        before = [generator.get_state() for generator in generators]
        _hidden(policy, params, tokens)
        after = [generator.get_state() for generator in generators]
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _describe_head(module: Any) -> Head:
    """Read the head off the module: tied weights get the name under which `named_parameters` knows them."""
    if not hasattr(module, "get_output_embeddings") or not hasattr(module, "base_model"):
        raise ValueError(f"{type(module).__name__} is no causal LM from transformers: it has no output embeddings.")
    linear = module.get_output_embeddings()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if linear is None or id(getattr(linear, "weight", None)) not in names:
        raise ValueError(f"{type(module).__name__} has no linear output head, so it is no causal LM.")
    config = module.config.get_text_config()
    scale = 1.0
    for name, power in (
        ("logit_scale", 1), ("logits_scaling", -1), ("lm_head_multiplier", 1), ("logits_mup_width_multiplier", -1),
    ):  # fmt: skip
        scale *= (getattr(config, name, None) or 1.0) ** power
    softcaps = [
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    ]
    bias = getattr(linear, "bias", None)
    return Head(
        names[id(linear.weight)],
        None if bias is None else names[id(bias)],
        scale,
        next((softcap for softcap in softcaps if softcap is not None), None),
    )


def _check_against(module: Any, policy: Policy, params: Params) -> None:
    """Run a few tokens through both. Refuse the model by name where they disagree or where tokens see what they may not."""
    name = type(module).__name__
    device = next(iter(params.values())).device
    if device.type == "meta":
        return  # nothing to compare: an architecture without weights
    first, other, second, later = (
        _probe(module, tokens, device) for tokens in ((1, 2, 3, 4, 5), (9, 8, 7, 6, 5), (3, 1, 2), (1, 2, 3, 4, 6))
    )
    versions = [value._version for value in params.values()]
    with torch.no_grad():
        hidden = _hidden(policy, params, first, second)
        if versions != [value._version for value in params.values()]:
            raise attention_interface.Impossible(f"{name} has changed its parameters in place: load it anew.")
        logits = policy.head.bind(params).logits(hidden)
        own = policy.with_own_attention()
        alone = [
            functional_call(own, params, kwargs={"input_ids": ids[None], "use_cache": False}) for ids in (first, second)
        ]
        expected = torch.cat([output.logits[0] for output in alone])
        if _moves(policy, params, (first, second), (later, second), slice(0, first.numel() - 1)):
            raise ValueError(f"{name} lets a token see those after it, so it gives no probability of the next token.")
        if _moves(policy, params, (first, second), (other, second), slice(first.numel(), None)):
            raise ValueError(f"{name} lets sequences of a {policy.layout} batch see each other.")
    if logits.shape != expected.shape:
        raise ValueError(
            f"{name} gives {expected.shape[-1]} logits, and its output matrix has {logits.shape[-1]} rows."
        )
    eps = max(torch.finfo(hidden.dtype).eps, torch.finfo(torch.float32).eps)  # models keep parts in float32
    error = (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    tolerance = 1e-4 if eps < 1e-6 else 32 * eps
    if not error <= tolerance:
        raise ValueError(
            f"{name}: {policy.layout} logits differ from the model's own by {error:.1e} of the largest (limit "
            f"{tolerance:.0e}). Its head or its attention is not what was read off it: {policy.head}."
        )


def _moves(policy: Policy, params: Params, before: Sequence[Tensor], after: Sequence[Tensor], places: slice) -> bool:
    """Whether hidden states at `places` change with the sequences, by more than a rounding of float32.

    In half precision an expert that sees another group of tokens may round otherwise, so float32 decides.
    """

    def change(params: Params) -> tuple[bool, torch.dtype]:
        a, b = (_hidden(policy, params, *sequences)[places] for sequences in (before, after))
        return bool((a - b).abs().max() > 16 * torch.finfo(torch.float32).eps * a.abs().max()), a.dtype

    moved, dtype = change(params)
    if moved and dtype in (torch.float16, torch.bfloat16):
        moved, _ = change({key: value.float() if value.is_floating_point() else value for key, value in params.items()})
    return moved


def _hidden(policy: Policy, params: Params, *sequences: Int[Tensor, " _"]) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of the sequences' tokens, in the layout that the policy is for."""
    if policy.padded_only is None:
        return policy.hidden_states(params, _packed(*sequences))
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=ids.device)
    columns = torch.arange(ids.shape[1], device=ids.device)
    mask = columns < lengths[:, None]
    hidden = policy.hidden_states(params, PaddedInputs(ids, columns.expand_as(ids), mask))
    return hidden[rearrange(mask, "batch seq -> (batch seq)")]


def _probe(module: Any, tokens: tuple[int, ...], device: torch.device) -> Int[Tensor, " tokens"]:
    return torch.tensor(tokens, device=device) % module.get_input_embeddings().weight.shape[0]


def _packed(*sequences: Int[Tensor, " _"]) -> PackedInputs:
    counts = torch.tensor([0] + [ids.numel() for ids in sequences], device=sequences[0].device)
    positions = torch.cat([torch.arange(ids.numel(), device=ids.device) for ids in sequences])
    return PackedInputs(torch.cat(sequences), positions, counts.cumsum(0).to(torch.int32))
