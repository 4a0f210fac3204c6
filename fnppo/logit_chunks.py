"""One chunk of logits at a time, in buffers that all chunks use in turn: what a head does where nothing is traced.

The formulas are those of `fnppo.head`, where the same is said as plain torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Constants(NamedTuple):
    """What is not differentiated: the shape of the head, and whether the entropy is wanted."""

    scale: float
    softcap: float | None
    entropy: bool


class Workspace:
    """Buffers of one chunk of logits, which all chunks use in turn.

    Made anew for each chunk they would cost more than the arithmetic: the system clears every page that it hands out,
    and blocks of this size, freed and made again, scatter over the heap until it holds many chunks.
    """

    def __init__(self, constants: Constants, hidden: Tensor, weight: Tensor, chunk_size: int) -> None:
        self.constants = constants
        rows = min(chunk_size, hidden.shape[0])
        count = 2 if constants.softcap is None else 3
        self.buffers = [
            torch.empty(rows, weight.shape[0], dtype=precise(hidden.dtype), device=hidden.device) for _ in range(count)
        ]

    def stats(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the targets of a chunk; the entropies are empty when they are not wanted."""
        p, logp = self.softmax(hidden, weight, bias, temperature)
        logprobs = logp.gather(-1, token_ids[:, None]).squeeze(-1)
        if not self.constants.entropy:
            return logprobs, logprobs.new_empty(0)
        # A product and a sum: the sum is pairwise, where a dot product of 50k terms would lose 3e-4 in float32.
        return logprobs, p.mul_(_finite(logp)).sum(-1).neg_()

    def softmax(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(p, log p) of the chunk, both in buffers."""
        logp = self.log_softmax(hidden, weight, bias, temperature)
        return torch.exp(logp, out=self.buffers[0][: hidden.shape[0]]), logp

    def log_softmax(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
        """log p of the chunk, in the second buffer."""
        x, logp, *capped = (buffer[: hidden.shape[0]] for buffer in self.buffers)
        if x.dtype == hidden.dtype:
            torch.mm(hidden, weight.to(hidden.dtype).T, out=x)
        else:
            x.copy_(hidden @ weight.to(hidden.dtype).T)
        if bias is not None:
            x.add_(bias)
        if self.constants.scale != 1.0:
            x.mul_(self.constants.scale)
        if self.constants.softcap is not None:
            x.div_(self.constants.softcap).tanh_()
            capped[0].copy_(x)
            x.mul_(self.constants.softcap)
        x.div_(temperature[:, None])
        torch.ops.aten._log_softmax.out(x, -1, False, out=logp)
        return logp

    def logit_gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor,
        entropy: Tensor,
    ) -> Tensor:
        """Gradient of the loss in x = hidden weightᵀ + bias, in a buffer.

        With z = cap(scale · x) / T, p = softmax(z), H = -Σ p log p:

            ∂logprob/∂z_v = 1[v = token] - p_v        ∂H/∂z_v = -p_v (log p_v + H)
        """
        p, logp = self.softmax(hidden, weight, bias, temperature)
        if self.constants.entropy:
            grad = _finite(logp).mul_(grad_entropy[:, None]).add_((grad_logprobs + grad_entropy * entropy)[:, None])
            grad.mul_(p).neg_()
        else:
            grad = p.mul_(-grad_logprobs[:, None])
        grad.scatter_add_(-1, token_ids[:, None], grad_logprobs[:, None])
        return self.through_head(grad, temperature)

    def through_head(self, grad: Tensor, temperature: Tensor) -> Tensor:
        """From the gradient in z to that in x, in place: ∂z_v/∂x_v = scale / T · (1 - tanh²)."""
        grad.mul_((self.constants.scale / temperature)[:, None])
        if self.constants.softcap is not None:
            tanh = self.buffers[2][: grad.shape[0]]
            grad.mul_(tanh.square_().neg_().add_(1))
        return grad


def _finite(logp: Tensor) -> Tensor:
    """Clamps in place, where p is 0 in any precision: 0 · -inf is NaN, 0 · -10⁴ is 0."""
    return logp.clamp_(min=-1e4)


def precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
