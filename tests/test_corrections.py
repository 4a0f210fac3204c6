"""Ratios, weights and masks for tokens of another sampler, against loops over rows and tokens in plain Python."""

import math
import subprocess
import sys
from inspect import unwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.func import grad, vmap
from torch.testing import assert_close

import fnppo
from fnppo import PaddedBatch, pack_sequences, pad_sequences, padded_batch, select_rows, token_mean
from fnppo.corrections.diagnostics import effective_share, off_policy_diagnostics
from fnppo.corrections.masks import inside, near_sampler, off_policy_mask, reject, whole_rows
from fnppo.corrections.weights import (
    geometric_ratios,
    mask_outside,
    sequence_normalized,
    sequence_ratios,
    token_normalized,
    token_ratios,
    truncate,
    with_importance_weights,
)
from fnppo.kl import kl_k1, kl_k2, kl_k3
from fnppo.testing import padded_batches

F64, NAN, INF = torch.float64, math.nan, math.inf


@st.composite
def batches(draw, extreme=False):
    """Batches of every shape, with NaN where nothing may be read; the sampler is a little off, or very far."""
    batch = draw(padded_batches(vocab_size=13))
    distances = st.floats(-2, 2)
    if extreme:
        distances = st.one_of(distances, st.sampled_from([-1000.0, 1000.0]))
    sampler = batch.old_logprobs.clone()
    for row, column in batch.loss_mask.nonzero().tolist():
        sampler[row, column] -= draw(distances)
    return batch._replace(extra=batch.extra | {"sampler_logprobs": sampler})


def rows_of(batch):
    """[(column, log-ratio), ...] of the learned tokens of each row."""
    sampler = batch.extra["sampler_logprobs"]
    return [
        [
            (t, batch.old_logprobs[i, t].item() - sampler[i, t].item())
            for t in range(batch.input_ids.shape[1])
            if batch.loss_mask[i, t]
        ]
        for i in range(batch.input_ids.shape[0])
    ]


def exp(x):
    return math.exp(x) if x < 700 else INF


def laid_out(batch, per_row):
    """The rectangle that holds `per_row(log-ratios of the row)` at its learned tokens, 0 elsewhere."""
    values = torch.zeros(batch.input_ids.shape, dtype=F64)
    for i, row in enumerate(rows_of(batch)):
        for (t, _), value in zip(row, per_row([x for _, x in row]), strict=True):
            values[i, t] = value
    return values


RATIOS = {
    token_ratios: lambda xs: [exp(x) for x in xs],
    sequence_ratios: lambda xs: [exp(math.fsum(xs))] * len(xs),
    geometric_ratios: lambda xs: [exp(math.fsum(xs) / len(xs)) for _ in xs],
}


@pytest.mark.core
@pytest.mark.parametrize("ratios", RATIOS, ids=lambda f: f.__name__)
@given(batches(extreme=True))
def test_ratios(ratios, batch):
    """NaN elsewhere, rows without targets, empty rows, and ratios that overflow to inf or underflow to 0."""
    found = ratios(batch)
    assert_close(found, laid_out(batch, RATIOS[ratios]), rtol=1e-10, atol=1e-300)
    assert found.dtype == F64


def by_hand():
    """Rows with ratios [2, 4], [0.5], none; a prompt token and padding hold NaN."""
    batch = padded_batch([[1], [1], [1]], [[2, 3], [4], []])
    old = tensor([[NAN, -1.0, -2.0], [NAN, -1.5, NAN], [NAN, NAN, NAN]])
    sampler = old - tensor([[0, math.log(2), math.log(4)], [0, math.log(0.5), 0], [0, 0, 0]])
    return batch._replace(old_logprobs=old, extra={"sampler_logprobs": sampler})


def test_by_hand():
    batch = by_hand()
    of_sequences = tensor([[0, 8, 8], [0, 0.5, 0], [0, 0, 0]])
    assert_close(token_ratios(batch), tensor([[0, 2, 4], [0, 0.5, 0], [0, 0, 0]]))
    assert_close(sequence_ratios(batch), of_sequences)
    assert_close(geometric_ratios(batch), tensor([[0, 8**0.5, 8**0.5], [0, 0.5, 0], [0, 0, 0]]))
    assert_close(truncate(sequence_ratios(batch), at=2.0), tensor([[0, 2.0, 2], [0, 0.5, 0], [0, 0, 0]]))
    icepop = mask_outside(token_ratios(batch), low=0.6, high=5.0)
    assert_close(icepop, tensor([[0, 2.0, 4], [0, 0, 0], [0, 0, 0]]))
    assert_close(token_normalized(icepop, batch), tensor([[0, 1.0, 2], [0, 0, 0], [0, 0, 0]]))  # mean 6/3
    mean = (8 + 0.5) / 2
    assert_close(sequence_normalized(of_sequences, batch), of_sequences / mean)
    veto = whole_rows(inside(token_ratios(batch), low=0.0, high=3.0), batch)
    assert reject(batch, veto).loss_mask.tolist() == [[False] * 3, [False, True, False], [False] * 3]


