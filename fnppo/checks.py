"""Every way in which a batch can be malformed, each answered by a `ValueError` that names the row and the way out.

The checks run wherever a batch enters the library: in the layouts, `compute_logprobs` and `update_policy`. What sees only
targets checks nothing but shapes.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from fnppo.types import PaddedBatch

FLOAT_COLUMNS = ("old_logprobs", "advantages", "ref_logprobs", "loss_weights")


def check_batch(batch: PaddedBatch) -> PaddedBatch:
    """`batch` with boolean masks, or a `ValueError`.

    Masks may come as bool or as 0/1 numbers. Float columns must be finite at every learned token; elsewhere they may
    hold anything, since they are never read there.

    >>> batch = PaddedBatch(torch.tensor([[5, 6]]), torch.tensor([[1, 1]]), torch.tensor([[1, 1]]))
    >>> check_batch(batch)
    Traceback (most recent call last):
        ...
    ValueError: row 0, column 0: loss_mask is set on the first token of the row, which nothing predicts. Clear
    loss_mask there, or put a token (such as a BOS token) before it.
    """
    shape = batch.input_ids.shape
    if batch.input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(shape)}; a batch needs [batch, seq]. Unsqueeze a single row.")
    if batch.input_ids.dtype.is_floating_point or batch.input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids has dtype {batch.input_ids.dtype}; token ids are integers.")
    columns = {"attention_mask": batch.attention_mask, "loss_mask": batch.loss_mask}
    columns |= {name: getattr(batch, name) for name in FLOAT_COLUMNS if getattr(batch, name) is not None} | batch.extra
    for name, column in columns.items():
        if column.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, input_ids has {tuple(shape)}. Every column of a batch is "
                "token-aligned: column t is about token t. Pad response-only columns on the left to the full width."
            )
        if column.device != batch.input_ids.device:
            raise ValueError(f"{name} is on {column.device}, input_ids on {batch.input_ids.device}. Move one of them.")
    if batch.groups is not None and batch.groups.shape != shape[:1]:
        raise ValueError(f"groups has shape {tuple(batch.groups.shape)}; it needs one entry a row: ({shape[0]},).")

    attention_mask = _as_mask("attention_mask", batch.attention_mask)
    loss_mask = _as_mask("loss_mask", batch.loss_mask)
    _refuse(
        loss_mask & ~attention_mask,
        "loss_mask is set where attention_mask is not: a token that does not exist cannot be learned. Set "
        "attention_mask on prompt and response.",
    )
    first = attention_mask & (attention_mask.cumsum(1) == 1)
    _refuse(
        loss_mask & first,
        "loss_mask is set on the first token of the row, which nothing predicts. Clear loss_mask there, or put a "
        "token (such as a BOS token) before it.",
    )
    _refuse(
        attention_mask & (batch.input_ids < 0),
        "input_ids is {value}, a negative id at an existing token. Labels such as -100 do not belong in input_ids: "
        "use loss_mask.",
        batch.input_ids,
    )
    for name in FLOAT_COLUMNS:
        column = getattr(batch, name)
        if column is not None:
            _refuse(
                loss_mask & ~column.isfinite(),
                name + " is {value} at a learned token. Clear loss_mask there, or mend the value.",
                column,
            )
    return batch._replace(attention_mask=attention_mask, loss_mask=loss_mask)


def check_vocabulary(batch: PaddedBatch, vocab_size: int) -> None:
    """Raise a `ValueError` that names the first existing token outside the vocabulary."""
    attention_mask = _as_mask("attention_mask", batch.attention_mask)
    _refuse(
        attention_mask & (batch.input_ids >= vocab_size),
        f"input_ids is {{value}}, but the model's vocabulary has {vocab_size} entries. Check that tokenizer and model "
        "belong together.",
        batch.input_ids,
    )


def _as_mask(name: str, mask: Tensor) -> Bool[Tensor, "batch seq"]:
    if mask.dtype == torch.bool:
        return mask
    _refuse(
        (mask != 0) & (mask != 1),
        f"{name} is {{value}}; a mask holds True/False or 0/1. Sequence numbers of packed data are not a mask: "
        "give each sequence a row of its own.",
        mask,
    )
    return mask != 0


def _refuse(bad: Bool[Tensor, "batch seq"], message: str, values: Tensor | None = None) -> None:
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        value = "" if values is None else values[row, column].item()
        raise ValueError(f"row {row}, column {column}: {message.format(value=value)}")
