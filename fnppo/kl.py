"""Estimators of KL(π ‖ π_ref) from one sampled token each (Schulman, "Approximating KL Divergence", 2020).

Each takes log π(token) and log π_ref(token), [targets] each, and returns one value a target, in nats. With
d = log π - log π_ref and tokens sampled from π:

    name   value            as a value               as a loss (gradient in π)
    k1     d                unbiased, noisy          expected gradient 0: never use it as a loss
    k2     d² / 2           biased, low variance     expected gradient is that of the true KL
    k3     exp(-d) - 1 + d  unbiased, non-negative   biased; grows like exp(-d) when π is far below π_ref

No value is capped: a cap would make the gradient 0 just where the policy is farthest from the reference.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
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


def _distance(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    for name, column in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        check_tensor(name, column)
        if column.shape != logprobs.shape:  # it would be broadcast
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, logprobs {tuple(logprobs.shape)}. Give both for the same targets."
            )
    return logprobs - ref_logprobs
