"""One chunk of logits at a time, in buffers that all chunks use in turn: what a head does where nothing is traced.

The formulas are those of `fnppo.head`, where the same is said as plain torch. The product of hidden states and weight
fills a chunk; what follows is many cheap passes over it, so it walks through blocks that stay in the processor's cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Budget(NamedTuple):
    """Bytes of a chunk of logits, and of a block of it."""

    chunk: int
    block: int


ON_CPU = Budget(chunk=40 * 2**20, block=2 * 2**20)
"""A chunk is large enough for a fast product; a block is about what the caches of two cores hold."""
ON_GPU = Budget(chunk=2**30, block=64 * 2**20)
"""Each chunk reads the whole weight once, which some hundreds of targets make worth while."""


def targets_per_chunk(vocab: int, dtype: torch.dtype, device: torch.device, *, budget: int | None = None) -> int:
    """How many targets have logits of at most `budget` bytes in float32 or better; at least 1.

    The default depends on the kind of device alone, not on what memory is free, so that a run can be repeated to the bit.

    >>> targets_per_chunk(150_000, torch.bfloat16, torch.device("cuda"))
    1789
    >>> targets_per_chunk(150_000, torch.bfloat16, torch.device("cpu"), budget=10_000_000)
    16
    """
    return max(1, (_budget(device).chunk if budget is None else budget) // (vocab * precise(dtype).itemsize))


def targets_per_block(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """The same for a block."""
    return max(1, _budget(device).block // (vocab * precise(dtype).itemsize))


def _budget(device: torch.device) -> Budget:
    return ON_CPU if device.type == "cpu" else ON_GPU


def chunks(size: int, *columns: Tensor) -> list[tuple[Tensor, ...]]:
    """Slices of `size` targets; one empty slice when there is no target.

    >>> [len(hidden) for hidden, _ in chunks(2, torch.zeros(3, 4), torch.zeros(3))]
    [2, 1]
    """
    return list(zip(*(column.split(size) for column in columns), strict=True))


class Constants(NamedTuple):
    """What is not differentiated: the shape of the head, and whether the entropy is wanted."""

    scale: float
    softcap: float | None
    entropy: bool


class Softmax(NamedTuple):
    """softmax of a block of logits: p = exp(z) / total, log p = z - log total.

    Attributes:
        z: [targets, vocab], the logits less their largest, which is `top`.
        top, total: [targets].
    """

    z: Tensor
    top: Tensor
    total: Tensor


class Workspace:
    """Buffers of one chunk of logits, and of one block of it, which all chunks use in turn.

    Made anew for each chunk they would cost more than the arithmetic: the system clears every page that it hands out,
    and blocks of this size, freed and made again, scatter over the heap until it holds many chunks.
    """

    def __init__(self, constants: Constants, hidden: Tensor, weight: Tensor, chunk_size: int) -> None:
        self.constants = constants
        rows, dtype, vocab = min(chunk_size, hidden.shape[0]), precise(hidden.dtype), weight.shape[0]
        self.block_size = targets_per_block(vocab, dtype, hidden.device)
        self.chunk = torch.empty(rows, vocab, dtype=dtype, device=hidden.device)
        self.block = [self.chunk.new_empty(min(rows, self.block_size), vocab) for _ in range(2)]

    def stats(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the targets of a chunk; the entropies are empty when they are not wanted."""
        logprobs, entropies, _ = self.softmax_and_stats(hidden, weight, bias, token_ids, temperature)
        return logprobs, entropies

    def softmax_and_stats(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Softmax]:
        """The same, and the softmax of the whole chunk, which lasts until the next chunk."""
        x = self.logits(hidden, weight, bias)
        parts = []
        for z, ids, temp in chunks(self.block_size, x, token_ids, temperature):
            block = self.softmax(z, temp)
            parts.append((*self._stats(block, ids), block.top, block.total))
        logprobs, entropies, top, total = (torch.cat(part) for part in zip(*parts, strict=True))
        return logprobs, entropies, Softmax(x, top, total)

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
        """Gradient of the loss in x = hidden weightᵀ + bias, in the buffer of the chunk."""
        x = self.logits(hidden, weight, bias)
        columns = (token_ids, temperature, grad_logprobs, grad_entropy, entropy)
        for z, *of_block in chunks(self.block_size, x, *columns):
            softmax = self.softmax(z, of_block[1])
            self._gradients(softmax, self.exp_of_block(z), *of_block)
        return x

    def gradients(self, softmax: Softmax, *columns: Tensor) -> Tensor:
        """The same, where the softmax of the chunk is known; its `z` is overwritten. `columns` are as above."""
        for z, top, total, *of_block in chunks(self.block_size, *softmax, *columns):
            self._gradients(Softmax(z, top, total), torch.exp(z, out=self.exp_of_block(z)), *of_block)
        return softmax.z

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x = hidden weightᵀ + bias, in the buffer of the chunk."""
        x = self.chunk[: hidden.shape[0]]
        if x.dtype == hidden.dtype:
            torch.mm(hidden, weight.to(hidden.dtype).T, out=x)
        else:
            x.copy_(hidden @ weight.to(hidden.dtype).T)
        return x if bias is None else x.add_(bias)

    def softmax(self, x: Tensor, temperature: Tensor) -> Softmax:
        """softmax(cap(scale · x) / T) of a block, in place of x; leaves exp(z) in `exp_of_block`."""
        scale, softcap, _ = self.constants
        if scale != 1.0:
            x.mul_(scale)
        if softcap is not None:
            x.div_(softcap).tanh_().mul_(softcap)
        x.div_(temperature[:, None])
        top = x.amax(-1)
        z = x.sub_(top[:, None])
        return Softmax(z, top, torch.exp(z, out=self.exp_of_block(z)).sum(-1))

    def exp_of_block(self, z: Tensor) -> Tensor:
        """The buffer for e^z of a block."""
        return self.block[0][: z.shape[0]]

    def slope(self, softmax: Softmax, temperature: Tensor) -> Tensor | None:
        """cap'(scale · x) = 1 - tanh² of a block, in a buffer; None without a cap."""
        if self.constants.softcap is None:
            return None
        z, top, _ = softmax  # z + top = softcap / T · tanh
        tanh = torch.add(z, top[:, None], out=self.block[1][: z.shape[0]])
        return tanh.mul_((temperature / self.constants.softcap)[:, None]).square_().neg_().add_(1)

    def _stats(self, softmax: Softmax, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """logprob = z[token] - log total, and H = log total - Σ exp(z) z / total, just after `softmax`."""
        log_total = softmax.total.log()
        logprobs = softmax.z.gather(-1, token_ids[:, None]).squeeze(-1) - log_total
        if not self.constants.entropy:
            return logprobs, logprobs.new_empty(0)
        exp, product = self.exp_of_block(softmax.z), self.block[1][: logprobs.shape[0]]
        # A product and a sum: the sum is pairwise, where a dot product of 50k terms would lose 3e-4 in float32.
        mean = _finite(softmax.z, out=product).mul_(exp).sum(-1) / softmax.total
        return logprobs, log_total - mean

    def _gradients(
        self,
        softmax: Softmax,
        exp: Tensor,
        token_ids: Tensor,
        temperature: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor,
        entropy: Tensor,
    ) -> None:
        """In place of z, the gradient in x. With p = softmax(cap(scale · x) / T) and H = -Σ p log p:

        ∂logprob/∂x_v = (1[v = token] - p_v) c_v        ∂H/∂x_v = -p_v (log p_v + H) c_v
        c_v = scale / T · cap'(scale · x_v)
        """
        z, _, total = softmax
        slope, factor = self.slope(softmax, temperature), self.constants.scale / temperature
        if self.constants.entropy:
            constant = (grad_logprobs + grad_entropy * (entropy - total.log())) * factor / total
            linear = grad_entropy * factor / total
            torch.addcmul(-constant[:, None], _finite(z, out=z), -linear[:, None], out=z).mul_(exp)
        else:
            torch.mul(exp, (-grad_logprobs * factor / total)[:, None], out=z)
        z.scatter_add_(-1, token_ids[:, None], (grad_logprobs * factor)[:, None])
        if slope is not None:
            z.mul_(slope)


def _finite(z: Tensor, *, out: Tensor) -> Tensor:
    """Clamped where p is 0 in any precision: 0 · -inf is NaN, 0 · -10⁴ is 0."""
    return torch.clamp(z, min=-1e4, out=out)


def precise(dtype: torch.dtype) -> torch.dtype:
    """That in which softmax, log-probs and entropies are computed: float32, or better if `dtype` is."""
    return torch.promote_types(dtype, torch.float32)
