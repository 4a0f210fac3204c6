"""fnppo on the same columns: each function takes what verl's takes, and returns value and gradient under the same names."""

from collections.abc import Callable
from typing import Any

import torch
from batches import Columns
from torch import Tensor
from torch.nn.functional import pad

import fnppo
from fnppo.advantages import on_every_token
from fnppo.corrections import off_policy_diagnostics
from fnppo.kl import KLEstimator
from fnppo.surrogates import Surrogate

Weights = Callable[[fnppo.PaddedBatch], fnppo.PaddedBatch]


def with_prompt(column: Tensor) -> Tensor:
    """Columns of verl begin with the response; those of a `PaddedBatch` have a prompt before it: here of one token."""
    return pad(column, (1, 0))


def batch_of(columns: Columns, weights: Weights, **extra: str) -> fnppo.PaddedBatch:
    """The batch of these columns; `extra` says which of them go into `batch.extra`, by the name that fnppo reads."""
    mask = with_prompt(columns["response_mask"]) > 0
    named = {"old_logprobs": "old_log_prob", "advantages": "advantages", "ref_logprobs": "ref_log_prob"}
    batch = fnppo.PaddedBatch(
        input_ids=torch.zeros(mask.shape, dtype=torch.long),
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        groups=columns.get("index"),
        extra={name: with_prompt(columns[column]) for name, column in extra.items()},
        **{name: with_prompt(columns[column]) for name, column in named.items() if column in columns},
    )
    return weights(batch)


def at_targets(column: Tensor, targets: fnppo.Targets) -> Tensor:
    """The values of a response column at the targets."""
    return with_prompt(column)[targets.rows, targets.columns]


def differentiate(value: Callable[[Tensor], Tensor], column: Tensor) -> Columns:
    """{value, gradient of its sum}."""
    leaf = column.clone().requires_grad_()
    found = value(leaf)
    return {"value": found.detach(), "gradient": torch.autograd.grad(found.sum(), leaf)[0]}


def loss(
    columns: Columns,
    surrogate: Surrogate = fnppo.clipped_surrogate,
    *,
    weights: Weights = fnppo.token_mean,
    choose: Callable[..., fnppo.PaddedBatch] | None = None,
    chosen_by: str = "log_prob",
    extra: dict[str, str] | None = None,
    shares: dict[str, list[str]] | None = None,
    **numbers: Any,
) -> Columns:
    """`ppo_loss` and its gradient in the log-probs.

    Args:
        choose: (batch, column `chosen_by`) -> batch, such as `select_kl_cov`.
        extra: name that fnppo reads -> column.
        shares: verl's name of a clip fraction -> the clips in it.
        **numbers: those of `ppo_loss` and of the surrogate.
    """
    batch = batch_of(columns, weights, **extra or {})
    if choose:
        batch = choose(batch, with_prompt(columns[chosen_by]))
    targets = fnppo.pad_sequences(batch).targets
    metrics = {}

    def value(log_prob: Tensor) -> Tensor:
        entropy = at_targets(columns["entropy"], targets) if "entropy" in columns else None
        stats = fnppo.TokenStats(at_targets(log_prob, targets), entropy)
        found, all_metrics = fnppo.ppo_loss(stats, targets, surrogate=surrogate, **numbers)
        tokens = all_metrics.totals["tokens"]
        for name, clips in (shares or {}).items():
            metrics[name] = sum(all_metrics.per_token[f"{clip}_fraction"] for clip in clips) / tokens
        return found

    return differentiate(value, columns["log_prob"]) | metrics


def kl(columns: Columns, estimator: KLEstimator) -> Columns:
    """One KL a token, and the gradient of their sum over the learned ones."""
    mask = columns["response_mask"] > 0
    kept = torch.where(mask, columns["ref_log_prob"], 0)
    return differentiate(
        lambda log_prob: torch.where(mask, estimator(log_prob.flatten(), kept.flatten()).reshape(mask.shape), 0),
        columns["log_prob"],
    )


def aggregate(columns: Columns, weights: Weights) -> Columns:
    """Σ w · l."""
    targets = fnppo.pad_sequences(batch_of(columns, weights)).targets
    return differentiate(lambda losses: (targets.loss_weights * at_targets(losses, targets)).sum(), columns["loss_mat"])


def value_loss(columns: Columns, *, clip: float, weights: Weights = fnppo.token_mean) -> Columns:
    """`value_loss` and its gradient in the values."""
    batch = batch_of(columns, weights, values="values", returns="returns")
    targets = fnppo.pad_sequences(batch).targets
    return differentiate(
        lambda values: fnppo.value_loss(at_targets(values, targets), targets, clip=clip)[0], columns["vpreds"]
    )


def of_responses(estimator: Callable[..., Tensor], columns: Columns, **options: Any) -> Columns:
    """Advantages of responses, given to their tokens. Rewards are verl's: the sum over the tokens."""
    rewards = columns["token_level_rewards"].sum(1)
    return {"value": on_every_token(estimator(rewards, columns["index"], **options), columns["response_mask"])}


def from_sampler(columns: Columns) -> fnppo.PaddedBatch:
    """The batch of a correction: with the log-probs of the policy that sampled."""
    return batch_of(columns, fnppo.token_mean, sampler_logprobs="rollout_log_prob")


def correction(columns: Columns, function: Callable[[fnppo.PaddedBatch], Tensor]) -> Columns:
    """A column of weights, or a mask of what is kept, where something is learned."""
    batch = from_sampler(columns)
    found = torch.where(batch.loss_mask, function(batch), 0).double()
    return {"value": found[:, 1:]}


def diagnostics(columns: Columns) -> Columns:
    """`off_policy_diagnostics`, under verl's names."""
    names = {
        "kl": "mismatch_k1",
        "k3_kl": "mismatch_k3",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
        "training_ppl": "perplexity_trainer",
        "rollout_ppl": "perplexity_sampler",
        "log_ppl_diff": "log_perplexity_gap",
    }
    found = off_policy_diagnostics(from_sampler(columns))
    return {name: found[ours] for name, ours in names.items()}


def count_learned(result: Columns) -> Columns:
    """The number of tokens with a gradient."""
    return result | {"tokens": (result["gradient"] != 0).sum()}


def entropy(columns: Columns) -> Columns:
    """The entropy of each token, and the gradient in the logits."""
    return differentiate(lambda logits: _stats(logits, columns)[1], columns["logits"])


def logprobs(columns: Columns) -> Columns:
    """The log-prob of each label, and the gradient in the logits."""
    return differentiate(lambda logits: _stats(logits, columns)[0], columns["logits"])


def _stats(logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    labels = columns["labels"]
    stats = fnppo.logits_to_stats(logits.flatten(0, 1), labels.flatten(), temperature=1.0)
    assert stats.entropy is not None
    return stats.logprobs.reshape(labels.shape), stats.entropy.reshape(labels.shape)
