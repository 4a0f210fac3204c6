"""Batches for tests that do not draw them."""

import torch
from tiny import VOCAB

import fnppo


def some_batch(rows=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (rows, 2), generator=g).tolist()
    draw = lambda n: torch.randint(VOCAB, (n,), generator=g).tolist()
    prompts = [draw(p) for p, _ in sizes]
    batch = fnppo.padded_batch([prompts[i // 2] for i in range(rows)], [draw(r) for _, r in sizes])
    shape = batch.input_ids.shape
    normal = lambda: torch.randn(shape, generator=g, dtype=torch.float64)
    return batch._replace(old_logprobs=normal() * 0.3 - 2.5, advantages=normal(), ref_logprobs=normal() * 0.3 - 2.5)
