"""Assertions for any trainer: what must not change a number does not change it.

Each takes a function of yours, calls it on batches that hypothesis draws, and compares the results with those on another
batch that means the same. A failure shows the smallest batch that was found, and the bug that usually makes that pattern.

Your function gets a `PaddedBatch` (`input_ids`, `attention_mask`, `loss_mask` and float columns of shape [batch, seq]) on
the CPU and answers with a tensor or any tree of tensors: log-probs, a loss, gradients. It must depend on its arguments
alone, so a method that takes an optimizer step has to work on a copy of the weights. It gets copies, and may change them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from fnppo.rows import select_rows
from fnppo.testing import causes
from fnppo.testing.differences import largest_difference
from fnppo.testing.perturb import fillings, other_tokens, spread, without_padding
from fnppo.testing.strategies import padded_batches, splits
from fnppo.testing.trial import Isolated, check_result, fail, run
from fnppo.types import PaddedBatch

TOLERANCE = 1e-4
"""Room for float32 rounding, which a bug is seldom as small as: in nats for values a token or a row, else relative."""

Batches = st.SearchStrategy[PaddedBatch]
nats = partial(largest_difference, floor=1.0)


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
        tolerance: largest difference allowed, in nats (relative to values above 1).
        max_examples: number of batches.

    Raises:
        AssertionError: with the smallest failing batch and the usual cause.

    >>> assert_layout_invariant(lambda batch: -batch.input_ids.float(), vocab_size=11)
    >>> assert_layout_invariant(lambda batch: batch.attention_mask.float().cumsum(0), vocab_size=11)  # reads other rows
    Traceback (most recent call last):
    AssertionError: Log-probs change with the layout...
    """

    fn = Isolated(logprob_fn)

    def check(batch: PaddedBatch) -> None:
        check_result(together := fn(batch), tuple(batch.input_ids.shape))
        for row in range(batch.input_ids.shape[0]):
            there, alone = select_rows(batch, [row]), without_padding(batch, row)
            if not bool(alone.loss_mask.any()):
                continue
            check_result(unpadded := fn(alone), tuple(alone.input_ids.shape))
            expected = spread(unpadded, batch, row)
            found = nats(together[row : row + 1], expected, there.loss_mask)
            if found.size <= tolerance:
                continue
            padding_alone = nats(fn(there), expected, there.loss_mask).size > tolerance
            cause = causes.of_padding(there) if padding_alone else causes.TOGETHER
            fail(
                batch,
                f"Log-probs change with the layout: row {row}, column {found.place[1]} has {found.here:.4g} in this batch, "
                f"and {found.there:.4g} when its row stands alone and unpadded.",
                cause,
            )

    batches = everyday_batches(vocab_size=vocab_size) if batches is None else batches
    run(check, batches, vocab_size=vocab_size, tolerance=tolerance, max_examples=max_examples)


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

    isolated = Isolated(fn)

    def check(batch: PaddedBatch) -> None:
        shape = tuple(batch.input_ids.shape)
        check_result(before := isolated(batch), shape, shape[:1])
        for row in range(batch.input_ids.shape[0]):
            after = isolated(other_tokens(batch, row, vocab_size=vocab_size))
            others = torch.arange(batch.input_ids.shape[0]) != row
            found = nats(after, before, others if before.dim() == 1 else batch.loss_mask & others[:, None])
            if found.size > tolerance:
                trio = select_rows(batch, [found.place[0], row, found.place[0]])
                fail(
                    batch,
                    f"Rows are not independent: with other tokens in row {row}, row {found.place[0]} changes from "
                    f"{found.there:.4g} to {found.here:.4g}.",
                    causes.of_leak(
                        isolated(trio), isolated(other_tokens(trio, 1, vocab_size=vocab_size)), trio, tolerance
                    ),
                )

    batches = everyday_batches(vocab_size=vocab_size, min_rows=2) if batches is None else batches
    run(check, batches, vocab_size=vocab_size, tolerance=tolerance, max_examples=max_examples)


