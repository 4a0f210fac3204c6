"""Loss weights: the numbers of the field's aggregation modes, independent of padding and of splits."""

from functools import partial

import pytest
import torch
from hypothesis import given
from torch import tensor

import fnppo
from fnppo import PaddedBatch
from fnppo.testing import padded_batches
from fnppo.weights import constant_norm, group_token_mean, sequence_mean, sequence_sum, token_mean, token_sum

NAN = float("nan")
MODES = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_norm": partial(constant_norm, horizon=3.0),
    "group_token_mean": group_token_mean,
}


def batch_of(mask, groups=None):
    mask = tensor(mask, dtype=torch.bool)
    mask = torch.nn.functional.pad(mask, (1, 0))  # a prompt token, so that every learned token has a predictor
    return PaddedBatch(torch.zeros(mask.shape, dtype=torch.long), torch.ones_like(mask), mask, groups=groups)


def total(weights, losses, mask, groups=None):
    """(Σ w l, d/dl) with the losses that the targets would have; masked losses are dropped by the layout, not multiplied."""
    batch = weights(batch_of(mask, groups))
    targets = fnppo.pack_sequences(batch).targets
    losses = tensor(losses, dtype=torch.float64, requires_grad=True)
    value = (targets.loss_weights * losses[targets.rows, targets.columns - 1]).sum()
    return value.item(), torch.autograd.grad(value, losses)[0].tolist()


A1 = [[1.0, 2.0, 3.0], [10.0, NAN, NAN]], [[1, 1, 1], [1, 0, 0]]


def test_token_mean():
    """A1."""
    value, gradient = total(token_mean, *A1)
    assert value == 4.0
    assert gradient == [[0.25, 0.25, 0.25], [0.25, 0, 0]]


def test_ranks_only_add():
    """A4, A5: weights come from the whole mini-batch, so two ranks with a row each hold 6/4 and 10/4, which add to 4.

    There is no factor of the number of ranks that could be missing, and no count that two ranks could both make.
    """
    batch = token_mean(batch_of(A1[1]))
    losses = tensor(A1[0], dtype=torch.float64)
    parts = []
    for rank in (0, 1):
        targets = fnppo.pack_sequences(fnppo.select_rows(batch, [rank])).targets
        parts.append((targets.loss_weights * losses[rank, targets.columns - 1]).sum().item())
    assert parts == [1.5, 2.5]


def test_micro_batches_that_do_not_divide_the_mini_batch():
    """A13, A16: 6 rows of loss 1 in micro-batches of 4 and 2 give 1.0."""
    batch = token_mean(batch_of([[1]] * 6))
    parts = [
        fnppo.pack_sequences(fnppo.select_rows(batch, rows)).targets.loss_weights.sum()
        for rows in ([0, 1, 2, 3], [4, 5])
    ]
    assert sum(parts).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "value"),
    [("token_mean", 4.0), ("token_sum", 16.0), ("sequence_mean", 6.0), ("sequence_sum", 8.0), ("constant_norm", 8 / 3)],
)
def test_modes_differ(mode, value):
    """A6."""
    assert total(MODES[mode], *A1)[0] == pytest.approx(value)


def test_constant_norm_does_not_depend_on_the_width():
    """A7."""
    wide = [row + [NAN] * 4 for row in A1[0]], [row + [0] * 4 for row in A1[1]]
    assert total(MODES["constant_norm"], *wide)[0] == pytest.approx(8 / 3)
    assert constant_norm(batch_of([[1]]), horizon=0.5).loss_weights.tolist() == [[0.0, 2.0]]
    for horizon in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="horizon is"):
            constant_norm(batch_of([[1]]), horizon=horizon)


@pytest.mark.parametrize("mode", MODES)
def test_no_rows(mode):
    weights = MODES[mode](batch_of([[1, 1]], groups=tensor([0]))._replace(**{
        "input_ids": torch.zeros(0, 3, dtype=torch.long), "attention_mask": torch.zeros(0, 3, dtype=torch.bool),
        "loss_mask": torch.zeros(0, 3, dtype=torch.bool), "groups": torch.zeros(0, dtype=torch.long),
    })).loss_weights  # fmt: skip
    assert weights.shape == (0, 3)


@pytest.mark.parametrize("mode", MODES)
def test_all_masked(mode):
    """A8: loss 0 and gradient 0, finite."""
    value, gradient = total(MODES[mode], [[NAN, NAN]], [[0, 0]], groups=tensor([0]))
    assert value == 0.0
    assert gradient == [[0, 0]]


