"""Hypothesis strategies for the batches that the field produces, and for ways to split them."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import nn

from fnppo.testing.architectures import tiny_causal_lm
from fnppo.types import PaddedBatch

NAN = float("nan")
PADDING = ("none", "right", "left", "both", "holes")
"""Where padding may stand: nowhere, after, before or on both sides of a row's tokens, and between them."""
NO_TOKENS = (-100, 0, 10**6)
"""What may stand in `input_ids` where no token is."""


@st.composite
def padded_batches(
    draw: st.DrawFn,
    *,
    vocab_size: int,
    max_rows: int = 4,
    max_length: int = 8,
    min_rows: int = 1,
    min_length: int = 0,
    padding: Sequence[str] = PADDING,
    garbage: bool = True,
    dtype: torch.dtype = torch.float64,
) -> PaddedBatch:
    """Batches of every shape that the field produces.

    Padding left, right, on both sides and as holes; multi-turn loss masks; rows of length 0 and 1; rows and batches
    without a target; several responses to one prompt.

    Args:
        vocab_size: token ids are below this.
        max_rows, max_length, min_rows, min_length: how many rows, and how many tokens a row may have; a row with holes
            may have fewer than `min_length`.
        padding: where padding may stand, see `PADDING`; the first is what a failing example shrinks to.
        garbage: fill slots that nobody may read with what does harm: NaN in float columns, ids outside of any
            vocabulary. False fills them with 0.
        dtype: of the float columns.

    >>> batch = padded_batches(vocab_size=13, padding=["left"]).example()  # doctest: +SKIP
    """
    rows = draw(st.integers(min_rows, max_rows))
    width = draw(st.integers(max(min_length, 1), max_length))
    kind = draw(st.sampled_from(list(padding)))
    attention, loss = torch.zeros(rows, width, dtype=torch.bool), torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        if kind == "none":
            attention[row] = True
        elif kind == "holes":
            attention[row] = torch.tensor(draw(st.lists(st.booleans(), min_size=width, max_size=width)))
        else:
            length = draw(st.integers(min_length, width))
            start = {"left": width - length, "right": 0, "both": (width - length) // 2}[kind]
            attention[row, start : start + length] = True
        exists = attention[row].nonzero()[:, 0].tolist()
        for column in exists[1:]:  # the first token has no predictor
            loss[row, column] = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    ids = torch.randint(vocab_size, (rows, width), generator=generator)
    for row in range(1, rows):
        if draw(st.booleans()):  # another response to the prompt of an earlier row
            source = draw(st.integers(0, row - 1))
            prompt = loss[source].cumsum(0) == 0
            attention[row] = attention[source]
            ids[row, prompt] = ids[source, prompt]
            loss[row] = loss[source] & ((loss[source].cumsum(0) == 1) | (torch.rand(width, generator=generator) < 0.5))

    ids = torch.where(attention, ids, draw(st.sampled_from(NO_TOKENS)) if garbage else 0)
    return _with_columns(ids, attention, loss, generator, vocab_size=vocab_size, garbage=garbage, dtype=dtype)


@st.composite
def branching_batches(
    draw: st.DrawFn,
    *,
    vocab_size: int,
    max_rows: int = 5,
    max_length: int = 12,
    padding: Sequence[str] = PADDING,
    garbage: bool = True,
    dtype: torch.dtype = torch.float64,
) -> PaddedBatch:
    """Batches whose rows grow on each other: dialogues in which a row is an earlier one and a further turn, rollouts of a
    tree search that fork anywhere, rows that are the same, and rows that have nothing in common.

    Rows go on from rows that go on from others, to any depth. What is learned is drawn for each row by itself, so a token
    that two rows share may be a target of both, of one or of none, with other advantages in each.

    Args:
        vocab_size, max_rows, max_length, padding, garbage, dtype: as in `padded_batches`. Without padding, rows shorter than
            the longest still have it on the right.

    >>> batch = branching_batches(vocab_size=13).example()  # doctest: +SKIP
    """
    rows: list[list[int]] = []
    token = st.integers(0, vocab_size - 1)
    for row in range(draw(st.integers(2, max(max_rows, 2)))):
        trunk: list[int] = rows[draw(st.integers(0, row - 1))] if row and draw(st.booleans()) else []
        fork = draw(st.integers(0, len(trunk)))
        further = draw(st.lists(token, min_size=0 if trunk else 1, max_size=max(max_length - fork, 1)))
        rows.append(trunk[:fork] + further)
    kind = draw(st.sampled_from(list(padding)))
    width = max(map(len, rows)) + (0 if kind == "none" else draw(st.integers(0, 2)))
    attention, loss = torch.zeros(len(rows), width, dtype=torch.bool), torch.zeros(len(rows), width, dtype=torch.bool)
    ids = torch.full((len(rows), width), draw(st.sampled_from(NO_TOKENS)) if garbage else 0)
    for row, tokens in enumerate(rows):
        free = width - len(tokens)
        start = {"left": free, "both": free // 2}.get(kind, 0)
        columns = list(range(start, start + len(tokens)))
        if kind == "holes":
            columns = sorted(draw(st.permutations(range(width)))[: len(tokens)])
        attention[row, columns] = True
        ids[row, columns] = torch.tensor(tokens, dtype=torch.long)
        for column in columns[1:]:  # the first token has no predictor
            loss[row, column] = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return _with_columns(ids, attention, loss, generator, vocab_size=vocab_size, garbage=garbage, dtype=dtype)


def _with_columns(
    ids: torch.Tensor,
    attention: torch.Tensor,
    loss: torch.Tensor,
    generator: torch.Generator,
    *,
    vocab_size: int,
    garbage: bool,
    dtype: torch.dtype,
) -> PaddedBatch:
    """The batch of these ids and masks, with random columns, which hold what does harm where nobody may read."""

    def live(values: torch.Tensor) -> torch.Tensor:
        return torch.where(loss, values, NAN if garbage else 0.0)

    rows, width = ids.shape
    normal = torch.randn(3, rows, width, generator=generator, dtype=dtype)
    return PaddedBatch(
        input_ids=ids,
        attention_mask=attention,
        loss_mask=loss,
        # around log(1/vocab), so that ratios fall on both sides of the clips
        old_logprobs=live(normal[0] * 0.5 - torch.tensor(float(vocab_size)).log()),
        advantages=live(normal[1]),
        ref_logprobs=live(normal[2] * 0.5 - torch.tensor(float(vocab_size)).log()),
        groups=torch.randint(3, (rows,), generator=generator),
        extra={"column": live(normal[0])},
    )


@st.composite
def splits(draw: st.DrawFn, rows: int) -> list[list[int]]:
    """The rows 0 … rows - 1 in any order, cut into any number of groups."""
    order = draw(st.permutations(range(rows)))
    cuts = draw(st.lists(st.booleans(), min_size=rows - 1, max_size=rows - 1))
    groups: list[list[int]] = [[order[0]]]
    for row, cut in zip(order[1:], cuts, strict=True):
        if cut:
            groups.append([])
        groups[-1].append(row)
    return groups


FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2", "gpt2", "gpt_oss", "llama4", "deepseek_v3", "granite", "phi")
"""Rotary and absolute positions, windows, chunks, softcaps, sinks, QK-norm, experts, latent attention, multipliers, biases."""


@st.composite
def tiny_models(draw: st.DrawFn, *, vocab_size: int = 13, architectures: Sequence[str] = FAMILIES) -> nn.Module:
    """A tiny random causal LM of one of the `architectures`, in float64, without gradients, with eager attention.

    Draw batches for it with `padded_batches(vocab_size=...)` of the same vocabulary.
    """
    model = tiny_causal_lm(draw(st.sampled_from(architectures)), vocab_size=vocab_size, seed=draw(st.integers(0, 9)))
    return model.double().requires_grad_(False)
