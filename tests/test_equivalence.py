"""The public assertions find planted bugs, name the cause, and let right code pass."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny

import fnppo
from fnppo.layouts import sharing
from fnppo.testing import (
    assert_layout_invariant,
    assert_masked_values_unread,
    assert_microbatch_invariant,
    assert_rows_independent,
    causes,
    everyday_batches,
    padded_batches,
)
from fnppo.testing.differences import largest_difference
from fnppo.testing.drawing import draw_batch

VOCAB = 13
NASTY = padded_batches(vocab_size=VOCAB, max_rows=3)


def message(assertion, fn, **options):
    with pytest.raises(AssertionError) as error:
        assertion(fn, vocab_size=VOCAB, **options)
    return " ".join(str(error.value).split())


# Stand-ins for a model: the "log-prob" of a token is made of its row's tokens up to it, by one formula or another.


def right(batch):
    """Sum of the row's tokens so far, its position, and nothing else."""
    ids = torch.where(batch.attention_mask, batch.input_ids, 0)
    return (ids.cumsum(1) + batch.attention_mask.cumsum(1)).float()


def packed(batch):
    """One axis for all rows, and nobody says where they end."""
    flat = batch.input_ids[batch.attention_mask].float().cumsum(0)
    return torch.zeros(batch.input_ids.shape).masked_scatter(batch.attention_mask, flat)


def rolled(batch):
    """Labels shifted on the flat axis."""
    return batch.input_ids.flatten().roll(-1).view_as(batch.input_ids).float()


def width(batch):
    """The distance to the last column, which is the last token only where no padding is on the right."""
    return right(batch) + torch.arange(batch.input_ids.shape[1]).flip(0)


def length(batch):
    """Positions as if the mask were a length."""
    start = batch.attention_mask.long().argmax(1, keepdim=True)
    return (torch.arange(batch.input_ids.shape[1]) - start).float()


def column(batch):
    return torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids).float()


def centred(batch):
    return right(batch) - right(batch)[batch.attention_mask].mean()


@pytest.mark.parametrize(
    ("fn", "cause", "options"),
    [
        (column, causes.LEFT, {}),
        (width, causes.RIGHT, {}),
        (length, causes.HOLES, {"batches": padded_batches(vocab_size=VOCAB, padding=["holes"])}),
        (packed, causes.TOGETHER, {}),
        (centred, causes.TOGETHER, {}),
    ],
    ids=["column", "width", "length", "packed", "centred"],
)
def test_layout(fn, cause, options):
    """B3, B5, B7: the failure names the bug."""
    assert message(assert_layout_invariant, fn, **options).endswith(f"Usual cause: {cause}")


@pytest.mark.parametrize(
    ("fn", "cause"), [(packed, causes.AHEAD), (rolled, causes.ROLLED), (centred, causes.STATISTIC)]
)
def test_rows(fn, cause):
    """B1, B3."""
    assert message(assert_rows_independent, fn).endswith(f"Usual cause: {cause}")


def test_values_of_a_row():
    assert_rows_independent(lambda batch: right(batch).sum(1), vocab_size=VOCAB)
    assert "row 1 changes" in message(assert_rows_independent, lambda batch: centred(batch)[:, -1])


def total(batch):
    return torch.where(batch.loss_mask, batch.old_logprobs, 0).sum()


def count(batch):
    return batch.loss_mask.sum()


def mean(batch):
    return total(batch) / count(batch)


SPLITS = {
    causes.SUM_OF_MEANS: lambda parts: sum(mean(b) if count(b) else torch.zeros(()) for b in parts),
    causes.MEAN_OF_MEANS: lambda parts: sum(mean(b) if count(b) else torch.zeros(()) for b in parts) / len(parts),
    causes.ROW_WEIGHTED: lambda parts: (
        sum(mean(b).nan_to_num() * len(b.input_ids) for b in parts) / sum(len(b.input_ids) for b in parts)
    ),
    causes.LAST_ONLY: lambda parts: total(parts[-1]),
    causes.FIRST_ONLY: lambda parts: total(parts[0]),
    causes.SPLIT: lambda parts: sum(map(total, parts)) * len(parts) ** 2,
    causes.NO_TARGETS: lambda parts: sum(mean(b) * count(b) for b in parts) / sum(count(b) for b in parts),
}


