"""How the ranks of a run stand to each other: three named dimensions, any of which may be 1.

    replicate   whole copies of the sharded model (HSDP)
    shard       parameters, gradients and moments are cut over these ranks
    sequence    tokens of a micro-batch are cut over these ranks (Ulysses); parameters are sharded over them as well

Rows are dealt over `replicate` x `shard`, the data ranks; the ranks of one `sequence` group work on the same rows.
"""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fnppo.arguments import check_count, check_type

DIMS = ("replicate", "shard", "sequence")


class Ranks(NamedTuple):
    """A mesh, taken apart.

    Attributes:
        world: all ranks.
        shards: what parameters are placed on: [replicate, shard · sequence], or [shard · sequence] without replicas.
        data: the ranks that work on other rows at the same place of the sequence.
        sequence: the ranks that work on other tokens of the same rows.
    """

    world: dist.ProcessGroup
    shards: DeviceMesh
    data: dist.ProcessGroup
    sequence: dist.ProcessGroup


def start() -> torch.device:
    """Make the process group of a script that torchrun has started; returns this rank's device.

    Ranks that torchrun starts again are given the store of those before, where they would find the addresses of dead ranks.
    So each attempt has keys of its own.
    """
    device = torch.device("cpu")
    if torch.accelerator.is_available() and (found := torch.accelerator.current_accelerator()) is not None:
        device = torch.device(found.type, dist.get_node_local_rank(fallback_rank=0))
        torch.accelerator.set_device_index(device)
    store, rank, ranks = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(store=keys, rank=rank, world_size=ranks)
    return device


def make_mesh(*, sequence: int = 1, replicate: int = 1, device_type: str | None = None) -> DeviceMesh:
    """A mesh over all ranks, [replicate, shard, sequence]; `shard` takes what the other two leave.

    Neighbours (the ranks of one machine) are in one sequence group first, then in one group of shards.

    Args:
        sequence: ranks that share the tokens of a row. It must divide the number of attention heads.
        replicate: copies of the sharded model, such as one a machine.
        device_type: "cuda" or "cpu"; by default that of the accelerator, if there is one.

    Raises:
        ValueError: a number is below 1, or their product does not divide the number of ranks; no process group has been made.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group. Start with torchrun, and call fnppo.distributed.start().")
    for name, value in (("sequence", sequence), ("replicate", replicate)):
        check_count(name, value, least=1, remedy="1 is for none.")
    ranks = dist.get_world_size()
    if ranks % (sequence * replicate):
        raise ValueError(
            f"there are {ranks} ranks, which sequence {sequence} times replicate {replicate} does not divide. Start a "
            "multiple of it."
        )
    if device_type is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = "cpu" if found is None else found.type
    shape = (replicate, ranks // (sequence * replicate), sequence)
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMS)


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """The groups of a mesh whose dimensions are named after some of `replicate`, `shard` and `sequence`.

    Raises:
        ValueError: a dimension has no name, or another one.
    """
    check_type("mesh", mesh, DeviceMesh, "Use make_mesh(), or torch's init_device_mesh with named dimensions.")
    names = mesh.mesh_dim_names or ()
    if not names or set(names) - set(DIMS):
        raise ValueError(
            f"the dimensions of the mesh are named {names or 'nothing'}; {', '.join(DIMS)} are known. Use make_mesh()."
        )
    sizes = {name: mesh.size(names.index(name)) if name in names else 1 for name in DIMS}
    order = [names.index(name) for name in DIMS if name in names]
    ranks = mesh.mesh.permute(order).reshape(*(sizes[name] for name in DIMS))
    if sizes["replicate"] == 1:
        shards = DeviceMesh(mesh.device_type, ranks.flatten(), mesh_dim_names=("shard",))
    else:
        shards = DeviceMesh(mesh.device_type, ranks.flatten(1), mesh_dim_names=("replicate", "shard"))
    rows = DeviceMesh(mesh.device_type, ranks.flatten(0, 1), mesh_dim_names=("data", "sequence"))
    world = DeviceMesh(mesh.device_type, ranks.flatten(), mesh_dim_names=("world",))
    return Ranks(world.get_group(), shards, rows.get_group("data"), rows.get_group("sequence"))
