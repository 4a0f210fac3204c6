"""Malformed batches end in a ValueError that names the place and the way out."""

import pytest
import torch
from torch import tensor

from fnppo import PaddedBatch, pack_sequences, pad_sequences, padded_batch
from fnppo.checks import check_batch, check_vocabulary

GOOD = padded_batch([[1, 2], [3]], [[4], [5, 6]], advantages=[1.0, 2.0], old_logprobs=[[-1.0], [-1.0, -1.0]])


def with_value(name, row, column, value):
    changed = getattr(GOOD, name).clone()
    changed[row, column] = value
    return GOOD._replace(**{name: changed})


BAD = {
    "learned but absent": (
        with_value("attention_mask", 1, 3, False),
        "row 1, column 3: loss_mask is set where attention_mask is not",
    ),
    "learned but first": (with_value("loss_mask", 1, 1, True), "row 1, column 1: loss_mask is set on the first token"),
    "learned, first after padding": (
        padded_batch([[], [1]], [[2], [3]]),
        "row 0, column 1: loss_mask is set on the first",
    ),
    "negative id": (with_value("input_ids", 1, 2, -100), "row 1, column 2: input_ids is -100"),
    "NaN advantage": (
        with_value("advantages", 1, 2, float("nan")),
        "row 1, column 2: advantages is nan at a learned token",
    ),
    "infinite old_logprobs": (with_value("old_logprobs", 0, 2, -float("inf")), "row 0, column 2: old_logprobs is -inf"),
    "short column": (
        GOOD._replace(advantages=torch.zeros(2, 2)),
        r"advantages has shape \(2, 2\), input_ids has \(2, 4\)",
    ),
    "short mask": (GOOD._replace(loss_mask=torch.zeros(2, 2, dtype=torch.bool)), r"loss_mask has shape \(2, 2\)"),
    "short extra": (GOOD._replace(extra={"mine": torch.zeros(2)}), r"mine has shape \(2,\)"),
    "groups": (GOOD._replace(groups=tensor([1])), r"groups has shape \(1,\)"),
    "one row": (PaddedBatch(*(x[0] for x in GOOD[:3])), r"a batch needs \[batch, seq\]"),
    "float ids": (GOOD._replace(input_ids=GOOD.input_ids.float()), "token ids are integers"),
    "other device": (GOOD._replace(advantages=torch.zeros(2, 4, device="meta")), "advantages is on meta"),
}


@pytest.mark.parametrize("layout", [pack_sequences, pad_sequences])
@pytest.mark.parametrize("what", BAD)
def test_bad_batches_are_refused(what, layout):
    batch, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        layout(batch)


def test_a_good_batch_passes_and_masked_values_are_not_read():
    batch = check_batch(with_value("advantages", 0, 0, float("nan")))
    assert batch.attention_mask.dtype == torch.bool
    numbers = GOOD._replace(attention_mask=GOOD.attention_mask.long(), loss_mask=GOOD.loss_mask.double())
    for name in ("attention_mask", "loss_mask"):
        assert torch.equal(getattr(check_batch(numbers), name), getattr(GOOD, name))


def test_vocabulary():
    check_vocabulary(GOOD, 7)
    with pytest.raises(ValueError, match="row 1, column 3: input_ids is 6, but the model's vocabulary has 6 entries"):
        check_vocabulary(GOOD, 6)
    check_vocabulary(with_value("input_ids", 1, 0, 10**6), 7)  # padding is never read
