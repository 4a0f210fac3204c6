"""Assertions for any trainer: what must not change a number does not change it.

Each takes a function of yours, calls it on batches that hypothesis draws, and compares the results with those on another
batch that means the same. A failure shows the smallest batch that was found, and the bug that usually makes that pattern.

Your function gets a `PaddedBatch` (`input_ids`, `attention_mask`, `loss_mask` and float columns of shape [batch, seq]) on
the CPU and answers with a tensor or any tree of tensors: log-probs, a loss, gradients. It must depend on its arguments
alone, so a method that takes an optimizer step has to work on a copy of the weights.
"""

import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

import optree
import torch
from hypothesis import HealthCheck, Phase, Verbosity, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fnppo.packing import select_rows
from fnppo.testing import causes
from fnppo.testing.differences import largest_difference
from fnppo.testing.drawing import LEGEND, draw_batch
from fnppo.testing.strategies import padded_batches, splits
from fnppo.types import PaddedBatch

TOLERANCE = 1e-4
"""Room for float32 rounding, of which a bug is seldom as small: a difference counts relative to values above 1."""

Batches = st.SearchStrategy[PaddedBatch]


def everyday_batches(*, vocab_size: int, min_rows: int = 1) -> Batches:
    """What every trainer meets: rows of two to eight tokens, padded left or right, with zeros in the masked slots.

    For the rest (empty rows, holes in the mask, NaN in masked slots) pass `padded_batches(vocab_size=...)` instead.
    """
    return padded_batches(
        vocab_size=vocab_size,
        min_rows=min_rows,
        min_length=2,
        padding=("none", "right", "left"),
        garbage=False,
        dtype=torch.float32,
    ).filter(lambda batch: bool(batch.loss_mask.any()))


def assert_layout_invariant(
    logprob_fn: Callable[[PaddedBatch], Tensor],
    *,
    vocab_size: int,
    batches: Batches | None = None,
    tolerance: float = TOLERANCE,
    max_examples: int = 50,
) -> None:
    """A token's log-prob is the same wherever padding stands and whatever rows are beside it.

    Args:
        logprob_fn: batch -> log-prob of each token, [batch, seq]; column t is about token t. Only learned tokens are read.
        vocab_size: the model's; drawn token ids are below it.
        batches: strategy for the batches; `everyday_batches` if None.
        tolerance: largest difference allowed, relative to values above 1. Half precision needs more, say 0.1.
        max_examples: number of batches.

    Raises:
        AssertionError: with the smallest failing batch and the usual cause.

    >>> assert_layout_invariant(lambda batch: -batch.input_ids.float(), vocab_size=11)
    >>> assert_layout_invariant(lambda batch: batch.attention_mask.float().cumsum(0), vocab_size=11)  # reads other rows
    Traceback (most recent call last):
    AssertionError: Log-probs change with the layout...
    """

    def check(batch: PaddedBatch) -> None:
        together = logprob_fn(batch)
        for row in range(batch.input_ids.shape[0]):
            there, alone = select_rows(batch, [row]), _without_padding(batch, row)
            if not bool(alone.loss_mask.any()):
                continue
            expected = _spread(logprob_fn(alone), batch, row)
            found = largest_difference(together[row : row + 1], expected, there.loss_mask)
            if found.size <= tolerance:
                continue
            padding_alone = largest_difference(logprob_fn(there), expected, there.loss_mask).size > tolerance
            cause = causes.of_padding(there) if padding_alone else causes.TOGETHER
            _fail(
                batch,
                f"Log-probs change with the layout: row {row}, column {found.place[1]} has {found.here:.4g} in this batch, "
                f"and {found.there:.4g} when its row stands alone and unpadded.",
                cause,
            )

    _run(check, batches or everyday_batches(vocab_size=vocab_size), max_examples)