@pytest.mark.parametrize("cause", SPLITS)
def test_microbatches(cause):
    """A1, A4, A8, A13."""
    assert message(assert_microbatch_invariant, SPLITS[cause]).endswith(f"Usual cause: {cause}")


def test_sums_of_what_depends_on_the_rows_beside_it_have_no_wrong_divisor():
    """Equal halves add up, so to name the sum of means would mislead: the cause is something inside of a micro-batch."""
    centred = lambda b: (
        torch.where(b.loss_mask, (b.old_logprobs - mean(b)).square(), 0).sum() if count(b) else torch.zeros(())
    )
    assert message(assert_microbatch_invariant, lambda parts: sum(map(centred, parts))).endswith(causes.SPLIT)


def test_a_tree_names_the_leaf_that_differs():
    text = message(assert_microbatch_invariant, lambda parts: {"loss": total(parts[0]), "rows": torch.tensor(0.0)})
    assert "at ['loss']" in text


def test_microbatches_pass():
    assert_microbatch_invariant(lambda parts: sum(map(total, parts)), vocab_size=VOCAB)
    assert_microbatch_invariant(
        lambda parts: sum(map(total, parts)) / sum(map(count, parts)).clamp(min=1), vocab_size=VOCAB, batches=NASTY
    )


@pytest.mark.parametrize(
    ("fn", "start", "cause"),
    [
        (lambda b: (b.advantages * b.loss_mask).sum(), "advantages is read", causes.MULTIPLIED),
        (lambda b: b.ref_logprobs.mean(), "ref_logprobs is read", causes.NOT_MASKED),
        (lambda b: b.old_logprobs.square().sum(1), "old_logprobs is read", causes.NOT_MASKED),
        (lambda b: b.extra["column"].sum(), "extra['column'] is read", causes.NOT_MASKED),
        (lambda b: {"g": b.advantages.clone()}, "advantages is read", causes.NOT_MASKED),
        (lambda b: b.input_ids.float().sum(), "input_ids is read where attention_mask is 0", causes.PADDING_READ),
    ],
)
def test_masked_values(fn, start, cause):
    """A10, A11, B17, C11."""
    text = message(assert_masked_values_unread, fn)
    assert text.startswith(start)
    assert text.endswith(f"Usual cause: {cause}")


def test_masked_values_pass():
    assert_masked_values_unread(total, vocab_size=VOCAB)
    # a value a token: what stands in masked slots of the result is nobody's business
    assert_masked_values_unread(lambda b: b.old_logprobs + right(b), vocab_size=VOCAB)


def test_what_is_not_finite_is_a_difference():
    assert "nan" in message(assert_masked_values_unread, lambda batch: batch.loss_mask.sum() * float("nan"))
    assert "inf" in message(assert_layout_invariant, lambda batch: right(batch) / batch.attention_mask.all())


@pytest.mark.parametrize(
    "layout", [fnppo.packed, fnppo.padded, sharing(least_shared=1)], ids=["packed", "padded", "shared"]
)
def test_the_library_holds_on_the_hardest_batches(layout, unchecked):
    policy, params = fnppo.functional_policy(tiny("gpt2"))
    tokens = {"policy": policy, "temperature": 0.9, "max_tokens": 100, "layout": layout}

    def logprobs(batch):
        return fnppo.compute_logprobs(params, batch, **tokens).logprobs

    def gradients(micro_batches):
        def loss_fn(params, micro):
            return fnppo.ppo_loss(
                fnppo.forward_logprobs(params, micro, policy=policy, temperature=0.9), micro.targets, kl_coef=0.1
            )

        return fnppo.accumulate_gradients(loss_fn, params, [layout.lay(micro) for micro in micro_batches])

    hard = {"vocab_size": VOCAB, "batches": NASTY, "max_examples": 10}
    assert_layout_invariant(logprobs, **hard)
    assert_rows_independent(logprobs, **hard)
    assert_masked_values_unread(logprobs, **hard)
    hard["batches"] = NASTY.map(fnppo.token_mean)
    assert_microbatch_invariant(lambda parts: gradients(parts)[1], **hard)
    assert_masked_values_unread(lambda batch: gradients([batch])[1], **hard)


