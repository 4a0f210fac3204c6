"""A linear head by its definition, all logits at once:

    x = hidden weightᵀ + bias        z = cap(scale · x) / temperature        cap(y) = softcap · tanh(y / softcap)
    logprob = z[token] - logsumexp(z)        entropy = -Σ_v p_v log p_v,   p = softmax(z)

`fnppo.head` computes the same a chunk at a time.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_device, check_floating, check_ids, check_number, check_tensor
from fnppo.faults import Fault, refuse
from fnppo.logit_chunks import Constants, precise
from fnppo.transforms import inside_transform
from fnppo.types import TokenStats


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
    check_token_ids(token_ids, logits.shape[0], logits.shape[1], logits)
    temperature = one_per_target(temperature, logits.shape[0], like=logits)
    logp = tempered_log_softmax(logits, temperature)
    logprobs = logp.gather(-1, token_ids[:, None]).squeeze(-1)
    return TokenStats(logprobs, _entropy(logp) if entropy else None)


def stats_of_chunk(
    constants: Constants, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """`logits_to_stats` of hidden states. The entropy is empty when it is not wanted."""
    logits = LinearHead(weight, bias, constants.scale, constants.softcap).logits(hidden)
    stats = logits_to_stats(logits, token_ids, temperature=temperature, entropy=constants.entropy)
    return stats.logprobs, stats.logprobs.new_empty(0) if stats.entropy is None else stats.entropy


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


def check_token_ids(token_ids: Tensor, targets: int, vocab: int, like: Tensor) -> None:
    """A `ValueError` unless there is one id of the vocabulary a target."""
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
