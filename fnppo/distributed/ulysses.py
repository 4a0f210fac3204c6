"""Sequence parallelism after DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509): each rank has a slice of the tokens.

All of a layer but its attention is about single tokens. Before the attention an all-to-all exchanges tokens for heads, so
that each rank has all tokens of some heads; after it another one exchanges them back. Between the two any backend runs,
with the segments of the whole batch: packed rows, shared prefixes, windows and softcap are none of this file's business.

    tokens / ranks, all heads   --all-to-all-->   all tokens, heads / ranks   --attention, all-to-all-->   as before

Log-probs are computed where their predictor is, and then shared, so a loss sees all targets of its rows. Every rank of
the group computes the same loss; each carries back the gradient of the log-probs that it has computed. So gradients of
the ranks add up to that of one loss, and there is no factor to correct.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from fnppo.attention import Attention
from fnppo.policy import Policy
from fnppo.segments import Segments
from fnppo.types import ModelBatch, PackedInputs


class Ulysses(NamedTuple):
    """What `Policy.split` needs: which tokens and targets are this rank's, and how ranks come together."""

    group: dist.ProcessGroup

    @property
    def ranks(self) -> int:
        """How many share the tokens of a row."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.group.rank()

    def even(self, inputs: PackedInputs) -> PackedInputs:
        """Filled up at the end, by a segment of its own, until all ranks have as many tokens."""
        filler = -inputs.input_ids.numel() % self.ranks
        if filler == 0:
            return inputs
        # Segments of one token each, at position 0, which every model has.
        tokens, bounds, parents = inputs.input_ids.numel(), inputs.cu_seqlens, inputs.parents
        ends = torch.arange(tokens + 1, tokens + filler + 1, dtype=bounds.dtype, device=bounds.device)
        return PackedInputs(
            torch.cat([inputs.input_ids, inputs.input_ids.new_zeros(filler)]),
            torch.cat([inputs.position_ids, inputs.position_ids.new_zeros(filler)]),
            torch.cat([bounds, ends]),
            None if parents is None else torch.cat([parents, parents.new_full((filler,), -1)]),
        )

    def part(self, tokens: int) -> slice:
        """This rank's part of an axis that `even` has filled up."""
        size = -(-tokens // self.ranks)
        return slice(size * self.rank, size * (self.rank + 1))

    def places(self, batch: ModelBatch) -> Int[Tensor, " here"]:
        """The targets whose predictors are this rank's."""
        own, predictors = self.part(batch.inputs.input_ids.numel()), batch.targets.predictors
        return ((predictors >= own.start) & (predictors < own.stop)).nonzero()[:, 0]

    def attention(self, backend: Attention) -> Attention:
        """`backend` on all tokens and this rank's heads."""

        def attend(
            query: Float[Tensor, "1 heads tokens dim"],
            key: Float[Tensor, "1 kv_heads tokens dim"],
            value: Float[Tensor, "1 kv_heads tokens value_dim"],
            segments: Segments,
            *,
            sinks: Float[Tensor, " heads"] | None = None,
            **asked: Any,
        ) -> Float[Tensor, "1 heads tokens value_dim"]:
            check_heads(query.shape[1], key.shape[1], self.ranks)
            copies = max(self.ranks // key.shape[1], 1)  # of a key/value head, so that each rank has one
            key, value = (repeat(x, "1 kv tokens dim -> 1 (kv copies) tokens dim", copies=copies) for x in (key, value))
            query, key, value = (self._heads_here(x) for x in (query, key, value))
            if sinks is not None:
                sinks = sinks.unflatten(0, (self.ranks, -1))[self.rank]
            return self._tokens_here(backend(query, key, value, segments, sinks=sinks, **asked))

        return attend

    def gather(self, values: Tensor, places: Int[Tensor, " here"], count: int) -> Tensor:
        """Values of all `count` targets on every rank. The gradient of a value goes to the rank that has computed it."""
        return _SumOfParts.apply(values.new_zeros(count).index_put((places,), values), self.group)

    def _heads_here(self, x: Tensor) -> Tensor:
        """Tokens of this rank, all heads -> all tokens, heads of this rank."""
        parts = rearrange(x, "1 (ranks heads) tokens dim -> (ranks heads) tokens dim", ranks=self.ranks)
        found = self._exchange(parts)
        return rearrange(found, "(ranks heads) tokens dim -> 1 heads (ranks tokens) dim", ranks=self.ranks)

    def _tokens_here(self, x: Tensor) -> Tensor:
        """All tokens, heads of this rank -> tokens of this rank, all heads."""
        parts = rearrange(x, "1 heads (ranks tokens) dim -> (ranks heads) tokens dim", ranks=self.ranks)
        return rearrange(self._exchange(parts), "heads tokens dim -> 1 heads tokens dim")

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of the first axis to rank i."""
        return collectives.wait_tensor(
            collectives.all_to_all_single_autograd(parts.contiguous(), None, None, self.group)
        )


def split_tokens(policy: Policy, group: dist.ProcessGroup) -> Policy:
    """The policy on slices of the packed axis, one a rank of `group`; all of its ranks call it with the same batches.

    Raises:
        ValueError: the policy reads padded batches only, or has heads that the ranks cannot share.
    """
    if policy.padded_only is not None:
        raise ValueError(
            f"{type(policy.skeleton).__name__} reads padded batches only, whose tokens cannot be split over ranks: "
            f"{policy.padded_only} Use sequence=1."
        )
    config: Any = policy.skeleton.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(kv_heads, int):  # else the first forward says it
        check_heads(heads, kv_heads, group.size())
    return dataclasses.replace(policy, split=Ulysses(group))


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise a `ValueError` unless `ranks` ranks can share the heads evenly.

    >>> check_heads(8, 2, 4)
    >>> check_heads(6, 2, 4)
    Traceback (most recent call last):
        ...
    ValueError: the model has 6 query heads, which 4 sequence ranks cannot share evenly. Use a sequence size that divides 6.
    >>> check_heads(6, 3, 2)
    Traceback (most recent call last):
        ...
    ValueError: the model has 3 key/value heads, which 2 sequence ranks can neither share evenly nor have copies of. Use a
    sequence size that divides 3 or is a multiple of it.
    """
    if heads % ranks:
        raise ValueError(
            f"the model has {heads} query heads, which {ranks} sequence ranks cannot share evenly. Use a sequence size that "
            f"divides {heads}."
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"the model has {kv_heads} key/value heads, which {ranks} sequence ranks can neither share evenly nor have copies "
            f"of. Use a sequence size that divides {kv_heads} or is a multiple of it."
        )


class _SumOfParts(torch.autograd.Function):
    """The sum over ranks; backward, the gradient as it is, since every rank has the same loss of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
