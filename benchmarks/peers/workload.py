"""The two workloads: a small Llama whose head is a large part of its work, and GRPO batches with skewed lengths.

W1 has short prompts and long responses, W2 long prompts and many short responses. Prompts are padded on the left and
responses on the right, as every peer wants them.
"""

import math
from typing import Any

import torch

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
