"""Values of the targets of a batch under a critic, with gradients and without, and the loss that fits them to returns."""

import dataclasses
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_hyper, check_type
from fnppo.checks import check_batch, check_model_batch, check_targets, check_vocabulary
from fnppo.critic import Critic
from fnppo.layouts import Layout, forward_rows, packed
from fnppo.logprobs import logprobs_of_hidden
from fnppo.metrics import Metrics, count_targets
from fnppo.policy import Policy
from fnppo.surrogates import column, one_a_target
from fnppo.types import ModelBatch, PaddedBatch, Params, Targets, TokenStats


def forward_values(params: Params, batch: ModelBatch, *, critic: Critic) -> Float[Tensor, " targets"]:
    """V_t, the value before token t is chosen, of every target: read off its predictor. Pure and differentiable in `params`.

    Args:
        params: the parameters, as `functional_critic` or `functional_actor_critic` returns them.
        batch: from `pack_sequences` or `pad_sequences`.
        critic: from the same function as `params`.

    Returns:
        One value a target, in float32, or float64 for a float64 model.

    Raises:
        ValueError: a token outside the vocabulary; a predictor or a position that is not there; columns of different
            lengths; parameters that are not the critic's.

    >>> from fnppo import pack_sequences, padded_batch
    >>> from fnppo.critic import functional_critic
    >>> from fnppo.testing import tiny_llama
    >>> critic, params = functional_critic(tiny_llama())
    >>> forward_values(params, pack_sequences(padded_batch([[1, 5], [3]], [[4], [6, 2]])), critic=critic)
    tensor([0., 0., 0.])
    """
    _check(params, critic)
    check_model_batch(batch, vocab_size=critic.model.num_embeddings)
    model, places = critic.model, critic.model.places(batch)
    values = critic.values(params, model.hidden_at(params, batch, places))
    return model.together(values, batch, places)


def forward_logprobs_and_values(
    params: Params,
    batch: ModelBatch,
    *,
    policy: Policy,
    critic: Critic,
    temperature: float | Float[Tensor, "..."],
    entropy: bool = True,
    chunk_size: int | None = None,
) -> tuple[TokenStats, Float[Tensor, " targets"]]:
    """`forward_logprobs` and `forward_values` of a policy and a critic that share a trunk, which runs once.

    Args:
        policy, critic, params: from `functional_actor_critic`.
        batch, temperature, entropy, chunk_size: as in `forward_logprobs`.

    Raises:
        ValueError: policy and critic have not one trunk, attention and dropout seed, or as in `forward_logprobs`.

    >>> from fnppo import pack_sequences, padded_batch
    >>> from fnppo.critic import functional_actor_critic
    >>> from fnppo.testing import tiny_llama
    >>> policy, critic, params = functional_actor_critic(tiny_llama())
    >>> batch = pack_sequences(padded_batch([[1, 5], [3]], [[4], [6, 2]]))
    >>> stats, values = forward_logprobs_and_values(params, batch, policy=policy, critic=critic, temperature=1.0)
    >>> stats.logprobs.shape, values.shape
    (torch.Size([3]), torch.Size([3]))
    """
    _check(params, critic)
    check_type("policy", policy, Policy, "Use what functional_actor_critic(module) returned.")
    if dataclasses.replace(critic.model, head=policy.head) != policy:
        raise ValueError(
            "policy and critic differ in more than their heads (trunk, attention or dropout seed), so one forward cannot "
            "serve both. Make both with functional_actor_critic(module), or call forward_logprobs and forward_values."
        )
    check_model_batch(batch, vocab_size=policy.vocab_size)
    places = policy.places(batch)
    hidden = policy.hidden_at(params, batch, places)
    stats = logprobs_of_hidden(
        hidden, params, batch.targets, places,
        policy=policy, temperature=temperature, entropy=entropy, chunk_size=chunk_size,
    )  # fmt: skip
    return policy.together((stats, critic.values(params, hidden)), batch, places)


def compute_values(
    params: Params, batch: PaddedBatch, *, critic: Critic, max_tokens: int, layout: Layout = packed
) -> Float[Tensor, "batch seq"]:
    """Values of the learned tokens of a batch, without gradients: for `gae_advantages`, and for the clip of `value_loss`.

    Args:
        params, critic: as in `forward_values`.
        batch: the rollouts; only its ids and masks are read.
        max_tokens: limit of real tokens of one forward.
        layout: `packed`, `shared` or `padded`, from `fnppo.layouts`.

    Returns:
        V_t in column t, rows in the order of the input, 0 where `loss_mask` is clear.

    Raises:
        ValueError: the batch is malformed, a token is outside the vocabulary, a row is over `max_tokens` or longer than
            the model has positions, or as in `forward_values`.

    >>> from fnppo import padded_batch
    >>> from fnppo.critic import functional_critic
    >>> from fnppo.testing import tiny_llama
    >>> critic, params = functional_critic(tiny_llama())
    >>> params["value_head.bias"] = torch.ones(1)
    >>> compute_values(params, padded_batch([[1, 5], [3]], [[4], [6, 2]]), critic=critic, max_tokens=100)
    tensor([[0., 0., 1., 0.],
            [0., 0., 1., 1.]])
    """
    _check(params, critic)
    batch = check_batch(batch)
    check_vocabulary(batch, critic.model.num_embeddings, critic.model.max_positions)

    def forward(micro_batch: ModelBatch) -> Tensor:
        return forward_values(params, micro_batch, critic=critic)

    return forward_rows(forward, batch, layout=layout, max_tokens=max_tokens)


