"""Layouts: what is packed where, that both layouts have the same targets, and what is refused."""

from functools import partial

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

import fnppo
from fnppo import PaddedBatch, pack_sequences, pad_sequences
from fnppo.testing import branching_batches, padded_batches

NAN = float("nan")


def batch_of(attention_mask, loss_mask=None, input_ids=None):
    attention_mask = tensor(attention_mask)
    ids = torch.arange(attention_mask.numel()).reshape(attention_mask.shape) if input_ids is None else tensor(input_ids)
    loss = torch.zeros_like(attention_mask) if loss_mask is None else tensor(loss_mask)
    return PaddedBatch(ids, attention_mask, loss)


def test_the_label_of_the_last_token_is_not_the_next_sequence():
    """B1, B2 and F6 (no rank holds a slice that it could roll by itself): packed [5, 6 | 7, 8, 9] has targets 6, 8, 9, each predicted inside its own sequence."""
    targets = pack_sequences(fnppo.padded_batch([[5], [7]], [[6], [8, 9]])).targets
    assert targets.token_ids.tolist() == [6, 8, 9]
    assert targets.predictors.tolist() == [0, 2, 3]


def test_positions_come_from_the_mask():
    """B5: also of the padding, which stands on the right only."""
    inputs = pad_sequences(batch_of([[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]])).inputs
    assert inputs.position_ids.tolist() == [[0, 1, 2]] * 2
    assert inputs.attention_mask.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("layout", [pack_sequences, pad_sequences])
def test_sequence_numbers_are_no_mask(layout):
    """B6."""
    with pytest.raises(ValueError, match="row 0, column 3: attention_mask is 2; a mask holds"):
        layout(batch_of([[1, 1, 1, 2, 2, 3, 0]]))
    with pytest.raises(ValueError, match="row 0, column 1: loss_mask is 3"):
        layout(batch_of([[1, 1]], [[0, 3]]))


def test_holes():
    """B7: left padding, right padding and a hole."""
    batch = batch_of(
        [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]], [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 0]]
    )
    packed = pack_sequences(batch)
    assert packed.inputs.input_ids.tolist() == [2, 3, 4, 5, 6, 7, 10, 12, 13]
    assert packed.inputs.cu_seqlens.tolist() == [0, 3, 6, 9]
    assert packed.inputs.position_ids.tolist() == [0, 1, 2] * 3
    assert packed.targets.predictors.tolist() == [6, 7]
    padded = pad_sequences(batch)
    assert padded.inputs.input_ids.tolist() == [[2, 3, 4], [5, 6, 7], [10, 12, 13]]
    assert padded.targets.predictors.tolist() == [6, 7]  # over the hole


def test_empty_rows_and_rows_of_one():
    """B10, B13."""
    assert pack_sequences(batch_of([[1, 1, 1], [0, 0, 0], [1, 1, 0]])).inputs.cu_seqlens.tolist() == [0, 3, 3, 5]
    ones = pack_sequences(batch_of([[1], [1], [1]])).inputs
    assert ones.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert ones.position_ids.tolist() == [0, 0, 0]


def test_shared_prompts():
    """Two responses to [7, 8], one to [5]: the prompt is there once, and predicts the first token of both."""
    batch = fnppo.padded_batch([[7, 8], [5], [7, 8]], [[6], [9], [4, 3]])
    inputs, targets = pack_sequences(batch, share_prefixes=True, least_shared=1)
    assert inputs.input_ids.tolist() == [7, 8, 6, 5, 9, 4, 3]
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert inputs.cu_seqlens.tolist() == [0, 2, 3, 5, 7]
    assert inputs.parents.tolist() == [-1, 0, -1, 0]
    assert targets.token_ids.tolist() == [6, 9, 4, 3]
    assert targets.predictors.tolist() == [1, 3, 1, 5]
    later = pack_sequences(
        fnppo.padded_batch([[5], [7, 8], [7, 8]], [[9], [6], [4]]), share_prefixes=True, least_shared=1
    )
    assert later.inputs.input_ids.tolist() == [5, 9, 7, 8, 6, 4]
    assert later.targets.predictors.tolist() == [0, 3, 3]
    assert pack_sequences(batch).inputs.parents is None
    nothing_shared = pack_sequences(fnppo.padded_batch([[7], [5]], [[6], [9]]), share_prefixes=True, least_shared=1)
    assert nothing_shared.inputs.parents is None
    padding = batch._replace(input_ids=torch.where(batch.attention_mask, batch.input_ids, torch.arange(3)[:, None]))
    padded = pack_sequences(padding, share_prefixes=True, least_shared=1)
    assert padded.inputs.input_ids.tolist() == inputs.input_ids.tolist()


