"""Log-probability and entropy of the targets of a batch under a policy, with gradients and without."""

from collections.abc import Callable
from typing import Any

import optree
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_type
from fnppo.checks import check_batch, check_model_batch, check_vocabulary
from fnppo.gradients import checked_loss
from fnppo.head import chunked_logprobs
from fnppo.layouts import Layout, forward_rows, packed
from fnppo.policy import Policy
from fnppo.types import ModelBatch, PaddedBatch, Params, Targets, TokenStats


def forward_logprobs(
    params: Params,
    batch: ModelBatch,
    *,
    policy: Policy,
    temperature: float | Float[Tensor, "..."],
    entropy: bool = True,
    chunk_size: int | None = None,
    loss: Callable[[TokenStats, Targets], tuple[Tensor, Any]] | None = None,
) -> TokenStats:
    """Log-prob and entropy of every target under the policy with parameters `params`. Pure and differentiable in `params`.

    Args:
        params: the parameters, as `functional_policy` returns them.
        batch: from `pack_sequences` or `pad_sequences`.
        policy: from `functional_policy`.
        temperature: the sampler's temperature, above 0; a number, or one a target. Logits are divided by it for the
            log-prob and for the entropy alike. No gradient flows to it.
        entropy: False leaves it out and saves its work.
        chunk_size: targets per chunk; by default as many as fit 40 MiB on a CPU and 1 GiB elsewhere
            (`fnppo.logit_chunks`). It does not change the result.
        loss: the function that the result will be given to, such as `partial(ppo_loss, clip_high=0.28)`. A hint, which
            changes no number: where its terms are of one target each, the head makes its gradients in the forward and
            saves a quarter of its products (see `fnppo.one_pass`). It is called once a chunk, with the targets of the
            chunk, and must be pure. For losses of whole rows, such as GSPO's, leave it out.

    Returns:
        `TokenStats`, [targets] each, in float32, or float64 for a float64 model.

    Raises:
        ValueError: temperature not above 0, or of a wrong shape; chunk_size below 1; a token outside the vocabulary; a
            predictor or a position that is not there; columns of different lengths.

    >>> from fnppo import functional_policy, pack_sequences, padded_batch
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> batch = pack_sequences(padded_batch([[1, 5], [3]], [[4], [6, 2]]))
    >>> stats = forward_logprobs(params, batch, policy=policy, temperature=1.0)
    >>> stats.logprobs.shape, stats.entropy.shape
    (torch.Size([3]), torch.Size([3]))
    """
    check_type("policy", policy, Policy, "Use what functional_policy(module) returned.")
    check_type("params", params, dict, "Use what functional_policy(module) returned.")
    if loss is not None and not callable(loss):
        raise ValueError(
            f"loss is a {type(loss).__name__}; a function is needed: (stats, targets) -> (loss, metrics). Pass it uncalled."
        )
    check_model_batch(batch, vocab_size=policy.vocab_size)  # before the device has work that would be waited for
    places = policy.places(batch)
    hidden = policy.hidden_at(params, batch, places)
    stats = logprobs_of_hidden(
        hidden, params, batch.targets, places,
        policy=policy, temperature=temperature, entropy=entropy, chunk_size=chunk_size, loss=loss,
    )  # fmt: skip
    return policy.together(stats, batch, places)


def logprobs_of_hidden(
    hidden: Float[Tensor, "here hidden"],
    params: Params,
    targets: Targets,
    places: Tensor | slice,
    *,
    policy: Policy,
    temperature: float | Float[Tensor, "..."],
    entropy: bool,
    chunk_size: int | None,
    loss: Callable[[TokenStats, Targets], tuple[Tensor, Any]] | None = None,
) -> TokenStats:
    """`forward_logprobs` from hidden states on: those of the predictors of `targets[places]`."""
    here: Any = optree.tree_map(lambda column: column[places], targets)  # type: ignore[arg-type]
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        temperature = temperature[places]

    def of_chunk(stats: TokenStats, chunk: Int[Tensor, " chunk"]) -> Float[Tensor, ""]:
        assert loss is not None
        return checked_loss(loss(stats, optree.tree_map(lambda column: column[chunk], here)))[0]  # type: ignore[arg-type]

    return chunked_logprobs(
        hidden,
        here.token_ids,
        **policy.head.bind(params)._asdict(),
        temperature=temperature,
        entropy=entropy,
        chunk_size=chunk_size,
        loss=None if loss is None else of_chunk,
    )


def compute_logprobs(
    params: Params,
    batch: PaddedBatch,
    *,
    policy: Policy,
    temperature: float,
    max_tokens: int,
    entropy: bool = False,
    chunk_size: int | None = None,
    layout: Layout = packed,
) -> TokenStats:
    """Log-probs (and entropy) of the learned tokens of a batch, without gradients: for `old_logprobs`, `ref_logprobs`.

    Args:
        params, policy, temperature, entropy, chunk_size: as in `forward_logprobs`.
        batch: the rollouts; only its ids and masks are read.
        max_tokens: limit of real tokens of one forward.
        layout: `packed`, `shared` or `padded`, from `fnppo.layouts`.

    Returns:
        `TokenStats`, [batch, seq], in nats, rows in the order of the input, 0 where `loss_mask` is clear.

    Raises:
        ValueError: the batch is malformed, a token is outside the vocabulary, a row is over `max_tokens` or longer than
            the model has positions, or as in `forward_logprobs`.

    >>> from fnppo import functional_policy, padded_batch
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> batch = padded_batch([[1, 5], [3]], [[4], [6, 2]])
    >>> stats = compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=100)
    >>> (stats.logprobs != 0).tolist() == batch.loss_mask.tolist()
    True
    """
    check_type("policy", policy, Policy, "Use what functional_policy(module) returned.")
    batch = check_batch(batch)
    check_vocabulary(batch, policy.vocab_size, policy.max_positions)

    def forward(micro_batch: ModelBatch) -> TokenStats:
        return forward_logprobs(
            params, micro_batch, policy=policy, temperature=temperature, entropy=entropy, chunk_size=chunk_size
        )

    return forward_rows(forward, batch, layout=layout, max_tokens=max_tokens)
