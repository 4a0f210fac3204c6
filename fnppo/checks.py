"""Every way in which data can be malformed, each answered by a `ValueError` that names the place and the way out.

The checks run wherever data enters the library. Shapes, dtypes and devices are always looked at. Values are looked at
outside of torch.func transforms, where they are known, with one question to the device for all that can be wrong.
"""

import math
import operator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from fnppo.transforms import inside_transform
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


def check_count(name: str, value: Any, *, least: int, remedy: str) -> int:
    """`value` as an int, or a `ValueError`: NaN, fractions, strings and numbers below `least` are none.

    >>> check_count("max_tokens", 0.5, least=1, remedy="Raise it.")
    Traceback (most recent call last):
        ...
    ValueError: max_tokens is 0.5; it must be a whole number of at least 1. Raise it.
    """
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError):
        count = least - 1
    if count < least:
        raise ValueError(f"{name} is {value}; it must be a whole number of at least {least}. {remedy}")
    return count


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    infinite: bool = False,
    remedy: str,
) -> None:
    """Raise a `ValueError` if a hyper-parameter is no number, NaN or out of range. Inside a transform it is unknown.

    >>> check_number("horizon", float("nan"), above=0, remedy="Use the largest number of response tokens.")
    Traceback (most recent call last):
        ...
    ValueError: horizon is nan; it must be a finite number above 0. Use the largest number of response tokens.
    """
    if isinstance(value, Tensor) and inside_transform():
        return
    try:
        number = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
        good = (number >= least) & (number <= most) & (number.isfinite() | (infinite & number.isinf()))
        good = good & ((number > above) | (above == -math.inf)) & ((number < below) | (below == math.inf))
        if number.numel() and bool(good.all()):
            return
    except (TypeError, ValueError, RuntimeError):
        pass
    low = f" above {above}" if above > -math.inf else f" of at least {least}" if least > -math.inf else ""
    high = f" below {below}" if below < math.inf else f" of at most {most}" if most < math.inf else ""
    kind = "a number" if infinite else "a finite number"
    raise ValueError(f"{name} is {value}; it must be {kind}{' and'.join(filter(None, (low, high)))}. {remedy}")


def check_type(name: str, value: Any, wanted: type, remedy: str) -> None:
    """Raise a `ValueError` if `value` is of another type."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name} is a {type(value).__name__}; a {wanted.__name__} is needed. {remedy}")


def check_floating(name: str, value: Any) -> None:
    """Raise a `ValueError` if `value` is no tensor of floating point."""
    check_tensor(name, value)
    if not value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; it needs floating point. Call .float() on it.")


def check_tensor(name: str, value: Any) -> None:
    """Raise a `ValueError` if `value` is no tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; a tensor is needed. Use torch.as_tensor.")
    if value.layout != torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; a dense tensor is needed. Call .to_dense() on it.")


def check_ids(name: str, ids: Tensor) -> None:
    """Raise a `ValueError` unless `ids` is int32 or int64, which are what models can look up."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {ids.dtype}; token ids are integers: int32 or int64. Call .long() on it.")


def check_whole(name: str, numbers: Tensor) -> None:
    """Raise a `ValueError` unless `numbers` has an integer dtype."""
    if numbers.is_floating_point() or numbers.is_complex():
        raise ValueError(f"{name} has dtype {numbers.dtype}; it needs integers. Number them, and call .long() on it.")


def check_device(name: str, column: Tensor, of: str, other: Tensor) -> None:
    """Raise a `ValueError` if two tensors are on different devices."""
    if column.device != other.device:
        raise ValueError(f"{name} is on {column.device}, {of} on {other.device}. Move one of them.")


class Fault(NamedTuple):
    """Where something is wrong, and what to say about the first such place; "{value}" is its number in `values`."""

    bad: Bool[Tensor, "..."]
    message: str
    values: Tensor | None = None
    label: str | None = None
    """What the entries of a flat tensor are; rows where it is None."""


def not_a_mask(name: str, mask: Tensor) -> Fault:
    """Anything but True/False and 0/1."""
    return Fault(
        (mask != 0) & (mask != 1),
        f"{name} is {{value}}; a mask holds True/False or 0/1. Sequence numbers of packed data are not a mask: give "
        "each sequence a row of its own.",
        mask,
    )


def not_finite(name: str, column: Tensor, learned: Bool[Tensor, "batch seq"]) -> Fault:
    """NaN or infinity at a learned token."""
    return Fault(
        learned & ~column.isfinite(),
        name + " is {value} at a learned token. Clear loss_mask there, or mend the value.",
        column,
    )


def outside_vocabulary(name: str, ids: Tensor, vocab_size: int, label: str | None) -> Fault:
    """Ids that a model has no entry for."""
    return Fault(
        (ids < 0) | (ids >= vocab_size),
        f"{name} holds {{value}}, but the model's vocabulary has {vocab_size} entries. Check that tokenizer and model "
        "belong together.",
        ids,
        label,
    )


def refuse(*faults: Fault) -> None:
    """Raise the first fault there is. One question to the device for all; none inside a transform."""
    if inside_transform() or not faults:
        return
    found = torch.stack([fault.bad.any() for fault in faults]).tolist()
    for is_bad, (bad, message, values, label) in zip(found, faults, strict=True):
        if is_bad:
            place = bad.nonzero()[0].tolist()
            names = ("row", "column") if label is None else (label,)
            where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
            value = "" if values is None else values[tuple(place)].item()
            raise ValueError(f"{where}: {message.format(value=value)}")