numbers = st.floats(0.01, 50)


@pytest.mark.core
@given(batches(extreme=True), numbers, numbers)
def test_truncation_and_masks_of_ratios(batch, a, b):
    """Also of those that are inf or 0: no inf is left after a truncation or a mask."""
    low, high = min(a, b), max(a, b)
    for ratios, oracle in RATIOS.items():
        found = ratios(batch)
        assert_close(truncate(found, at=a), laid_out(batch, lambda xs: [min(r, a) for r in oracle(xs)]))
        expected = laid_out(batch, lambda xs: [r if low <= r <= high else 0.0 for r in oracle(xs)])
        near_an_edge = ((found - low).abs() < 1e-9) | ((found - high).abs() < 1e-9)
        assert_close(
            torch.where(near_an_edge, 0, mask_outside(found, low=low, high=high)),
            torch.where(near_an_edge, 0, expected),
        )
        assert bool(inside(found, low=0.0, high=INF)[batch.loss_mask].all())


@pytest.mark.core
@given(batches(), st.floats(0.05, 3), st.sampled_from([1.0, 1e-30, 1e300]))
def test_normalised_weights_have_mean_one(batch, at, scale):
    weights = truncate(token_ratios(batch), at=at) * scale
    rows = [[weights[i, t].item() for t, _ in row] for i, row in enumerate(rows_of(batch)) if row]
    tokens = [w for row in rows for w in row]
    if not tokens:
        assert not token_normalized(weights, batch).any()
        assert not sequence_normalized(weights, batch).any()
        return
    mean = math.fsum(w / len(tokens) for w in tokens)
    of_rows = math.fsum(math.fsum(w / len(row) for w in row) / len(rows) for row in rows)
    assert_close(token_normalized(weights, batch), weights / mean, rtol=1e-10, atol=1e-12)
    assert_close(sequence_normalized(weights, batch), weights / of_rows, rtol=1e-10, atol=1e-12)


def test_weights_that_are_all_zero_stay_zero():
    batch = by_hand()
    for normalised in (token_normalized, sequence_normalized):
        assert not normalised(torch.zeros(3, 3), batch).any()
        assert normalised(torch.zeros(0, 3), select_rows(batch, [])).shape == (0, 3)


@pytest.mark.core
@given(batches(extreme=True), st.floats(0.01, 3), st.sampled_from([kl_k1, kl_k2, kl_k3]))
def test_masks_of_rows(batch, most, kl):
    """near_sampler, off_policy_mask and whole_rows: row by row, what a loop says."""
    of_row = {
        kl_k1: lambda x: -x,
        kl_k2: lambda x: x * x / 2,
        kl_k3: lambda x: (math.expm1(x) if x < 700 else INF) - x,
    }[kl]
    near, opsm = near_sampler(batch, most=most, kl=kl), off_policy_mask(batch, threshold=most)
    kept = inside(token_ratios(batch), low=0.5, high=2.0)
    whole = whole_rows(kept, batch)
    for i, row in enumerate(rows_of(batch)):
        if not row:
            continue
        xs = [x for _, x in row]
        mean, gap = sum(map(of_row, xs)) / len(xs), -math.fsum(xs) / len(xs)
        for t, _ in row:
            if not abs(mean - most) < 1e-9:
                assert near[i, t].item() is (mean <= most)
            if not abs(gap - most) < 1e-9:
                assert opsm[i, t].item() is not (batch.advantages[i, t].item() < 0 and gap > most)
            assert whole[i, t].item() is all(kept[i, s].item() for s, _ in row)


