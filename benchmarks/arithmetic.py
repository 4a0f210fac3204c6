"""What an update computes at least, what it holds at most, and how fast the machine computes it."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fnppo
from fnppo.layouts import Layout, shared
from fnppo.logit_chunks import targets_per_block, targets_per_chunk


class Work(NamedTuple):
    """Floating-point operations of the matrix products of an update, forward and backward, none of them done twice."""

    layers: float
    """Projections and MLP, of every token that is read."""
    attention: float
    """Scores, and sums of values, of every pair of a token and one that it sees."""
    head: float
    """Logits, of learned tokens only."""


def work_of(config: Any, batch: fnppo.PaddedBatch, layout: Layout) -> Work:
    """Of a model with gated MLPs, such as Llama or Qwen2, from its configuration.

    A product of [n, k] and [k, m] is 2 · n · k · m operations. Its backward is two products of that size, one for each
    gradient, so forward and backward are three.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    per_token = 2 * hidden * (heads + kv_heads) * dim + 3 * hidden * inner
    parts = [(0, length) for length in fnppo.lengths(batch)]
    if layout is shared:
        tree = fnppo.prefix_tree(batch)
        parts = list(zip(tree.starts, tree.stops, strict=True))
    tokens = sum(stop - start for start, stop in parts)
    pairs = sum((stop * (stop + 1) - start * (start + 1)) / 2 for start, stop in parts)
    return Work(
        layers=6 * layers * per_token * tokens,
        attention=6 * layers * 2 * pairs * heads * dim,
        head=6 * int(batch.loss_mask.sum()) * hidden * config.vocab_size,
    )


def peak_of(config: Any, *, tokens: int, targets: int, parameters: int, several: bool) -> float:
    """Bytes above parameters and moments that an update of a Llama in float32 holds at one time.

    Backward, when the head is done and all activations are still there; or the optimizer: gradients, and as many updates.

    Args:
        tokens, targets: of the largest micro-batch.
        parameters: how many there are.
        several: whether there are several micro-batches, so that a sum of gradients is there from the second on.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    # Two norms (input, normalized, scaled), query, key, value, two copies of what attention gives; gate, silu, up, product.
    layer = hidden * (9 + 2 * config.num_key_value_heads / config.num_attention_heads) + 4 * config.intermediate_size
    cpu = torch.device("cpu")
    chunk, block = (
        min(targets, most(vocab, torch.float32, cpu)) * vocab for most in (targets_per_chunk, targets_per_block)
    )
    ends = 4 * hidden  # the last norm, and hidden states beside it
    backward = tokens * (config.num_hidden_layers * layer + ends) + vocab * hidden + chunk + 2 * block
    return 4 * max(backward + several * parameters, 2 * parameters)


def matmul_rate(device: str, dtype: torch.dtype, *, size: int, repeats: int = 10) -> float:
    """FLOP/s of products of square matrices: the best of three tries, the first of which is for the machine to wake up."""
    a = torch.randn(size, size, device=device).to(dtype)
    seconds = [timed(device, lambda: [a @ a for _ in range(repeats)]) for _ in range(3)][1:]
    return repeats * 2 * size**3 / min(seconds)


def timed(device: str, run: Callable[[], Any]) -> float:
    """Seconds, until the device is done."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start
