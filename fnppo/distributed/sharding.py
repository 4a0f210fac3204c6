"""Sharded parameters as a tree of DTensors: the readable version of what `fnppo.distributed.engine` does with FSDP2.

    shards = shard_params(params, ranks_of(mesh))             each rank keeps its rows of every parameter
    loss_fn(gather_params(shards), micro_batch)               all-gather; its backward is a reduce-scatter

Nothing else changes: `value_and_grad` gives a tree of sharded gradients, and the optimizers take it.
"""

from functools import partial

import optree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fnppo.distributed.mesh import Ranks
from fnppo.types import PyTree


def shard_params(params: PyTree, ranks: Ranks) -> PyTree:
    """Each tensor cut along its first dimension over the shards, and whole on every replica. Scalars are whole everywhere.

    Every rank passes the whole tree. Nothing is sent: each cuts out its own part.

    >>> import torch, torch.distributed as dist
    >>> from fnppo.distributed import make_mesh, ranks_of
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: fnppo.distributed.start()
    >>> shards = shard_params({"w": torch.tensor([1.0, 2.0])}, ranks_of(make_mesh(device_type="cpu")))
    >>> shards["w"].placements, gather_params(shards)
    ((Shard(dim=0),), {'w': tensor([1., 2.])})
    >>> dist.destroy_process_group()
    """
    return optree.tree_map(partial(_cut, ranks.shards), params)


def gather_params(shards: PyTree) -> PyTree:
    """Whole plain tensors on every rank. Differentiable: gradients of all ranks are added, and each keeps its part.

    The sum is right because losses of ranks are parts of one sum (`fnppo.weights`).
    """
    return optree.tree_map(_gather, shards)


def _cut(mesh: DeviceMesh, leaf: Tensor) -> DTensor:
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if leaf.dim() > 0:
        placements[-1] = Shard(0)
    return distribute_tensor(leaf.detach(), mesh, placements, src_data_rank=None)


def _gather(leaf: DTensor) -> Tensor:
    return leaf.full_tensor(grad_placements=[Partial()] * leaf.device_mesh.ndim)