def test_off_policy_mask_by_hand():
    """Gap log 2 in the mean of row 0: only its negative advantages go, and only beyond the threshold."""
    batch = by_hand()
    batch = batch._replace(extra={"sampler_logprobs": 2 * batch.old_logprobs - batch.extra["sampler_logprobs"]})
    batch = batch._replace(advantages=tensor([[NAN, -1.0, 0.0], [NAN, -1.0, NAN], [NAN] * 3]))
    learned = lambda kept: (kept & batch.loss_mask).tolist()  # gaps: log 8 / 2 = 1.04, and -log 2
    assert learned(off_policy_mask(batch, threshold=1.0)) == [[False, False, True], [False, True, False], [False] * 3]
    assert learned(off_policy_mask(batch, threshold=1.1)) == batch.loss_mask.tolist()
    assert learned(off_policy_mask(batch, threshold=-1.0)) == [[False, False, True], [False] * 3, [False] * 3]


WEIGHTS = {
    "TIS": lambda b: truncate(token_ratios(b), at=2.0),
    "IcePop": lambda b: mask_outside(token_ratios(b), low=0.5, high=5.0),
    "MIS": lambda b: mask_outside(sequence_ratios(b), low=0.0, high=2.0),
    "geometric": lambda b: torch.where(
        inside(geometric_ratios(b), low=0.9, high=1.1), truncate(token_ratios(b), at=2.0), 0
    ),
    "tokens, normalised": lambda b: token_normalized(truncate(token_ratios(b), at=2.0), b),
    "sequences, normalised": lambda b: sequence_normalized(truncate(sequence_ratios(b), at=2.0), b),
    "near": lambda b: torch.where(near_sampler(b, most=0.5), token_ratios(b), 0),
    "masked": lambda b: torch.where(off_policy_mask(b, threshold=0.1), token_ratios(b), 0),
    "veto": lambda b: torch.where(whole_rows(inside(token_ratios(b), low=0.3, high=INF), b), token_ratios(b), 0),
}


def every(columns, change):
    """The batch with `change` applied to all that has a row."""
    changed = {k: change(v) for k, v in columns._asdict().items() if isinstance(v, torch.Tensor)}
    return columns._replace(**changed, extra={k: change(v) for k, v in columns.extra.items()})


@pytest.mark.core
@pytest.mark.parametrize("name", WEIGHTS)
@given(batch=batches(), data=st.data())
def test_neither_padding_nor_the_order_of_rows_matters(name, batch, data):
    weights = WEIGHTS[name](batch)
    assert bool((weights[~batch.loss_mask] == 0).all())
    rows = batch.input_ids.shape[0]
    order = data.draw(st.permutations(range(rows)))
    assert_close(WEIGHTS[name](select_rows(batch, order)), weights[order], rtol=1e-12, atol=1e-15)
    left, right = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))

    def wider(column):
        fill = {torch.bool: False, torch.int64: 0}.get(column.dtype, NAN)
        return torch.nn.functional.pad(column, (left, right), value=fill) if column.dim() == 2 else column

    padded = torch.nn.functional.pad(weights, (left, right))
    assert_close(WEIGHTS[name](every(batch, wider)), padded, rtol=1e-12, atol=1e-15)


@pytest.mark.core
@given(batches())
def test_weights_reach_the_targets_in_every_layout(batch):
    weights = WEIGHTS["TIS"](batch)
    with_weights = with_importance_weights(batch, weights)
    assert {*batch.extra} | {"importance_weights"} == {*with_weights.extra}
    assert "importance_weights" not in batch.extra
    for layout in (pack_sequences, pad_sequences):
        assert torch.equal(layout(with_weights).targets.extra["importance_weights"], weights[batch.loss_mask])


@pytest.mark.core
@given(batches(), st.floats(0.3, 3))
def test_what_is_rejected_leaves_the_divisors_and_what_has_weight_zero_stays(batch, high):
    """The difference of the two ends, with losses of 1: a mean of what is left is 1; with weights it is the share left."""
    kept = inside(token_ratios(batch), low=0.0, high=high)
    learned, left = (sum(x) for x in zip((0, 0), *(
        (len(row), sum(exp(x) <= high for _, x in row)) for row in rows_of(batch)), strict=True))  # fmt: skip
    smaller = reject(batch, kept)
    assert int(smaller.loss_mask.sum()) == left
    assert torch.equal(smaller.attention_mask, batch.attention_mask)
    assert token_mean(smaller).loss_weights.sum().item() == pytest.approx(float(left > 0))
    ones = with_importance_weights(batch, torch.where(kept, 1.0, 0.0).to(F64))
    weighted = (token_mean(ones).loss_weights * ones.extra["importance_weights"]).sum().item()
    assert weighted == pytest.approx(left / learned if learned else 0.0)


