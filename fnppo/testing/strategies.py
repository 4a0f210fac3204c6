"""Hypothesis strategies for the batches that the field produces, and for ways to split them."""

import torch
from hypothesis import strategies as st

from fnppo.types import PaddedBatch

NAN = float("nan")


@st.composite
def padded_batches(
    draw: st.DrawFn,
    *,
    vocab_size: int,
    max_rows: int = 4,
    max_length: int = 8,
    dtype: torch.dtype = torch.float64,
) -> PaddedBatch:
    """Padding left, right, on both sides and as holes; multi-turn loss masks; rows of length 0 and 1; rows and batches
    without a target; several responses to one prompt. Masked slots hold garbage: NaN in float columns, ids outside of any vocabulary in `input_ids`.
    """
    rows = draw(st.integers(1, max_rows))
    width = draw(st.integers(1, max_length))
    kind = draw(st.sampled_from(["left", "right", "both", "holes", "none"]))
    attention, loss = torch.zeros(rows, width, dtype=torch.bool), torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        if kind == "none":
            attention[row] = True
        elif kind == "holes":
            attention[row] = torch.tensor(draw(st.lists(st.booleans(), min_size=width, max_size=width)))
        else:
            length = draw(st.integers(0, width))
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

    def live(values: torch.Tensor) -> torch.Tensor:
        return torch.where(loss, values, NAN)

    normal = torch.randn(3, rows, width, generator=generator, dtype=dtype)
    return PaddedBatch(
        input_ids=torch.where(attention, ids, draw(st.sampled_from([-100, 0, 10**6]))),
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
