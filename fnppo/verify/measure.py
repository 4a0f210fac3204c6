"""Log-probs, entropy and gradients of one batch: by the model itself, row by row, and by the library in any layout."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fnppo.gradients import value_and_grad
from fnppo.logprobs import forward_logprobs
from fnppo.policy import Policy
from fnppo.rows import padded_batch, select_rows
from fnppo.testing.oracle import float64_everywhere
from fnppo.types import ModelBatch, PaddedBatch, Params, TokenStats

TEMPERATURE = 0.9
ENTROPY = 0.1


class Measured(NamedTuple):
    """Of all targets in the order of the rows; gradients of a weighted sum of both, in float32 or better."""

    logprobs: Tensor
    entropy: Tensor
    grads: Params


def nats_apart(a: Measured, b: Measured) -> float:
    """Largest difference of log-probs and entropies."""
    return max(apart(a.logprobs, b.logprobs), apart(a.entropy, b.entropy))


def grads_apart(a: Params, b: Params) -> float:
    """Largest difference in any parameter, relative to that parameter's largest gradient in `b`.

    Where all of a parameter's gradients are below a thousandth of the largest anywhere, relative to that thousandth: what
    is left of a gradient that cancels out, such as that of a key's bias, is rounding only.
    """
    largest = {name: float(torch.linalg.vector_norm(grad, math.inf)) for name, grad in b.items() if grad.numel()}
    if not all(math.isfinite(size) for size in largest.values()):
        return math.inf
    floor = max(1e-3 * max(largest.values()), 1e-30)
    return max(apart(a[name], b[name]) / max(size, floor) for name, size in largest.items())


def apart(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; NaN is infinite."""
    return float((a - b).abs_().max().nan_to_num(nan=math.inf)) if a.numel() else 0.0


def probe_batch(vocab_size: int, *, length: int, device: torch.device, seed: int = 0) -> PaddedBatch:
    """Four rows: two responses to one prompt, one of them `length` tokens long, a very short row, and a middling one."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    prompt = tokens(max(length // 4, 1))
    prompts = [prompt, prompt, tokens(2), tokens(max(length // 3, 1))]
    responses = [tokens(n) for n in (max(length - len(prompt), 1), max(length // 6, 1), 1, max(length // 3, 1))]
    batch = padded_batch(prompts, responses, device=device)
    # Weights of both signs and unequal size, so that no two errors can cancel.
    weights = torch.randn(batch.input_ids.shape, generator=generator).to(device)
    return batch._replace(loss_weights=weights / batch.loss_mask.sum())


def by_the_model(module: nn.Module, params: Params, batch: PaddedBatch) -> Measured:
    """The model's own forward on each row that learns, alone, and autograd through all logits."""

    def loss_fn(params: Params, row: PaddedBatch) -> tuple[Tensor, TokenStats]:
        ids, learned = row.input_ids[row.attention_mask], row.loss_mask[row.attention_mask]
        logits = functional_call(module, params, kwargs={"input_ids": ids[None], "use_cache": False}).logits[0]
        logprobs = (logits[:-1][learned[1:]].to(_wide(logits)) / TEMPERATURE).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(-1, ids[1:][learned[1:], None])[:, 0]
        return _loss(row.loss_weights[row.loss_mask], chosen, entropy), TokenStats(chosen, entropy)  # type: ignore[index]

    with in_float64(params):
        learned = batch.loss_mask.any(1).nonzero()[:, 0].tolist()
        return _add_up(loss_fn, params, [select_rows(batch, [row]) for row in learned])


def by_the_library(
    policy: Policy,
    params: Params,
    batches: Sequence[ModelBatch],
    *,
    chunk_size: int | None = None,
    wide: bool = True,
) -> Measured:
    """What a training step would compute, from batches whose rows stand in the order of the mini-batch.

    `wide=False` leaves transformers' float32 parts of a float64 model as they are.
    """

    def loss_fn(params: Params, batch: ModelBatch) -> tuple[Tensor, TokenStats]:
        stats = forward_logprobs(params, batch, policy=policy, temperature=TEMPERATURE, chunk_size=chunk_size)
        return _loss(batch.targets.loss_weights, stats.logprobs, stats.entropy), stats

    with in_float64(params) if wide else contextlib.nullcontext():
        return _add_up(loss_fn, params, batches)


@torch.no_grad()
def logprobs_by_the_library(policy: Policy, params: Params, batch: ModelBatch) -> Tensor:
    """Of all targets, without gradients."""
    with in_float64(params):
        return forward_logprobs(params, batch, policy=policy, temperature=TEMPERATURE, entropy=False).logprobs


@torch.no_grad()
def logits_by_the_model(module: nn.Module, params: Params, ids: Tensor) -> Tensor:
    """Of one row, [tokens, vocab]."""
    with in_float64(params):
        return functional_call(module, params, kwargs={"input_ids": ids[None], "use_cache": False}).logits[0]


def in_float64(params: Params) -> contextlib.AbstractContextManager[Any]:
    """For a model in float64, the parts that transformers computes in float32 are in float64 too."""
    double = any(value.dtype == torch.float64 for value in params.values())
    return float64_everywhere() if double else contextlib.nullcontext()


def _loss(weights: Tensor | None, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    assert weights is not None
    assert entropy is not None
    return (weights * -(logprobs + ENTROPY * entropy)).sum()


def _add_up(loss_fn: Callable[..., Any], params: Params, pieces: Sequence[Any]) -> Measured:
    stats, totals = [], dict[str, Tensor]()
    for piece in pieces:
        (_, found), grads = value_and_grad(loss_fn)(params, piece)
        stats.append(found)
        for name, grad in grads.items():
            totals[name] = totals[name] + grad if name in totals else grad.to(_wide(grad))
    return Measured(torch.cat([s.logprobs for s in stats]), torch.cat([s.entropy for s in stats]), totals)


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
