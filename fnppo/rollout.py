"""Sampling from a policy with explicit parameters, over transformers' `generate`.

For trainers that sample elsewhere (vLLM, SGLang), `fnppo.padded_batch` makes the same `PaddedBatch` from lists.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from fnppo.arguments import check_count, check_number, check_type
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
        ValueError: a prompt is empty, a number is out of range, or the policy reads padded batches only, since its model may
            read the padding that stands before short prompts.

    >>> from fnppo import functional_policy
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> batch = generate(
    ...     params, [[1, 5], [3]], policy=policy, max_new_tokens=4, num_responses=3, seed=0, eos_token_id=()
    ... )
    >>> batch.input_ids.shape, batch.groups
    (torch.Size([6, 6]), tensor([0, 0, 0, 1, 1, 1]))
    """
    check_type("policy", policy, Policy, "Use what functional_policy(module) returned.")
    if policy.padded_only is not None:
        raise ValueError(
            f"generate cannot sample from this policy: {policy.padded_only} Prompts of several lengths are padded on the left, "
            "and such a model may read the padding. Sample with an inference engine, or with the model's own generate and "
            "prompts of one length, and make the batch with padded_batch."
        )
    check_number("temperature", temperature, above=0, remedy="For the most probable tokens, use greedy=True.")
    for name, value in (("max_new_tokens", max_new_tokens), ("num_responses", num_responses)):
        check_count(name, value, least=1, remedy="A row is a prompt with a response.")
    if not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts is {prompts!r}; a list of prompts is needed. Put it into a list.")
    rows = [_ids(f"prompt {row}", prompt, policy) for row, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("there are 0 prompts; generate needs at least 1. Skip it.")
    for row, prompt in enumerate(rows):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; a response needs a token before it. Give it a BOS token.")
        if policy.max_positions is not None and len(prompt) + max_new_tokens > policy.max_positions:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens, and with {max_new_tokens} new ones it is beyond the "
                f"{policy.max_positions} positions of the model. Lower max_new_tokens or shorten the prompt."
            )
    single = isinstance(eos_token_id, int)
    ends = _ids("eos_token_id", (eos_token_id,) if single else () if eos_token_id is None else eos_token_id, policy)
    pad_token_id = check_count("pad_token_id", pad_token_id, least=-(2**63), remedy="Give any id; it is never read.")
    device = next(iter(params.values())).device
    width = max(map(len, rows))
    input_ids = torch.tensor([[0] * (width - len(p)) + p for p in rows], device=device)
    attention_mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in rows], device=device)

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
        groups=torch.arange(len(rows), device=device).repeat_interleave(num_responses),
    )


def _ids(name: str, tokens: Any, policy: Policy) -> list[int]:
    """Token ids that the policy knows."""
    try:
        ids = [operator.index(token) for token in tokens]
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} is {tokens!r}; a list of token ids is needed. Tokenize it first.") from error
    if ids and not 0 <= min(ids) <= max(ids) < policy.vocab_size:
        raise ValueError(
            f"{name} holds {min(ids)} to {max(ids)}, but the model's vocabulary has {policy.vocab_size} entries. Check that "
            "tokenizer and model belong together."
        )
    return ids


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
