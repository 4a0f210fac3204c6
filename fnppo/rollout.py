"""Sampling from a policy with explicit parameters, over transformers' `generate`.

For trainers that sample elsewhere (vLLM, SGLang), `fnppo.padded_batch` makes the same `PaddedBatch` from lists.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from fnppo.policy import Policy
from fnppo.seeding import seeded
from fnppo.types import PaddedBatch, Params


@torch.no_grad()
def generate(
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy,
    max_new_tokens: int,
    seed: int,
    eos_token_id: int | Sequence[int] | None,
    temperature: float = 1.0,
    num_responses: int = 1,
    greedy: bool = False,
    pad_token_id: int = 0,
) -> PaddedBatch:
    """Sample responses, and keep the log-prob of each sampled token.

    Tokens come from softmax(logits / temperature), with no top-k or top-p: what is sampled is what `old_logprobs` says.
    The global random state is left alone; the same arguments give the same bits.

    Args:
        prompts: token ids of each prompt, at least one token each.
        max_new_tokens: limit of a response.
        seed: of the sampling.
        eos_token_id: token or tokens that end a response. The end token belongs to the response and is learned. None or
            `()` is for responses of full length.
        temperature: above 0.
        num_responses: responses of each prompt. Its prompt is read once for all of them.
        greedy: take the most probable token instead of sampling.
        pad_token_id: what stands in the padding; it is never read.

    Returns:
        `PaddedBatch` of len(prompts) · num_responses rows, those of one prompt together, with `old_logprobs` and with
        `groups` holding the number of the prompt.

    Raises:
        ValueError: a prompt is empty, or a number is out of range.

    >>> from fnppo import functional_policy
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> batch = generate(
    ...     params, [[1, 5], [3]], policy=policy, max_new_tokens=4, num_responses=3, seed=0, eos_token_id=()
    ... )
    >>> batch.input_ids.shape, batch.groups
    (torch.Size([6, 6]), tensor([0, 0, 0, 1, 1, 1]))
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; it must be above 0. For the most probable tokens, use greedy=True."
        )
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("num_responses", num_responses),
        ("prompts", len(prompts)),
    ):
        if value < 1:
            raise ValueError(f"there are {value} {name}; generate needs at least 1.")
    rows = [[int(token) for token in prompt] for prompt in prompts]
    for row, prompt in enumerate(rows):
        if not prompt:
            raise ValueError(f"prompt {row} is empty. Give it at least a BOS token.")
        if not 0 <= min(prompt) <= max(prompt) < policy.vocab_size:
            raise ValueError(
                f"prompt {row} holds {min(prompt)} to {max(prompt)}, but the model's vocabulary has {policy.vocab_size} entries. "
                "Check that tokenizer and model belong together."
            )
    device = next(iter(params.values())).device
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(p)) + p for p in rows], device=device)
    attention_mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)

    ends = [int(end) for end in torch.as_tensor(() if eos_token_id is None else eos_token_id).flatten()]
    recorder = _Recorder(temperature)
    with seeded(seed, device):
        sequences = functional_call(
            _Sampler(policy),
            {f"model.{name}": value for name, value in params.items()},
            (input_ids, attention_mask, num_responses),
            {
                "logits_processor": [recorder],
                "max_new_tokens": max_new_tokens,
                "do_sample": not greedy,
                "eos_token_id": ends or None,
                "pad_token_id": 0,  # put where a response has ended, and never read
            },
        )
    response = sequences[:, width:]
    exists = _up_to_first(response, torch.tensor(ends, dtype=torch.long, device=device))
    prompt_mask = attention_mask.repeat_interleave(num_responses, 0)
    nothing = torch.zeros_like(prompt_mask)
    logprobs = torch.where(exists, recorder.logprobs(response), 0)
    attention_mask = torch.cat([prompt_mask, exists], 1)
    return PaddedBatch(
        input_ids=torch.where(attention_mask, sequences, pad_token_id),
        attention_mask=attention_mask,
        loss_mask=torch.cat([nothing, exists], 1),
        old_logprobs=torch.cat([nothing.to(logprobs.dtype), logprobs], 1),
        groups=torch.arange(len(prompts), device=device).repeat_interleave(num_responses),
    )


class _Sampler(nn.Module):
    """The policy's architecture with a cache and transformers' own attention, for `functional_call`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        from transformers import GenerationConfig

        model: Any = policy.with_own_attention()
        model.generation_config = GenerationConfig()  # the model's own would bring top-k, top-p and penalties
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, repeats: int, **options: Any) -> Tensor:
        if repeats > 1 and bool(attention_mask[:, :-1].any(1).all()):
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
            head = {"attention_mask": attention_mask[:, :-1].long(), "position_ids": positions}
            cache = self.model(input_ids[:, :-1], **head, use_cache=True, logits_to_keep=1).cache
            cache.batch_repeat_interleave(repeats)
            options["cache"] = cache
        rows, mask = (column.repeat_interleave(repeats, 0) for column in (input_ids, attention_mask.long()))
        sequences: Tensor = self.model.generate(rows, attention_mask=mask, **options)
        return sequences


class _Recorder:
    """A logits processor that divides by the temperature and remembers the log-probs of what is then sampled."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.columns: list[Tensor] = []  # log-probs of the tokens sampled so far
        self.current: Tensor | None = None  # [rows, vocab] log-probs of the token that is being sampled

    def __call__(self, input_ids: Int[Tensor, "rows seq"], scores: Float[Tensor, "rows vocab"]) -> Tensor:
        if self.current is not None:
            self.columns.append(self.current.gather(1, input_ids[:, -1:]))
        scaled = scores.float() / self.temperature
        self.current = scaled.log_softmax(-1)
        return scaled

    def logprobs(self, response: Int[Tensor, "rows seq"]) -> Float[Tensor, "rows seq"]:
        """The log-prob of each token of the response; those after the end are of no meaning."""
        assert self.current is not None
        last = self.current.gather(1, response[:, -1:])
        return torch.cat([*self.columns, last], 1)[:, : response.shape[1]]


def _up_to_first(tokens: Int[Tensor, "rows seq"], ends: Int[Tensor, " ends"]) -> Bool[Tensor, "rows seq"]:
    """True up to and including the first end token of each row."""
    is_end = torch.isin(tokens, ends).long()
    return is_end.cumsum(1) - is_end == 0
