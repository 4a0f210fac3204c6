"""What goes wrong on one rank is said on all of them, with the rank and the row, and nobody waits."""

import pytest
import torch
from batches import some_batch
from programs import failing_loss, refused, shared_rows, uneven_losses, unlike
from ranks import Failed
from test_actor import apart

import fnppo

OPTIONS = {"mini_batch_size": 4, "max_tokens": 12}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b._replace(input_ids=b.input_ids + 100), "row 0, column"),
        (lambda b: b._replace(advantages=b.advantages * float("nan")), "advantages is nan"),
        (lambda b: b._replace(attention_mask=b.attention_mask[:, 1:]), "attention_mask has shape"),
    ],
    ids=["beyond the vocabulary", "not a number", "another shape"],
)
def test_a_bad_row(change, words, pools):
    parts = [some_batch(2, 0), change(some_batch(2, 1))]
    for said, before, after in pools(2).run(refused, (1, 2, 1), OPTIONS, each=parts):
        assert said.startswith("rank 1: ")
        assert words in said
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_row_over_the_cap(pools):
    """E3: named with its rank, on every rank, before anything is computed."""
    short, long = fnppo.padded_batch([[1]], [[2, 3]]), fnppo.padded_batch([[1], [1]], [[2], [3] * 11])
    for said, *_ in pools(2).run(refused, (1, 2, 1), OPTIONS | {"max_tokens": 8}, each=[short, long]):
        assert said.startswith("rank 1: row 1 has 12 tokens, max_tokens is 8.")


ONE_EACH = {"mini_batch_size": 2, "max_tokens": 12}  # a step has one micro-batch on each of two ranks


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("before the layers", "no use"),
        ("after the layers", "bad row 7"),
        ("metrics of another type", "a Metrics is needed"),
    ],
)
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1)], ids=str)
def test_a_loss_that_fails_on_one_rank(shape, where, words, pools):
    """All end the step with the same message. Parameters and moments are those of the steps before, and it can go on."""
    parts = [some_batch(1, 0), some_batch(1, 1)]
    for said, _, after, expected in pools(2).run(failing_loss, shape, where, ONE_EACH, each=parts):
        assert said.startswith("rank 1: micro-batch 0: ")
        assert words in said
        assert apart(after, expected) < 1e-12


def test_a_gradient_that_is_not_finite_on_one_rank(pools):
    """G8: all ranks skip the step, and the next is as if it had not been."""
    parts = [some_batch(1, 0), some_batch(1, 1)]
    for said, skipped, after, expected in pools(2).run(failing_loss, (1, 2, 1), "not a number", ONE_EACH, each=parts):
        assert (said, skipped) == (None, 1)
        assert apart(after, expected) < 1e-12


def test_losses_that_differ_between_ranks(pools):
    """A loss without a graph, metrics that one rank has, and NaN of one rank; on replicas weights are handed out as copies."""
    full, none = some_batch(2, 0), fnppo.select_rows(some_batch(2, 1), [])
    unlearned = some_batch(1, 2)
    unlearned = unlearned._replace(loss_mask=torch.zeros_like(unlearned.loss_mask))
    each = [[full, unlearned, unlearned], [some_batch(1, 3), some_batch(1, 4), none]]
    for shape in ((1, 2, 1), (2, 1, 1)):
        for found in pools(2).run(uneven_losses, shape, each=each):
            assert [metrics["steps"] for metrics in found] == [1.0] * 3
            assert found[0]["tokens"] == int(full.loss_mask.sum() + each[1][0].loss_mask.sum())
            assert found[0]["strange"] != found[0]["strange"]
            assert found[1]["tokens"] == int(each[1][1].loss_mask.sum())
            assert "policy_loss" not in found[2]


def test_arguments_that_differ_between_ranks(pools):
    with pytest.raises(Failed, match="mini_batch_size is 5 on rank 1, 4 on rank 0. Pass the same on all ranks."):
        pools(2).run(unlike, (1, 2, 1), each=[some_batch(2), some_batch(2)])


def test_rows_are_gathered_in_the_order_of_ranks(pools):
    """Widths differ, a rank has none, and columns keep their dtype."""
    parts = [some_batch(3, 0), fnppo.select_rows(some_batch(2, 1), []), some_batch(1, 2), some_batch(2, 3)]
    found = pools(4).run(shared_rows, (1, 4, 1), each=parts)
    for part, (batch, own) in zip(parts, found, strict=True):
        assert torch.equal(own, part.input_ids)
        assert fnppo.lengths(batch) == [length for each in parts for length in fnppo.lengths(each)]
        assert batch.loss_mask.dtype == torch.bool
        assert batch.old_logprobs.dtype == torch.float64
    assert all(torch.equal(batch.input_ids, found[0][0].input_ids) for batch, _ in found)


def test_columns_and_sequence_groups_that_differ(pools):
    batch = some_batch(2)
    with pytest.raises(Failed, match="column old_logprobs is not there on rank 1, torch.float64 on cpu on rank 0"):
        pools(2).run(shared_rows, (1, 2, 1), each=[batch, batch._replace(old_logprobs=None)])
    with pytest.raises(Failed, match="rank 1 has another batch than the first rank of its sequence group"):
        pools(2).run(shared_rows, (1, 1, 2), each=[batch, some_batch(2, 9)])
