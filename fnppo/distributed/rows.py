"""Rows of all data ranks, on every rank: then everything that an update decides is decided everywhere alike.

Which rows make a mini-batch, the loss weights, the plan of micro-batches: each rank computes them from the same batch with
the functions of a single process, and does its share. So an update does not depend on who brought which row.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fnppo.distributed.mesh import Ranks
from fnppo.distributed.reduce import raise_together
from fnppo.types import PaddedBatch


class AllRows(NamedTuple):
    """The rows of all data ranks in the order of ranks, and which of them are this rank's."""

    batch: PaddedBatch
    own: slice
    width: int  # of this rank's rectangle


def gather_rows(
    batch: PaddedBatch, ranks: Ranks, *, check: Callable[[PaddedBatch], Any], alike: dict[str, Any] | None = None
) -> AllRows:
    """The rows of all data ranks. The ranks of one sequence group pass the same batch.

    Args:
        batch: this rank's rows, maybe none. Widths may differ.
        check: raises a `ValueError` where something is wrong with a batch. What it says on one rank is raised on all.
        alike: arguments that must be the same on all ranks.

    Raises:
        ValueError: on every rank, what `check` said on one of them; a column is not there on all ranks, or has another
            dtype or device; ranks of a sequence group, or arguments, differ.
    """
    error = None
    try:
        check(batch)
    except Exception as refused:  # of any kind: the other ranks wait to hear of it
        error = str(refused)
    raise_together(error, ranks.world)
    found: list[Any] = [None] * ranks.world.size()
    dist.all_gather_object(
        found, (ranks.data.rank(), _description(batch, ranks.sequence.size() > 1, alike or {})), group=ranks.world
    )
    shapes: dict[int, Any] = {}
    for rank, (data_rank, description) in enumerate(found):
        _compare(rank, description, found[0][1], shapes.setdefault(data_rank, description))
    sizes = [shapes[data_rank]["shape"] for data_rank in range(ranks.data.size())]
    most, width = (max(size[i] for size in sizes) for i in (0, 1))

    def gather(column: Tensor) -> Tensor:
        """A column of all ranks: each rank's rectangle in one as large as the largest, and cut out again."""
        wire = column.to(torch.uint8) if column.dtype == torch.bool else column
        room = wire.new_zeros((most, width)[: column.dim()])
        room[tuple(map(slice, column.shape))] = wire
        parts = [torch.empty_like(room) for _ in sizes]
        dist.all_gather(parts, room, group=ranks.data)
        return torch.cat([part[: size[0]] for part, size in zip(parts, sizes, strict=True)]).to(column.dtype)

    start = sum(size[0] for size in sizes[: ranks.data.rank()])
    rows = slice(start, start + batch.input_ids.shape[0])
    return AllRows(optree.tree_map(gather, batch), rows, batch.input_ids.shape[1])  # type: ignore[arg-type]


def own_rows(values: Any, rows: AllRows) -> Any:
    """This rank's rows of [all rows, seq] tensors, as wide as it brought them."""
    return optree.tree_map(lambda column: column[rows.own, : rows.width], values)


def _description(batch: PaddedBatch, digested: bool, alike: dict[str, Any]) -> dict[str, Any]:
    columns = {name: column for name, column in batch._asdict().items() if isinstance(column, Tensor)} | batch.extra
    digest = hashlib.blake2b(digest_size=16)
    for column in columns.values() if digested else ():
        digest.update(column.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "shape": tuple(batch.input_ids.shape),
        "columns": {name: f"{column.dtype} on {column.device.type}" for name, column in columns.items()},
        "alike": alike,
        "digest": digest.hexdigest(),
    }


def _compare(rank: int, own: dict[str, Any], first: dict[str, Any], of_group: dict[str, Any]) -> None:
    for name, value in own["alike"].items():
        if value != first["alike"][name]:
            raise ValueError(
                f"{name} is {value} on rank {rank}, {first['alike'][name]} on rank 0. Pass the same on all ranks."
            )
    for name in sorted(own["columns"].keys() | first["columns"].keys()):
        here, there = (side["columns"].get(name, "not there") for side in (own, first))
        if here != there:
            raise ValueError(
                f"column {name} is {here} on rank {rank}, {there} on rank 0. Give the same columns on all ranks, also where "
                "there are no rows."
            )
    if own["digest"] != of_group["digest"] or own["shape"] != of_group["shape"]:
        raise ValueError(
            f"rank {rank} has another batch than the first rank of its sequence group. The ranks of a group work on the "
            "same rows: give each of them the same batch."
        )
