"""What a surrogate is, and what all of them do first: take the columns of the targets, look at their own numbers."""

from collections.abc import Callable
from typing import Any, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

from fnppo.arguments import check_hyper, check_tensor
from fnppo.types import Targets, TokenStats

PerTarget: TypeAlias = tuple[Float[Tensor, " targets"], dict[str, Float[Tensor, " targets"]]]
Surrogate: TypeAlias = Callable[..., PerTarget]

WAYS_OUT = {
    "loss_weights": "call token_mean(batch) or a sibling once per mini-batch",
    "old_logprobs": "or state that the batch is on-policy: on_policy(targets, stats)",
    "advantages": "such as grpo_advantages gives",
    "returns": "put those of gae_advantages into batch.extra",
    "values": "put those of compute_values, from before the update, into batch.extra; or set clip=None",
    "ref_logprobs": "for the KL term, from compute_logprobs with the reference; or set kl_coef=0",
    "sampler_logprobs": "those that the sampler gave, as batch.extra['sampler_logprobs']",
    "clip_cov": "call select_clip_cov(batch, ...) once per mini-batch, such as in prepare=... of update_policy",
    "kl_cov": "call select_kl_cov(batch, ...) once per mini-batch, such as in prepare=... of update_policy",
    "selected": "call select_top_entropy(batch, ...) once per mini-batch, such as in prepare=... of update_policy",
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
    return one_a_target(f"targets.{name}", found, targets)


def log_ratio(stats: TokenStats, targets: Targets) -> Float[Tensor, " targets"]:
    """log ρ_t = log π(token_t) - log π_old(token_t)."""
    return one_a_target("stats.logprobs", stats.logprobs, targets) - column("old_logprobs", targets)


def one_a_target(name: str, values: Tensor, targets: Targets) -> Tensor:
    """`values`, or a `ValueError` if there is not one a target."""
    check_tensor(name, values)
    if values.shape != targets.token_ids.shape:  # it would be broadcast
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; there are {targets.token_ids.numel()} targets. Take stats and "
            "targets of the same batch."
        )
    return values


def check_clips(
    clip_low: Any,
    clip_high: Any,
    per_target: Tensor | None = None,
    remedy: str = "It is a distance from ratio 1, such as 0.2.",
) -> None:
    """Raise a `ValueError` if a clip is negative, or neither a number nor one a target."""
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        check_hyper(name, clip, per_target, least=0, infinite=True, remedy=remedy)


def as_floats(clips: dict[str, Bool[Tensor, " targets"]], like: Tensor) -> dict[str, Float[Tensor, " targets"]]:
    """The clips as numbers of the dtype of `like`, to be summed."""
    return {name: clip.to(like.dtype) for name, clip in clips.items()}
