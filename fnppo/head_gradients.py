"""Gradients of a function of a linear head's logits, a chunk of targets at a time.

For the backward of an autograd Function that has saved its inputs only. Sums over chunks are kept in float32 or better.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fnppo.linear_head import stats_of_chunk
from fnppo.logit_chunks import Constants, Workspace, chunks, precise

Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
"""With respect to hidden, weight and bias."""


def logprob_gradients(
    constants: Constants,
    chunk_size: int,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    temp: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    *,
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """From the gradients in log-probs and entropies; the logits of each chunk are computed again.

    Args:
        entropy: the entropies of the forward. Where they were not wanted, it and `grad_entropy` are not read.
        wanted: whether hidden, weight and bias need a gradient.
    """
    if not constants.entropy:
        entropy = grad_entropy = torch.zeros_like(grad_logprobs)
    parts = chunks(chunk_size, hidden, ids, temp, grad_logprobs, grad_entropy, entropy)
    if torch.is_grad_enabled():  # somebody may differentiate these gradients in turn
        unwanted = grad_entropy.new_empty(0)
        return differentiable_gradients(
            partial(stats_of_chunk, constants), weight, bias,
            ((h, (i, t), (g, e if constants.entropy else unwanted)) for h, i, t, g, e, _ in parts),
        )  # fmt: skip
    formula = Workspace(constants, hidden, weight, chunk_size).logit_gradients
    return fast_gradients(formula, weight, bias, parts, wanted=wanted)


def differentiable_gradients(
    definition: Callable[..., Any],
    weight: Tensor,
    bias: Tensor | None,
    parts: Iterable[tuple[Tensor, tuple[Tensor, ...], Any]],
) -> Gradients:
    """Gradients by autograd through the definition, which any outer transform can follow.

    Args:
        definition: (hidden, weight, bias, *columns) -> outputs of a chunk.
        parts: (hidden, columns, gradients of the outputs) of each chunk.
    """
    shared = (weight,) if bias is None else (weight, bias)
    grad_hidden: list[Tensor] = []
    totals = [torch.zeros_like(parameter, dtype=precise(parameter.dtype)) for parameter in shared]
    for hidden, columns, cotangents in parts:

        def chunk(
            hidden: Tensor, weight: Tensor, bias: Tensor | None = None, columns: tuple[Tensor, ...] = columns
        ) -> Any:
            return definition(hidden, weight, bias, *columns)

        grads = torch.func.vjp(chunk, hidden, *shared)[1](cotangents)
        grad_hidden.append(grads[0])
        totals = [total + grad for total, grad in zip(totals, grads[1:], strict=True)]
    narrow = [total.to(parameter.dtype) for total, parameter in zip(totals, shared, strict=True)]
    return torch.cat(grad_hidden), narrow[0], None if bias is None else narrow[1]


def fast_gradients(
    formula: Callable[..., Tensor],
    weight: Tensor,
    bias: Tensor | None,
    parts: Iterable[tuple[Tensor, ...]],
    *,
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """The same by formula: (hidden, weight, bias, *columns) -> gradient in x = hidden weightᵀ + bias, free to be changed.

    Args:
        parts: (hidden, *columns) of each chunk.
        wanted: whether hidden, weight and bias need a gradient.
    """
    want_hidden, want_weight, want_bias = wanted
    grad_hidden: list[Tensor] = []
    grad_weight = torch.zeros_like(weight, dtype=precise(weight.dtype)) if want_weight else None
    grad_bias = torch.zeros_like(bias, dtype=precise(bias.dtype)) if want_bias and bias is not None else None
    for hidden, *columns in parts:
        grad = formula(hidden, weight, bias, *columns)
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        grad = grad.to(hidden.dtype)
        if want_hidden:
            grad_hidden.append(grad @ weight.to(hidden.dtype))
        if grad_weight is not None and grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.T, hidden)
        elif grad_weight is not None:
            grad_weight += grad.T @ hidden
    return (
        torch.cat(grad_hidden) if want_hidden else None,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