def test_masks_compose():
    batch = by_hand()
    kept = inside(token_ratios(batch), low=0.0, high=3.0) & inside(geometric_ratios(batch), low=1.0, high=9.0)
    assert reject(batch, kept).loss_mask.tolist() == [[False, True, False], [False] * 3, [False] * 3]


# Diagnostics


def numbers(found):
    assert all(value.shape == () and value.dtype == F64 for value in found.values())
    return {name: value.item() for name, value in found.items()}


@pytest.mark.core
@given(batches())
def test_diagnostics(batch):
    rows = [[x for _, x in row] for row in rows_of(batch) if row]
    tokens = [x for row in rows for x in row]
    found = numbers(off_policy_diagnostics(batch))
    if not tokens:
        assert all(math.isnan(value) for value in found.values())
        return
    mean = lambda xs: math.fsum(xs) / len(xs)
    ess = lambda xs: math.fsum(map(exp, xs)) ** 2 / math.fsum(exp(2 * x) for x in xs) / len(xs)
    sums = [math.fsum(row) for row in rows]
    logs = {
        name: [mean([column[i, t].item() for t, _ in row]) for i, row in enumerate(rows_of(batch)) if row]
        for name, column in (("trainer", batch.old_logprobs), ("sampler", batch.extra["sampler_logprobs"]))
    }
    expected = {
        "mismatch_k1": -mean(tokens),
        "mismatch_k3": mean([math.exp(x) - 1 - x for x in tokens]),
        "chi2_token": mean([math.exp(2 * x) for x in tokens]) - 1,
        "chi2_sequence": mean([math.exp(2 * x) for x in sums]) - 1,
        "ess_token": ess(tokens),
        "ess_sequence": ess(sums),
        "perplexity_trainer": mean([math.exp(-x) for x in logs["trainer"]]),
        "perplexity_sampler": mean([math.exp(-x) for x in logs["sampler"]]),
        "log_perplexity_gap": mean([b - a for a, b in zip(logs["trainer"], logs["sampler"], strict=True)]),
        "smallest_ratio": math.exp(min(tokens)),
        "largest_ratio": math.exp(max(tokens)),
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)
    share = effective_share(token_ratios(batch), batch).item()
    assert share == pytest.approx(found["ess_token"], rel=1e-9)


def test_diagnostics_by_hand():
    """Ratios 2, 4 and 0.5 in two rows of products 8 and 0.5."""
    found = numbers(off_policy_diagnostics(by_hand()))
    assert found["mismatch_k1"] == pytest.approx(-math.log(4) / 3)
    assert found["mismatch_k3"] == pytest.approx((6.5 - 3 - math.log(4)) / 3)
    assert found["chi2_token"] == pytest.approx((4 + 16 + 0.25) / 3 - 1)
    assert found["chi2_sequence"] == pytest.approx((64 + 0.25) / 2 - 1)
    assert found["ess_token"] == pytest.approx(6.5**2 / 20.25 / 3)
    assert found["ess_sequence"] == pytest.approx(8.5**2 / 64.25 / 2)
    assert found["log_perplexity_gap"] == pytest.approx((-math.log(8) / 2 + math.log(2)) / 2)
    assert (found["smallest_ratio"], found["largest_ratio"]) == (pytest.approx(0.5), pytest.approx(4.0))
    cut = truncate(token_ratios(by_hand()), at=2.0)
    assert effective_share(cut, by_hand()).item() == pytest.approx(4.5**2 / 8.25 / 3)


def test_equal_policies():
    batch = by_hand()._replace(extra={"sampler_logprobs": by_hand().old_logprobs})
    found = numbers(off_policy_diagnostics(batch))
    for name in ("mismatch_k1", "mismatch_k3", "chi2_token", "chi2_sequence", "log_perplexity_gap"):
        assert found[name] == 0.0
    for name in ("ess_token", "ess_sequence", "smallest_ratio", "largest_ratio"):
        assert found[name] == pytest.approx(1.0, abs=1e-12)
    for ratios in RATIOS:
        assert torch.equal(ratios(batch), batch.loss_mask.float())


