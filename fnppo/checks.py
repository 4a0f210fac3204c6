"""Every way in which a batch can be malformed, each answered by a `ValueError` that names the place and the way out.

Shapes, dtypes and devices are always looked at. Values are looked at outside of torch.func transforms, where they are
known, with one question to the device for all that can be wrong.
"""

import math

import torch

from fnppo.arguments import check_device, check_floating, check_ids, check_tensor, check_type, check_whole
from fnppo.faults import Fault, not_a_mask, not_finite, outside_vocabulary, refuse
from fnppo.types import ModelBatch, PackedInputs, PaddedBatch, PaddedInputs, Targets

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
    check_columns(batch)
    attention_mask, loss_mask = batch.attention_mask != 0, batch.loss_mask != 0
    first = attention_mask & (attention_mask.cumsum(1) == 1)
    refuse(
        not_a_mask("attention_mask", batch.attention_mask),
        not_a_mask("loss_mask", batch.loss_mask),
        Fault(
            loss_mask & ~attention_mask,
            "loss_mask is set where attention_mask is not: a token that does not exist cannot be learned. Set "
            "attention_mask on prompt and response.",
        ),
        Fault(
            loss_mask & first,
            "loss_mask is set on the first token of the row, which nothing predicts. Clear loss_mask there, or put a "
            "token (such as a BOS token) before it.",
        ),
        Fault(
            attention_mask & (batch.input_ids < 0),
            "input_ids is {value}, a negative id at an existing token. Labels such as -100 do not belong in "
            "input_ids: use loss_mask.",
            batch.input_ids,
        ),
        *(
            not_finite(name, column, loss_mask)
            for name in FLOAT_COLUMNS
            if (column := getattr(batch, name)) is not None
        ),
    )
    return batch._replace(attention_mask=attention_mask, loss_mask=loss_mask)


def check_columns(batch: PaddedBatch) -> None:
    """Raise a `ValueError` where a column has a shape, dtype or device that does not fit. No value is read."""
    if not isinstance(batch, PaddedBatch):
        raise ValueError(
            f"the batch is a {type(batch).__name__}; a PaddedBatch is needed. Make one with padded_batch(...)."
        )
    check_type("extra", batch.extra, dict, "Use {} for none.")
    columns = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "loss_mask": batch.loss_mask}
    columns |= {name: getattr(batch, name) for name in FLOAT_COLUMNS if getattr(batch, name) is not None} | batch.extra
    for name, column in columns.items():
        check_tensor(name, column)
    ids, shape = batch.input_ids, batch.input_ids.shape
    if ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(shape)}; a batch needs [batch, seq]. Unsqueeze a single row.")
    check_ids("input_ids", ids)
    for name, column in columns.items():
        if column.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(column.shape)}, input_ids has {tuple(shape)}. Every column of a batch is "
                "token-aligned: column t is about token t. Pad response-only columns on the left to the full width."
            )
        check_device(name, column, "input_ids", ids)
        if name in FLOAT_COLUMNS:
            check_floating(name, column)
        if name.endswith("_mask") and column.is_complex():
            raise ValueError(f"{name} has dtype {column.dtype}; a mask holds True/False or 0/1. Call .real on it.")
    if batch.groups is not None:
        check_tensor("groups", batch.groups)
        if batch.groups.shape != shape[:1]:
            raise ValueError(
                f"groups has shape {tuple(batch.groups.shape)}; it needs one entry a row: ({shape[0]},). Number the "
                "prompts, and give each row the number of its prompt."
            )
        check_device("groups", batch.groups, "input_ids", ids)
        check_whole("groups", batch.groups)


def check_vocabulary(batch: PaddedBatch, vocab_size: int, max_positions: int | None = None) -> None:
    """Raise a `ValueError` that names the first token outside the vocabulary, or the first row that is too long."""
    exists = batch.attention_mask != 0
    count = exists.sum(1)
    refuse(
        not_a_mask("attention_mask", batch.attention_mask),
        Fault(
            exists & (batch.input_ids >= vocab_size),
            f"input_ids is {{value}}, but the model's vocabulary has {vocab_size} entries. Check that tokenizer and "
            "model belong together.",
            batch.input_ids,
        ),
        Fault(
            count > (math.inf if max_positions is None else max_positions),
            f"there are {{value}} tokens, but the model has {max_positions} positions. Shorten or drop the row.",
            count,
        ),
    )


def check_model_batch(batch: ModelBatch, *, vocab_size: int) -> None:
    """Raise a `ValueError` where targets do not fit the inputs. The inputs themselves are for `check_inputs`."""
    if not isinstance(batch, ModelBatch):
        raise ValueError(
            f"the batch is a {type(batch).__name__}; a ModelBatch is needed. Make one with pack_sequences(batch)."
        )
    inputs, targets = batch
    if not isinstance(inputs, (PackedInputs, PaddedInputs)):
        raise ValueError(
            f"inputs is a {type(inputs).__name__}; PackedInputs or PaddedInputs are needed. Use those of pack_sequences(batch)."
        )
    check_targets(targets)
    check_tensor("input_ids", inputs.input_ids)
    check_device("targets.token_ids", targets.token_ids, "input_ids", inputs.input_ids)
    tokens = inputs.input_ids.numel()
    refuse(
        Fault(
            (targets.predictors < 0) | (targets.predictors >= tokens),
            f"its predictor is {{value}}, but the model reads {tokens} tokens. Give inputs and "
            "targets of the same pack_sequences or pad_sequences.",
            targets.predictors,
            "target",
        ),
        outside_vocabulary("token_ids", targets.token_ids, vocab_size, "target"),
        Fault(
            targets.rows.diff(prepend=targets.rows[:1]) < 0,
            "its row is {value}, after a higher one. Targets stand row by row: sort them.",
            targets.rows,
            "target",
        ),
    )


