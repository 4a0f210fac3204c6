"""Policy-gradient surrogates: one loss a target, from the current log-probs and the columns of the batch.

A surrogate is a function `(stats, targets, *, its own numbers) -> (losses, clips)`:

    losses   one a target, unreduced; `ppo_loss` sums them with the weights of the mini-batch
    clips    name -> 1 where that clip has taken the gradient of a target's loss away, else 0; no two at one target

Its numbers are keyword-only; each is a number or a tensor of one, so that it can be differentiated and batched. Below,
ρ_t = π(token_t) / π_old(token_t), A_t is the advantage, and sg stops the gradient.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_number, check_tensor
from fnppo.types import Targets, TokenStats

PerTarget: TypeAlias = tuple[Float[Tensor, " targets"], dict[str, Float[Tensor, " targets"]]]
Surrogate: TypeAlias = Callable[..., PerTarget]


def clipped_surrogate(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    dual_clip: float | Tensor | None = 3.0,
) -> PerTarget:
    """PPO's (arXiv:1707.06347, eq. 7), with a bound for negative advantages (arXiv:1912.09729, eq. 5).

        l_t = max(-A_t ρ_t, -A_t clip(ρ_t, 1 - clip_low, 1 + clip_high))
        for A_t < 0 further   l_t = min(l_t, -A_t dual_clip)

    Args:
        stats: the current policy's log-probs.
        targets: needs `old_logprobs` and `advantages`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. PPO has one ε for both; DAPO
            (arXiv:2503.14476, eq. 10) raises the upper one. One number, or one a target.
        dual_clip: upper bound c > 1 of the ratio for negative advantages; None for none.

    Returns:
        The losses, and the clips `clip_low`, `clip_high`, `dual_clip`.

    Raises:
        ValueError: a column is missing, a clip is negative, or dual_clip is not above 1.

    >>> index, zero = torch.zeros(2, dtype=torch.long), torch.zeros(2)
    >>> targets = Targets(index, index, index, index, old_logprobs=zero, advantages=zero + 1)
    >>> loss, clips = clipped_surrogate(TokenStats(torch.tensor([1.5, 0.5]).log()), targets)
    >>> loss, clips["clip_high"]
    (tensor([-1.2000, -0.5000]), tensor([1., 0.]))
    """
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        check_number(name, clip, least=0, infinite=True, remedy="It is a distance from ratio 1, such as 0.2.")
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, above=1, infinite=True, remedy="It bounds a ratio; None turns it off.")
    logratio, advantages = log_ratio(stats, targets), column("advantages", targets)
    for name, number in (("clip_low", clip_low), ("clip_high", clip_high), ("dual_clip", dual_clip)):
        check_scalar(name, number, tuple(logratio.shape))
    ratio = logratio.detach().exp()
    clips = {
        "clip_low": (advantages < 0) & (ratio < 1 - clip_low),
        "clip_high": (advantages > 0) & (ratio > 1 + clip_high),
    }
    if dual_clip is not None:
        clips["dual_clip"] = (advantages < 0) & (ratio > dual_clip)
    # A ratio that no gradient comes from is left out before the exp: 0 · inf would be NaN.
    unread = (advantages == 0) & ratio.isinf()
    for clip in clips.values():
        unread = unread | clip
    losses = -advantages * torch.where(unread, 0, logratio).exp()
    losses = torch.where(clips["clip_low"], -advantages * (1 - clip_low), losses)
    losses = torch.where(clips["clip_high"], -advantages * (1 + clip_high), losses)
    if dual_clip is not None:
        losses = torch.where(clips["dual_clip"], -advantages * dual_clip, losses)
    return losses, {name: clip.to(ratio.dtype) for name, clip in clips.items()}


WAYS_OUT = {
    "loss_weights": "call token_mean(batch) or a sibling once per mini-batch",
    "old_logprobs": "or state that the batch is on-policy: on_policy(targets, stats)",
    "advantages": "such as grpo_advantages gives",
    "returns": "put those of gae_advantages into batch.extra",
    "values": "put those of compute_values, from before the update, into batch.extra; or set clip=None",
    "ref_logprobs": "for the KL term, from compute_logprobs with the reference; or set kl_coef=0",
}


def column(name: str, targets: Targets) -> Float[Tensor, " targets"]:
    """A column that the loss needs, of `targets` or of its `extra`.

    Raises:
        ValueError: it is not there, or has not one value a target.
    """
    found: Tensor | None = getattr(targets, name) if name in Targets._fields else targets.extra.get(name)
    if found is None:
        place = f"targets.{name}" if name in Targets._fields else f"targets.extra[{name!r}]"
        raise ValueError(f"the loss needs {place}: {WAYS_OUT.get(name, 'put the column into batch.extra')}.")
    return _one_a_target(f"targets.{name}", found, targets)


def log_ratio(stats: TokenStats, targets: Targets) -> Float[Tensor, " targets"]:
    """log ρ_t = log π(token_t) - log π_old(token_t)."""
    return _one_a_target("stats.logprobs", stats.logprobs, targets) - column("old_logprobs", targets)


def check_scalar(name: str, number: float | Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raise a `ValueError` if a tensor of numbers has neither no dim nor one of `shapes`: it would be broadcast."""
    if isinstance(number, Tensor) and tuple(number.shape) not in ((), *shapes):
        raise ValueError(
            f"{name} has shape {tuple(number.shape)}; it needs {' or '.join(map(str, ((), *shapes)))}. Give a number."
        )


def _one_a_target(name: str, values: Tensor, targets: Targets) -> Tensor:
    check_tensor(name, values)
    if values.shape != targets.token_ids.shape:  # it would be broadcast
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; there are {targets.token_ids.numel()} targets. Take stats and "
            "targets of the same batch."
        )
    return values
