"""Optimizers as pairs of pure functions, after optax.

    optimizer = chain(clip_by_global_norm(1.0), adamw(1e-6))
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = apply_updates(params, updates)

An update is what is added to the parameters. `donate=True` lets a function reuse the memory of the gradients and the
state (`apply_updates`: of the parameters) that it is given, which are then gone; the numbers are the same to the bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import optree
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnppo.arguments import check_floating, check_number, check_type
from fnppo.dtensor import whole
from fnppo.foreach import foreach
from fnppo.schedules import Schedule
from fnppo.transforms import inside_transform
from fnppo.types import PyTree

State: TypeAlias = Any


class UpdateFn(Protocol):
    """(grads, state, params) -> (updates, state)."""

    def __call__(
        self, grads: PyTree, state: State, params: PyTree, *, donate: bool = False
    ) -> tuple[PyTree, State]: ...


class Optimizer(NamedTuple):
    """`init(params) -> state` and `update(grads, state, params, *, donate=False) -> (updates, state)`."""

    init: Callable[[PyTree], State]
    update: UpdateFn


def apply_updates(params: PyTree, updates: PyTree, *, donate: bool = False) -> PyTree:
    """params + updates, in the dtype of the parameters.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.25)})
    {'w': tensor(0.7500)}
    """
    leaves, treedef = optree.tree_flatten(params)
    changed = foreach("add_" if donate else "add", leaves, _leaves_like(params, updates, "updates"))
    return treedef.unflatten(new.to(old.dtype) for new, old in zip(changed, leaves, strict=True))


class AdamWState(NamedTuple):
    """Steps taken so far, and the running means of gradient and squared gradient."""

    step: Int[Tensor, ""]
    first_moment: PyTree
    second_moment: PyTree


def adamw(
    learning_rate: float | Tensor | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled weight decay (Kingma & Ba, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, 1711.05101).

        m ← b1 m + (1 - b1) g            v ← b2 v + (1 - b2) g²
        update = -lr · ( m / (1 - b1ᵗ) / (√(v / (1 - b2ᵗ)) + eps) + weight_decay · θ )

    Args:
        learning_rate: a number, or a schedule: number of steps taken so far -> rate.
        b1, b2, eps, weight_decay: as in `torch.optim.AdamW`, which takes the same steps.

    Moments have the dtype of the parameters. In bfloat16 small updates are rounded away: keep parameters in float32.

    Raises:
        ValueError: a number is out of range, eps is 0 in the dtype of a parameter, the trees of gradients, state and
            parameters differ, or a leaf has another shape.

    >>> optimizer, params = adamw(0.1, weight_decay=0.0), {"w": torch.tensor([1.0, -2.0])}
    >>> updates, state = optimizer.update({"w": torch.tensor([3.0, -5.0])}, optimizer.init(params), params)
    >>> updates["w"], state.step
    (tensor([-0.1000,  0.1000]), tensor(1))
    """

    _check_rate(learning_rate)
    for name, decay in (("b1", b1), ("b2", b2)):
        check_number(name, decay, least=0, below=1, remedy="It is the share of a mean that is kept, such as 0.9.")
    check_number("eps", eps, least=0, remedy="Use 1e-8.")
    check_number("weight_decay", weight_decay, least=0, remedy="Use 0 for none.")

    def init(params: PyTree) -> AdamWState:
        for leaf in _floating_leaves("params", params):
            if eps and leaf.new_tensor(eps) == 0:
                raise ValueError(
                    f"eps = {eps} is 0 in {leaf.dtype}, so a gradient of 0 would give NaN. Keep the parameters in float32, or "
                    "raise eps."
                )
        return AdamWState(_no_steps(params), *(optree.tree_map(torch.zeros_like, params) for _ in range(2)))

    def update(grads: PyTree, state: AdamWState, params: PyTree, *, donate: bool = False) -> tuple[PyTree, AdamWState]:
        p, treedef = optree.tree_flatten(params)
        _check_state(state, AdamWState)
        g, m, v = (
            _leaves_like(params, tree, name)
            for name, tree in (("grads", grads), ("opt_state", state.first_moment), ("opt_state", state.second_moment))
        )
        rate, step = _rate(learning_rate, state.step), (state.step + 1).double()
        own = "_" if donate else ""
        m = foreach("lerp" + own, m, g, 1 - b1)
        v = foreach("addcmul_", foreach("mul" + own, v, b2), g, g, value=1 - b2)
        # One buffer goes from √(v / (1 - b2ᵗ)) + eps to the update. Scalars are float64, arrays keep their own dtype.
        updates = foreach("mul_", foreach("sqrt", v), (1 - b2**step).rsqrt())
        updates = foreach("mul_", foreach("reciprocal_", foreach("add_", updates, eps)), m)
        updates = foreach("mul_", updates, 1 / (1 - b1**step))
        if weight_decay != 0:
            updates = foreach("add_", updates, p, alpha=weight_decay)
        updates = foreach("mul_", updates, -rate)
        unflatten = treedef.unflatten
        return unflatten(updates), AdamWState(state.step + 1, unflatten(m), unflatten(v))

    return Optimizer(init, update)