def test_the_smallest_failure_is_shown():
    def wrong_for_long_rows(batch):
        return right(batch) + (batch.attention_mask.sum() > 5) * column(batch)

    text = message(assert_layout_invariant, wrong_for_long_rows)
    assert text.count("·") + text.count("*") <= 12


def test_weights_are_a_column_too():
    fn = lambda b: (b.loss_weights * torch.where(b.loss_mask, b.advantages, 0)).sum()
    batches = everyday_batches(vocab_size=VOCAB).map(fnppo.token_mean)
    assert message(assert_masked_values_unread, fn, batches=batches).startswith("loss_weights is read")


def test_a_small_loss_hides_nothing():
    small = SPLITS[causes.MEAN_OF_MEANS]
    assert message(assert_microbatch_invariant, lambda parts: 1e-5 * small(parts)).endswith(causes.MEAN_OF_MEANS)


def test_results_in_one_buffer_and_batches_changed_in_place():
    buffer = torch.zeros(())

    def gradient(parts):
        return {"w": buffer.copy_(SPLITS[causes.MEAN_OF_MEANS](parts))}

    assert message(assert_microbatch_invariant, gradient).endswith(causes.MEAN_OF_MEANS)
    assert_rows_independent(lambda batch: batch.input_ids.add_(1).float(), vocab_size=VOCAB)
    assert_masked_values_unread(
        lambda batch: torch.where(batch.loss_mask, batch.advantages.add_(1), 0).sum(), vocab_size=VOCAB
    )


def test_micro_batches_without_a_target():
    def refusing(parts):
        if not all(bool(count(part)) for part in parts):
            raise RuntimeError("no targets")
        return sum(map(total, parts)) / sum(map(count, parts))

    text = message(assert_microbatch_invariant, refusing)
    assert "raise RuntimeError: no targets" in text
    assert text.endswith(causes.NO_TARGETS)
    assert_microbatch_invariant(refusing, vocab_size=VOCAB, empty_micro_batches=False)


@pytest.mark.parametrize(
    ("assertion", "fn", "options", "match"),
    [
        (assert_layout_invariant, lambda b: right(b)[:, 1:], {}, r"returned shape .*pad one column on the left"),
        (assert_layout_invariant, lambda b: {"a": right(b)}, {}, "returned dict"),
        (assert_rows_independent, lambda b: right(b).sum(), {}, r"returned shape \(\)"),
        (assert_rows_independent, lambda b: right(b)[..., None], {}, "returned shape"),
        (assert_microbatch_invariant, lambda parts: None, {}, "returned None"),
        (assert_masked_values_unread, lambda b: torch.rand(()), {}, r"two calls .*model.eval"),
        (assert_rows_independent, right, {"vocab_size": 1}, "vocab_size is 1"),
        (assert_rows_independent, right, {"tolerance": float("nan")}, "tolerance is nan"),
        (assert_rows_independent, right, {"max_examples": 0}, "max_examples is 0"),
    ],
)
def test_what_cannot_be_tested_is_refused(assertion, fn, options, match):
    with pytest.raises(ValueError, match=match):
        assertion(fn, **({"vocab_size": VOCAB} | options))


def test_errors_of_the_function_itself_are_passed_on():
    with pytest.raises(ZeroDivisionError):
        assert_masked_values_unread(lambda batch: 1 // 0, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="other shapes"):
        largest_difference(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="other structures"):
        largest_difference({"a": torch.zeros(2)}, [torch.zeros(2)])


@given(data=st.data(), batch=everyday_batches(vocab_size=VOCAB))
def test_everyday_batches_are_tame(data, batch):
    assert bool(batch.loss_mask.any())
    assert all(bool(leaf.isfinite().all()) for leaf in optree.tree_leaves(batch))
    assert bool((batch.input_ids < VOCAB).all() & (batch.input_ids >= 0).all())
    assert bool((batch.attention_mask.sum(1) >= 2).all())
    assert len(draw_batch(batch).splitlines()) == batch.input_ids.shape[0]
