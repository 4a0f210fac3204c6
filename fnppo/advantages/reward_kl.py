"""The KL to a reference policy as part of the reward, with a coefficient that is fixed or follows a target."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fnppo.advantages.token_columns import learned_columns
from fnppo.arguments import check_hyper, check_type
from fnppo.kl import KLEstimator, kl_k1


def kl_in_reward(
    rewards: Float[Tensor, "batch seq"],
    logprobs: Float[Tensor, "batch seq"],
    ref_logprobs: Float[Tensor, "batch seq"],
    loss_mask: Shaped[Tensor, "batch seq"],
    *,
    kl_coef: float | Tensor,
    kl: KLEstimator = kl_k1,
) -> tuple[Float[Tensor, "batch seq"], Float[Tensor, " batch"]]:
    """Each token's reward minus its share of the KL (Ziegler et al., arXiv:1909.08593, eq. 2).

        r_t - kl_coef · KL_t

    Args:
        rewards: one a token; outcome rewards with `on_last_token`.
        logprobs: log π of the policy that sampled: `batch.old_logprobs`.
        ref_logprobs: log π of the reference policy.
        kl_coef: a number, or `state.coef` of an `AdaptiveKL`.
        kl: an estimator from `fnppo.kl`; the paper's is k1.

    Returns:
        (rewards, KL of each row, summed over its tokens); 0 where `loss_mask` is clear.

    Raises:
        ValueError: the shapes differ, a number is not finite at a learned token, or kl_coef is below 0.

    >>> rewards, kl = kl_in_reward(
    ...     torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]),
    ...     torch.tensor([[True, True]]), kl_coef=0.5,
    ... )
    >>> rewards, kl
    (tensor([[-0.2500,  1.0000]]), tensor([0.5000]))
    """
    check_hyper("kl_coef", kl_coef, least=0, remedy="Use 0 for no term; below 0 it would drive the policy away.")
    columns = {"rewards": rewards, "logprobs": logprobs, "ref_logprobs": ref_logprobs}
    learned, (rewards, logprobs, ref_logprobs) = learned_columns(loss_mask, **columns)
    penalty = kl(logprobs.flatten(), ref_logprobs.flatten())
    if penalty.shape != logprobs.flatten().shape:  # it would be broadcast
        raise ValueError(f"kl gave shape {tuple(penalty.shape)} for {logprobs.numel()} tokens. Do not reduce in it.")
    penalty = torch.where(learned, penalty.reshape(rewards.shape), 0)
    return rewards - kl_coef * penalty, penalty.sum(1)


class AdaptiveKL(NamedTuple):
    """The state of a coefficient that follows a target: the coefficient itself. A fixed one needs no state."""

    coef: Float[Tensor, ""] | float


def adapt_kl(
    state: AdaptiveKL,
    kl: float | Float[Tensor, ""],
    *,
    target: float | Tensor,
    gain: float | Tensor = 0.1,
    max_error: float | Tensor = 0.2,
) -> AdaptiveKL:
    """The coefficient for the next batch: larger where the KL was above its target (arXiv:1909.08593, section 2.2).

        e = clip(KL / target - 1, -max_error, max_error)        coef' = coef · (1 + gain · e)

    Args:
        kl: KL of the last batch, in the unit of the target: `kl.mean()` of what `kl_in_reward` returned is nats a response.
        target: the KL to be kept.
        gain: K_β of the paper. Others give it as responses of the batch / horizon.
        max_error: bound of e.

    Raises:
        ValueError: kl is not finite, or target, gain or max_error is not above 0, or gain · max_error reaches 1.

    >>> adapt_kl(AdaptiveKL(0.5), 9.0, target=6.0)
    AdaptiveKL(coef=tensor(0.5100))
    """
    check_type("state", state, AdaptiveKL, "Begin with AdaptiveKL(0.1).")
    check_hyper("coef", state.coef, least=0, remedy="Begin with a number such as AdaptiveKL(0.1).")
    check_hyper("kl", kl, remedy="Give kl.mean() of what kl_in_reward returned.")
    check_hyper("target", target, above=0, remedy="It is a KL, such as 6 nats a response.")
    check_hyper(
        "gain", gain, above=0, remedy="It is a share of the error, such as 0.1; a fixed coefficient needs no update."
    )
    check_hyper("max_error", max_error, above=0, remedy="It bounds the relative error, such as 0.2.")
    check_hyper(
        "gain * max_error",
        gain * max_error,
        below=1,
        remedy="A step of 1 would end at coefficient 0. Lower gain or max_error.",
    )
    coef = torch.as_tensor(state.coef)
    coef = coef if coef.is_floating_point() else coef.float()
    error = torch.as_tensor(kl, dtype=coef.dtype, device=coef.device) / target - 1
    bound = torch.as_tensor(max_error, dtype=error.dtype, device=error.device)
    error = error.clamp(-bound, bound)
    return AdaptiveKL(coef * (1 + gain * error))
