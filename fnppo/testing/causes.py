"""What usually makes a number change that should not: from the pattern of a failure to the bug behind it."""

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from fnppo.rows import select_rows
from fnppo.testing.differences import largest_difference
from fnppo.types import PaddedBatch

TOGETHER = (
    "each padded row is right alone, and wrong beside the others, so rows see each other. A packed forward needs the "
    "boundaries (cu_seqlens or a block mask) in every attention layer, position ids that restart with each row, and labels "
    "shifted within each row; many models ignore boundaries without a word."
)
LEFT = (
    "position ids count the padding, or the mask does not reach the attention. Take positions from the mask, "
    "(attention_mask.cumsum(-1) - 1).clamp(min=0), and pass both to the model."
)
RIGHT = (
    "a length is taken from the width of the batch: the last column is read as the last token, or padding is attended. "
    "Index by the attention mask."
)
HOLES = "the mask is read as a length. Index the kept tokens by the mask; positions count kept tokens only."
AHEAD = (
    "only later rows change, so attention crosses from one row into the next, or a recurrent state runs on: all rows lie on "
    "one axis, and the model does not know where they end."
)
ROLLED = (
    "only the row before changes, so its last label is the first token of the next row. Shift labels within each row, "
    "before flattening, and ignore the last slot."
)
STATISTIC = (
    "rows on both sides change, so something is computed over the whole batch: a mean or whitening, experts with a capacity, "
    "positions or rotary embeddings scaled by the longest row."
)
NO_TARGETS = (
    "a micro-batch without a learned token divides by zero. Divide by the count of the whole mini-batch, and let an empty "
    "micro-batch add 0."
)
SUM_OF_MEANS = (
    "each micro-batch is divided by its own count and the results are added, so the loss grows with the number of "
    "micro-batches. Divide each sum by the count of the whole mini-batch."
)
MEAN_OF_MEANS = (
    "each micro-batch is divided by its own count and the results are averaged, so a token in a small micro-batch weighs "
    "more. Divide each sum by the count of the whole mini-batch."
)
ROW_WEIGHTED = (
    "each micro-batch is divided by its own token count and weighted by its number of rows, which is right only where all "
    "rows are equally long. Divide each sum by the token count of the whole mini-batch."
)
LAST_ONLY = "only the last micro-batch counts: gradients or metrics are replaced where they should be added."
FIRST_ONLY = "only the first micro-batch counts: the loop ends early, or the number of micro-batches is rounded down."
SPLIT = (
    "something depends on what else is in a micro-batch: a mean or whitening taken per micro-batch, dropout, or columns that "
    "are not reordered with the rows."
)
MULTIPLIED = (
    "values are multiplied by the mask after they were computed, and 0 times NaN is NaN. Select before any arithmetic: "
    "torch.where(mask, values, 0)."
)
NOT_MASKED = (
    "the column is reduced (sum, mean, whitening) without its mask. Select first: torch.where(mask, values, 0)."
)
PADDING_READ = (
    "padding is attended or trained on. Pass the attention mask to the model, and keep padding out of the loss and of every "
    "count."
)


def of_padding(there: PaddedBatch) -> str:
    """The cause for one row that is wrong as soon as it is padded."""
    kept = there.attention_mask[0].nonzero()[:, 0]
    first, last = int(kept[0]), int(kept[-1])
    if last - first + 1 > kept.numel():
        return HOLES
    return LEFT if first > 0 else RIGHT


def of_leak(before: Tensor, after: Tensor, batch: PaddedBatch, tolerance: float) -> str:
    """The cause for rows that change with another row's tokens: the middle one of three changed, so which others did?"""

    def changed(row: int) -> bool:
        keep = batch.loss_mask[row] if before.dim() == 2 else None
        return largest_difference(after[row], before[row], keep, floor=1.0).size > tolerance

    return {(False, True): AHEAD, (True, False): ROLLED}.get((changed(0), changed(2)), STATISTIC)


def of_split(
    loss_fn: Callable[[list[PaddedBatch]], Any], batch: PaddedBatch, groups: list[list[int]], tolerance: float
) -> str:
    """The cause for a result that changes with the split: try the usual wrong ways to put two micro-batches together.

    The second gets the rows of the first as well, so that the two differ in rows as well as in tokens.
    """
    pieces = [select_rows(batch, rows) for rows in (groups[0], groups[-1] + groups[0])]
    split, alone = loss_fn(pieces), [loss_fn([piece]) for piece in pieces]
    first, second = (piece.input_ids.shape[0] for piece in pieces)
    ways = {
        MEAN_OF_MEANS: (0.5, 0.5),
        ROW_WEIGHTED: (first / (first + second), second / (first + second)),
        SUM_OF_MEANS: (1.0, 1.0),
        LAST_ONLY: (0.0, 1.0),
        FIRST_ONLY: (1.0, 0.0),
    }

    def is_split_into(a: float, b: float) -> bool:
        return largest_difference(split, optree.tree_map(lambda x, y: a * x + b * y, *alone)).size <= tolerance

    halves = loss_fn([pieces[0], pieces[0]]), loss_fn([select_rows(batch, groups[0] * 2)])
    if is_split_into(1.0, 1.0) and largest_difference(*halves).size <= tolerance:
        return SPLIT  # equal halves add up, so no divisor is wrong
    for cause, (a, b) in ways.items():
        if is_split_into(a, b):
            return cause
    return SPLIT


def of_filler(column: str, filler: float) -> str:
    """The cause for a masked value that was read: which values showed it tells how."""
    if column == "input_ids":
        return PADDING_READ
    return MULTIPLIED if filler != filler else NOT_MASKED
