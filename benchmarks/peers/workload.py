"""The two workloads: a small Llama whose head is a large part of its work, and GRPO batches with skewed lengths.

W1 has short prompts and long responses, W2 long prompts and many short responses. Prompts are padded on the left and
responses on the right, as every peer wants them.
"""

import math
from typing import Any

import torch

import fnppo

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
WORKLOADS = {
    "W1": {"prompts": 4, "responses": 8, "prompt": 256, "response": 512},
    "W2": {"prompts": 2, "responses": 16, "prompt": 768, "response": 256},
    "tiny": {"prompts": 2, "responses": 2, "prompt": 12, "response": 8},
}
"""Number of prompts, responses a prompt, and the most tokens of each."""


def rollouts(*, prompts: int, responses: int, prompt: int, response: int) -> dict[str, Any]:
    """The columns of a batch, by the names that verl gives them."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = prompts * responses, MODEL["vocab_size"]
    prompt_lengths = torch.randint(prompt // 4, prompt + 1, (prompts,), generator=generator)
    lengths = torch.exp(torch.randn(rows, generator=generator) * 0.8 + math.log(response / 5))
    response_lengths = lengths.long().clamp(min(4, response), response)
    ids = torch.zeros(rows, prompt + response, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(rows):
        length = int(prompt_lengths[row // responses])
        if row % responses == 0:
            question = torch.randint(3, vocab, (length,), generator=generator)
        answer = torch.randint(3, vocab, (int(response_lengths[row]),), generator=generator)
        ids[row, prompt - length : prompt + len(answer)] = torch.cat([question, answer])
        mask[row, prompt - length : prompt + len(answer)] = 1
    response_mask = mask[:, prompt:].clone()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, prompt:].clone(),
        "response_mask": response_mask,
        "advantages": torch.randn(rows, 1, generator=generator) * response_mask,
    }


def flops(batch: Any) -> float:
    """Floating-point operations of an update that have to be done: the matrix products of forward and backward over the
    tokens, shared prompts counted once, of the head over the response tokens alone, and of causal attention.
    """
    hidden, inner, layers = (MODEL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv_heads = MODEL["num_attention_heads"], MODEL["num_key_value_heads"]
    dim = hidden // heads
    per_token = layers * (2 * hidden * (heads + kv_heads) * dim + 3 * hidden * inner)
    tokens = pairs = 0.0
    for prompt, rows in fnppo.prompt_groups(batch).items():
        own = [int(batch.attention_mask[row].sum()) - len(prompt) for row in rows]
        tokens += len(prompt) + sum(own)
        pairs += len(prompt) * (len(prompt) + 1) / 2 + sum(n * len(prompt) + n * (n + 1) / 2 for n in own)
    head = int(batch.loss_mask.sum()) * hidden * MODEL["vocab_size"]
    return 3 * 2 * (per_token * tokens + head + layers * 2 * pairs * heads * dim)