def test_a_tree_of_rows():
    """Two rollouts that fork after a learned token, a dialogue that goes on from one, the same row again, and another row.

    By hand: the stretches are 7 8 5 | 6 | 9 4 | 3 | 1 2, laid as the rows come to them.
    """
    prompts, responses = [[7, 8], [7, 8], [1], [7, 8, 5, 9, 4], [7, 8]], [[5, 6], [5, 9, 4], [2], [3], [5, 9, 4]]
    batch = fnppo.padded_batch(prompts, responses, advantages=[1.0, 2.0, 3.0, 4.0, 5.0])
    inputs, targets = pack_sequences(batch, share_prefixes=True, least_shared=1, pad_to=12)
    assert inputs.input_ids.tolist() == [7, 8, 5, 6, 9, 4, 1, 2, 3, 0, 0, 0]
    assert inputs.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 0, 1, 5, 0, 1, 2]
    assert inputs.cu_seqlens.tolist() == [0, 3, 4, 6, 8, 9, 12]
    assert inputs.parents.tolist() == [-1, 0, 0, -1, 2, -1]
    assert targets.token_ids.tolist() == [5, 6, 5, 9, 4, 2, 3, 5, 9, 4]
    assert targets.predictors.tolist() == [1, 2, 1, 2, 4, 6, 5, 1, 2, 4]
    assert targets.rows.tolist() == [0, 0, 1, 1, 1, 2, 3, 4, 4, 4]
    assert targets.advantages.tolist() == [1, 1, 2, 2, 2, 3, 4, 5, 5, 5]
    alone = pack_sequences(batch, share_prefixes=True, least_shared=6)
    for a, b in zip(alone.inputs[:3] + alone.targets[:4], pack_sequences(batch).inputs[:3] + targets[:4], strict=True):
        assert torch.equal(a, b) or a is alone.targets.predictors
    assert alone.inputs.parents is None


def test_rows_that_are_the_same_need_no_parents():
    batch = fnppo.padded_batch([[7], [7]], [[6, 5], [6, 5]])
    inputs, targets = pack_sequences(batch, share_prefixes=True, least_shared=1)
    assert (inputs.input_ids.tolist(), inputs.cu_seqlens.tolist(), inputs.parents) == ([7, 6, 5], [0, 3], None)
    assert targets.predictors.tolist() == [0, 1, 0, 1]


@pytest.mark.core
@given(branching_batches(vocab_size=3), st.integers(1, 5))
def test_every_target_has_the_tokens_before_it(batch, least):
    """From a target's predictor up through its segment and its ancestors stand the tokens of its row, and their positions."""
    inputs, targets = pack_sequences(batch, share_prefixes=True, least_shared=least, pad_to=70)
    bounds = inputs.cu_seqlens.tolist()
    parents = [-1] * (len(bounds) - 1) if inputs.parents is None else inputs.parents.tolist()
    before = {}  # place -> the places that it reads
    for segment, parent in enumerate(parents):
        line = before[bounds[parent + 1] - 1] if parent >= 0 else []
        for place in range(bounds[segment], bounds[segment + 1]):
            line = before[place] = [*line, place]
    for row, column, predictor in zip(
        *(x.tolist() for x in (targets.rows, targets.columns, targets.predictors)), strict=True
    ):
        there = batch.attention_mask[row].clone()
        there[column:] = False
        places = before[predictor]
        assert inputs.input_ids[places].tolist() == batch.input_ids[row, there].tolist()
        assert inputs.position_ids[places].tolist() == list(range(len(places)))


