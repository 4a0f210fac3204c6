"""A linear head over a large vocabulary: log-prob and entropy of given tokens, a chunk of logits at a time.

    x = hidden weightᵀ + bias        z = cap(scale · x) / temperature        cap(y) = softcap · tanh(y / softcap)
    logprob = z[token] - logsumexp(z)        entropy = -Σ_v p_v log p_v,   p = softmax(z)

For 100k targets and a vocabulary of 150k, the logits would be 60 GB in float32. Here the targets pass in chunks; the
backward computes the logits of each chunk again, turns them into gradients and drops them.

With `fnppo.logit_chunks` and `fnppo.head_gradients`, this file needs nothing of the library but its types and checks:
`chunked_logprobs` can be lifted out.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_count, check_device, check_floating, check_ids, check_number, check_tensor
from fnppo.faults import Fault, refuse
from fnppo.head_gradients import chunks, differentiable_gradients, fast_gradients
from fnppo.logit_chunks import Constants, Workspace, precise
from fnppo.transforms import inside_forward_mode, inside_transform
from fnppo.types import TokenStats

LOGITS_PER_CHUNK = 10_000_000
"""Default size of a chunk: 40 MB in float32, so that allocators hand it back to the system as a whole."""


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
) -> TokenStats:
    """Log-prob and entropy of `token_ids` under a linear head, chunk by chunk.

    Works under `torch.func.grad`, `vjp`, `jvp`, `vmap` and any nesting of them. The memory bound holds for the forward
    and for a first-order backward at top level; a transform keeps what it needs to be differentiated again.

    Args:
        hidden: hidden state of each target's predictor.
        weight, bias, scale, softcap: the head; the product is computed in the dtype of `hidden`, as the model itself
            would, and everything after it in float32 or better.

    See `fnppo.forward_logprobs` for the other arguments, the result and the errors. Token ids are looked at on the CPU
    only, since it would mean to wait for another device: `forward_logprobs` has looked at them before it began.

    >>> stats = chunked_logprobs(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]), weight=torch.eye(3))
    >>> stats.logprobs, stats.entropy
    (tensor([-0.1698]), tensor([0.5243]))
    """
    check_head(hidden, LinearHead(weight, bias, scale, softcap))
    targets, vocab = hidden.shape[0], weight.shape[0]
    _check_token_ids(token_ids, targets, vocab, hidden)
    if chunk_size is None:
        chunk_size = max(1, LOGITS_PER_CHUNK // vocab)
    check_count("chunk_size", chunk_size, least=1, remedy="A chunk holds at least 1 target; None chooses a size.")
    temperature = one_per_target(temperature, targets, like=hidden)
    constants = Constants(scale, softcap, entropy)
    if inside_forward_mode():
        # Saved tensors of a custom Function lose outer tangents, so nested jvp would be silently wrong.
        slices = chunks(chunk_size, hidden, token_ids, temperature)
        parts = [_stats(constants, h, weight, bias, ids, t) for h, ids, t in slices]
        logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        logprobs, entropies = _ChunkedHead.apply(constants, chunk_size, hidden, weight, bias, token_ids, temperature)
    return TokenStats(logprobs, entropies if entropy else None)


def logits_to_stats(
    logits: Float[Tensor, "targets vocab"],
    token_ids: Int[Tensor, " targets"],
    *,
    temperature: float | Float[Tensor, "..."] = 1.0,
    entropy: bool = True,
) -> TokenStats:
    """The definition, for logits that fit into memory: log-softmax of logits / temperature, in float32 or better.

    A logit of -inf is a token of probability 0; it adds 0 to the entropy and gets gradient 0.

    >>> logits_to_stats(torch.tensor([[1.0, 0.0, -torch.inf]]), torch.tensor([0])).entropy
    tensor([0.5822])
    """
    check_floating("logits", logits)
    if logits.dim() != 2:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; it needs [targets, vocab]. Flatten batch and sequence."
        )
    _check_token_ids(token_ids, logits.shape[0], logits.shape[1], logits)
    temperature = one_per_target(temperature, logits.shape[0], like=logits)
    logp = tempered_log_softmax(logits, temperature)
    logprobs = logp.gather(-1, token_ids[:, None]).squeeze(-1)
    return TokenStats(logprobs, _entropy(logp) if entropy else None)


class LinearHead(NamedTuple):
    """logits = cap(scale · (hidden weightᵀ + bias)); `softcap` None is no cap."""

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens vocab"]:
        """All logits at once. The product is computed in the dtype of `hidden`, the rest in float32 or better."""
        logits = (hidden @ self.weight.to(hidden.dtype).T).to(precise(hidden.dtype))
        if self.bias is not None:
            logits = logits + self.bias
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _stats(
    constants: Constants, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk. The entropy is empty when it is not wanted."""
    logits = LinearHead(weight, bias, constants.scale, constants.softcap).logits(hidden)
    stats = logits_to_stats(logits, token_ids, temperature=temperature, entropy=constants.entropy)
    return stats.logprobs, stats.logprobs.new_empty(0) if stats.entropy is None else stats.entropy


