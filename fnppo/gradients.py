"""Values and gradients of a loss with respect to a tree of parameters."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import optree
import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.dtensor import local
from fnppo.metrics import Metrics, merge_metrics
from fnppo.transforms import inside_transform
from fnppo.types import ModelBatch, PaddedBatch, PyTree

T = TypeVar("T")
LossFn: TypeAlias = Callable[..., tuple[Tensor, Metrics]]
"""(params, micro-batch) -> (loss, metrics)."""


def value_and_grad(loss_fn: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[tuple[Tensor, Any], PyTree]]:
    """Turn `loss_fn(params, *args) -> (loss, aux)` into `(params, *args) -> ((loss, aux), grads)`.

    `grads` has the tree of `params`; a parameter that the loss does not use gets zeros. At top level the gradient comes
    from `torch.autograd.grad`, which frees the graph as it goes and knows recomputation and every kernel. Inside a
    torch.func transform it comes from `torch.func.grad_and_value`, so `vmap`, `jvp` and `grad` of the result work.

    First order at top level: the result carries no graph. To differentiate it again, transform it with torch.func.

    >>> loss_fn = lambda params, x: ((params["w"] * x).sum(), {})
    >>> (loss, aux), grads = value_and_grad(loss_fn)({"w": torch.tensor([2.0, 3.0])}, torch.tensor([4.0, 5.0]))
    >>> loss, grads
    (tensor(23.), {'w': tensor([4., 5.])})
    """

    _check_callable(loss_fn)

    def run(params: PyTree, *args: Any) -> tuple[tuple[Tensor, Any], PyTree]:
        if inside_transform():
            grads, (loss, aux) = torch.func.grad_and_value(loss_fn, has_aux=True)(params, *args)
            return (loss, aux), grads
        leaves, treedef = _flattened(params)
        aliases = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            loss, aux = checked_loss(loss_fn(optree.tree_unflatten(treedef, aliases), *args))
        grads = (
            torch.autograd.grad(loss, aliases, materialize_grads=True)
            if loss.requires_grad
            else map(torch.zeros_like, leaves)
        )
        return (loss.detach(), detached(aux)), optree.tree_unflatten(treedef, _each_its_own(grads))

    return run


def accumulate_gradients(
    loss_fn: LossFn, params: PyTree, batches: Iterable[Any]
) -> tuple[tuple[Float[Tensor, ""], Metrics], PyTree]:
    """Sum of losses, metrics and gradients over micro-batches.

    The weights of the mini-batch make the loss a sum over targets, so adding is all there is to do: the result is that
    of one batch that holds all targets. Micro-batches may come from a generator; each one's graph is gone before the
    next is built.

    Returns:
        ((loss, metrics), grads), as `value_and_grad` does.

    Raises:
        ValueError: there is no micro-batch, a parameter is no tensor of floating point, or loss_fn does not return a
            scalar and its metrics.

    >>> loss_fn = lambda params, x: ((params["w"] * x).sum(), Metrics())
    >>> (loss, _), grads = accumulate_gradients(loss_fn, {"w": torch.tensor(2.0)}, [torch.tensor(1.0), torch.tensor(4.0)])
    >>> loss, grads
    (tensor(10.), {'w': tensor(5.)})
    """
    _check_callable(loss_fn)
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"batches is a {type(batches).__name__}; a list of micro-batches is needed. Put it into a list."
        )
    if isinstance(batches, (ModelBatch, PaddedBatch)):
        raise ValueError(
            f"batches is one {type(batches).__name__}; a list of micro-batches is needed. Put it into a list."
        )
    leaves, treedef = _flattened(params)
    if inside_transform():
        summed, grads = _add_up(_in_float32(value_and_grad(loss_fn)(params, batch)) for batch in batches)
        return summed, optree.tree_map(lambda leaf, grad: grad.to(leaf.dtype), params, grads)
    aliases = [leaf.detach().requires_grad_() for leaf in leaves]

    def run(batch: Any) -> tuple[Tensor, Metrics]:
        with torch.enable_grad():
            loss, metrics = checked_loss(loss_fn(optree.tree_unflatten(treedef, aliases), batch))
        if not isinstance(metrics, Metrics):
            raise ValueError(
                f"loss_fn gave metrics of type {type(metrics).__name__}. Return (loss, fnppo.Metrics(...))."
            )
        if loss.requires_grad:
            torch.autograd.backward(loss, inputs=aliases)  # adds into the aliases' .grad, in place
        held = [alias for alias in aliases if alias.grad is not None]
        for alias, own in zip(held, _each_its_own(alias.grad for alias in held), strict=True):
            alias.grad = own
        return loss.detach(), detached(metrics)

    total, leaf_grads = collect_grads(aliases, map(run, batches))
    return _at_least_one(total), optree.tree_unflatten(treedef, leaf_grads)


def collect_grads(
    leaves: list[Tensor], parts: Iterable[tuple[Tensor, Metrics] | None]
) -> tuple[tuple[Tensor, Metrics] | None, list[Tensor]]:
    """The sum of losses and metrics, and of the gradients that `parts` leave in `leaves` as they come, one after the other.

    A part may be None, which has none of them. A leaf without a gradient has zeros. The leaves are free of gradients then.
    Sums of half-precision gradients are kept in float32: 256 + 1 is 256 in bfloat16.
    """
    coarse = [leaf for leaf in leaves if leaf.dtype in (torch.float16, torch.bfloat16)]
    totals = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in coarse]
    summed: tuple[Tensor, Metrics] | None = None
    try:
        for part in parts:
            for total, leaf in zip(totals, coarse, strict=True):
                if leaf.grad is not None:
                    total.add_(leaf.grad)
                    leaf.grad = None
            summed = _sum(summed, part) if summed and part else summed or part
        for total, leaf in zip(totals, coarse, strict=True):
            leaf.grad = total.to(leaf.dtype)
        return summed, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    finally:
        for leaf in leaves:
            leaf.grad = None


def _check_callable(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn is a {type(loss_fn).__name__}; a function is needed: (params, batch) -> (loss, metrics). Pass it uncalled."
        )


def _flattened(params: PyTree) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Leaves and tree of `params`; an error where a leaf cannot have a gradient."""
    paths, leaves, treedef = optree.tree_flatten_with_path(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"params/{'/'.join(map(str, path))} is {kind}; only floating point has gradients. Keep it out of params."
            )
    return leaves, treedef