@pytest.mark.core
@given(branching_batches(vocab_size=10**6, max_rows=3))
def test_without_a_common_beginning_it_is_the_plain_packing(batch):
    ids = batch.input_ids + torch.arange(len(batch.input_ids))[:, None] * 10**7
    batch = batch._replace(input_ids=torch.where(batch.attention_mask, ids, batch.input_ids))
    plain, shared = pack_sequences(batch), pack_sequences(batch, share_prefixes=True, least_shared=1)
    assert plain.inputs.parents is shared.inputs.parents is None
    for a, b in zip(optree.tree_leaves(shared), optree.tree_leaves(plain), strict=True):
        assert_close(a, b, rtol=0, atol=0)


def test_filler_is_a_segment_of_its_own():
    """B11: cu_seqlens ends at the length of the axis, and no filler segment is longer than the longest row."""
    inputs, targets = pack_sequences(fnppo.padded_batch([[5, 5], [7]], [[6], [8]]), pad_to=12)
    assert inputs.input_ids.shape == inputs.position_ids.shape == (12,)
    assert inputs.cu_seqlens.tolist() == [0, 3, 5, 8, 11, 12]
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]
    assert int(targets.predictors.max()) < 5
    with pytest.raises(ValueError, match="the batch has 5 tokens, pad_to is 4"):
        pack_sequences(fnppo.padded_batch([[5, 5], [7]], [[6], [8]]), pad_to=4)


@pytest.mark.parametrize("layout", [pack_sequences, pad_sequences])
@pytest.mark.parametrize("shape", [(2, 4), (0, 4), (2, 0), (0, 0)])
def test_nothing_at_all(layout, shape):
    """B9: a batch without tokens still has one position for the model to read, and no targets."""
    inputs, targets = layout(
        PaddedBatch(torch.full(shape, -7), torch.zeros(shape, dtype=bool), torch.zeros(shape, dtype=bool))
    )
    assert inputs.input_ids.shape == inputs.position_ids.shape
    assert not inputs.input_ids.any()
    assert not inputs.position_ids.any()
    assert inputs.input_ids.numel() == (max(shape[0], 1) if layout is pad_sequences else 1)
    if layout is pad_sequences:
        assert inputs.attention_mask.shape == inputs.input_ids.shape
        assert inputs.input_ids.dim() == 2
        assert not inputs.attention_mask.any()
    assert targets.token_ids.shape == targets.predictors.shape == (0,)


def test_filler_where_little_or_nothing_is():
    nothing, one = batch_of([[0, 0]]), batch_of([[1]])
    assert pack_sequences(nothing, pad_to=3).inputs.position_ids.tolist() == [0, 0, 0]
    assert pack_sequences(nothing, pad_to=3).inputs.cu_seqlens.tolist() == [0, 0, 1, 2, 3]
    no_rows = fnppo.select_rows(nothing, [])
    assert pack_sequences(no_rows, pad_to=3).inputs.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert pack_sequences(one, pad_to=1).inputs.cu_seqlens.tolist() == [0, 1]
    for pad_to in (0, -1):
        with pytest.raises(ValueError, match=f"pad_to is {pad_to}; it must be a whole number of at least 1"):
            pack_sequences(nothing, pad_to=pad_to)
    shared = pack_sequences(fnppo.padded_batch([[7], [7]], [[6], [9]]), share_prefixes=True, least_shared=1, pad_to=5)
    assert shared.inputs.parents.tolist() == [-1, 0, 0, -1, -1]


def test_dtypes():
    """Ids keep theirs, indices are int64, boundaries int32."""
    batch = fnppo.padded_batch([[5], [7, 8]], [[6], [9]])
    batch = batch._replace(input_ids=batch.input_ids.int())
    for inputs, targets in (pack_sequences(batch, pad_to=9), pad_sequences(batch)):
        assert inputs.input_ids.dtype == torch.int32
        assert inputs.position_ids.dtype == targets.token_ids.dtype == targets.predictors.dtype == torch.int64
        assert targets.rows.dtype == targets.columns.dtype == torch.int64
    assert pack_sequences(batch).inputs.cu_seqlens.dtype == torch.int32
    assert pad_sequences(batch).inputs.input_ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    padded = pad_sequences(batch._replace(input_ids=batch.input_ids + 1)).inputs
    assert padded.input_ids[~padded.attention_mask].tolist() == [0]


