"""The padded rectangle: made from lists, rows selected."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

import fnppo
from fnppo.testing import padded_batches

NAN = float("nan")


@pytest.mark.core
@given(batch=padded_batches(vocab_size=9), data=st.data())
def test_select_rows(batch, data):
    rows = data.draw(st.lists(st.integers(0, batch.input_ids.shape[0] - 1), max_size=5))
    selected = fnppo.select_rows(batch, rows)
    for i, row in enumerate(rows):
        for name in ("input_ids", "attention_mask", "loss_mask", "groups"):
            assert torch.equal(getattr(selected, name)[i], getattr(batch, name)[row])
        assert_close(selected.advantages[i], batch.advantages[row], equal_nan=True)
        assert_close(selected.extra["column"][i], batch.extra["column"][row], equal_nan=True)
    assert selected.input_ids.shape[0] == len(rows)
    for bad in ([batch.input_ids.shape[0]], [-1]):
        with pytest.raises(ValueError, match=f"are not all in a batch of {batch.input_ids.shape[0]} rows"):
            fnppo.select_rows(batch, bad)


def test_padded_batch():
    batch = fnppo.padded_batch(
        [[1, 2], [3]], [[4], [5, 6]], old_logprobs=[[-0.5], [-1, -2]], advantages=[2, -1], groups=[3, 3], pad_token_id=9
    )
    assert batch.input_ids.tolist() == [[1, 2, 4, 9], [9, 3, 5, 6]]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [False, True, True, True]]
    assert batch.loss_mask.tolist() == [[False, False, True, False], [False, False, True, True]]
    assert batch.old_logprobs.tolist() == [[0, 0, -0.5, 0], [0, 0, -1, -2]]
    assert batch.advantages.tolist() == [[0, 0, 2, 0], [0, 0, -1, -1]]
    assert batch.groups.tolist() == [3, 3]
    assert fnppo.lengths(batch) == [3, 3]
    assert fnppo.padded_batch([], []).input_ids.shape == (0, 0)
    assert fnppo.padded_batch([[1], [2]], [[3], [4, 5]]).input_ids[0, 2] == 0
    for name, column in (
        ("responses", [[3]]), ("old_logprobs", [[0.0]]), ("ref_logprobs", [[0.0]]), ("advantages", [1.0]), ("groups", [1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} has 1 rows, prompts has 2"):
            fnppo.padded_batch([[1], [2]], **({"responses": [[3], [4]]} | {name: column}))
    for name in ("old_logprobs", "ref_logprobs"):
        with pytest.raises(ValueError, match=f"row 1: 1 {name} for 2 response tokens"):
            fnppo.padded_batch([[1], [2]], [[3], [4, 5]], **{name: [[0.0], [0.0]]})


def test_padded_batch_has_the_dtypes_of_its_columns():
    """Whole numbers, nothing at all, and another default dtype: values are float32, masks bool, ids and groups int64."""
    columns = {"old_logprobs": [[-1]], "ref_logprobs": [[-2]], "advantages": [3], "groups": [4]}
    torch.set_default_dtype(torch.float64)
    try:
        batches = [
            fnppo.padded_batch([[]], [[5]], **columns),
            fnppo.padded_batch([], [], **{name: [] for name in columns}),
        ]
        floats = fnppo.padded_batch([[1]], [[5]], old_logprobs=[[-0.5]], ref_logprobs=[[-2.5]], advantages=[0.5])
    finally:
        torch.set_default_dtype(torch.float32)
    for batch in batches:
        assert batch.input_ids.dtype == batch.groups.dtype == torch.int64
        assert batch.attention_mask.dtype == batch.loss_mask.dtype == torch.bool
    for batch in (*batches, floats):
        assert batch.old_logprobs.dtype == batch.ref_logprobs.dtype == batch.advantages.dtype == torch.float32
    assert floats.old_logprobs.tolist() == [[0.0, -0.5]]
    assert floats.ref_logprobs.tolist() == [[0.0, -2.5]]
    assert floats.advantages.tolist() == [[0.0, 0.5]]


def test_rows_by_mask():
    batch = fnppo.padded_batch([[1], [2], [3]], [[4], [5], [6]])
    for mask in ([False, True, True], tensor([False, True, True])):
        assert fnppo.select_rows(batch, mask).input_ids.tolist() == [[2, 5], [3, 6]]
    with pytest.raises(ValueError, match=r"a mask of rows has shape \(2,\); the batch has 3 rows"):
        fnppo.select_rows(batch, tensor([True, False]))
    for rows, shape in ((tensor(1), r"\(\)"), (tensor([[1]]), r"\(1, 1\)")):
        with pytest.raises(ValueError, match=f"rows have shape {shape}"):
            fnppo.select_rows(batch, rows)
    with pytest.raises(ValueError, match="rows have dtype torch.uint8"):
        fnppo.select_rows(batch, tensor([1, 0, 1], dtype=torch.uint8))
    with pytest.raises(ValueError, match="rows have dtype torch.float32"):
        fnppo.select_rows(batch, tensor([0.0]))


def test_prompt_groups_by_hand():
    batch = fnppo.padded_batch([[7, 8], [5], [7, 8]], [[6], [9], [4]])
    assert fnppo.prompt_groups(batch) == {(7, 8): [0, 2], (5,): [1]}