class _ChunkedHead(torch.autograd.Function):
    """`_stats` over chunks, saving its inputs and the entropies. The backward computes each chunk again."""

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
        stats = (
            partial(_stats, constants) if inside_transform() else Workspace(constants, hidden, weight, chunk_size).stats
        )
        parts = [stats(h, weight, bias, i, t) for h, i, t in chunks(chunk_size, hidden, ids, temp)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.constants, ctx.chunk_size = inputs[:2]
        ctx.save_for_backward(*inputs[2:], output[1])

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, temp, entropy = ctx.saved_tensors
        if not ctx.constants.entropy:
            entropy = grad_entropy = torch.zeros_like(grad_logprobs)
        parts = chunks(ctx.chunk_size, hidden, ids, temp, grad_logprobs, grad_entropy, entropy)
        if torch.is_grad_enabled():  # somebody may differentiate these gradients in turn
            unwanted = grad_entropy.new_empty(0)
            gradients = differentiable_gradients(
                partial(_stats, ctx.constants), weight, bias,
                ((h, (i, t), (g, e if ctx.constants.entropy else unwanted)) for h, i, t, g, e, _ in parts),
            )  # fmt: skip
        else:
            formula = Workspace(ctx.constants, hidden, weight, ctx.chunk_size).logit_gradients
            gradients = fast_gradients(formula, weight, bias, parts, wanted=ctx.needs_input_grad[2:5])
        return (None, None, *gradients, None, None)


def tempered_log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) over the vocabulary, in float32 or better; one temperature a target."""
    return torch.log_softmax(logits.to(precise(logits.dtype)) / temperature[:, None], dim=-1)


def _entropy(logp: Tensor) -> Tensor:
    """-Σ p log p with 0 log 0 = 0, in value and gradient: both factors are chosen before they meet."""
    possible = logp > -math.inf
    return -(logp.exp() * torch.where(possible, logp, 0)).sum(-1)


def check_head(hidden: Tensor, head: LinearHead, of: str = "") -> None:
    """Raise a `ValueError` where the tensors of a head do not fit hidden states; `of` is what their names begin with."""
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name, tensor in tensors.items():
        if tensor is not None:
            check_floating(of + name, tensor)
            check_device(of + name, tensor, of + "hidden", hidden)
    weight = head.weight
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise ValueError(
            f"{of}hidden has shape {tuple(hidden.shape)}, {of}weight {tuple(weight.shape)}; they need [targets, hidden] "
            "and [vocab, hidden]. Transpose the weight, or flatten batch and sequence."
        )
    vocab = weight.shape[0]
    if head.bias is not None and head.bias.shape != (vocab,):
        raise ValueError(
            f"{of}bias has shape {tuple(head.bias.shape)}; {of}weight has {vocab} rows. Give one bias a row."
        )
    check_number(of + "scale", head.scale, remedy="Use 1 for none.")
    if head.softcap is not None:
        check_number(of + "softcap", head.softcap, above=0, remedy="None is no cap.")


def one_per_target(temperature: float | Tensor, targets: int, *, like: Tensor) -> Tensor:
    """[targets], checked: above 0 where its value can be seen, and not to be differentiated."""
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature requires a gradient, and none flows to it. Pass temperature.detach().")
        if temperature.shape not in ((), (targets,)):
            raise ValueError(
                f"temperature has shape {tuple(temperature.shape)}; there are {targets} targets. Give a number, or one a target."
            )
        if not inside_transform() and not bool(((temperature > 0) & temperature.isfinite()).all()):
            bad = temperature[~((temperature > 0) & temperature.isfinite())].flatten()[0].item()
            raise ValueError(f"temperature is {bad}; it must be a number above 0. For greedy samples, use 1.")
        return temperature.to(like.device, precise(like.dtype)).expand(targets)
    check_number("temperature", temperature, above=0, remedy="For greedy samples, use 1.")
    return torch.full((targets,), float(temperature), dtype=precise(like.dtype), device=like.device)


def _check_token_ids(token_ids: Tensor, targets: int, vocab: int, like: Tensor) -> None:
    check_tensor("token_ids", token_ids)
    check_device("token_ids", token_ids, "hidden", like)
    check_ids("token_ids", token_ids)
    if token_ids.shape != (targets,):
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)}; there are {targets} targets. Give one a target."
        )
    if token_ids.device.type == "cpu":
        message = (
            f"token_ids is {{value}}, but the head has {vocab} entries. Check that tokenizer and model belong together."
        )
        refuse(Fault((token_ids < 0) | (token_ids >= vocab), message, token_ids, "target"))
