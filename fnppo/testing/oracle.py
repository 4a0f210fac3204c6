"""The update computed the slow and obvious way: one row at a time, one token at a time, no masks, no packing.

Nothing here shares code with the paths that it judges.
"""

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fnppo.types import PaddedBatch, Params


class float64_everywhere(TorchFunctionMode):
    """Turns every request for float32 into float64.

    Models from transformers compute norms, rotary angles and softmax in float32 even when they are in float64. Two
    layouts that agree to 1e-16 before such a rounding may then differ by 1e-7 after it, and an equality to 1e-10 could
    not be tested. Inside this mode it can. It does not reach layers that are computed again in the backward.

    >>> with float64_everywhere():
    ...     torch.ones(1, dtype=torch.float64).to(torch.float32).dtype
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        single, double = torch.float32, torch.float64
        for i, arg in enumerate(args):
            if arg is single:
                args = (*args[:i], double, *args[i + 1 :])
        if not kwargs:
            return func(*args)
        return func(*args, **{name: double if arg is single else arg for name, arg in kwargs.items()})


def oracle_stats(
    module: nn.Module, params: Params, batch: PaddedBatch, *, temperature: float
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """{(row, column): (log-prob, entropy)} of each learned token, with `module`'s own attention, differentiable in `params`."""
    stats = {}
    for row in range(batch.input_ids.shape[0]):
        columns = [t for t in range(batch.input_ids.shape[1]) if batch.attention_mask[row, t]]
        if not columns:
            continue
        ids = batch.input_ids[row, columns]
        logits = functional_call(module, params, kwargs={"input_ids": ids[None], "use_cache": False}).logits[0]
        for k, t in enumerate(columns):
            if batch.loss_mask[row, t]:
                z = logits[k - 1] / temperature
                p = (z - z.max()).exp() / (z - z.max()).exp().sum()
                q = p[p > 0]
                stats[row, t] = p[ids[k]].log(), -(q * q.log()).sum()
    return stats


def oracle_loss(
    stats: dict[tuple[int, int], tuple[Tensor, Tensor]],
    batch: PaddedBatch,
    weights: dict[tuple[int, int], float],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
) -> Tensor:
    """The PPO loss as the papers write it, token by token, with k3 for the KL."""
    total = torch.zeros((), dtype=torch.float64)
    for place, (logprob, entropy) in stats.items():
        old, advantage = float(batch.old_logprobs[place]), float(batch.advantages[place])  # type: ignore[index]
        ratio = (logprob - old).exp()
        low, high = 1 - clip_low, 1 + clip_high
        clipped = ratio if low <= ratio.item() <= high else _number(min(max(ratio.item(), low), high))
        gain = min(ratio * advantage, clipped * advantage, key=Tensor.item)
        if advantage < 0 and gain.item() < dual_clip * advantage:
            gain = _number(dual_clip * advantage)
        loss = -gain - entropy_coef * entropy
        if kl_coef:
            d = logprob - float(batch.ref_logprobs[place])  # type: ignore[index]
            loss = loss + kl_coef * ((-d).exp() - 1 + d)
        total = total + weights[place] * loss
    return total


def oracle_loss_and_grads(
    module: nn.Module,
    params: Params,
    batch: PaddedBatch,
    weights: dict[tuple[int, int], float],
    *,
    temperature: float,
    **loss_options: float,
) -> tuple[Tensor, Params]:
    """(loss, gradients) of `oracle_loss` on `oracle_stats`; parameters that the loss does not reach get zeros.

    >>> from fnppo import padded_batch
    >>> from fnppo.testing import tiny_llama
    >>> module = tiny_llama().double()
    >>> batch = padded_batch([[5]], [[6]], old_logprobs=[[-2.0]], advantages=[1.0])
    >>> loss, grads = oracle_loss_and_grads(module, dict(module.named_parameters()), batch, {(0, 1): 1.0}, temperature=1.0)
    >>> grads["lm_head.weight"].shape
    torch.Size([13, 8])
    """
    params = {name: value.detach().requires_grad_() for name, value in params.items()}
    loss = oracle_loss(oracle_stats(module, params, batch, temperature=temperature), batch, weights, **loss_options)
    if not loss.requires_grad:
        return loss, {name: torch.zeros_like(value) for name, value in params.items()}
    grads = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    return loss.detach(), dict(zip(params, grads, strict=True))


def oracle_grpo_advantages(
    rewards: list[float], groups: list[int], *, normalize: bool = True, eps: float = 1e-6
) -> list[float]:
    """Reward minus the mean of its group, over the group's standard deviation; 0 where all rewards are equal.

    >>> oracle_grpo_advantages([3.0, 1.0], [0, 0], normalize=False)
    [1.0, -1.0]
    """
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            advantages.append(0.0)
            continue
        centred = reward - statistics.fmean(members)
        advantages.append(centred / (statistics.stdev(members) + eps) if normalize else centred)
    return advantages


def oracle_gae_advantages(rewards: list[float], values: list[float], *, gamma: float, lam: float) -> list[float]:
    """One row's advantages as the sum of equation 16 of arXiv:1506.02438, over its learned tokens only.

    >>> oracle_gae_advantages([0.0, 2.0], [0.5, 1.0], gamma=1.0, lam=0.5)
    [1.0, 1.0]
    """
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
