"""FSDP2 under the pure functions: a model in shards that runs as the backbone of a `Policy`, and gradients as DTensors.

torch's `functional_call` on sharded modules gives local gradients that nobody reduces, silently wrong. So here the whole
loss is computed inside the forward of one module, the root, which torch has sharded:

    root(loss_fn, micro_batch) -> loss_fn(params, micro_batch)        params: those of the root, gathered
                                      policy.hidden_states            the layers, each of which torch gathers as it runs

The embeddings, the last norm and the head belong to the root. They are gathered once a micro-batch, the head's chunks
and their backward included.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fnppo.arguments import check_type
from fnppo.distributed.mesh import Ranks
from fnppo.distributed.reduce import raise_together, sum_losses
from fnppo.gradients import LossFn, checked_loss, collect_grads, detached
from fnppo.metrics import Metrics
from fnppo.policy import Policy, backbone_of
from fnppo.remat import layers_of
from fnppo.train import Accumulate
from fnppo.types import ModelBatch, PackedInputs, PaddedInputs, Params


class Root(nn.Module):
    """The module that is sharded as a whole: any function of the parameters runs as its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(params, *args)`."""
        return function(dict(self.model.named_parameters()), *args)


def shard_policy(policy: Policy, params: Params, ranks: Ranks, **fsdp: Any) -> tuple[Policy, Root]:
    """The policy over a sharded copy of its model, and the root of that copy. Parameters that were frozen stay so.

    The policy that was given stays one of whole parameters.

    Args:
        policy, params: from `functional_policy`; every rank passes the same.
        ranks: from `ranks_of`.
        fsdp: options of torch's `fully_shard`, such as `mp_policy` or `offload_policy`.
    """
    model = copy.deepcopy(policy.skeleton)  # without weights
    own = {
        name: nn.Parameter(params[name].detach(), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for name, first in _names(model).items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, own[first])
    root, precision = Root(model), fsdp.pop("mp_policy", MixedPrecisionPolicy())
    for layer in layers_of(model):  # one after the other goes to the device whole, and leaves its part there
        fully_shard(layer, mesh=ranks.shards, mp_policy=precision, **fsdp)
    # Columns of a batch and losses keep their dtype: only what the model computes is in another.
    around = dataclasses.replace(precision, cast_forward_inputs=False, output_dtype=None)
    fully_shard(root, mesh=ranks.shards, mp_policy=around, **fsdp)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # loss weights are global: gradients add
            module.set_force_sum_reduction_for_comms(True)
            # Ranks must send as much as each other, also where one has no token for an expert, or no target.
            module.set_reduce_scatter_unused_params(True)
    return dataclasses.replace(policy, skeleton=model, run=RunModule(policy.head.weight)), root


def without_gradients(root: Root, function: Callable[..., Any], *args: Any) -> Any:
    """`function(params, *args)` without gradients, in the forward of the root, however many forwards of the model it makes."""
    try:
        with torch.no_grad():
            return root(function, *args)
    finally:
        reshard(root)


def reshard(root: Root) -> None:
    """Free what is gathered of all modules, which would else be used again although the shards have changed."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gradients_of(root: Root, policy: Policy, ranks: Ranks) -> Accumulate:
    """`accumulate_gradients` for the sharded model: losses, metrics and gradients are summed over micro-batches and ranks.

    Where the loss of one rank cannot be computed, that rank goes on with the others to the end of the step, adds nothing,
    and then all of them raise its error. No rank waits for another, and the parameters are as before the step.
    """

    def accumulate(loss_fn: LossFn, params: Params, batches: Iterable[Any]) -> tuple[tuple[Tensor, Metrics], Params]:
        errors = list[str]()

        def run(numbered: tuple[int, ModelBatch]) -> tuple[Tensor, Metrics] | None:
            loss, metrics, error = root(_loss_or_error, loss_fn, policy, numbered[1])
            torch.autograd.backward(loss)
            if error is not None:
                errors.append(f"micro-batch {numbered[0]}: {error}")
                return None
            return loss.detach(), detached(metrics)

        summed, grads = collect_grads(list(params.values()), map(run, enumerate(batches)))
        raise_together(errors[0] if errors else None, ranks.world)
        assert summed is not None, "a rank has at least one micro-batch, which may be empty"
        return sum_losses(*summed, ranks.data), dict(zip(params, grads, strict=True))

    return accumulate


def _loss_or_error(
    params: Params, loss_fn: LossFn, policy: Policy, batch: ModelBatch
) -> tuple[Tensor, Metrics | None, Exception | None]:
    """Loss and metrics, or 0 and what went wrong. Either way the layers have run once, which the other ranks count on."""
    run: Any = policy.run
    run.began, run.hidden = False, None
    try:
        loss, metrics = checked_loss(loss_fn(params, batch))
        check_type("what loss_fn gave as metrics", metrics, Metrics, "Return (loss, fnppo.Metrics(...)).")
        error = None
    except Exception as failed:
        if run.began and run.hidden is None:
            raise  # in the layers themselves, where the ranks are apart for good
        loss, metrics, error = torch.zeros((), device=batch.targets.token_ids.device), None, failed
    try:
        if run.hidden is None:
            policy.hidden_states(params, _filler(batch))
        return loss + 0 * run.hidden.sum(), metrics, error  # the backward goes through the layers on every rank
    finally:
        run.hidden = None


class RunModule:
    """The backbone as a module: its parameters are those that torch gathers, not those of `params`."""

    def __init__(self, head: str) -> None:
        self.head, self.began = head, False
        self.hidden: Tensor | None = None

    def __call__(self, skeleton: nn.Module, params: Params, arguments: dict[str, Any]) -> Tensor:
        if isinstance(params.get(self.head), DTensor):
            raise ValueError(
                "the policy is sharded, and runs inside of the methods of its FSDPActor only. Use actor.compute_logprobs, or "
                "call it in the loss_fn of actor.update_policy."
            )
        self.began = True
        hidden: Tensor = backbone_of(skeleton)(**arguments).last_hidden_state
        if hidden.requires_grad:
            self.hidden = hidden
        return hidden


def _filler(batch: ModelBatch) -> PackedInputs | PaddedInputs:
    """One token that no target points to, in the layout of `batch`."""
    zero = batch.inputs.input_ids.new_zeros(1)
    if isinstance(batch.inputs, PaddedInputs):
        return PaddedInputs(zero[None], zero[None], torch.ones_like(zero[None], dtype=torch.bool))
    return PackedInputs(zero, zero, torch.tensor([0, 1], dtype=torch.int32, device=zero.device))


def _names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
