"""Changes to a batch after which something must be as it was."""

from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from fnppo.checks import FLOAT_COLUMNS
from fnppo.rows import select_rows
from fnppo.types import PaddedBatch


def other_tokens(batch: PaddedBatch, row: int, *, vocab_size: int) -> PaddedBatch:
    """Other tokens in one row, all of them."""
    ids = batch.input_ids.clone()
    ids[row] = torch.where(batch.attention_mask[row], (ids[row] + 1) % vocab_size, ids[row])
    return batch._replace(input_ids=ids)


def without_padding(batch: PaddedBatch, row: int) -> PaddedBatch:
    """One row by itself, with its existing tokens only."""
    here: Any = select_rows(batch, [row])
    exists = here.attention_mask[0]
    unpadded: Any = optree.tree_map(lambda column: column[:, exists] if column.dim() == 2 else column, here)
    return unpadded


def spread(values: Tensor, batch: PaddedBatch, row: int) -> Tensor:
    """Values of an unpadded row [1, tokens] at the places of its tokens in the batch [1, seq]."""
    places = values.new_zeros(1, batch.input_ids.shape[1])
    places[:, batch.attention_mask[row]] = values
    return places


def fillings(batch: PaddedBatch, *, vocab_size: int) -> Iterator[tuple[str, float, PaddedBatch]]:
    """(column, filler, batch with the filler in the column's masked slots)."""
    ids = torch.where(batch.attention_mask, batch.input_ids, vocab_size - 1)
    yield "input_ids", vocab_size - 1, batch._replace(input_ids=ids)
    for filler in (1.0, 1e9, float("nan")):
        for name in FLOAT_COLUMNS:
            if (column := getattr(batch, name)) is not None:
                filled: Any = {name: torch.where(batch.loss_mask, column, filler)}
                yield name, filler, batch._replace(**filled)
        for name, column in batch.extra.items():
            extra = batch.extra | {name: torch.where(batch.loss_mask, column, filler)}
            yield f"extra[{name!r}]", filler, batch._replace(extra=extra)