def test_diagnostics_of_what_no_float_holds():
    """Log-ratios of 1000: chi-square is e^2000, which is inf; the effective sample size is exact."""
    batch = by_hand()
    sampler = batch.old_logprobs - tensor([[0, 1000.0, 1000], [0, -1000, 0], [0, 0, 0]])
    found = numbers(off_policy_diagnostics(batch._replace(extra={"sampler_logprobs": sampler})))
    assert found["chi2_token"] == found["largest_ratio"] == found["mismatch_k3"] == INF
    assert (found["ess_token"], found["ess_sequence"]) == (pytest.approx(2 / 3), pytest.approx(1 / 2))
    assert found["mismatch_k1"] == pytest.approx(-1000 / 3, rel=1e-6)
    assert found["smallest_ratio"] == 0.0
    assert not any(map(math.isnan, found.values()))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_diagnostics_of_an_empty_batch(shape):
    no, zeros = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    batch = PaddedBatch(no.long(), no, no, old_logprobs=zeros, extra={"sampler_logprobs": zeros})
    assert all(map(math.isnan, numbers(off_policy_diagnostics(batch)).values()))


# Transforms


def test_under_vmap_and_grad_also_over_their_numbers():
    batch = by_hand()
    old = torch.stack([batch.old_logprobs, batch.old_logprobs + 0.3])
    for name, weights in WEIGHTS.items():
        run = lambda old: weights(batch._replace(old_logprobs=old, advantages=-torch.ones(3, 3)))
        assert_close(vmap(run)(old), torch.stack([run(x) for x in old]), msg=name)
    ats = tensor([1.0, 3.0])
    cut = lambda at: truncate(token_ratios(batch), at=at)
    assert_close(vmap(cut)(ats), torch.stack([cut(at) for at in ats]))
    assert grad(lambda at: cut(at).sum())(tensor(3.0)).item() == 1.0  # one ratio is above
    bounds = lambda low: mask_outside(token_ratios(batch), low=low, high=tensor(5.0))
    assert_close(vmap(bounds)(tensor([0.1, 3.0])), torch.stack([bounds(0.1), bounds(3.0)]))
    slope = grad(lambda old: truncate(token_ratios(batch._replace(old_logprobs=old)), at=3.0).sum())(batch.old_logprobs)
    assert_close(slope, tensor([[0, 2.0, 0], [0, 0.5, 0], [0, 0, 0]]))  # NaN stays outside
    for name in off_policy_diagnostics(batch):
        run = lambda old, name=name: off_policy_diagnostics(batch._replace(old_logprobs=old))[name]
        assert_close(vmap(run)(old), torch.stack([run(x) for x in old]), msg=name)
        assert torch.autograd.gradcheck(run, batch.old_logprobs.double().requires_grad_()), name


CHILD = """
import torch
from fnppo import padded_batch
from fnppo.corrections import *
ratios = torch.tensor([[0.0, 0.5, 4.0]])
batch = padded_batch([[1]], [[2, 3]], old_logprobs=[[-1.0, -2.0]], advantages=[-1.0])
batch = batch._replace(extra={"sampler_logprobs": torch.tensor([[0.0, -2.0, -2.5]])})
for run in (
    lambda x, n: truncate(x, at=n), lambda x, n: truncate(x, at=2.0),
    lambda x, n: mask_outside(x, low=0.1, high=n), lambda x, n: inside(x, low=0.1, high=3.0),
    lambda x, n: token_normalized(truncate(sequence_ratios(batch._replace(old_logprobs=-x)), at=n), batch),
    lambda x, n: reject(batch, off_policy_mask(batch._replace(old_logprobs=-x), threshold=0.1 * n)).loss_mask,
    lambda x, n: near_sampler(batch._replace(old_logprobs=-x), most=n),
    lambda x, n: whole_rows(inside(geometric_ratios(batch._replace(old_logprobs=-x)), low=0.1, high=n), batch),
    lambda x, n: torch.stack([*off_policy_diagnostics(batch._replace(old_logprobs=-x)).values()]),
    lambda x, n: sequence_normalized(truncate(x, at=n), batch), lambda x, n: effective_share(truncate(x, at=n), batch),
):
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ratios, torch.tensor(2.0)), run(ratios, torch.tensor(2.0)))
print("compiled")
"""


def test_compiled_without_graph_breaks():
    """In a process of its own: torch.compile cannot read the run-time checker of the tests."""
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.stdout == "compiled\n", child.stderr[-2000:]


# Refusals


