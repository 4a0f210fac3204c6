"""A policy: an architecture without weights, whose methods are pure functions of parameters and inputs.

The architecture is a copy of a module on the meta device: a parameter that is missing is an error, never a silent use of
the module's own weights. `fnppo.functional` makes one from a module.
"""

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from fnppo.arguments import check_device, check_tensor
from fnppo.attention import Attention, choose_attention
from fnppo.checks import check_inputs
from fnppo.head import LinearHead
from fnppo.seeding import seeded
from fnppo.segments import Segments, chunks_of, segments_of
from fnppo.transforms import forward_order, inside_transform
from fnppo.types import ModelBatch, PackedInputs, PaddedInputs, Params, PyTree


@runtime_checkable
class Split(Protocol):
    """Which tokens and targets of a packed batch are computed here, and how the parts come together: see
    `fnppo.distributed.ulysses`, the only one there is.
    """

    def even(self, inputs: PackedInputs) -> PackedInputs:
        """Filled up until there is as much for each rank."""
        ...

    def part(self, tokens: int) -> slice:
        """Which of so many tokens are computed here."""
        ...

    def attention(self, backend: Attention) -> Attention:
        """A backend that is given the tokens of this rank, and sees all."""
        ...

    def places(self, batch: ModelBatch) -> Tensor:
        """The targets whose predictors are computed here."""
        ...

    def gather(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """Values of all `count` targets from those at `places`."""
        ...


def run_pure(skeleton: nn.Module, params: Params, arguments: dict[str, Any]) -> Float[Tensor, "batch seq hidden"]:
    """The model below the head as a pure function of its parameters."""
    backbone = backbone_of(skeleton)
    _check_params(skeleton, params, arguments["input_ids"])
    # A tied weight has one name in params, which may be that of the head.
    names = {id(parameter): name for name, parameter in skeleton.named_parameters()}
    own = {name: params[names[id(parameter)]] for name, parameter in backbone.named_parameters()}
    device = arguments["input_ids"].device
    own |= {name: buffer.to(device) for name, buffer in backbone.named_buffers()}
    hidden: Tensor = functional_call(backbone, own, kwargs=arguments).last_hidden_state
    return hidden


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
    run: Callable[[nn.Module, Params, dict[str, Any]], Tensor] = run_pure
    """(skeleton, params, arguments of the model's forward) -> hidden states."""
    split: Split | None = None
    """How tokens are split over ranks; None where all are computed here."""

    def hidden_states(self, params: Params, inputs: PackedInputs | PaddedInputs) -> Float[Tensor, "tokens hidden"]:
        """Last hidden state of every position, after the final norm; padded inputs come out flattened, row by row.

        Of the positions of this rank, where tokens are split.
        """
        if forward_order() > 1 and any(isinstance(child, nn.LayerNorm) for child in self.skeleton.modules()):
            raise ValueError(
                "jvp of jvp through torch's layer_norm is silently wrong. Take the second derivative with jvp of grad."
            )
        check_inputs(inputs, vocab_size=self.num_embeddings, max_positions=self.max_positions)
        arguments = {"use_cache": False} | (self._own if self.padded_only else self._ours)(inputs)
        with nullcontext() if self.dropout_seed is None else seeded(self.dropout_seed, inputs.input_ids.device):
            try:
                hidden = self.run(self.skeleton, params, arguments)
            except RuntimeError as error:
                _refuse_mixed_dtypes(params, error)
                raise
        return rearrange(hidden, "batch seq hidden -> (batch seq) hidden")

    def places(self, batch: ModelBatch) -> Tensor | slice:
        """Which targets are computed here: an index of each of their columns."""
        return slice(None) if self.split is None else self.split.places(batch)

    def hidden_at(self, params: Params, batch: ModelBatch, places: Tensor | slice) -> Float[Tensor, "here hidden"]:
        """Hidden states at the predictors of those targets."""
        hidden, predictors = self.hidden_states(params, batch.inputs), batch.targets.predictors[places]
        if self.split is not None:
            predictors = predictors - self.split.part(batch.inputs.input_ids.numel()).start
        return hidden.index_select(0, predictors)

    def together(self, values: PyTree, batch: ModelBatch, places: Tensor | slice) -> PyTree:
        """Values of all targets from [here], one a target that is computed here."""
        if self.split is None:
            return values
        assert isinstance(places, Tensor)
        gather = partial(self.split.gather, places=places, count=batch.targets.predictors.numel())
        return optree.tree_map(gather, values)

    def _ours(self, inputs: PackedInputs | PaddedInputs) -> dict[str, Any]:
        """Arguments of the model's forward under our attention, which knows the segments."""
        attention, here = self.attention, slice(None)
        if self.split is not None:
            if isinstance(inputs, PaddedInputs):
                raise ValueError(
                    "the batch is padded, and tokens that are split over ranks must be packed. Use pack_sequences "
                    "(layout=packed or shared)."
                )
            inputs = self.split.even(inputs)
            attention, here = self.split.attention(attention), self.split.part(inputs.input_ids.numel())
        segments = segments_of(inputs)
        add_batch = slice(None) if isinstance(inputs, PaddedInputs) else None
        return {
            "input_ids": inputs.input_ids[here][add_batch],
            "position_ids": inputs.position_ids[here][add_batch],
            "attention_mask": inputs.attention_mask if isinstance(inputs, PaddedInputs) else None,
            "attend": partial(_attend, attention, segments, cache(partial(chunks_of, segments))),
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
        if inside_transform():
            return {"input_ids": inputs.input_ids}
        mask = inputs.attention_mask
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError(
                "the batch has padding on the left of a token, which the model would read. pad_sequences has it on the right."
            )
        wrong = mask & (inputs.position_ids != torch.arange(mask.shape[1], device=mask.device))
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"row {row} has position {int(inputs.position_ids[row, column])} in column {column}, and the model, which "
                "counts its positions itself, would take it for the column's number. Count from 0, as pad_sequences does."
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
    def num_embeddings(self) -> int:
        """Number of tokens that the model can read, which may be another than that of its logits."""
        return int(self.skeleton.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

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


def _check_params(skeleton: nn.Module, params: Params, input_ids: Tensor) -> None:
    """Names, shapes, devices and dtypes: a misspelt name would be ignored in silence, a vector of one number broadcast."""
    own = dict(skeleton.named_parameters())
    if missing := sorted(own.keys() - params.keys()):
        raise ValueError(f"params lacks {missing[0]}. Give the whole tree that functional_policy returned.")
    for name, value in params.items():
        check_tensor(f"params[{name!r}]", value)
        if name not in own or value.shape != own[name].shape:
            there = f"is {tuple(own[name].shape)}" if name in own else "does not exist"
            raise ValueError(
                f"params holds {name} of shape {tuple(value.shape)}, which {there} in the model. Give the tree that "
                "functional_policy returned."
            )
        check_device(name, value, "input_ids", input_ids)
        if own[name].is_floating_point() and not value.is_floating_point():
            raise ValueError(f"params holds {name} in {value.dtype}; it needs floating point. Call .float() on it.")


def _refuse_mixed_dtypes(params: Params, error: RuntimeError) -> None:
    """What torch says about two dtypes in one product, with the names of parameters. Models bear some mixtures, not all."""
    first: dict[torch.dtype, str] = {}
    for name, value in params.items():
        first.setdefault(value.dtype, name)
    if len(first) > 1 and ("dtype" in str(error) or "scalar type" in str(error)):
        found = " and ".join(f"{name} in {dtype}" for dtype, name in first.items())
        raise ValueError(
            f"the model cannot compute with {found} among its params: {error}. Cast all of them to one dtype."
        ) from error


def _attend(
    backend: Attention,
    segments: Segments,
    chunks: Callable[[int], Segments],
    *tensors: Tensor,
    chunk: int | None,
    **asked: Any,
) -> Tensor:
    return backend(*tensors, segments if chunk is None else chunks(chunk), **asked)


def backbone_of(module: Any) -> nn.Module:
    """The model below the head."""
    for name in (module.base_model_prefix, "model"):  # the prefix of a text model may be that of its multimodal parent
        backbone = getattr(module, name, None)
        if isinstance(backbone, nn.Module) and backbone is not module:
            return backbone
    raise ValueError(f"{type(module).__name__} has no backbone under its head, and is not supported.")
