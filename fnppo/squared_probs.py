"""Σ_v π(v)² at each target, over the whole vocabulary: what `otb_advantages` needs beside the log-prob of the token."""

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_count, check_type
from fnppo.checks import check_batch, check_vocabulary
from fnppo.layouts import Layout, forward_rows, packed
from fnppo.linear_head import one_per_target, tempered_log_softmax
from fnppo.logit_chunks import chunks, targets_per_chunk
from fnppo.policy import Policy
from fnppo.types import ModelBatch, PaddedBatch, Params


def compute_sum_squared_probs(
    params: Params,
    batch: PaddedBatch,
    *,
    policy: Policy,
    temperature: float,
    max_tokens: int,
    chunk_size: int | None = None,
    layout: Layout = packed,
) -> Float[Tensor, "batch seq"]:
    """Σ_v softmax(logits / temperature)_v² at the predictors of the learned tokens, without gradients.

    1 where the policy is sure of the next token, 1 / vocab where it has no idea; a chunk of logits at a time.

    Args:
        params, batch, policy, temperature, max_tokens, chunk_size, layout: as in `compute_logprobs`.

    Returns:
        In column t the sum for the token in column t, rows in the order of the input, 0 where `loss_mask` is clear.

    Raises:
        ValueError: as in `compute_logprobs`.

    >>> from fnppo import functional_policy, padded_batch
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> params = {name: 0 * value for name, value in params.items()}  # all 13 tokens alike
    >>> compute_sum_squared_probs(params, padded_batch([[1]], [[2, 3]]), policy=policy, temperature=1.0, max_tokens=9)
    tensor([[0.0000, 0.0769, 0.0769]])
    """
    check_type("policy", policy, Policy, "Use what functional_policy(module) returned.")
    check_type("params", params, dict, "Use what functional_policy(module) returned.")
    batch = check_batch(batch)
    check_vocabulary(batch, policy.vocab_size, policy.max_positions)
    head = policy.head.bind(params)
    if chunk_size is None:
        chunk_size = targets_per_chunk(policy.vocab_size, head.weight.dtype, head.weight.device)
    size = check_count(
        "chunk_size", chunk_size, least=1, remedy="A chunk holds at least 1 target; None chooses a size."
    )

    def forward(micro_batch: ModelBatch) -> Tensor:
        places = policy.places(micro_batch)
        hidden = policy.hidden_at(params, micro_batch, places)
        temperatures = one_per_target(temperature, hidden.shape[0], like=hidden)
        slices = chunks(size, hidden, temperatures)
        sums = torch.cat([tempered_log_softmax(head.logits(h), t).exp().square().sum(-1) for h, t in slices])
        found: Tensor = policy.together(sums, micro_batch, places)
        return found

    found: Tensor = forward_rows(forward, batch, layout=layout, max_tokens=max_tokens)
    return found
