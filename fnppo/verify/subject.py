"""What is verified, and against what.

The reference is the model's own forward in the next wider dtype: float32 for half precision, float64 for float32. How far
the model's own numbers are from it, in its dtype, is the rounding that it has anyway; fnppo may have four times that.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from fnppo.layouts import Layout, padded
from fnppo.policy import Policy
from fnppo.rows import select_rows
from fnppo.types import ModelBatch, PaddedBatch, Params
from fnppo.verify.measure import (
    Measured,
    apart,
    by_the_model,
    grads_apart,
    logits_by_the_model,
    nats_apart,
    probe_batch,
)
from fnppo.verify.report import Check

ROUNDINGS = 4
FLOOR = 16
"""In units of the dtype's eps: below it, a model of few operations may be lucky in its own rounding."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, rows to try it on, what it makes of them by itself, and how far from that a number may be."""

    module: Any
    policy: Policy
    params: Params
    batch: PaddedBatch
    reference: Measured
    logits: Tensor
    """The reference's, of row 0."""
    nats: float
    """Tolerance of log-probs, entropies and logits."""
    relative: float
    """Tolerance of gradients, see `grads_apart`."""
    layout: Layout = padded
    """The one that the checks after the layouts use."""

    def lay(self, *rows: int) -> ModelBatch:
        """The batch, or rows of it."""
        return self.layout.lay(select_rows(self.batch, list(rows)) if rows else self.batch)

    def row(self) -> Tensor:
        """Token ids of row 0."""
        return self.batch.input_ids[0][self.batch.attention_mask[0]]

    def nats_check(self, name: str, error: float, *, cause: str, found: str) -> Check:
        """A row of the report: what was found, or the likely cause and the way out."""
        return _check(name, error, self.nats, cause, found)

    def grads_check(self, name: str, error: float, *, cause: str, found: str) -> Check:
        """The same for gradients."""
        return _check(name, error, self.relative, cause, found)


def _check(name: str, error: float, tolerance: float, cause: str, found: str) -> Check:
    return Check(name, error <= tolerance, found if error <= tolerance else cause, error, tolerance)


def subject_of(module: Any, policy: Policy, params: Params, *, length: int, seed: int) -> Subject:
    """Run the model by itself, in its dtype and in the wider one.

    Raises:
        ValueError: it has fewer positions than `length`, or its numbers are not finite.
    """
    if policy.max_positions is not None and length > policy.max_positions:
        raise ValueError(
            f"length is {length}, but the model has {policy.max_positions} positions. Use at most --length {policy.max_positions}."
        )
    vocabulary = min(policy.vocab_size, module.get_input_embeddings().weight.shape[0])
    dtype = params[policy.head.weight].dtype
    batch = probe_batch(vocabulary, length=length, device=params[policy.head.weight].device, seed=seed)
    ids = batch.input_ids[0][batch.attention_mask[0]]
    own = policy.with_own_attention()
    numbers, logits = by_the_model(own, params, batch), logits_by_the_model(own, params, ids)
    finite = [numbers.logprobs, numbers.entropy, *numbers.grads.values()]
    if not all(bool(values.isfinite().all()) for values in finite):
        raise ValueError(
            f"its own log-probs or gradients are not finite in {str(dtype).removeprefix('torch.')}. Use a wider dtype."
        )
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:  # nothing is wider
        return Subject(module, policy, params, batch, numbers, logits, eps**0.5, eps**0.5)
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    reference, wide_logits = _in(wider, own, params, batch, ids)
    nats = max(ROUNDINGS * max(nats_apart(numbers, reference), apart(logits, wide_logits)), FLOOR * eps)
    relative = max(ROUNDINGS * grads_apart(numbers.grads, reference.grads), FLOOR * eps)
    return Subject(module, policy, params, batch, reference, wide_logits, nats, relative)


def _in(dtype: torch.dtype, own: nn.Module, params: Params, batch: PaddedBatch, ids: Tensor) -> tuple[Measured, Tensor]:
    wide = {name: value.to(dtype) if value.is_floating_point() else value for name, value in params.items()}
    own = own.to(dtype)  # its buffers; the parameters are on the meta device
    return by_the_model(own, wide, batch), logits_by_the_model(own, wide, ids)