def value_loss(
    values: Float[Tensor, " targets"], targets: Targets, *, clip: float | Tensor | None = 0.2
) -> tuple[Float[Tensor, ""], Metrics]:
    """Half the squared error of the values, clipped as PPO's code has it (Schulman et al., openai/baselines, ppo2).

        l_t = ½ max((V_t - R_t)², (clip(V_t, V_old - clip, V_old + clip) - R_t)²)        L = Σ_t w_t · l_t

    A value that has moved by more than `clip`, to where it is nearer to its return than the clipped one, gets no gradient.

    Args:
        values: V_t under the current parameters, from `forward_values`.
        targets: needs `loss_weights`, `extra["returns"]`, and for the clip `extra["values"]`: V_old, from `compute_values`
            before the update. Put both into `batch.extra`.
        clip: in units of the return, since it bounds a value and not a ratio; None for none.

    Returns:
        The loss (a scalar that adds up over micro-batches), and its metrics: `loss` and `value_loss` (the same here),
        `value_clip_fraction` (share of tokens whose gradient the clip has removed), `value_mean`, `return_mean`,
        `return_square_mean`, `value_error_mean`, `value_error_square_mean` (of R_t - V_t), for `explained_variance`;
        `tokens`, `rows`.

    Raises:
        ValueError: a column is missing, there is not one value a target, or clip is negative or NaN. Values of columns are
            not looked at: NaN among them makes the loss NaN.

    >>> one, index = torch.ones(2), torch.zeros(2, dtype=torch.long)
    >>> extra = {"values": 0 * one, "returns": one}
    >>> targets = Targets(index, index, index, index, loss_weights=one, extra=extra)
    >>> loss, metrics = value_loss(torch.tensor([0.5, -0.5]), targets)
    >>> loss, metrics.per_token["value_clip_fraction"]
    (tensor(1.4450), tensor(1.))
    """
    check_targets(targets)
    one_a_target("values", values, targets)
    returns, weights = column("returns", targets), column("loss_weights", targets)
    error = values - returns
    clips = torch.zeros_like(error, dtype=torch.bool)
    if clip is not None:
        check_hyper(
            "clip", clip, least=0, infinite=True, remedy="It is a distance from the old value; None is no clip."
        )
        old = column("values", targets)
        error = error + 0 * old  # so that NaN among the old values is seen, which the comparison would pass over
        bounded = torch.clamp(values.detach(), old - clip, old + clip) - returns
        clips = bounded.abs() > error.abs()
        error = torch.where(clips, bounded, error)
    loss = (weights * (0.5 * error.square())).sum()
    # In float64: the variances of `explained_variance` are small differences of these.
    value, target = values.detach().double(), returns.double()
    sums = {
        "value_clip_fraction": clips.to(values.dtype),
        "value_mean": value,
        "return_mean": target,
        "return_square_mean": target.square(),
        "value_error_mean": target - value,
        "value_error_square_mean": (target - value).square(),
    }
    return loss, Metrics(
        per_step={"loss": loss.detach(), "value_loss": loss.detach()},
        per_token={name: column.detach().sum() for name, column in sums.items()},
        totals=count_targets(targets),
    )


def explained_variance(summary: dict[str, float]) -> float:
    """1 - Var(R - V) / Var(R) from summarized metrics of `value_loss`: 1 is a perfect critic, 0 one no better than a constant.

    NaN where returns do not vary.

    >>> mean = {"return_mean": 1.0, "return_square_mean": 2.0, "value_error_mean": 0.5, "value_error_square_mean": 0.5}
    >>> explained_variance(mean)
    0.75
    """
    variance = summary["return_square_mean"] - summary["return_mean"] ** 2
    left = summary["value_error_square_mean"] - summary["value_error_mean"] ** 2
    varies = variance > 1e-12 * summary["return_square_mean"]  # less is the rounding of the sums
    return 1 - left / variance if varies else math.nan


def _check(params: Any, critic: Any) -> None:
    check_type("critic", critic, Critic, "Use what functional_critic(module) returned.")
    check_type("params", params, dict, "Use what functional_critic(module) returned.")
