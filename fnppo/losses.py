"""The clipped policy-gradient loss with entropy bonus and KL term. It sees targets, never a layout."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_number, check_tensor, check_type
from fnppo.checks import check_targets
from fnppo.kl import KLEstimator, kl_k3
from fnppo.metrics import Metrics
from fnppo.types import Targets, TokenStats


def ppo_loss(
    stats: TokenStats,
    targets: Targets,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    dual_clip: float | Tensor | None = 3.0,
    entropy_coef: float | Tensor = 0.0,
    kl_coef: float | Tensor = 0.0,
    kl: KLEstimator = kl_k3,
) -> tuple[Float[Tensor, ""], Metrics]:
    """The PPO objective, negated, summed with the weights of the mini-batch.

        L = Σ_t w_t · (clipped_surrogate_t - entropy_coef · H_t + kl_coef · KL_t)

    Args:
        stats: log-probs (and entropy, if `entropy_coef` is not 0) of the current policy, from `forward_logprobs`.
        targets: needs `loss_weights`, `old_logprobs`, `advantages`; and `ref_logprobs` if `kl_coef` is not 0.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. PPO (arXiv:1707.06347, eq. 7) has
            one ε for both; DAPO (arXiv:2503.14476, eq. 10) raises the upper one.
        dual_clip: upper bound c > 1 of the ratio for negative advantages (arXiv:1912.09729, eq. 5); None for none.
        entropy_coef, kl_coef: weights of the entropy bonus and of the KL to the reference, in nats.
        kl: an estimator from `fnppo.kl`.

    Returns:
        The loss (a scalar that adds up over micro-batches), and its metrics: `loss`, `policy_loss` (without entropy
        and KL in it), `entropy`, `kl` (where there is a reference), `approx_kl` (k3 of the old policy against the
        current one), `clip_low_fraction`, `clip_high_fraction`, `dual_clip_fraction`, `clamped_fraction` (share of
        tokens whose policy gradient a clip has removed), `ratio_mean`, `ratio_min`, `ratio_max`, `tokens`, `rows`.

    Raises:
        ValueError: a column that the chosen terms need is missing, a shape does not fit, or a number is NaN or out of
            range. Values of columns are not looked at: NaN among them makes the loss NaN.

    >>> one = torch.ones(1)
    >>> targets = Targets(*[torch.zeros(1, dtype=torch.long)] * 4, loss_weights=one, old_logprobs=0 * one, advantages=-one)
    >>> loss, metrics = ppo_loss(TokenStats(torch.tensor([5.0]).log()), targets)
    >>> loss, metrics.per_token["dual_clip_fraction"]
    (tensor(3.), tensor(1.))
    """
    check_number("entropy_coef", entropy_coef, remedy="Use 0 for no bonus; below 0 it is a penalty.")
    check_number("kl_coef", kl_coef, least=0, remedy="Use 0 for no term; below 0 it would drive the policy away.")
    for name, coefficient in (("entropy_coef", entropy_coef), ("kl_coef", kl_coef)):
        _check_shape(name, coefficient, ())
    check_targets(targets)
    check_type("stats", stats, TokenStats, "Use what forward_logprobs returned.")
    for name, column in stats._asdict().items():
        if column is not None:
            check_tensor(f"stats.{name}", column)
            if column.shape != targets.token_ids.shape:
                raise ValueError(
                    f"stats.{name} has shape {tuple(column.shape)}; there are {targets.token_ids.numel()} targets. Take "
                    "stats and targets of the same batch."
                )
    with_entropy, with_kl = _is_on(entropy_coef), _is_on(kl_coef)
    weights = _column("loss_weights", targets, "call token_mean(batch) or a sibling once per mini-batch")
    old_logprobs = _column("old_logprobs", targets, "or state that the batch is on-policy: on_policy(targets, stats)")
    advantages = _column("advantages", targets, "such as grpo_advantages gives")

    logratio = stats.logprobs - old_logprobs
    surrogate, clips = clipped_surrogate(
        logratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    policy_loss = (weights * surrogate).sum()
    loss = policy_loss
    per_token = {f"{name}_fraction": clip for name, clip in clips.items()}
    per_token["clamped_fraction"] = torch.stack(tuple(clips.values()))
    if with_entropy and stats.entropy is None:
        raise ValueError(
            f"entropy_coef is {entropy_coef}, but stats.entropy is None. Call forward_logprobs(entropy=True)."
        )
    if stats.entropy is not None:
        per_token["entropy"] = stats.entropy
        if with_entropy:
            loss = loss - entropy_coef * (weights * stats.entropy).sum()
    if with_kl or targets.ref_logprobs is not None:
        way_out = "for the KL term, from compute_logprobs with the reference; or set kl_coef=0"
        ref_logprobs = _column("ref_logprobs", targets, way_out)
        per_token["kl"] = kl(stats.logprobs, ref_logprobs)
        if per_token["kl"].shape != ref_logprobs.shape:
            raise ValueError(
                f"kl gave shape {tuple(per_token['kl'].shape)} for {ref_logprobs.numel()} targets; the loss needs one "
                "value a target. Do not reduce in it."
            )
        if with_kl:
            loss = loss + kl_coef * (weights * per_token["kl"]).sum()

    ratio = logratio.detach().exp()
    per_token["ratio_mean"] = ratio
    per_token["approx_kl"] = kl_k3(old_logprobs, stats.logprobs)
    changes = (targets.rows[1:] != targets.rows[:-1]).sum() + min(targets.rows.numel(), 1)
    return loss, Metrics(
        per_step={"loss": loss.detach(), "policy_loss": policy_loss.detach()},
        per_token={name: value.detach().sum() for name, value in per_token.items()},
        totals={"tokens": torch.tensor(targets.rows.numel(), device=targets.rows.device), "rows": changes},
        minima={"ratio_min": torch.cat([ratio, ratio.new_tensor([math.inf])]).amin()},
        maxima={"ratio_max": torch.cat([ratio, ratio.new_tensor([-math.inf])]).amax()},
    )


def clipped_surrogate(
    logratio: Float[Tensor, " targets"],
    advantages: Float[Tensor, " targets"],
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | Tensor | None,
) -> tuple[Float[Tensor, " targets"], dict[str, Float[Tensor, " targets"]]]:
    """One loss a target, and which clips have removed its gradient (0 or 1 a target).

    l_t = max(-A_t ρ_t, -A_t clip(ρ_t, 1 - clip_low, 1 + clip_high))     ρ_t = exp(logratio_t)
    for A_t < 0 further   l_t = min(l_t, -A_t dual_clip)

    Raises:
        ValueError: a clip is negative, or dual_clip is not above 1.

    >>> loss, clips = clipped_surrogate(
    ...     torch.tensor([1.5, 0.5]).log(), torch.tensor([1.0, 1.0]), clip_low=0.2, clip_high=0.2, dual_clip=None
    ... )
    >>> loss, clips["clip_high"]
    (tensor([-1.2000, -0.5000]), tensor([1., 0.]))
    """
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        check_number(name, clip, least=0, infinite=True, remedy="It is a distance from ratio 1, such as 0.2.")
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, above=1, infinite=True, remedy="It bounds a ratio; None turns it off.")
    for name, number in (("clip_low", clip_low), ("clip_high", clip_high), ("dual_clip", dual_clip)):
        _check_shape(name, number, (), tuple(logratio.shape))
    if logratio.shape != advantages.shape:
        raise ValueError(
            f"logratio has shape {tuple(logratio.shape)}, advantages {tuple(advantages.shape)}. Give one a target."
        )
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
    surrogate = -advantages * torch.where(unread, 0, logratio).exp()
    surrogate = torch.where(clips["clip_low"], -advantages * (1 - clip_low), surrogate)
    surrogate = torch.where(clips["clip_high"], -advantages * (1 + clip_high), surrogate)
    if dual_clip is not None:
        surrogate = torch.where(clips["dual_clip"], -advantages * dual_clip, surrogate)
    return surrogate, {name: clip.to(ratio.dtype) for name, clip in clips.items()}


def on_policy(targets: Targets, stats: TokenStats) -> Targets:
    """State that the current policy is the one that sampled: `old_logprobs` = its own log-probs, detached.

    Every ratio is then exactly 1, and the gradient is that of REINFORCE. Only right for the first step on a batch.

    >>> index = torch.zeros(1, dtype=torch.long)
    >>> on_policy(Targets(index, index, index, index), TokenStats(torch.tensor([-2.0]))).old_logprobs
    tensor([-2.])
    """
    return targets._replace(old_logprobs=stats.logprobs.detach())


def _column(name: str, targets: Targets, way_out: str) -> Tensor:
    column: Tensor | None = getattr(targets, name)
    if column is None:
        raise ValueError(f"the loss needs targets.{name}: {way_out}.")
    return column


def _check_shape(name: str, number: float | Tensor | None, *shapes: tuple[int, ...]) -> None:
    if isinstance(number, Tensor) and tuple(number.shape) not in shapes:
        raise ValueError(
            f"{name} has shape {tuple(number.shape)}; it needs {' or '.join(map(str, shapes))}. Give a number."
        )


def _is_on(coefficient: float | Tensor) -> bool:
    """A tensor is always on: under vmap or grad its value is not known."""
    return isinstance(coefficient, Tensor) or coefficient != 0