def assert_rows_independent(
    fn: Callable[[PaddedBatch], Tensor],
    *,
    vocab_size: int,
    batches: Batches | None = None,
    tolerance: float = TOLERANCE,
    max_examples: int = 50,
) -> None:
    """Other tokens in one row change nothing in the others.

    Args:
        fn: batch -> a value a token [batch, seq] (only learned tokens are read) or a row [batch].
        vocab_size, batches, tolerance, max_examples: as in `assert_layout_invariant`.

    Raises:
        AssertionError: with the smallest failing batch and the usual cause.

    >>> assert_rows_independent(lambda batch: batch.input_ids.float(), vocab_size=11)
    >>> assert_rows_independent(lambda batch: batch.input_ids.float() - batch.input_ids.float().mean(), vocab_size=11)
    Traceback (most recent call last):
    AssertionError: Rows are not independent...
    """

    def check(batch: PaddedBatch) -> None:
        before = fn(batch)
        for row in range(batch.input_ids.shape[0]):
            after = fn(other_tokens(batch, row, vocab_size=vocab_size))
            others = torch.arange(batch.input_ids.shape[0]) != row
            found = largest_difference(
                after, before, others if before.dim() == 1 else batch.loss_mask & others[:, None]
            )
            if found.size > tolerance:
                trio = select_rows(batch, [found.place[0], row, found.place[0]])
                _fail(
                    batch,
                    f"Rows are not independent: with other tokens in row {row}, row {found.place[0]} changes from "
                    f"{found.there:.4g} to {found.here:.4g}.",
                    causes.of_leak(fn(trio), fn(other_tokens(trio, 1, vocab_size=vocab_size)), trio, tolerance),
                )

    _run(check, batches or everyday_batches(vocab_size=vocab_size, min_rows=2), max_examples)


def assert_microbatch_invariant(
    loss_fn: Callable[[list[PaddedBatch]], Any],
    *,
    vocab_size: int,
    batches: Batches | None = None,
    tolerance: float = TOLERANCE,
    max_examples: int = 50,
) -> None:
    """A mini-batch has the same loss and gradients however its rows are ordered and cut into micro-batches.

    Args:
        loss_fn: the micro-batches of one mini-batch -> its loss, or any tree of tensors such as (loss, gradients).
        vocab_size, batches, tolerance, max_examples: as in `assert_layout_invariant`. Where your loss reads weights that
            are computed once per mini-batch, map the strategy: `everyday_batches(vocab_size=V).map(token_mean)`.

    Raises:
        AssertionError: with the smallest failing batch, its split and the usual cause.

    >>> def mean_of_means(micro_batches):
    ...     return sum((b.old_logprobs * b.loss_mask).sum() / b.loss_mask.sum().clamp(min=1) for b in micro_batches)
    >>> assert_microbatch_invariant(mean_of_means, vocab_size=11)
    Traceback (most recent call last):
    AssertionError: The result changes with the micro-batches...
    """

    def check(all_learn: bool, batch: PaddedBatch, data: st.DataObject) -> None:
        groups = data.draw(splits(batch.input_ids.shape[0]))
        pieces = [select_rows(batch, rows) for rows in groups]
        assume(not all_learn or all(bool(piece.loss_mask.any()) for piece in pieces))
        split, whole = loss_fn(pieces), loss_fn([batch])
        found = largest_difference(split, whole)
        if found.size > tolerance:
            _fail(
                batch,
                f"The result changes with the micro-batches: rows {' | '.join(map(str, groups))} give {found.here:.4g} "
                f"where one micro-batch gives {found.there:.4g}{found.where}.",
                causes.of_split(loss_fn, batch, groups, tolerance) if all_learn else causes.NO_TARGETS,
            )

    strategy = batches or everyday_batches(vocab_size=vocab_size, min_rows=2)
    for all_learn in (
        True,
        False,
    ):  # first without micro-batches that have no target, which many trainers do not expect
        _settings(max_examples)(given(st.just(all_learn), strategy, st.data())(check))()