class SGDState(NamedTuple):
    """Steps taken so far, and the running sum of gradients (`()` without momentum)."""

    step: Int[Tensor, ""]
    momentum: PyTree


def sgd(learning_rate: float | Tensor | Schedule, *, momentum: float = 0.0) -> Optimizer:
    """update = -lr · b,   b ← momentum · b + g.

    >>> optimizer, params = sgd(0.5), {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init(params), params)[0]
    {'w': tensor(-1.5000)}
    """

    _check_rate(learning_rate)
    check_number("momentum", momentum, least=0, below=1, remedy="Use 0 for none.")

    def init(params: PyTree) -> SGDState:
        _floating_leaves("params", params)
        return SGDState(_no_steps(params), optree.tree_map(torch.zeros_like, params) if momentum else ())

    def update(grads: PyTree, state: SGDState, params: PyTree, *, donate: bool = False) -> tuple[PyTree, SGDState]:
        _check_state(state, SGDState)
        g, treedef = _leaves_like(params, grads, "grads"), optree.tree_structure(params)
        if momentum:
            buffers = _leaves_like(params, state.momentum, "opt_state")
            g = foreach("add_", foreach("mul_" if donate else "mul", buffers, momentum), g)
        updates = foreach("mul", g, -_rate(learning_rate, state.step))
        return treedef.unflatten(updates), SGDState(state.step + 1, treedef.unflatten(g) if momentum else ())

    return Optimizer(init, update)


