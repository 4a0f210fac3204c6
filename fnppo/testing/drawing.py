"""A batch as text, small enough to read in a failure message."""

from fnppo.types import PaddedBatch

LEGEND = "* learned, · padding"


def draw_batch(batch: PaddedBatch) -> str:
    """One line a row: token ids, `*` behind learned ones, `·` for padding.

    >>> from fnppo import padded_batch
    >>> print(draw_batch(padded_batch([[5], [7, 8]], [[6], [9]])))
    row 0    ·   5   6*
    row 1    7   8   9*
    """
    lines = []
    for row in range(batch.input_ids.shape[0]):
        cells = [_cell(batch, row, column) for column in range(batch.input_ids.shape[1])]
        lines.append(f"row {row} " + "".join(cells).rstrip())
    return "\n".join(lines)


def _cell(batch: PaddedBatch, row: int, column: int) -> str:
    if not batch.attention_mask[row, column]:
        return "   · "
    star = "*" if batch.loss_mask[row, column] else " "
    return f"{int(batch.input_ids[row, column]):>4}{star}"
