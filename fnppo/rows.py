"""The padded rectangle and its rows: made from lists, selected, counted, grouped by prompt."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from fnppo.arguments import check_count
from fnppo.checks import check_batch, check_columns
from fnppo.faults import not_a_mask, refuse
from fnppo.types import PaddedBatch


def padded_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    old_logprobs: Sequence[Sequence[float]] | None = None,
    ref_logprobs: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    pad_token_id: int = 0,
    device: torch.device | str | None = None,
) -> PaddedBatch:
    """A `PaddedBatch` from lists of token ids: prompts padded on the left, responses on the right.

    Args:
        prompts, responses: token ids of each row. Every response token is a learned token.
        old_logprobs, ref_logprobs: one value a response token.
        advantages: one value a row, given to all of its response tokens.
        groups: prompt group of each row.
        pad_token_id: what stands in the padding; it is never read.

    For dialogues of several turns, put the whole dialogue into a prompt and its last response, and replace `loss_mask`.

    Raises:
        ValueError: a list has another number of rows than prompts, a row has not one value a response token, or a token
            or group is not a whole number.

    >>> batch = padded_batch([[5], [7, 8]], [[6], [9]], advantages=[1.0, -1.0])
    >>> batch.input_ids
    tensor([[0, 5, 6],
            [7, 8, 9]])
    >>> batch.advantages
    tensor([[ 0.,  0.,  1.],
            [ 0.,  0., -1.]])
    """
    prompts, responses = _rows("prompts", prompts, int), _rows("responses", responses, int)
    old_logprobs = None if old_logprobs is None else _rows("old_logprobs", old_logprobs, float)
    ref_logprobs = None if ref_logprobs is None else _rows("ref_logprobs", ref_logprobs, float)
    of_rows = None if advantages is None else _rows("advantages", advantages, float, one_each=True)
    group_of = None if groups is None else _rows("groups", groups, int, one_each=True)
    for name, column in (("responses", responses), ("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs),
                         ("advantages", of_rows), ("groups", group_of)):  # fmt: skip
        if column is not None and len(column) != len(prompts):
            raise ValueError(f"{name} has {len(column)} rows, prompts has {len(prompts)}. Give one a prompt.")
    pad_token_id = check_count("pad_token_id", pad_token_id, least=-(2**63), remedy="Give any id; it is never read.")
    prompt_width, response_width = (max(map(len, side), default=0) for side in (prompts, responses))
    shape = (len(prompts), prompt_width + response_width)

    def rectangle(
        left: Iterable[Sequence[Any]], right: Iterable[Sequence[Any]], fill: Any, dtype: torch.dtype
    ) -> Tensor:
        rows = [
            [fill] * (prompt_width - len(prompt)) + [*prompt, *response] + [fill] * (response_width - len(response))
            for prompt, response in zip(left, right, strict=True)
        ]
        return torch.tensor(rows, dtype=dtype, device=device).reshape(shape)

    def about_responses(name: str, column: Sequence[Sequence[float]] | None) -> Tensor | None:
        if column is None:
            return None
        for row, (values, response) in enumerate(zip(column, responses, strict=True)):
            if len(values) != len(response):
                raise ValueError(
                    f"row {row}: {len(values)} {name} for {len(response)} response tokens. Give one a token."
                )
        return rectangle([[]] * len(prompts), column, 0.0, torch.float32)

    there = [[True] * len(prompt) for prompt in prompts], [[True] * len(response) for response in responses]
    loss_mask = rectangle([[]] * len(prompts), there[1], False, torch.bool)
    per_row = None if of_rows is None else torch.tensor(of_rows, dtype=torch.float32, device=device).reshape(-1, 1)
    return PaddedBatch(
        input_ids=rectangle(prompts, responses, pad_token_id, torch.long),
        attention_mask=rectangle(*there, False, torch.bool),
        loss_mask=loss_mask,
        old_logprobs=about_responses("old_logprobs", old_logprobs),
        ref_logprobs=about_responses("ref_logprobs", ref_logprobs),
        advantages=None if per_row is None else torch.where(loss_mask, per_row, 0.0),
        groups=None if group_of is None else torch.tensor(group_of, dtype=torch.long, device=device).reshape(-1),
    )


def _rows(name: str, rows: Any, of: type, *, one_each: bool = False) -> list[list[Any]]:
    """Lists of numbers; a fraction among whole numbers is refused, where torch.tensor would cut it off in silence."""
    convert: Any = operator.index if of is int else float
    what = {int: "whole numbers of 64 bits", float: "numbers"}[of]
    try:
        rows = list(rows)
    except TypeError as error:
        raise ValueError(f"{name} is {rows!r}; it needs one entry a row. Give a list.") from error
    converted: list[list[Any]] = []
    for row, values in enumerate(rows):
        try:
            converted.append([convert(value) for value in ([values] if one_each else values)])
            if of is int and not all(-(2**63) <= number < 2**63 for number in converted[-1]):
                raise OverflowError
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            kind = f"one of the {what}" if one_each else f"a list of {what}"
            raise ValueError(f"{name}, row {row}: {values!r} is not {kind}. Mend it or drop the row.") from error
    return converted


def select_rows(batch: PaddedBatch, rows: Sequence[int] | Shaped[Tensor, "..."]) -> PaddedBatch:
    """The batch of the given rows, in the given order, with every column. A boolean mask of rows selects, too.

    Raises:
        ValueError: a row is not in the batch, the mask has another length, or a column does not fit the others.

    >>> batch = padded_batch([[5], [7, 8]], [[6], [9]])
    >>> select_rows(batch, [1]).input_ids
    tensor([[7, 8, 9]])
    """
    check_columns(batch)
    try:
        index = torch.as_tensor(rows, device=batch.input_ids.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rows are {rows!r}. Give a list of row numbers or a mask of booleans.") from error
    if index.dtype == torch.bool:
        if index.shape != batch.input_ids.shape[:1]:
            raise ValueError(
                f"a mask of rows has shape {tuple(index.shape)}; the batch has {batch.input_ids.shape[0]} rows. "
                "Give one boolean a row."
            )
        index = index.nonzero()[:, 0]
    if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype == torch.uint8):
        raise ValueError(f"rows have dtype {index.dtype}. Give row numbers or a mask of booleans.")
    if index.dim() != 1:
        raise ValueError(f"rows have shape {tuple(index.shape)}. Give a list of row numbers or a mask of booleans.")
    index = index.long()
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < batch.input_ids.shape[0]):
        size = batch.input_ids.shape[0]
        place = next(i for i, row in enumerate(index.tolist()) if not 0 <= row < size)
        raise ValueError(
            f"rows[{place}] is {int(index[place])}: rows are not all in a batch of {size} rows. Count from 0."
        )
    pick = {name: column[index] for name, column in batch._asdict().items() if isinstance(column, Tensor)}
    return batch._replace(**pick, extra={name: column[index] for name, column in batch.extra.items()})


def lengths(batch: PaddedBatch) -> list[int]:
    """Number of existing tokens of each row.

    >>> lengths(padded_batch([[5], [7, 8]], [[6], [9]]))
    [2, 3]
    """
    check_columns(batch)
    refuse(not_a_mask("attention_mask", batch.attention_mask))
    counts: list[int] = (batch.attention_mask != 0).sum(1).tolist()
    return counts


def prompt_groups(batch: PaddedBatch) -> dict[tuple[int, ...], list[int]]:
    """{prompt: its rows}, in the order of first appearance. A prompt is what stands before the first learned token.

    >>> prompt_groups(padded_batch([[7, 8], [5], [7, 8]], [[6], [9], [4]]))
    {(7, 8): [0, 2], (5,): [1]}
    """
    batch = check_batch(batch)
    groups: dict[tuple[int, ...], list[int]] = {}
    before = batch.loss_mask.cumsum(1) == 0
    mask = batch.attention_mask & before
    for row, (ids, in_prompt) in enumerate(zip(batch.input_ids.cpu(), mask.cpu(), strict=True)):
        groups.setdefault(tuple(ids[in_prompt].tolist()), []).append(row)
    return groups
