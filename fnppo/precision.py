"""Half precision over float32 parameters: the layers compute in it, and nothing else does.

    optimizer = dynamic_loss_scale(chain(clip_by_global_norm(1.0), adamw(1e-6)))  # for float16; bfloat16 needs no scale

    def loss_fn(params, micro_batch):
        stats = forward_logprobs(cast(params, torch.float16), micro_batch, policy=policy, temperature=1.0)
        return ppo_loss(stats, micro_batch.targets)

Parameters, moments and sums of gradients stay in float32, where a small update is not rounded away (256 + 1 is 256 in
bfloat16). Log-probs, entropies and the loss are in float32 at least, whatever the layers compute in.

bfloat16 has the range of float32. float16 has no number between 0 and 6e-8, where many gradients lie, and none above 65504.
So the loss is multiplied by a scale before the backward, and the float32 gradients are divided by it after (Micikevicius et
al., arXiv:1710.03740). The scale is a power of 2, which changes no digit.
"""

import math
from typing import NamedTuple

import optree
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_count, check_floating, check_number
from fnppo.foreach import foreach
from fnppo.optim import Optimizer, SkipState, State, skip_nonfinite
from fnppo.types import PyTree

LARGEST = 2.0**24
"""Of a scale. The least is 1."""


def cast(params: PyTree, dtype: torch.dtype) -> PyTree:
    """All leaves in `dtype`. Differentiable: gradients come back in the dtype that each leaf had.

    Raises:
        ValueError: `dtype` or a leaf is not of floating point.

    >>> weight = torch.tensor(1.001, requires_grad=True)
    >>> half = cast({"w": weight}, torch.bfloat16)
    >>> half
    {'w': tensor(1., dtype=torch.bfloat16, grad_fn=<ToCopyBackward0>)}
    >>> torch.autograd.grad(half["w"], weight)
    (tensor(1.),)
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; floating point is needed. Use torch.bfloat16 or torch.float16.")
    paths, leaves, treedef = optree.tree_flatten_with_path(params)
    for path, leaf in zip(paths, leaves, strict=True):
        check_floating(f"params/{'/'.join(map(str, path))}", leaf)
    return treedef.unflatten(leaf.to(dtype) for leaf in leaves)


class LossScaleState(NamedTuple):
    """The scale, the steps since it last changed, and the state of the optimizer inside, which counts skipped updates."""

    scale: Float[Tensor, ""]
    streak: Int[Tensor, ""]
    inner: SkipState


def dynamic_loss_scale(
    optimizer: Optimizer, *, initial: float = 2.0**16, factor: float = 2.0, interval: int = 2000
) -> Optimizer:
    """An optimizer for gradients of scale · loss, which finds the scale as it goes.

        a gradient is not finite           nothing is updated; scale ← max(scale / factor, 1)
        `interval` finite steps in a row   scale ← min(scale · factor, 2²⁴)

    `train_step` and `update_policy` multiply the loss by the scale of the state, and report gradient norms without it.
    It goes around all other optimizers, so that clipping sees the gradients of the loss. `opt_state.inner.skipped` counts
    skipped updates, which the first steps often are.

    Args:
        optimizer: the one inside, with its clipping.
        initial: the first scale, a power of 2.
        factor: of growth and back-off, a power of 2.
        interval: steps after which a larger scale is tried.

    Raises:
        ValueError: a number is out of range; or, at `init`, a parameter is in float16, where the division would undo what
            the scale is for.

    >>> from fnppo import sgd
    >>> optimizer, params = dynamic_loss_scale(sgd(0.5), initial=4.0, interval=1), {"w": torch.tensor(0.0)}
    >>> updates, state = optimizer.update({"w": torch.tensor(12.0)}, optimizer.init(params), params)
    >>> updates, state.scale
    ({'w': tensor(-1.5000)}, tensor(8.))
    >>> updates, state = optimizer.update({"w": torch.tensor(torch.inf)}, state, params)
    >>> updates, state.scale, state.inner.skipped
    ({'w': tensor(-0.)}, tensor(4.), tensor(1))
    """
    inside = skip_nonfinite(optimizer)
    check_number("initial", initial, least=1, most=LARGEST, remedy="Use a power of 2, such as 2.0**16.")
    check_number("factor", factor, above=1, remedy="Use 2.")
    for name, number in (("initial", initial), ("factor", factor)):
        if math.frexp(number)[0] != 0.5:
            raise ValueError(f"{name} is {number}; a power of 2 is needed, which changes no digit. Use 2.0**16, and 2.")
    check_count("interval", interval, least=1, remedy="It counts steps between two tries of a larger scale.")

    def init(params: PyTree) -> LossScaleState:
        paths, leaves, _ = optree.tree_flatten_with_path(params)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float16:
                raise ValueError(
                    f"params/{'/'.join(map(str, path))} is in float16, where gradients divided by the scale are 0. Keep "
                    "parameters in float32, and cast them in the loss."
                )
        state = inside.init(params)
        scale = torch.full_like(state.skipped, initial, dtype=torch.float32)
        return LossScaleState(scale, torch.zeros_like(state.skipped), state)

    def update(grads: PyTree, state: State, params: PyTree, *, donate: bool = False) -> tuple[PyTree, LossScaleState]:
        if not isinstance(state, LossScaleState):
            raise ValueError(
                f"opt_state is a {type(state).__name__}, the optimizer needs LossScaleState. Make it with the init of this "
                "optimizer."
            )
        leaves, treedef = optree.tree_flatten(grads)
        unscaled = foreach("mul_" if donate else "mul", leaves, 1 / state.scale)
        grads = treedef.unflatten(new.to(old.dtype) for new, old in zip(unscaled, leaves, strict=True))
        updates, inner = inside.update(grads, state.inner, params, donate=donate)
        finite = inner.skipped == state.inner.skipped
        streak = torch.where(finite, state.streak + 1, 0)
        grown = torch.where(streak == interval, state.scale * factor, state.scale)
        scale = torch.where(finite, grown, state.scale / factor).clamp(1.0, LARGEST)
        return updates, LossScaleState(scale, streak % interval, inner)

    return Optimizer(init, update)


def loss_scale_of(opt_state: State) -> Float[Tensor, ""] | None:
    """What the loss is to be multiplied by, for the optimizer whose state this is; None is no scale.

    Raises:
        ValueError: another optimizer is around `dynamic_loss_scale`.

    >>> from fnppo import sgd
    >>> params = {"w": torch.tensor(0.0)}
    >>> loss_scale_of(dynamic_loss_scale(sgd(0.5)).init(params)), loss_scale_of(sgd(0.5).init(params))
    (tensor(65536.), None)
    """
    scaled = isinstance(opt_state, LossScaleState)
    if _has_scale(opt_state.inner if scaled else opt_state):
        raise ValueError(
            "an optimizer stands around dynamic_loss_scale, and would see gradients of the scaled loss. Put "
            "dynamic_loss_scale around all others."
        )
    return opt_state.scale if scaled else None


def _has_scale(state: State) -> bool:
    return isinstance(state, LossScaleState) or (isinstance(state, tuple) and any(map(_has_scale, state)))