@pytest.mark.parametrize("mode", ["token_mean", "token_sum", "sequence_mean", "sequence_sum", "group_token_mean"])
def test_nan_at_a_masked_place(mode):
    """A10."""
    value, gradient = total(MODES[mode], [[1.0, NAN]], [[1, 0]], groups=tensor([0]))
    assert value == 1.0
    assert gradient == [[1, 0]]


def test_the_numerator_is_masked():
    """A11."""
    value, gradient = total(token_mean, [[2.0, 50.0], [4.0, -9.0]], [[1, 0], [1, 0]])
    assert value == 3.0
    assert gradient == [[0.5, 0], [0.5, 0]]


def test_what_a_filter_removed_is_in_no_divisor():
    """A15: a row whose mask a filter has cleared counts neither as tokens nor as a sequence."""
    ones = [[1.0] * 6] * 2
    for mode in ("token_mean", "sequence_mean", "group_token_mean"):
        assert total(MODES[mode], ones, [[1, 1, 1, 1, 0, 0], [0] * 6], groups=tensor([0, 1]))[0] == pytest.approx(1.0)
    assert total(sequence_sum, ones, [[1, 1, 1, 1, 0, 0], [0] * 6])[0] == pytest.approx(4.0)


def test_mean_within_a_prompt_group():
    """A17: groups go by their number, wherever their rows stand."""
    losses, mask = [[1.0, 1.0], [5.0, NAN], [1.0, NAN]], [[1, 1], [1, 0], [1, 0]]
    assert total(group_token_mean, losses, mask, groups=tensor([7, 2, 7]))[0] == pytest.approx(3.0)
    assert total(token_mean, losses, mask)[0] == pytest.approx(2.0)
    with pytest.raises(
        ValueError,
        match=r"^group_token_mean needs batch\.groups, the prompt group of each row\. Give groups=\.\.\. \.$",
    ):
        group_token_mean(batch_of(mask))


@pytest.mark.parametrize("mode", MODES)
def test_weights_have_the_dtype_of_the_advantages_and_are_zero_where_masked(mode):
    batch = batch_of([[1, 0], [1, 1]], groups=tensor([0, 1]))
    for dtype in (torch.float32, torch.float64):
        weights = MODES[mode](batch._replace(advantages=torch.zeros(2, 3, dtype=dtype))).loss_weights
        assert weights.dtype == dtype
        assert bool((weights[~batch.loss_mask] == 0).all())
        assert bool((weights[batch.loss_mask] > 0).all())


def test_half_precision_advantages_do_not_make_half_precision_weights():
    """70,000 targets are infinitely many in float16, and 1003 are 1004 in bfloat16."""
    batch = batch_of([[1] * 70_000])
    for dtype in (torch.float16, torch.bfloat16):
        weights = token_mean(batch._replace(advantages=torch.zeros(1, 70_001, dtype=dtype))).loss_weights
        assert weights.dtype == torch.float32
        assert weights.sum().item() == pytest.approx(1.0, abs=1e-4)


def counted(mode, loss_mask, groups):
    """{(row, column): weight}, one token at a time."""
    learned = {row: [t for t, there in enumerate(mask) if there] for row, mask in enumerate(loss_mask)}
    sequences = sum(1 for columns in learned.values() if columns)
    of_group = {g: sum(len(learned[r]) for r in learned if groups[r] == g) for g in groups}
    weight = {
        "token_mean": lambda row: 1 / sum(map(len, learned.values())),
        "token_sum": lambda row: 1.0,
        "sequence_mean": lambda row: 1 / sequences / len(learned[row]),
        "sequence_sum": lambda row: 1 / sequences,
        "constant_norm": lambda row: 1 / sequences / 3.0,
        "group_token_mean": lambda row: 1 / sum(1 for n in of_group.values() if n) / of_group[groups[row]],
    }[mode]
    return {(row, t): weight(row) for row, columns in learned.items() for t in columns}


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
@given(batch=padded_batches(vocab_size=9, max_rows=6))
def test_weights_are_counted_one_token_at_a_time(mode, batch):
    """A1, A6, A8, A10, A17: for any masks and groups, with NaN in the columns where nothing is learned."""
    weights = MODES[mode](batch).loss_weights
    expected = counted(mode, batch.loss_mask.tolist(), batch.groups.tolist())
    found = {tuple(place): weights[tuple(place)].item() for place in weights.nonzero().tolist()}
    assert found == pytest.approx(expected, rel=1e-12)
