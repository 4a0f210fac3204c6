"""Estimators of KL(π ‖ π_ref) from one sampled token each (Schulman, "Approximating KL Divergence", 2020).

The KL itself, over the whole vocabulary, is in `fnppo.exact_kl`.

Each takes log π(token) and log π_ref(token), [targets] each, and returns one value a target, in nats. With
d = log π - log π_ref and tokens sampled from π:

    name   value            as a value               as a loss (gradient in π)
    k1     d                unbiased, noisy          expected gradient 0: never use it as a loss
    k2     d² / 2           biased, low variance     expected gradient is that of the true KL
    k3     exp(-d) - 1 + d  unbiased, non-negative   expected gradient is that of KL(π_ref ‖ π), the other direction;
                                                     it grows like exp(-d) where π is far below π_ref
    abs    |d|              at least the KL          expected gradient is that of Σ |π - π_ref|, twice the total variation

    straight_through(k)     that of k                that of k2
    importance_corrected(k) unbiased for k1 and k3   so is its gradient; for tokens from another policy than π

No estimator caps its value: a cap makes the gradient 0 just where the policy is farthest from the reference. One that is
asked for, `ppo_loss(kl_cap=...)`, is `capped` here, and is counted.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_tensor

KLEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def kl_k1(logprobs: Float[Tensor, " targets"], ref_logprobs: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """k1 = d.

    >>> kl_k1(torch.tensor([-0.5]), torch.zeros(1))
    tensor([-0.5000])
    """
    return _distance(logprobs, ref_logprobs)


def kl_k2(logprobs: Float[Tensor, " targets"], ref_logprobs: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """k2 = d² / 2.

    >>> kl_k2(torch.tensor([-0.5]), torch.zeros(1))
    tensor([0.1250])
    """
    return _distance(logprobs, ref_logprobs).square() / 2


def kl_k3(logprobs: Float[Tensor, " targets"], ref_logprobs: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """k3 = exp(-d) - 1 + d (GRPO, arXiv:2402.03300, eq. 4).

    >>> kl_k3(torch.tensor([-0.5, 0.5]), torch.zeros(2))
    tensor([0.1487, 0.1065])
    """
    d = _distance(logprobs, ref_logprobs)
    return torch.expm1(-d) + d


def kl_abs(logprobs: Float[Tensor, " targets"], ref_logprobs: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """|d|. Its gradient in log π is the sign of d, and 0 at d = 0.

    >>> kl_abs(torch.tensor([-0.5]), torch.zeros(1))
    tensor([0.5000])
    """
    return _distance(logprobs, ref_logprobs).abs()


def straight_through(kl: KLEstimator) -> KLEstimator:
    """The value of `kl` with the gradient of k2, whose expectation is the gradient of the true KL.

    >>> d = torch.tensor([-0.5], requires_grad=True)
    >>> value = straight_through(kl_k3)(d, torch.zeros(1))
    >>> value.item(), torch.autograd.grad(value, d)[0].item()
    (0.148721..., -0.5)
    """

    def estimator(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        k2 = kl_k2(logprobs, ref_logprobs)
        return kl(logprobs, ref_logprobs).detach() + (k2 - k2.detach())

    return estimator


def importance_corrected(kl: KLEstimator, old_logprobs: Float[Tensor, " targets"]) -> KLEstimator:
    """ρ · kl with ρ = π / π_old: unbiased, in value and gradient, for tokens that π_old has sampled.

    With k1 or k3, E_old[ρ kl] = E_π[kl] = KL(π ‖ π_ref) holds for every π, hence for its gradient too, which flows through
    ρ as well. With k3 it is the KL of DeepSeek-V3.2 (arXiv:2512.02556). k2 and `straight_through` have the
    right gradient only without that of ρ: do not correct them with this. Computed in float64; a ρ of less than 1e-308
    counts as that.

    Args:
        kl: `kl_k1` or `kl_k3`.
        old_logprobs: log π_old of the tokens that the estimator will see, such as those of the targets of a micro-batch.

    >>> tokens_from = torch.tensor([0.5]).log()
    >>> logprobs = torch.tensor([0.25]).log()
    >>> importance_corrected(kl_k1, tokens_from)(logprobs, tokens_from)  # 0.5 · log 0.5
    tensor([-0.3466])
    """

    def estimator(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        # In float32 ρ is 0 and k3 infinite from 87 nats on, though their product is 1.
        here, ref, old = (column.double() for column in (logprobs, ref_logprobs, old_logprobs))
        ratio = _difference(here, "old_logprobs", old).exp()
        return (ratio.clamp(min=torch.finfo(ratio.dtype).tiny) * kl(here, ref)).to(logprobs.dtype)

    return estimator


def capped(
    kl: KLEstimator,
    logprobs: Float[Tensor, " targets"],
    ref_logprobs: Float[Tensor, " targets"],
    *,
    cap: float | Tensor,
) -> tuple[Float[Tensor, " targets"], Bool[Tensor, " targets"]]:
    """(min(kl, cap), where it is the cap). There the log-probs get no gradient, whatever overflows behind the cap.

    >>> logprobs = torch.tensor([-0.5, -1000.0], requires_grad=True)
    >>> values, over = capped(kl_k3, logprobs, torch.zeros(2), cap=10.0)
    >>> values.detach(), over
    (tensor([ 0.1487, 10.0000]), tensor([False,  True]))
    >>> torch.autograd.grad(values.sum(), logprobs)[0]
    tensor([-0.6487,  0.0000])
    """
    over = kl(logprobs.detach(), ref_logprobs) > cap
    if over.shape != logprobs.shape:
        raise ValueError(
            f"kl gave shape {tuple(over.shape)} for {logprobs.numel()} targets; a cap needs one value a target. Do not "
            "reduce in it."
        )
    # Where the cap holds, the estimator meets two equal policies, so that no exp overflows: 0 · inf would be NaN.
    values = kl(torch.where(over, ref_logprobs, logprobs), ref_logprobs)
    return torch.where(over, cap, values), over


def _distance(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return _difference(logprobs, "ref_logprobs", ref_logprobs)


def _difference(logprobs: Tensor, other: str, values: Tensor) -> Tensor:
    for name, column in (("logprobs", logprobs), (other, values)):
        check_tensor(name, column)
        if column.shape != logprobs.shape:  # it would be broadcast
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, logprobs {tuple(logprobs.shape)}. Give both for the same targets."
            )
    return logprobs - values
