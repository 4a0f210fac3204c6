"""A linear head over a large vocabulary: log-prob and entropy of given tokens, a chunk of logits at a time.

For 100k targets and a vocabulary of 150k, the logits would be 60 GB in float32. Here the targets pass in chunks; the
backward computes the logits of each chunk again, turns them into gradients and drops them. Where the loss is known
beforehand, `fnppo.one_pass` makes the gradients in the forward and spares the second computation.

`fnppo.linear_head` has the definition. With it, `fnppo.logit_chunks`, `fnppo.head_gradients` and `fnppo.one_pass`, this file
needs nothing of the library but its types, checks and `fnppo.transforms`: `chunked_logprobs` can be lifted out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_count
from fnppo.head_gradients import logprob_gradients
from fnppo.linear_head import LinearHead, check_head, check_token_ids, logits_to_stats, one_per_target, stats_of_chunk
from fnppo.logit_chunks import Constants, Workspace, chunks, targets_per_chunk
from fnppo.one_pass import OnePassHead, one_pass_is_possible
from fnppo.transforms import inside_forward_mode, inside_transform
from fnppo.types import TokenStats

__all__ = ["LinearHead", "chunked_logprobs", "logits_to_stats"]


def chunked_logprobs(
    hidden: Float[Tensor, "targets hidden"],
    token_ids: Int[Tensor, " targets"],
    *,
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Float[Tensor, "..."] = 1.0,
    entropy: bool = True,
    chunk_size: int | None = None,
    loss: Callable[[TokenStats, Int[Tensor, " chunk"]], Float[Tensor, ""]] | None = None,
) -> TokenStats:
    """Log-prob and entropy of `token_ids` under a linear head, chunk by chunk.

    Works under `torch.func.grad`, `vjp`, `jvp`, `vmap` and any nesting of them. The memory bound holds for the forward
    and for a first-order backward at top level; a transform keeps what it needs to be differentiated again.

    Args:
        hidden: hidden state of each target's predictor.
        weight, bias, scale, softcap: the head; the product is computed in the dtype of `hidden`, as the model itself
            would, and everything after it in float32 or better.
        loss: the loss that will be taken of the result, (stats of some targets, their numbers) -> scalar, in one pass
            (see `fnppo.one_pass`). It changes no number.

    See `fnppo.forward_logprobs` for the other arguments, the result and the errors. Token ids are looked at on the CPU
    only, since it would mean to wait for another device: `forward_logprobs` has looked at them before it began.

    >>> stats = chunked_logprobs(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]), weight=torch.eye(3))
    >>> stats.logprobs, stats.entropy
    (tensor([-0.1698]), tensor([0.5243]))
    """
    check_head(hidden, LinearHead(weight, bias, scale, softcap))
    targets, vocab = hidden.shape[0], weight.shape[0]
    check_token_ids(token_ids, targets, vocab, hidden)
    if chunk_size is None:
        chunk_size = targets_per_chunk(vocab, hidden.dtype, hidden.device)
    check_count("chunk_size", chunk_size, least=1, remedy="A chunk holds at least 1 target; None chooses a size.")
    temperature = one_per_target(temperature, targets, like=hidden)
    if loss is not None and not callable(loss):
        raise ValueError(
            f"loss is a {type(loss).__name__}; a function is needed: (stats, places) -> scalar. Pass it uncalled."
        )
    constants = Constants(scale, softcap, entropy)
    if inside_forward_mode():
        # Saved tensors of a custom Function lose outer tangents, so nested jvp would be silently wrong.
        slices = chunks(chunk_size, hidden, token_ids, temperature)
        parts = [stats_of_chunk(constants, h, weight, bias, ids, t) for h, ids, t in slices]
        logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    elif loss is None or not one_pass_is_possible(hidden, weight, bias):
        logprobs, entropies = _ChunkedHead.apply(constants, chunk_size, hidden, weight, bias, token_ids, temperature)
    else:
        logprobs, entropies = OnePassHead.apply(
            constants, chunk_size, loss, hidden, weight, bias, token_ids, temperature
        )
    return TokenStats(logprobs, entropies if entropy else None)


class _ChunkedHead(torch.autograd.Function):
    """`stats_of_chunk` over chunks, saving its inputs and the entropies. The backward computes each chunk again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        constants: Constants,
        chunk_size: int,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temp: Tensor,
    ) -> tuple[Tensor, ...]:
        if inside_transform():
            stats: Callable[..., Any] = partial(stats_of_chunk, constants)
        else:
            stats = Workspace(constants, hidden, weight, chunk_size).stats
        parts = [stats(h, weight, bias, i, t) for h, i, t in chunks(chunk_size, hidden, ids, temp)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.constants, ctx.chunk_size = inputs[:2]
        ctx.save_for_backward(*inputs[2:], output[1])

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, temp, entropy = ctx.saved_tensors
        gradients = logprob_gradients(
            ctx.constants, ctx.chunk_size, hidden, weight, bias, ids, temp, entropy, grad_logprobs, grad_entropy,
            wanted=ctx.needs_input_grad[2:5],
        )  # fmt: skip
        return (None, None, *gradients, None, None)