def check_targets(targets: Targets) -> None:
    """Raise a `ValueError` where the columns of targets do not have one entry a target. No value is read."""
    if not isinstance(targets, Targets):
        raise ValueError(
            f"targets is a {type(targets).__name__}; Targets are needed. Use those of pack_sequences(batch)."
        )
    check_type("targets.extra", targets.extra, dict, "Use {} for none.")
    columns = {name: column for name, column in targets._asdict().items() if column is not None and name != "extra"}
    columns |= {f"extra[{name!r}]": column for name, column in targets.extra.items()}
    for name, column in columns.items():
        check_tensor(f"targets.{name}", column)
        if column.dim() != 1 or column.shape != targets.token_ids.shape:
            raise ValueError(
                f"targets.{name} has shape {tuple(column.shape)}, token_ids {tuple(targets.token_ids.shape)}. Every "
                "column has one entry a target: select the same entries of all."
            )
        check_device(f"targets.{name}", column, "token_ids", targets.token_ids)
    for name in ("token_ids", "predictors", "rows", "columns"):
        check_ids(f"targets.{name}", getattr(targets, name))


def check_inputs(inputs: PackedInputs | PaddedInputs, *, vocab_size: int, max_positions: int | None) -> None:
    """Raise a `ValueError` for what a model cannot read, before it crashes on it or a kernel reads beside its memory."""
    packed = isinstance(inputs, PackedInputs)
    for name, column in inputs._asdict().items():
        if not (name == "parents" and column is None):
            check_tensor(name, column)
            check_device(name, column, "input_ids", inputs.input_ids)
    shape, wanted = inputs.input_ids.shape, 1 if packed else 2
    if len(shape) != wanted or inputs.input_ids.numel() == 0:
        raise ValueError(
            f"input_ids has shape {tuple(shape)}; {type(inputs).__name__} needs {wanted} dimensions, and a model at "
            "least one token. Use pack_sequences or pad_sequences, which see to both."
        )
    aligned = ("position_ids",) if packed else ("position_ids", "attention_mask")
    for name in aligned:
        if (column := getattr(inputs, name)).shape != shape:
            raise ValueError(f"{name} has shape {tuple(column.shape)}, input_ids {tuple(shape)}. Give one a token.")
    for name in ("input_ids", "position_ids"):
        check_ids(name, getattr(inputs, name))
    label = "position" if packed else None
    positions = inputs.position_ids
    faults = [
        outside_vocabulary("input_ids", inputs.input_ids, vocab_size, label),
        Fault(positions < 0, "position_ids is {value}; positions count from 0. Count up from 0.", positions, label),
        Fault(
            positions >= (math.inf if max_positions is None else max_positions),
            f"position_ids is {{value}}, but the model has {max_positions} positions, from 0. Shorten or drop the row.",
            positions,
            label,
        ),
    ]
    if isinstance(inputs, PaddedInputs):
        refuse(*faults, not_a_mask("attention_mask", inputs.attention_mask))
        return
    bounds, parents = inputs.cu_seqlens, inputs.parents
    if bounds.dim() != 1 or bounds.numel() == 0:
        raise ValueError(f"cu_seqlens has shape {tuple(bounds.shape)}; it needs [segments + 1]. It begins with 0.")
    check_ids("cu_seqlens", bounds)
    segments, tokens = bounds.numel() - 1, shape[0]
    step = torch.cat([bounds, bounds.new_full((1,), tokens)]).diff()
    wrong = (step < 0) | ((torch.arange(segments + 1, device=bounds.device) == segments) & (step != 0))
    wrong = wrong | ((torch.arange(segments + 1, device=bounds.device) == 0) & (bounds != 0))
    faults.append(
        Fault(
            wrong,
            f"cu_seqlens is {{value}} there; it must rise from 0 to the number of tokens, which is {tokens}. Give "
            "filler a segment of its own, as pack_sequences(pad_to=...) does.",
            bounds,
            "boundary",
        )
    )
    if parents is not None:
        check_ids("parents", parents)
        if parents.shape != (segments,):
            raise ValueError(
                f"parents has shape {tuple(parents.shape)}; there are {segments} segments. Give one a segment."
            )
        own = torch.arange(segments, device=parents.device)
        faults.append(
            Fault(
                (parents < -1) | (parents >= own),
                "its parent is {value}; a parent is a segment before it, or -1 for none. Lay parents before children.",
                parents,
                "segment",
            )
        )
    refuse(*faults)