def test_missing_and_malformed_columns():
    batch = by_hand()
    sampler = batch.extra["sampler_logprobs"]
    for of in (token_ratios, sequence_ratios, geometric_ratios, off_policy_diagnostics):
        with pytest.raises(ValueError, match="a correction needs batch.old_logprobs"):
            of(batch._replace(old_logprobs=None))
        with pytest.raises(ValueError, match=r'a correction needs batch.extra\["sampler_logprobs"\]'):
            of(batch._replace(extra={}))
        for value in (NAN, -INF):
            broken = sampler.clone()
            broken[0, 2] = value
            with pytest.raises(ValueError, match=rf"row 0, column 2: extra\['sampler_logprobs'\] is {value}"):
                of(batch._replace(extra={"sampler_logprobs": broken}))
        with pytest.raises(ValueError, match="dtype torch.int64"):
            of(batch._replace(extra={"sampler_logprobs": torch.zeros(3, 3).long()}))
        with pytest.raises(ValueError, match=r"sampler_logprobs has shape \(3, 2\)"):
            of(batch._replace(extra={"sampler_logprobs": sampler[:, 1:]}))
    with pytest.raises(ValueError, match="needs batch.advantages"):
        off_policy_mask(batch, threshold=0.1)


def test_numbers_out_of_range():
    batch, ratios = by_hand(), torch.ones(1, 2)
    for run, words in (
        (lambda: truncate(ratios, at=0.0), "at is 0.0"),
        (lambda: truncate(ratios, at=NAN), "at is nan"),
        (lambda: truncate(ratios, at=tensor([1.0, 2.0])), "at has shape"),
        (lambda: inside(ratios, low=-0.1, high=1.0), "low is -0.1"),
        (lambda: inside(ratios, low=0.0, high=0.0), "high is 0.0"),
        (lambda: mask_outside(ratios, low=2.0, high=1.0), "low is 2.0, high is 1.0: nothing"),
        (lambda: mask_outside(ratios, low=tensor(2.0), high=1.0), "nothing lies between them"),
        (lambda: near_sampler(batch, most=0.0), "most is 0.0"),
        (lambda: off_policy_mask(batch, threshold=NAN), "threshold is nan"),
    ):
        with pytest.raises(ValueError, match=words):
            run()


def test_weights_and_masks_that_do_not_fit():
    batch = by_hand()
    for takes in (token_normalized, sequence_normalized, lambda w, b: with_importance_weights(b, w), effective_share):
        for value in (INF, NAN, -1.0):
            weights = torch.ones(3, 3)
            weights[1, 1] = value
            weights[1, 2] = NAN  # masked
            with pytest.raises(ValueError, match=rf"row 1, column 1: the weight is {value} .* Truncate ratios"):
                takes(weights, batch)
        with pytest.raises(ValueError, match=r"weights has shape \(3, 2\), the batch \(3, 3\)"):
            takes(torch.ones(3, 2), batch)
    masked = with_importance_weights(batch, torch.full((3, 3), NAN).where(~batch.loss_mask, 1.0))
    assert torch.equal(masked.extra["importance_weights"], batch.loss_mask.float())
    for takes in (lambda k: reject(batch, k), lambda k: whole_rows(k, batch)):
        with pytest.raises(ValueError, match=r"kept has shape \(3, 2\)"):
            takes(torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"kept has dtype torch.float32; .* Compare: weights > 0"):
        unwrap(reject)(batch, torch.ones(3, 3))
    with pytest.raises(ValueError, match="the batch has loss_weights"):
        reject(token_mean(batch), batch.loss_mask)


def test_a_whole_update_with_weights_of_the_mini_batch():
    """Rejection as part of the weights function of update_policy: once per mini-batch, before the split."""
    from tiny import tiny

    policy, params = fnppo.functional_policy(tiny("llama"))
    batch = by_hand()._replace(advantages=torch.ones(3, 3))

    def loss_fn(params, mb):
        stats = fnppo.forward_logprobs(params, mb, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, mb.targets)

    optimizer = fnppo.sgd(0.0)
    weights = lambda b: token_mean(reject(b, inside(token_ratios(b), low=0.0, high=3.0)))
    *_, metrics = fnppo.update_policy(
        params, optimizer.init(params), batch, loss_fn=loss_fn, optimizer=optimizer, weights=weights,
        num_epochs=1, mini_batch_size=3, max_tokens=3,
    )  # fmt: skip
    assert (metrics["tokens"], metrics["rows"]) == (2.0, 2.0)