def checked_loss(output: Any) -> tuple[Tensor, Any]:
    """What a loss function has returned, if it is (scalar, anything)."""
    if not isinstance(output, tuple) or len(output) != 2:
        raise ValueError(f"loss_fn gave a {type(output).__name__}; (loss, metrics) is needed. Return both.")
    loss = output[0]
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        kind = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn gave a loss that is {kind}; a scalar is needed. Sum it with the loss weights.")
    return output


def _in_float32(part: tuple[Any, PyTree]) -> tuple[Any, PyTree]:
    """The gradients in float32 or better."""
    return part[0], optree.tree_map(lambda grad: grad.to(torch.promote_types(grad.dtype, torch.float32)), part[1])


def _each_its_own(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """Gradients that can be changed in place: autograd may give one tensor, or views of one, to several leaves."""
    seen: set[int] = set()
    own: list[Tensor] = []
    for grad in grads:
        assert grad is not None
        storage = (here := local(grad)).untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() < here.numel() * here.element_size()
        seen.add(storage.data_ptr())
        own.append(grad.clone() if shared else grad)
    return own


def detached(tree: Any) -> Any:
    """The tree without the graph of its tensors."""
    return optree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _add_up(parts: Iterable[tuple[tuple[Tensor, Metrics], PyTree]]) -> tuple[tuple[Tensor, Metrics], PyTree]:
    total = None
    for summed, grads in parts:
        total = (
            (summed, grads) if total is None else (_sum(total[0], summed), optree.tree_map(torch.add, total[1], grads))
        )
    return _at_least_one(total)


def _sum(a: tuple[Tensor, Metrics], b: tuple[Tensor, Metrics]) -> tuple[Tensor, Metrics]:
    return a[0] + b[0], merge_metrics(a[1], b[1])


def _at_least_one(total: T | None) -> T:
    if total is None:
        raise ValueError(
            "there is no micro-batch to take a gradient of. Give at least one; a generator is used up once."
        )
    return total
