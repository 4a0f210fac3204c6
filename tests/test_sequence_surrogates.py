"""Surrogates of whole sequences, and the sums over rows they are made of: against loops over rows and tokens."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from surrogate_cases import CASES, SEQUENCE, targets_of
from test_surrogates import advantage, clip, exp, flag, logprob, times, weight
from torch import tensor
from torch.func import grad, vmap
from torch.testing import assert_close

from fnppo import TokenStats, pack_sequences, padded_batch, ppo_loss, sequence_mean, sequence_sum
from fnppo.surrogates import gmpo, gspo, gspo_token, luspo, selected, vespo
from fnppo.surrogates.per_row import row_mean, row_sum
from fnppo.testing import padded_batches

F64 = torch.float64


@pytest.mark.core
@given(batch=padded_batches(vocab_size=9), seed=st.integers(0, 2**32 - 1))
def test_row_sums_one_target_at_a_time(batch, seed):
    """Any rows, also such as have no target; gradients too."""
    targets = pack_sequences(batch).targets
    rows = targets.rows.tolist()
    g = torch.Generator().manual_seed(seed)
    values, cotangent = (torch.randn(len(rows), generator=g, dtype=F64) for _ in range(2))
    values.requires_grad_()
    for reduce, divide in ((row_sum, False), (row_mean, True)):
        of_row = {row: [t for t, other in enumerate(rows) if other == row] for row in rows}
        count = {row: len(of_row[row]) if divide else 1 for row in rows}
        found = reduce(values, targets)
        expected = [sum(values[t].item() for t in of_row[row]) / count[row] for row in rows]
        slopes = [sum(cotangent[t].item() for t in of_row[row]) / count[row] for row in rows]
        assert_close(found.detach(), tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)
        slope = torch.autograd.grad(found, values, cotangent)[0]
        assert_close(slope, tensor(slopes, dtype=F64), rtol=1e-12, atol=1e-12)


def test_row_sums_under_vmap_and_without_targets():
    targets = targets_of([0.0] * 4, [0.0] * 4, rows=[3, 3, 9, 3])  # rows that are no neighbours are two
    values = tensor([[1.0, 2.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0]])
    batched = vmap(lambda v: row_sum(v, targets))(values)
    assert batched.tolist() == [[3.0, 3.0, 5.0, 7.0], [1.0, 1.0, 2.0, 3.0]]
    assert vmap(grad(lambda v: row_mean(v, targets)[0]))(values).tolist() == [[0.5, 0.5, 0.0, 0.0]] * 2
    none = targets_of([], [])
    assert row_mean(torch.zeros(0), none).shape == (0,)
    with pytest.raises(ValueError, match=r"values has shape \(1,\); there are 4 targets"):
        row_sum(torch.zeros(1), targets)


def oracle(name, lp, old, A, flags, weights, numbers, c):
    """(losses, gradient of Σ c_t l_t, clips) of one row, from the formulas in the docstrings."""
    n, every = len(lp), range(len(lp))
    lr = [a - b for a, b in zip(lp, old, strict=True)]
    base = name.split("_")[-1] if name != "gspo_token" else name
    if base == "vespo":
        total = sum(lr)
        losses, slopes = [], []
        for t in every:
            c1, c2 = (numbers["c1_pos"], numbers["c2_pos"]) if A[t] > 0 else (numbers["c1_neg"], numbers["c2_neg"])
            phi = exp(c1 * total + c2 * (1 - exp(total)))
            losses.append(-phi * A[t] * lp[t])
            slopes.append(-c[t] * phi * A[t])
        return losses, slopes, [None] * n
    if base == "gmpo":
        which = [
            "clip_low" if A[t] < 0 and lr[t] < -numbers["clip_low"] else
            "clip_high" if A[t] > 0 and lr[t] > numbers["clip_high"] else None
            for t in every
        ]  # fmt: skip
        bounds = {"clip_low": -numbers["clip_low"], "clip_high": numbers["clip_high"]}
        mean = exp(sum(bounds.get(which[t], lr[t]) for t in every) / n)
        losses = [times(-A[t], mean) for t in every]
        passes = [which[t] is None for t in every]
        slope_of_mean = losses
    else:
        mean = exp(sum(lr) / n)
        found = [clip(mean, A[t], mean, n if base == "luspo" else 1, **numbers) for t in every]
        losses = [loss * (n if base == "luspo" and w is None else 1) for loss, _, w in found]
        slope_of_mean = [slope * (n if base == "luspo" else 1) for _, slope, _ in found]
        which, passes = [w for *_, w in found], [True] * n
    kept = {"selected": flags, "weighted": weights}.get(name.split("_")[0], [1.0] * n)
    losses = [times(kept[t], losses[t]) for t in every]
    which = [which[t] if kept[t] else None for t in every]
    if name == "gspo_token":
        return losses, [c[t] * slope_of_mean[t] for t in every], which
    pull = sum(c[t] * times(kept[t], slope_of_mean[t]) for t in every) / n
    return losses, [pull if passes[t] and kept[t] else 0.0 for t in every], which


def check(name, rows, *, rel):
    """rows of tokens (lp, old, A, flag, weight), as in `tokens` of test_surrogates."""
    surrogate, numbers = CASES[name]
    flat = [token for row in rows for token in row]
    lp, old, A, flags, weights = (list(column) for column in zip(*flat, strict=True))
    at = [i for i, row in enumerate(rows) for _ in row]
    targets = targets_of(old, A, rows=[3 * i for i in at], selected=flags, importance_weights=weights)
    c = [1 / (1 + t) for t in range(len(flat))]
    logprobs = tensor(lp, dtype=F64, requires_grad=True)
    losses, clips = surrogate(TokenStats(logprobs), targets, **numbers)
    slopes = torch.autograd.grad((losses * tensor(c, dtype=F64)).sum(), logprobs)[0]
    expected, expected_slopes, which, start = [], [], [], 0
    for row in rows:
        columns = [list(column) for column in zip(*row, strict=True)]
        found = oracle(name, *columns, numbers, c[start : start + len(row)])
        for collected, new in zip((expected, expected_slopes, which), found, strict=True):
            collected.extend(new)
        start += len(row)
    assert losses.tolist() == pytest.approx(expected, rel=rel, abs=rel)
    assert slopes.tolist() == pytest.approx(expected_slopes, rel=rel, abs=rel)
    for clip_name, acts in clips.items():
        assert acts.tolist() == [float(w == clip_name) for w in which]


tokens = st.tuples(logprob, logprob, advantage, flag, weight)


@pytest.mark.core
@pytest.mark.parametrize("name", sorted(SEQUENCE))
@given(rows=st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=3))
def test_against_the_formula_one_row_at_a_time(name, rows):
    """Value, gradient of a weighted sum and clips, for any rows."""
    edges = CASES[name].numbers
    for row in rows:
        lr = [token[0] - token[1] for token in row]
        at = [exp(sum(lr) / len(row)) - 1, *lr] if edges else []
        assume(not any(abs(abs(a) - edge) < 1e-9 for a in at for edge in edges.values()))
    check(name, rows, rel=1e-10)


UP, DOWN = (-0.5, -1000.5), (-1000.5, -0.5)


@pytest.mark.parametrize("A", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("ways", [[UP], [DOWN], [UP, UP], [DOWN, DOWN], [UP, DOWN], [UP, (-0.5, -0.6)]])
@pytest.mark.parametrize("name", sorted(SEQUENCE))
def test_log_ratios_of_1000(name, ways, A):
    """C11: finite where the formula is, infinite elsewhere, never NaN; a row beside is not touched."""
    check(name, [[(*way, A, 1.0, 1.0) for way in ways], [(-0.5, -0.6, 1.0, 1.0, 2.0)]], rel=1e-10)


@pytest.mark.parametrize("name", sorted(SEQUENCE))
def test_nan_stays_in_its_row(name):
    """C12."""
    surrogate, numbers = CASES[name]
    logprobs = tensor([math.nan, -0.5, -0.5], dtype=F64)
    losses, _ = surrogate(TokenStats(logprobs), targets_of([-0.5] * 3, [1.0] * 3, rows=[0, 0, 1]), **numbers)
    assert losses.isnan().tolist() == [True, True, False]


def test_one_token_left_out_for_its_nan_does_not_hide_what_it_does_to_its_row():
    """The ratio of the sequence is still made of all its tokens."""
    targets = targets_of([-0.5] * 2, [1.0] * 2, selected=[0.0, 1.0])
    losses, _ = selected(gspo)(TokenStats(tensor([math.nan, -0.5], dtype=F64)), targets)
    assert losses.isnan().tolist() == [False, True]


def batch_and_logprobs(advantages=(1.0, -0.5)):
    batch = padded_batch(
        [[1], [1]], [[2, 3, 4], [5]], advantages=list(advantages), old_logprobs=[[-1.0, -2.0, -0.5], [-0.7]]
    )
    return batch, torch.tensor([-1.2, -1.7, -0.4, -0.8], requires_grad=True)


def value_and_slopes(surrogate, weights, batch, logprobs, **numbers):
    targets = pack_sequences(weights(batch)).targets
    loss, _ = ppo_loss(TokenStats(logprobs), targets, surrogate=surrogate, **numbers)
    return loss.item(), torch.autograd.grad(loss, logprobs)[0].tolist()


WIDE = {"clip_low": 0.9, "clip_high": 9.0}


def test_gspo_by_hand():
    """Ratios 2 and 8 have the geometric mean 4; its gradient is 4/2 for each token."""
    logprobs = tensor([math.log(2.0), math.log(8.0)], dtype=F64, requires_grad=True)
    targets = targets_of([0.0, 0.0], [-1.0, -1.0])
    losses, _ = gspo(TokenStats(logprobs), targets)
    assert losses.tolist() == pytest.approx([4.0, 4.0])
    assert torch.autograd.grad(losses.mean(), logprobs)[0].tolist() == pytest.approx([2.0, 2.0])
    losses, clips = gspo(TokenStats(logprobs), targets._replace(advantages=-targets.advantages))
    assert losses.tolist() == pytest.approx([-1.0004] * 2)
    assert clips["clip_high"].tolist() == [1.0, 1.0]


def test_gspo_token_is_gspo_where_advantages_are_the_same_for_a_row():
    """arXiv:2507.18071, section 4.3: the same value, and the same gradient."""
    plain, by_token = (value_and_slopes(s, sequence_mean, *batch_and_logprobs(), **WIDE) for s in (gspo, gspo_token))
    assert plain[0] == pytest.approx(by_token[0])
    assert plain[1] == pytest.approx(by_token[1])


def test_luspo_is_gspo_with_the_weights_of_sums():
    """Mean over sequences of |y| s A, both ways."""
    ours = value_and_slopes(luspo, sequence_mean, *batch_and_logprobs(), **WIDE)
    other = value_and_slopes(gspo, sequence_sum, *batch_and_logprobs(), **WIDE)
    assert ours[0] == pytest.approx(other[0])
    assert ours[1] == pytest.approx(other[1])
    by_hand = (-3 * math.exp((-0.2 + 0.3 + 0.1) / 3) + 0.5 * math.exp(-0.1)) / 2
    assert ours[0] == pytest.approx(by_hand)


def test_gmpo_by_hand():
    """A = 1, log-ratios -0.4 and 0.8, clipped at 0.4: geometric mean 1; only the first token has a gradient."""
    logprobs = tensor([-0.4, 0.8], dtype=F64, requires_grad=True)
    losses, clips = gmpo(TokenStats(logprobs), targets_of([0.0, 0.0], [1.0, 1.0]))
    assert losses.tolist() == pytest.approx([-1.0, -1.0])
    assert torch.autograd.grad(losses.mean(), logprobs)[0].tolist() == pytest.approx([-0.5, 0.0])
    assert clips["clip_high"].tolist() == [0.0, 1.0]


def test_vespo_by_hand():
    """arXiv:2602.10693: φ(1) = 1, and the largest φ(W)/W is 2.46 for (2, 3), at W = 1/3, and 1 for (3, 2), at W = 1."""
    phi = {}
    for A, w in ((1.0, 1.0), (1.0, 1 / 3), (-1.0, 1.0), (-1.0, 2.0)):
        half = math.log(w) / 2  # the product of two ratios is w
        losses, _ = vespo(TokenStats(tensor([half - 1, half - 1], dtype=F64)), targets_of([-1.0] * 2, [A] * 2))
        phi[A, w] = (losses[0] / (-A * (half - 1))).item()
    assert phi[1.0, 1.0] == phi[-1.0, 1.0] == pytest.approx(1.0)
    assert phi[1.0, 1 / 3] * 3 == pytest.approx(math.exp(2) / 3)
    assert math.exp(2) / 3 == pytest.approx(2.46, abs=0.005)
    assert phi[-1.0, 2.0] == pytest.approx(8 * math.exp(-2))
