"""The head in one pass: gradients made in the forward, while the logits are still there, for a loss that is known.

The backward of `fnppo.head` computes all logits again, a quarter of its products, because only then it learns the
derivative of the loss in each log-prob and entropy. Told the loss beforehand, it takes the derivative chunk by chunk:

    forward    logits -> log-probs, entropies -> loss of these targets -> its derivative -> gradients in hidden and weight
    backward   hand them out

That is right where the loss is a sum of terms of one target each, as token losses are. The backward looks, which asks the
device one question: where a derivative is another after all, say because the loss weighs whole rows or is one of several, it
makes all gradients again, in two passes. So the numbers are those of two passes, whatever the loss does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnppo.head_gradients import fast_gradients, logprob_gradients
from fnppo.logit_chunks import Constants, Workspace, chunks
from fnppo.transforms import inside_transform
from fnppo.types import TokenStats


def one_pass_is_possible(*inputs: Tensor | None) -> bool:
    """Whether there are gradients to be made, at top level, and not in float16: its small ones vanish without the loss
    scale, which only the backward knows.
    """
    given = [x for x in inputs if x is not None]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return wanted and not inside_transform() and all(x.dtype != torch.float16 for x in given)


class OnePassHead(torch.autograd.Function):
    """(constants, chunk_size, loss, hidden, weight, bias, token_ids, temperature) -> (log-probs, entropies)."""

    @staticmethod
    def forward(
        ctx: Any,
        constants: Constants,
        chunk_size: int,
        loss: Callable[[TokenStats, Tensor], Tensor],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temp: Tensor,
    ) -> tuple[Tensor, Tensor]:
        workspace, found = Workspace(constants, hidden, weight, chunk_size), list[tuple[Tensor, ...]]()

        def formula(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temp: Tensor, place: Tensor
        ) -> Tensor:
            logprobs, entropy, softmax = workspace.softmax_and_stats(hidden, weight, bias, ids, temp)
            derivative = _derivative(loss, TokenStats(logprobs, entropy if constants.entropy else None), place)
            found.append((logprobs, entropy, *derivative))
            filled = entropy if constants.entropy else torch.zeros_like(logprobs)
            return workspace.gradients(softmax, ids, temp, *derivative, filled)

        places = torch.arange(hidden.shape[0], device=hidden.device)
        wanted: Any = ctx.needs_input_grad[3:6]
        parts = chunks(chunk_size, hidden, ids, temp, places)
        ctx.gradients = fast_gradients(formula, weight, bias, parts, wanted=wanted)
        logprobs, entropy, *derivative = (torch.cat(part) for part in zip(*found, strict=True))
        ctx.constants, ctx.chunk_size = constants, chunk_size
        ctx.save_for_backward(hidden, weight, bias, ids, temp, entropy, *derivative)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, temp, entropy, *derivative = ctx.saved_tensors
        if not ctx.constants.entropy:
            entropy = grad_entropy = torch.zeros_like(grad_logprobs)
        gradients, ctx.gradients = ctx.gradients, None  # which are handed out once
        told = zip(derivative, (grad_logprobs, grad_entropy), strict=True)
        if gradients is None or torch.is_grad_enabled() or any(_differ(*pair) for pair in told):
            del gradients  # before there are others
            gradients = logprob_gradients(
                ctx.constants, ctx.chunk_size, hidden, weight, bias, ids, temp, entropy, grad_logprobs, grad_entropy,
                wanted=ctx.needs_input_grad[3:6],
            )  # fmt: skip
        return (None, None, None, *gradients, None, None)


def _derivative(loss: Callable[[TokenStats, Tensor], Tensor], stats: TokenStats, place: Tensor) -> tuple[Tensor, ...]:
    """Of the loss in log-probs and entropies; 0 where it is not finite, which the backward will find to be another."""
    logprobs = stats.logprobs.detach().requires_grad_()
    entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(TokenStats(logprobs, entropy), place)
    leaves = [leaf for leaf in (logprobs, entropy) if leaf is not None]
    if value.requires_grad:
        found = list(torch.autograd.grad(value, leaves, materialize_grads=True))
    else:
        found = [torch.zeros_like(leaf) for leaf in leaves]
    if entropy is None:
        found.append(torch.zeros_like(found[0]))
    return tuple(torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in found)


def _differ(told: Tensor, taken: Tensor) -> bool:
    """Whether any is apart by more than the last bits, or is not a number."""
    return not bool(((taken - told).abs() <= 4 * torch.finfo(taken.dtype).eps * taken.abs()).all())
