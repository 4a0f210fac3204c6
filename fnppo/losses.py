"""The policy-gradient loss with entropy bonus and KL term. It sees targets, never a layout."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_hyper, check_tensor, check_type
from fnppo.checks import check_targets
from fnppo.kl import KLEstimator, capped, kl_k3
from fnppo.metrics import Metrics, count_targets
from fnppo.surrogates import Surrogate, clipped_surrogate, column, one_a_target
from fnppo.types import Targets, TokenStats


def ppo_loss(
    stats: TokenStats,
    targets: Targets,
    *,
    surrogate: Surrogate = clipped_surrogate,
    entropy_coef: float | Tensor = 0.0,
    kl_coef: float | Tensor = 0.0,
    kl: KLEstimator | Float[Tensor, " targets"] = kl_k3,
    kl_cap: float | Tensor | None = None,
    **numbers: Any,
) -> tuple[Float[Tensor, ""], Metrics]:
    """The policy-gradient objective, negated, summed with the weights of the mini-batch.

        L = Σ_t w_t · (surrogate_t - entropy_coef · H_t + kl_coef · KL_t)

    Args:
        stats: log-probs (and entropy, if `entropy_coef` is not 0) of the current policy, from `forward_logprobs`.
        targets: needs `loss_weights`; the columns that the surrogate reads: `old_logprobs` and `advantages` for
            PPO's; and `ref_logprobs` if `kl_coef` is not 0 and `kl` is an estimator.
        surrogate: the loss of a target, from `fnppo.surrogates` or of your own: (stats, targets, **numbers) -> (one
            loss a target, clips).
        entropy_coef, kl_coef: weights of the entropy bonus and of the KL to the reference, in nats.
        kl: an estimator from `fnppo.kl`, or the KL of each target, such as `exact_kl` gives.
        kl_cap: the largest KL of a target; there its gradient is 0. None is no cap.
        **numbers: those of the surrogate: `clip_low=0.2`, `clip_high=0.2` and `dual_clip=3.0` for PPO's.

    Returns:
        The loss (a scalar that adds up over micro-batches), and its metrics: `loss`, `policy_loss` (without entropy
        and KL in it), `entropy`, `kl` (where there is a reference or `kl` is a tensor), `kl_capped_fraction` (share of
        tokens whose KL gradient the cap has removed), one `..._fraction` for each clip of the surrogate, such as
        `clip_low_fraction`, `clamped_fraction` (share of tokens whose policy gradient a clip has removed or bounded),
        `tokens`, `rows`; and where there are `old_logprobs`: `approx_kl` (k3 of the old policy against the current one),
        `ratio_mean`, `ratio_min`, `ratio_max`.

    Raises:
        ValueError: a column that the chosen terms need is missing, a shape does not fit, or a number is NaN or out of
            range. Values of columns are not looked at: NaN among them makes the loss NaN.

    >>> one = torch.ones(1)
    >>> targets = Targets(*[torch.zeros(1, dtype=torch.long)] * 4, loss_weights=one, old_logprobs=0 * one, advantages=-one)
    >>> loss, metrics = ppo_loss(TokenStats(torch.tensor([5.0]).log()), targets)
    >>> loss, metrics.per_token["dual_clip_fraction"]
    (tensor(3.), tensor(1.))
    """
    check_hyper("entropy_coef", entropy_coef, remedy="Use 0 for no bonus; below 0 it is a penalty.")
    check_hyper("kl_coef", kl_coef, least=0, remedy="Use 0 for no term; below 0 it would drive the policy away.")
    if not isinstance(kl, Tensor) and not callable(kl):
        raise ValueError(
            f"kl is a {type(kl).__name__}; an estimator or a tensor is needed. Use one of fnppo.kl, or exact_kl."
        )
    if kl_cap is not None:
        check_hyper("kl_cap", kl_cap, above=0, infinite=True, remedy="It is the largest KL of a token; None is no cap.")
    check_targets(targets)
    check_type("stats", stats, TokenStats, "Use what forward_logprobs returned.")
    for name, values in stats._asdict().items():
        if values is not None:
            one_a_target(f"stats.{name}", values, targets)
    with_entropy, with_kl = _is_on(entropy_coef), _is_on(kl_coef)
    counts_kl = with_kl or targets.ref_logprobs is not None or isinstance(kl, Tensor)
    if kl_cap is not None and not counts_kl:
        raise ValueError(
            f"kl_cap is {kl_cap}, but no KL is computed: kl_coef is 0 and targets.ref_logprobs is None. Leave it out."
        )
    weights = column("loss_weights", targets)

    found: Any = surrogate(stats, targets, **numbers)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise ValueError(
            f"surrogate returned a {type(found).__name__}; (losses, clips) are needed. Return (losses, {{}}) where nothing is clipped."
        )
    losses, clips = found
    _check_per_target("surrogate", losses, targets)
    policy_loss = (weights * losses).sum()
    loss = policy_loss
    per_token = {f"{name}_fraction": clip for name, clip in clips.items()}
    per_token["clamped_fraction"] = sum(clips.values(), torch.zeros_like(losses.detach()))
    if with_entropy and stats.entropy is None:
        raise ValueError(
            f"entropy_coef is {entropy_coef}, but stats.entropy is None. Call forward_logprobs(entropy=True)."
        )
    if stats.entropy is not None:
        per_token["entropy"] = stats.entropy
        if with_entropy:
            loss = loss - entropy_coef * (weights * stats.entropy).sum()
    if counts_kl:
        per_token |= _kl_terms(kl, stats, targets, kl_cap)
        if with_kl:
            loss = loss + kl_coef * (weights * per_token["kl"]).sum()

    metrics = Metrics(
        per_step={"loss": loss.detach(), "policy_loss": policy_loss.detach()},
        per_token={name: value.detach().sum() for name, value in per_token.items()},
        totals=count_targets(targets),
    )
    if targets.old_logprobs is None:
        return loss, metrics
    ratio = (stats.logprobs - targets.old_logprobs).detach().exp()
    approx_kl = kl_k3(targets.old_logprobs, stats.logprobs).detach()
    return loss, metrics._replace(
        per_token=metrics.per_token | {"ratio_mean": ratio.sum(), "approx_kl": approx_kl.sum()},
        minima={"ratio_min": torch.cat([ratio, ratio.new_tensor([math.inf])]).amin()},
        maxima={"ratio_max": torch.cat([ratio, ratio.new_tensor([-math.inf])]).amax()},
    )


def on_policy(targets: Targets, stats: TokenStats) -> Targets:
    """State that the current policy is the one that sampled: `old_logprobs` = its own log-probs, detached.

    Every ratio is then exactly 1, and the gradient is that of REINFORCE. Only right for the first step on a batch.

    >>> index = torch.zeros(1, dtype=torch.long)
    >>> on_policy(Targets(index, index, index, index), TokenStats(torch.tensor([-2.0]))).old_logprobs
    tensor([-2.])
    """
    return targets._replace(old_logprobs=stats.logprobs.detach())


def add_losses(
    first: tuple[Tensor, Metrics], second: tuple[Tensor, Metrics], *, coef: float | Tensor
) -> tuple[Float[Tensor, ""], Metrics]:
    """first + coef · second, two losses of the same targets: `ppo_loss` and `value_loss` over one trunk.

    Returns:
        The loss, and the metrics of both, with `loss` the sum. Targets are counted once.

    Raises:
        ValueError: an argument is no (loss, metrics), both have a metric of one name, or coef is no finite number.

    >>> one = torch.ones(())
    >>> pair = (one, Metrics({"loss": one, "policy_loss": one})), (3 * one, Metrics({"loss": 3 * one, "value_loss": 3 * one}))
    >>> add_losses(*pair, coef=0.5)[1].per_step
    {'loss': tensor(2.5000), 'policy_loss': tensor(1.), 'value_loss': tensor(3.)}
    """
    check_hyper("coef", coef, remedy="It weighs the second loss.")
    for name, pair in (("first", first), ("second", second)):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Metrics):
            raise ValueError(f"{name} is no (loss, metrics). Give what ppo_loss or value_loss returned.")
    loss = first[0] + coef * second[0]
    both = {}
    for kind in Metrics._fields:
        left, right = getattr(first[1], kind), getattr(second[1], kind)
        if twice := sorted(left.keys() & right.keys() - {"loss", "tokens", "rows"}):
            raise ValueError(f"both losses have a metric {twice[0]}, and one would be lost. Rename one.")
        both[kind] = left | right
    metrics = Metrics(**both)
    return loss, metrics._replace(per_step=metrics.per_step | {"loss": loss.detach()})


def _kl_terms(
    kl: KLEstimator | Tensor, stats: TokenStats, targets: Targets, cap: float | Tensor | None
) -> dict[str, Tensor]:
    """The KL of each target, and where there is a cap, 1 where it has taken the gradient away."""
    if isinstance(kl, Tensor):
        check_tensor("kl", kl)
        exact, ref_logprobs = kl, stats.logprobs  # which is not read
        kl = lambda *_: exact  # noqa: E731
    else:
        ref_logprobs = column("ref_logprobs", targets)
    if cap is None:
        values, counted = kl(stats.logprobs, ref_logprobs), {}
    else:
        values, over = capped(kl, stats.logprobs, ref_logprobs, cap=cap)
        counted = {"kl_capped_fraction": over.to(stats.logprobs.dtype)}
    _check_per_target("kl", values, targets)
    return {"kl": values} | counted


def _check_per_target(name: str, values: Tensor, targets: Targets) -> None:
    if values.shape != targets.token_ids.shape:
        raise ValueError(
            f"{name} gave shape {tuple(values.shape)} for {targets.token_ids.numel()} targets; the loss needs one value a "
            "target. Do not reduce in it."
        )


def _is_on(coefficient: float | Tensor) -> bool:
    """A tensor is always on: under vmap or grad its value is not known."""
    return isinstance(coefficient, Tensor) or coefficient != 0
