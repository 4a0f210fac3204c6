"""Which tokens belong together: the segments of a batch, and how to walk them one by one.

Packed, a segment is a row, or a piece of one that goes on from a parent (a shared prefix). Padded, it is a row of the
rectangle. A query sees keys of its own segment and of those that it continues; a layer whose attention stays within chunks
of positions sees finer segments (`chunks_of`).
"""

import itertools
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fnppo.types import PackedInputs, PaddedInputs


class Segments(NamedTuple):
    """Which tokens belong together.

    Attributes:
        ids: segment of each token, numbered within its row of the attention batch; -1 for padding.
        positions: position of each token in its sequence.
        packed: how to walk the segments one by one, when the tokens are packed (then batch is 1).
        ancestors: where segments have parents, [i, j] says whether segment i reads segment j.
    """

    ids: Int[Tensor, "batch tokens"]
    positions: Int[Tensor, "batch tokens"]
    packed: "PackedSegments | None" = None
    ancestors: Bool[Tensor, "segments segments"] | None = None


Part: TypeAlias = tuple[slice, slice, bool]
"""Queries, keys, and whether it is a causal triangle; else all of the queries see all of the keys."""


class PackedSegments(NamedTuple):
    """Queries and keys of each segment. A segment that has a parent also reads the parent's keys, which then are
    gathered once for each child: key i of the walk is key `gather[i]` of the axis. None: every segment reads itself.

    `parts` says the same without gathering: a triangle for each segment, then a rectangle for each segment and each run of
    its descendants on the axis.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    gather: Int[Tensor, " keys"] | None
    parts: tuple[Part, ...] | None = None


def segments_of(inputs: PackedInputs | PaddedInputs) -> Segments:
    """The segments of a batch, on the [batch, tokens] axes that the model sees."""
    if isinstance(inputs, PaddedInputs):
        return Segments(torch.where(inputs.attention_mask, 0, -1), inputs.position_ids)
    cu_seqlens, device = inputs.cu_seqlens, inputs.cu_seqlens.device
    index = torch.arange(cu_seqlens.numel() - 1, device=device)
    ids = index.repeat_interleave(cu_seqlens.diff(), output_size=inputs.input_ids.numel())[None]
    lengths = tuple(cu_seqlens.diff().tolist())
    if inputs.parents is None:
        return Segments(ids, inputs.position_ids[None], PackedSegments(lengths, lengths, None))

    lines = list[list[int]]()  # lines[i]: the ancestors of segment i, and i
    for segment, parent in enumerate(inputs.parents.tolist()):
        lines.append([*(lines[parent] if parent >= 0 else []), segment])
    keys = tuple(sum(lengths[segment] for segment in line) for line in lines)
    walk = torch.tensor([segment for line in lines for segment in line], dtype=torch.long, device=device)
    pieces = cu_seqlens.diff()[walk]
    shift = cu_seqlens[:-1][walk] - (pieces.cumsum(0) - pieces)  # from a place of the walk to one of the axis
    gather = torch.arange(sum(keys), device=device) + shift.repeat_interleave(pieces, output_size=sum(keys))
    ancestors = torch.zeros(len(lines), len(lines), dtype=torch.bool, device="cpu")
    for segment, line in enumerate(lines):
        ancestors[segment, line] = True
    packed = PackedSegments(lengths, keys, gather, _parts(cu_seqlens.tolist(), lines))
    return Segments(ids, inputs.position_ids[None], packed, ancestors.to(device))


def _parts(bounds: list[int], lines: list[list[int]]) -> tuple[Part, ...]:
    """Of segments with these boundaries and lines of ancestors. Empty segments have none.

    >>> _parts([0, 2, 3, 5], [[0], [0, 1], [0, 2]])[-1]
    (slice(2, 5, None), slice(0, 2, None), False)
    """
    places = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    runs: dict[int, list[slice]] = {}  # of each segment, where its descendants stand
    for *ancestors, segment in lines:
        place = places[segment]
        for ancestor in ancestors if place.start < place.stop else []:
            before = runs.setdefault(ancestor, [])
            joins = before and before[-1].stop == place.start
            before.append(slice(before.pop().start if joins else place.start, place.stop))
    triangles = [(place, place, True) for place in places if place.start < place.stop]
    rectangles = [(run, places[ancestor], False) for ancestor, found in runs.items() for run in found]
    return (*triangles, *(part for part in rectangles if part[1].start < part[1].stop))


def chunks_of(segments: Segments, size: int) -> Segments:
    """The segments cut where `position // size` changes: what a layer sees whose attention stays within such chunks.

    A piece goes on with the pieces of its ancestors that lie in the same chunk.
    """
    number = segments.positions // size
    if segments.packed is None:
        return segments._replace(ids=torch.where(segments.ids >= 0, number, -1))
    owner, number = segments.ids[0], number[0]
    starts = torch.ones_like(owner, dtype=torch.bool)
    starts[1:] = (owner.diff() != 0) | (number.diff() != 0)
    piece = starts.cumsum(0) - 1
    queries = tuple(piece.bincount().tolist())
    if segments.ancestors is None:
        return Segments(piece[None], segments.positions, PackedSegments(queries, queries, None))
    owner, number = owner[starts], number[starts]  # of each piece
    ancestors = segments.ancestors[owner[:, None], owner] & (number[:, None] == number)
    reads = ancestors[:, piece]  # [pieces, tokens], in the order of the line: ancestors stand before their descendants
    packed = PackedSegments(queries, tuple(reads.sum(1).tolist()), reads.nonzero()[:, 1])
    return Segments(piece[None], segments.positions, packed, ancestors)