def assert_microbatch_invariant(
    loss_fn: Callable[[list[PaddedBatch]], Any],
    *,
    vocab_size: int,
    batches: Batches | None = None,
    tolerance: float = TOLERANCE,
    max_examples: int = 50,
    empty_micro_batches: bool = True,
) -> None:
    """A mini-batch has the same loss and gradients however its rows are ordered and cut into micro-batches.

    Args:
        loss_fn: the micro-batches of one mini-batch -> its loss, or any tree of tensors such as (loss, gradients).
        vocab_size, batches, tolerance, max_examples: as in `assert_layout_invariant`. Where your loss reads weights that
            are computed once per mini-batch, map the strategy: `everyday_batches(vocab_size=V).map(token_mean)`.
        empty_micro_batches: also try micro-batches without a learned token, as filters and truncation make them. False for
            a trainer that never has one.

    Raises:
        AssertionError: with the smallest failing batch, its split and the usual cause.

    >>> def mean_of_means(micro_batches):
    ...     return sum((b.old_logprobs * b.loss_mask).sum() / b.loss_mask.sum().clamp(min=1) for b in micro_batches)
    >>> assert_microbatch_invariant(mean_of_means, vocab_size=11)
    Traceback (most recent call last):
    AssertionError: The result changes with the micro-batches...
    """

    fn = Isolated(loss_fn)

    def check(all_learn: bool, batch: PaddedBatch, data: st.DataObject) -> None:
        groups = data.draw(splits(batch.input_ids.shape[0]))
        pieces = [select_rows(batch, rows) for rows in groups]
        assume(not all_learn or all(bool(piece.loss_mask.any()) for piece in pieces))
        rows = f"rows {' | '.join(map(str, groups))}"
        whole = fn([batch])
        try:
            split = fn(pieces)
        except Exception as error:
            if all_learn:
                raise
            fail(batch, f"{rows} raise {type(error).__name__}: {error}", causes.NO_TARGETS)
        found = largest_difference(split, whole)
        if found.size > tolerance:
            fail(
                batch,
                f"The result changes with the micro-batches: {rows} give {found.here:.4g} where one micro-batch gives "
                f"{found.there:.4g}{found.where}.",
                causes.of_split(fn, batch, groups, tolerance) if all_learn else causes.NO_TARGETS,
            )

    batches = everyday_batches(vocab_size=vocab_size, min_rows=2) if batches is None else batches
    # First without micro-batches that have no target, which many trainers do not expect.
    for all_learn in (True, False)[: 1 + empty_micro_batches]:
        strategies = st.just(all_learn), batches, st.data()
        run(check, *strategies, vocab_size=vocab_size, tolerance=tolerance, max_examples=max_examples)


def assert_masked_values_unread(
    fn: Callable[[PaddedBatch], Any],
    *,
    vocab_size: int,
    batches: Batches | None = None,
    tolerance: float = TOLERANCE,
    max_examples: int = 50,
) -> None:
    """What stands in masked slots changes nothing: other tokens in the padding, and 1, 1e9 or NaN in each float column.

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

    isolated = Isolated(fn)

    def check(batch: PaddedBatch) -> None:
        before = isolated(batch)
        for column, filler, filled in fillings(batch, vocab_size=vocab_size):
            found = largest_difference(isolated(filled), before, batch.loss_mask)
            if found.size > tolerance:
                mask = "attention_mask" if column == "input_ids" else "loss_mask"
                fail(
                    batch,
                    f"{column} is read where {mask} is 0: with {filler} there the result is {found.here:.4g}, as it came it "
                    f"was {found.there:.4g}{found.where}.",
                    causes.of_filler(column, filler),
                )

    batches = everyday_batches(vocab_size=vocab_size) if batches is None else batches
    run(check, batches, vocab_size=vocab_size, tolerance=tolerance, max_examples=max_examples)