def test_prompt_is_read_and_not_learned():
    """B14, B16: prompt of 2, three responses; the response's predictors are positions 1, 2, 3."""
    batch = fnppo.padded_batch([[1, 2]], [[3, 4, 5]])
    assert batch.attention_mask.tolist() == [[True] * 5]
    assert pack_sequences(batch).targets.predictors.tolist() == [1, 2, 3]


@pytest.mark.core
@given(padded_batches(vocab_size=9))
def test_all_layouts_have_the_same_targets(batch):
    packed = pack_sequences(batch).targets
    for other in (pad_sequences(batch).targets, pack_sequences(batch, share_prefixes=True, least_shared=1).targets):
        for name, a, b in zip(packed._fields, packed, other, strict=True):
            if name != "predictors":
                assert_close(a, b, rtol=0, atol=0)
    place = packed.rows, packed.columns
    assert torch.equal(packed.token_ids, batch.input_ids[place])
    assert torch.equal(packed.advantages, batch.advantages[place])
    assert torch.equal(packed.old_logprobs, batch.old_logprobs[place])
    assert torch.equal(packed.ref_logprobs, batch.ref_logprobs[place])
    assert torch.equal(packed.extra["column"], batch.extra["column"][place])
    assert torch.equal(packed.groups, batch.groups[packed.rows])
    assert len(packed.rows) == int(batch.loss_mask.sum())


@pytest.mark.core
@given(padded_batches(vocab_size=9))
def test_unpack_is_the_inverse_of_packing(batch):
    for layout in (pack_sequences, pad_sequences, partial(pack_sequences, share_prefixes=True, least_shared=1)):
        targets = layout(batch).targets
        back = fnppo.unpack_targets(targets.advantages, targets, shape=tuple(batch.input_ids.shape), fill=-5.0)
        assert torch.equal(back, torch.where(batch.loss_mask, batch.advantages, -5.0))


def test_unpack_is_differentiable_and_checks_its_length():
    """B19: a mask or a column of another length is refused, never broadcast."""
    targets = pack_sequences(fnppo.padded_batch([[5], [7]], [[6], [8, 9]])).targets
    values = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: fnppo.unpack_targets(v, targets, shape=(2, 3)), values)
    with pytest.raises(ValueError, match="there are 3 targets"):
        fnppo.unpack_targets(torch.zeros(1), targets, shape=(2, 3))


@pytest.mark.parametrize(
    "layout", [pack_sequences, partial(pack_sequences, share_prefixes=True, least_shared=1, pad_to=12), pad_sequences]
)
def test_the_default_device_is_not_used(layout):
    """What is made is where the batch is. On `meta`, the default here, tensors have no values."""
    lists = [[1, 2], [1, 2], [3]], [[4], [5, 6], [7]]
    columns = {"old_logprobs": [[-1.0], [-2.0, -3.0], [-4.0]], "advantages": [1.0, 2.0, 3.0], "groups": [0, 0, 1]}
    expected = layout(batch := fnppo.padded_batch(*lists, **columns))
    with torch.device("meta"):
        assert fnppo.padded_batch(*lists, **columns).input_ids.is_meta
        made = layout(fnppo.padded_batch(*lists, **columns, device="cpu"))
        back = fnppo.unpack_targets(made.targets.advantages, made.targets, shape=(3, 4))
        rows = fnppo.select_rows(batch, [2, 0]), fnppo.select_rows(batch, [False, True, True])
    for a, b in zip(optree.tree_leaves(made), optree.tree_leaves(expected), strict=True):
        assert_close(a, b, rtol=0, atol=0)
    assert_close(back, batch.advantages, rtol=0, atol=0)
    assert [selected.input_ids.tolist() for selected in rows] == [
        batch.input_ids[[2, 0]].tolist(),
        batch.input_ids[1:].tolist(),
    ]


def test_as_many_prompts_as_columns():
    """Prompts are counted against rows, not columns, to see whether any is shared."""
    batch = fnppo.padded_batch([[7], [7], [8], [8]], [[6], [9], [6], [9]])
    assert pack_sequences(batch, share_prefixes=True, least_shared=1).inputs.input_ids.tolist() == [7, 6, 9, 8, 6, 9]
