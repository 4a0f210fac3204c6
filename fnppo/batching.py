"""Rows into mini-batches (one optimizer step each) and micro-batches (one forward each, under a token limit)."""

from collections.abc import Callable, Sequence

import torch

from fnppo.arguments import check_count
from fnppo.grouping import group_items
from fnppo.seeding import check_seed


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, min_groups: int = 0, hidden_size: int = 2048
) -> list[list[int]]:
    """Groups of rows with at most `max_tokens` real tokens each: few, and of like work.

    The number of groups is within 2% of a lower bound, or what best fit needs, from the longest row to the shortest;
    `fnppo.grouping` says how.

    Args:
        lengths: tokens of each row, such as `fnppo.lengths(batch)`. Padding does not count.
        max_tokens: the limit, never exceeded.
        min_groups: make at least so many groups, such as the largest number that a data-parallel rank needs. Work is
            spread over all of them; where there are fewer rows, the last groups are empty.
        hidden_size: of the model; the layouts of `update_policy` use the default. A row of n tokens is taken for
            n + n² / (12 · hidden_size) units of work, where attention is the second term.

    Returns:
        Row numbers of each group, ascending within a group; groups ordered by their first row. Every row is in exactly
        one group. Without rows there is no group but those asked for.

    Raises:
        ValueError: one row alone is over the limit, a number is not whole, or one is below its least value.

    >>> plan_microbatches([6, 6, 2, 2], max_tokens=8)
    [[0, 2], [1, 3]]
    >>> plan_microbatches([3, 12], max_tokens=8)
    Traceback (most recent call last):
        ...
    ValueError: row 1 has 12 tokens, max_tokens is 8. Raise max_tokens to at least 12, or shorten or drop the row.
    """
    lengths, max_tokens = _checked(lengths, max_tokens)
    if lengths:
        refuse_over(lengths.index(longest := max(lengths)), longest, max_tokens)
    work = work_of(hidden_size)
    check_min_groups(min_groups)
    works = [work(max(n, 1)) for n in lengths]  # rows without tokens go around as if they had one
    return group_items(lengths, works, limit=max_tokens, min_groups=min_groups)


def plan_minibatches(rows: int, *, mini_batch_size: int, num_epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """The rows of each optimizer step: every epoch in an order of its own, drawn from `seed`, cut into mini-batches.

    The last mini-batch of an epoch is shorter where `mini_batch_size` does not divide `rows`.

    Raises:
        ValueError: a size is below 1, or a number is not whole.

    >>> [len(step) for step in plan_minibatches(10, mini_batch_size=4, num_epochs=2)]
    [4, 4, 2, 4, 4, 2]
    """
    check_count("mini_batch_size", mini_batch_size, least=1, remedy="It counts rows of one optimizer step.")
    check_count("num_epochs", num_epochs, least=1, remedy="To make no step, do not call it.")
    check_count("rows", rows, least=0, remedy="Give the number of rows of the batch.")
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    epochs = [torch.randperm(rows, generator=generator, device="cpu").tolist() for _ in range(num_epochs)]
    return [order[start : start + mini_batch_size] for order in epochs for start in range(0, rows, mini_batch_size)]


def check_min_groups(min_groups: int) -> None:
    """A `ValueError` unless it counts."""
    check_count("min_groups", min_groups, least=0, remedy="Leave it out to ask for none.")


def work_of(hidden_size: int) -> Callable[[int], int]:
    """Work of a row by its length, in whole numbers: 12 · hidden_size times that of `plan_microbatches`."""
    per_token = 12 * check_count("hidden_size", hidden_size, least=1, remedy="Use config.hidden_size.")
    return lambda length: length * (per_token + length)


def _checked(lengths: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
    """Whole numbers: a negative length, or a limit that is NaN, would let a group grow over any limit."""
    if not hasattr(lengths, "__len__"):
        raise ValueError(f"lengths is {lengths!r}; one number a row is needed. Use fnppo.lengths(batch).")
    limit = checked_limit(max_tokens)
    remedy = "Use fnppo.lengths(batch)."
    if set(map(type, lengths)) == {int} and min(lengths) >= 0:  # much quicker than what follows
        return list(lengths), limit
    return [check_count(f"the length of row {i}", n, least=0, remedy=remedy) for i, n in enumerate(lengths)], limit


def checked_limit(max_tokens: int) -> int:
    """`max_tokens`, or a `ValueError` unless it counts."""
    return check_count("max_tokens", max_tokens, least=1, remedy="A micro-batch holds at least 1 token.")


def refuse_over(row: int, length: int, max_tokens: int) -> None:
    """A `ValueError` if a row is longer than a micro-batch may be."""
    if length > max_tokens:
        raise ValueError(
            f"row {row} has {length} tokens, max_tokens is {max_tokens}. Raise max_tokens to at least {length}, or "
            "shorten or drop the row."
        )
