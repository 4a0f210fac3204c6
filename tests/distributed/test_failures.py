"""What goes wrong on one rank is said on all of them, with the rank and the row, and nobody waits."""

import pytest
import torch
from programs import failing_loss, refused, shared_rows
from ranks import Failed
from test_sharding import some_batch

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


@pytest.mark.parametrize("where", ["before the layers", "after the layers"])
def test_a_loss_that_raises_on_one_rank(where, pools):
    """All end the step with the same message, keep their parameters, and can go on."""
    parts = [some_batch(2, 0), some_batch(2, 1)]
    words = {"before the layers": "no use", "after the layers": "bad row 7"}[where]
    for said, _, before, after, steps in pools(2).run(failing_loss, (1, 2, 1), where, OPTIONS, each=parts):
        assert said.startswith("rank 1: micro-batch 0: ")
        assert words in said
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert steps == 1.0


def test_a_gradient_that_is_not_finite_on_one_rank(pools):
    """G8: all ranks skip the step, and the next is as if it had not been."""
    parts = [some_batch(2, 0), some_batch(2, 1)]
    for said, skipped, before, after, steps in pools(2).run(
        failing_loss, (1, 2, 1), "not a number", OPTIONS, each=parts
    ):
        assert (said, skipped, steps) == (None, 1, 1.0)
        assert all(torch.equal(before[name], after[name]) for name in before)


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
    with pytest.raises(Failed, match="column old_logprobs is not there on rank 1, torch.float64 on rank 0"):
        pools(2).run(shared_rows, (1, 2, 1), each=[batch, batch._replace(old_logprobs=None)])
    with pytest.raises(Failed, match="rank 1 has another batch than the first rank of its sequence group"):
        pools(2).run(shared_rows, (1, 1, 2), each=[batch, some_batch(2, 9)])