def clip_by_global_norm(max_norm: float | Tensor) -> Optimizer:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init({}), {})[0]
    {'w': tensor([0.6000, 0.8000])}
    """

    check_number("max_norm", max_norm, least=0, infinite=True, remedy="Leave the clipping out for none.")

    def update(grads: PyTree, state: tuple[()], params: PyTree, *, donate: bool = False) -> tuple[PyTree, tuple[()]]:
        scale = (max_norm / (global_norm(grads) + 1e-6)).clamp(max=1.0)
        leaves, treedef = optree.tree_flatten(grads)
        return treedef.unflatten(foreach("mul_" if donate else "mul", leaves, scale)), state

    return Optimizer(lambda params: (), update)


def chain(*optimizers: Optimizer) -> Optimizer:
    """One after the other: the updates of one are the gradients of the next.

    >>> optimizer = chain(clip_by_global_norm(1.0), sgd(0.5))
    >>> params = {"w": torch.tensor([0.0, 0.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, 4.0])}, optimizer.init(params), params)[0]
    {'w': tensor([-0.3000, -0.4000])}
    """

    for place, optimizer in enumerate(optimizers):
        check_type(f"optimizer {place} of the chain", optimizer, Optimizer, "Such as adamw(1e-6).")

    def init(params: PyTree) -> tuple[State, ...]:
        return tuple(optimizer.init(params) for optimizer in optimizers)

    def update(grads: PyTree, state: State, params: PyTree, *, donate: bool = False) -> tuple[PyTree, State]:
        if type(state) is not tuple or len(state) != len(optimizers):
            raise ValueError(
                f"opt_state is a {type(state).__name__}, not one state for each of {len(optimizers)} optimizers. Make it "
                "with the init of this optimizer."
            )
        states = []
        for optimizer, own in zip(optimizers, state, strict=True):
            grads, own = optimizer.update(grads, own, params, donate=donate)
            states.append(own)
        return grads, tuple(states)

    return Optimizer(init, update)


class SkipState(NamedTuple):
    """How many updates were skipped, and the state of the optimizer inside."""

    skipped: Int[Tensor, ""]
    inner: State


def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """Where a gradient is not finite, do nothing: updates are zero, and moments, step and schedule stay as they are.

    The count of skipped updates is `opt_state.skipped`. Outside of transforms this reads one boolean from the device.

    >>> optimizer, params = skip_nonfinite(adamw(0.1)), {"w": torch.tensor(1.0)}
    >>> updates, state = optimizer.update({"w": torch.tensor(torch.nan)}, optimizer.init(params), params)
    >>> updates, state.skipped, state.inner.step
    ({'w': tensor(-0.)}, tensor(1), tensor(0))
    """

    check_type("optimizer", optimizer, Optimizer, "Such as adamw(1e-6).")

    def init(params: PyTree) -> SkipState:
        return SkipState(_no_steps(params), optimizer.init(params))

    def update(grads: PyTree, state: SkipState, params: PyTree, *, donate: bool = False) -> tuple[PyTree, SkipState]:
        _check_state(state, SkipState)
        _leaves_like(params, grads, "grads")
        finite = all_finite(grads)

        def nothing() -> PyTree:  # p + -0.0 is p to the bit for every p; p + 0.0 would turn -0.0 into 0.0
            return optree.tree_map(lambda grad: torch.full_like(grad, -0.0), grads)

        if not inside_transform():
            if not bool(finite):
                return nothing(), SkipState(state.skipped + 1, state.inner)
            updates, inner = optimizer.update(grads, state.inner, params, donate=donate)
            return updates, SkipState(state.skipped, inner)
        updates, inner = optimizer.update(grads, state.inner, params)
        keep: Any = lambda new, old: torch.where(finite, new, old)  # noqa: E731
        return optree.tree_map(keep, updates, nothing()), SkipState(
            state.skipped + (~finite).long(), optree.tree_map(keep, inner, state.inner)
        )

    return Optimizer(init, update)


def global_norm(tree: PyTree) -> Float[Tensor, ""]:
    """√ Σ x² over all entries of all leaves.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    norms = [
        torch.linalg.vector_norm(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
        for leaf in _floating_leaves("tree", tree)
    ]
    return whole(torch.linalg.vector_norm(torch.stack(norms))) if norms else torch.zeros(())


def all_finite(tree: PyTree) -> Bool[Tensor, ""]:
    """True where no entry of no leaf is infinite or NaN.

    >>> all_finite({"a": torch.tensor([1.0, torch.inf])})
    tensor(False)
    """
    finite = [leaf.isfinite().all() for leaf in _floating_leaves("tree", tree)]
    return whole(torch.stack(finite).all()) if finite else torch.ones((), dtype=torch.bool)


def _floating_leaves(what: str, tree: PyTree) -> list[Tensor]:
    """The leaves of a tree; an error where one is no tensor of floating point."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        check_floating(f"{what}/{'/'.join(map(str, path))}", leaf)
    return leaves


def _leaves_like(params: PyTree, tree: PyTree, what: str) -> list[Tensor]:
    """The leaves of `tree` in the order of those of `params`; an error where trees or shapes differ."""
    paths, own, treedef = optree.tree_flatten_with_path(params)
    try:
        leaves: list[Any] = treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} has another tree than params: {error}. Make both from the same params.") from error
    for path, leaf, parameter in zip(paths, leaves, own, strict=True):
        name = "/".join(map(str, path))
        if not isinstance(leaf, Tensor) or not isinstance(parameter, Tensor):
            raise ValueError(
                f"{name} is a {type(leaf).__name__} in {what}, and a {type(parameter).__name__} in params. Both need tensors."
            )
        if leaf.shape != parameter.shape or leaf.device != parameter.device:
            raise ValueError(
                f"{name} is {tuple(leaf.shape)} on {leaf.device} in {what}, {tuple(parameter.shape)} on {parameter.device} in "
                "params. Make both from the same params."
            )
    return leaves


def _check_state(state: State, wanted: type) -> None:
    if not isinstance(state, wanted):
        raise ValueError(
            f"opt_state is a {type(state).__name__}, the optimizer needs {wanted.__name__}. Make it with the init of this "
            "optimizer."
        )


def _check_rate(learning_rate: float | Tensor | Schedule) -> None:
    if not callable(learning_rate) or isinstance(learning_rate, Tensor):
        check_number("learning_rate", learning_rate, least=0, remedy="Such as 1e-6.")


def _no_steps(params: PyTree) -> Int[Tensor, ""]:
    leaves = optree.tree_leaves(params)
    return torch.zeros((), dtype=torch.long, device=leaves[0].device if leaves else None)


def _rate(learning_rate: float | Tensor | Schedule, step: Int[Tensor, ""]) -> float | Tensor:
    return learning_rate(step) if callable(learning_rate) and not isinstance(learning_rate, Tensor) else learning_rate