def assert_masked_values_unread(
    fn: Callable[[PaddedBatch], Any],
    *,
    vocab_size: int,
    batches: Batches | None = None,
    tolerance: float = TOLERANCE,
    max_examples: int = 50,
) -> None:
    """What stands in masked slots changes nothing: other tokens in the padding, and 1, 1e9 or NaN in float columns.

    Args:
        fn: batch -> loss, gradients or values a token ([batch, seq], of which only learned tokens are read): a tensor or
            any tree of them.
        vocab_size, batches, tolerance, max_examples: as in `assert_layout_invariant`.

    Raises:
        AssertionError: with the smallest failing batch, the column that was read, and the usual cause.

    >>> assert_masked_values_unread(lambda batch: torch.where(batch.loss_mask, batch.advantages, 0).sum(), vocab_size=11)
    >>> assert_masked_values_unread(lambda batch: (batch.advantages * batch.loss_mask).sum(), vocab_size=11)
    Traceback (most recent call last):
    AssertionError: advantages is read where loss_mask is 0...
    """

    def check(batch: PaddedBatch) -> None:
        before = fn(batch)
        for column, mask, filler in _fillings(batch, vocab_size):
            values = getattr(batch, column)
            after = fn(batch._replace(**{column: torch.where(mask, values, filler)}))  # type: ignore[arg-type]
            found = largest_difference(after, before, batch.loss_mask)
            if found.size > tolerance:
                name = "loss_mask" if column != "input_ids" else "attention_mask"
                _fail(
                    batch,
                    f"{column} is read where {name} is 0: with {filler} there the result is {found.here:.4g}, with 0 it was "
                    f"{found.there:.4g}{found.where}.",
                    causes.of_filler(column, filler),
                )

    strategy = batches or everyday_batches(vocab_size=vocab_size)
    _run(check, strategy, max_examples)


def _fillings(batch: PaddedBatch, vocab_size: int) -> list[tuple[str, Tensor, float]]:
    fillings: list[tuple[str, Tensor, float]] = [("input_ids", batch.attention_mask, vocab_size - 1)]
    for filler in (1.0, 1e9, float("nan")):
        for column in ("old_logprobs", "advantages", "ref_logprobs"):
            if getattr(batch, column) is not None:
                fillings.append((column, batch.loss_mask, filler))
    return fillings


def other_tokens(batch: PaddedBatch, row: int, *, vocab_size: int) -> PaddedBatch:
    """The batch with other tokens in one row, all of them."""
    others = (batch.input_ids[row] + 1) % vocab_size
    ids = batch.input_ids.clone()
    ids[row] = torch.where(batch.attention_mask[row], others, ids[row])
    return batch._replace(input_ids=ids)


def _without_padding(batch: PaddedBatch, row: int) -> PaddedBatch:
    """One row with its existing tokens only."""
    here: Any = select_rows(batch, [row])
    exists = here.attention_mask[0]
    unpadded: Any = optree.tree_map(lambda column: column[:, exists] if column.dim() == 2 else column, here)
    return unpadded


def _spread(values: Tensor, batch: PaddedBatch, row: int) -> Tensor:
    """The values of an unpadded row, at the places of its tokens in the batch."""
    spread = values.new_zeros(1, batch.input_ids.shape[1])
    spread[:, batch.attention_mask[row]] = values.detach()
    return spread


def _fail(batch: PaddedBatch, what: str, cause: str) -> NoReturn:
    what, cause = (textwrap.fill(text, 110, break_on_hyphens=False) for text in (what, f"Usual cause: {cause}"))
    raise AssertionError(f"{what}\n\n{draw_batch(batch)}\n({LEGEND})\n\n{cause}")


def _run(check: Callable[[PaddedBatch], None], batches: Batches, max_examples: int) -> None:
    _settings(max_examples)(given(batches)(check))()


def _settings(max_examples: int) -> settings:
    """The same examples in every run, shrunk when one fails; nothing is written to disk."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
