"""Tokens that are chosen by comparison: against loops and sorted lists, over the mini-batch, whatever its order."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

import fnppo
from fnppo import PaddedBatch, padded_batch, select_rows
from fnppo.surrogates.selection import select_clip_cov, select_kl_cov, select_top_entropy
from fnppo.testing import padded_batches

F64 = torch.float64
NAN = float("nan")


def draw_values(batch, seed):
    """One value a token, NaN where nothing is learned."""
    g = torch.Generator().manual_seed(seed)
    return torch.where(batch.loss_mask, torch.randn(batch.input_ids.shape, generator=g, dtype=F64), NAN)


def covariances(batch, logprobs):
    """{(row, column): (log π - mean)(A - mean)}, one token at a time."""
    places = [tuple(place) for place in batch.loss_mask.nonzero().tolist()]
    lp, A = ({p: values[p].item() for p in places} for values in (logprobs, batch.advantages))
    means = [sum(values.values()) / max(len(places), 1) for values in (lp, A)]
    return {p: (lp[p] - means[0]) * (A[p] - means[1]) for p in places}


def chosen(batch, name):
    column = batch.extra[name]
    assert column.dtype == F64
    assert set(column.flatten().tolist()) <= {0.0, 1.0}
    return {tuple(place) for place in column.nonzero().tolist()}


def assert_highest(found, values, fraction):
    """The floor(fraction · N) largest, at least one; which of equal ones is another test's."""
    count = min(len(values), max(1, int(fraction * len(values) + 1e-9)))
    least = sorted(values.values(), reverse=True)[count - 1] if count else 0.0
    assert len(found) == count
    assert {p for p in values if values[p] > least + 1e-12} <= found <= {p for p in values if values[p] > least - 1e-12}


seeds, fractions = st.integers(0, 2**32 - 1), st.floats(0.01, 1)


@pytest.mark.core
@given(batch=padded_batches(vocab_size=9), seed=seeds, fraction=fractions)
def test_the_highest_one_token_at_a_time(batch, seed, fraction):
    """KL-Cov and top entropy, for any masks; NaN where nothing is learned is not read."""
    values = draw_values(batch, seed)
    by_cov = select_kl_cov(batch, values, fraction=fraction)
    assert_highest(chosen(by_cov, "kl_cov"), covariances(batch, values), fraction)
    entropies = {tuple(p): values[tuple(p)].item() for p in batch.loss_mask.nonzero().tolist()}
    by_entropy = select_top_entropy(by_cov, values, fraction=fraction)
    assert_highest(chosen(by_entropy, "selected"), entropies, fraction)
    assert by_entropy.extra.keys() == {"column", "kl_cov", "selected"}


@pytest.mark.core
@given(batch=padded_batches(vocab_size=9), seed=seeds, fraction=fractions, low=st.floats(-1, 1))
def test_clip_cov_one_token_at_a_time(batch, seed, fraction, low):
    """As many as asked for, from the band, or all of a band with fewer; the same for the same generator."""
    values, high = draw_values(batch, seed), low + 1
    select = lambda state: select_clip_cov(
        batch, values, generator=torch.Generator().manual_seed(state), fraction=fraction, low=low, high=high
    )
    band = {place for place, covariance in covariances(batch, values).items() if low <= covariance <= high}
    drawn = chosen(select(seed), "clip_cov")
    tokens = int(batch.loss_mask.sum())
    assert drawn <= band
    assert len(drawn) == min(len(band), max(1, int(fraction * tokens + 1e-9)))
    assert drawn == chosen(select(seed), "clip_cov")


def some_batch():
    batch = padded_batch([[1]] * 3, [[2, 3, 4]] * 3, advantages=[1.0, -1.0, 0.5])
    return batch._replace(advantages=batch.advantages.double())


def test_clip_cov_draws_evenly_and_from_the_generator_alone():
    """Each of 9 candidates is 1 of 3 drawn in a third of the draws, and the global state is not used."""
    batch, values = some_batch(), draw_values(some_batch(), 0)
    g, before = torch.Generator().manual_seed(1), torch.random.get_rng_state()
    options = {"generator": g, "fraction": 1 / 3, "low": -99.0, "high": 99.0}
    draws = [select_clip_cov(batch, values, **options).extra["clip_cov"] for _ in range(300)]
    share = torch.stack(draws).mean(0)[:, 1:]
    assert bool(((share - 1 / 3).abs() < 0.12).all())  # 4.4 standard deviations of 0.0272
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_order_of_rows_changes_no_choice():
    batch, values = some_batch(), draw_values(some_batch(), 3)
    order = [2, 0, 1]
    for select in (select_kl_cov, select_top_entropy):
        whole = select(batch, values, fraction=0.34)
        other = select(select_rows(batch, order), values[order], fraction=0.34)
        for name, column in other.extra.items():
            assert torch.equal(column, whole.extra[name][order])


def test_covariance_by_hand():
    """Log-probs -1, -9 | -5, -5 and advantages 1 | -1: covariances 4, -4 | 0, 0."""
    batch = padded_batch([[1], [1]], [[2, 3], [4, 5]], advantages=[1.0, -1.0])
    logprobs = tensor([[NAN, -1.0, -9.0], [NAN, -5.0, -5.0]])
    assert select_kl_cov(batch, logprobs, fraction=0.26).extra["kl_cov"].tolist() == [[0, 1, 0], [0, 0, 0]]
    two = select_kl_cov(batch, logprobs, fraction=0.5).extra["kl_cov"].tolist()
    assert two == [[0, 1, 0], [0, 1, 0]]  # of the two that are equal, the first
    drawn = lambda low, high: select_clip_cov(
        batch, logprobs, generator=torch.Generator(), fraction=1.0, low=low, high=high
    ).extra["clip_cov"].tolist()  # fmt: skip
    assert drawn(1.0, 5.0) == drawn(4.0, 4.0) == [[0, 1, 0], [0, 0, 0]]
    assert drawn(4.1, 5.0) == [[0, 0, 0], [0, 0, 0]]
    assert drawn(-4.0, 0.0) == [[0, 0, 1], [0, 1, 1]]


def test_all_that_reach_the_threshold_of_entropy():
    """arXiv:2506.01939 compares with a threshold, so equal entropies are treated alike."""
    batch = padded_batch([[1]], [[2, 3, 4, 5]])
    entropy = tensor([[9.0, 0.5, 0.1, 0.5, 0.0]])
    assert select_top_entropy(batch, entropy, fraction=0.25).extra["selected"].tolist() == [[0, 1, 0, 1, 0]]


def test_a_fraction_that_floating_point_cannot_hold():
    """0.29 of 100 tokens are 29, though 0.29 · 100 is 28.999… ."""
    batch = padded_batch([[1]], [[2] * 100], advantages=[1.0])
    entropy = torch.arange(101.0)[None]
    assert select_top_entropy(batch, entropy, fraction=0.29).extra["selected"].sum().item() == 29


@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_to_choose_from(rows):
    none = torch.zeros(rows, 3, dtype=torch.long)
    batch = PaddedBatch(none, none == 0, none != 0, advantages=none.double())
    values = torch.full((rows, 3), NAN)
    for select in (select_kl_cov, select_top_entropy):
        assert select(batch, values).extra.popitem()[1].sum().item() == 0
    assert select_clip_cov(batch, values, generator=torch.Generator()).extra["clip_cov"].sum().item() == 0


def test_half_precision_is_compared_in_float32():
    batch = padded_batch([[1]], [[2, 3]], advantages=[1.0])
    entropy = tensor([[0.0, 1.0, 2.0]], dtype=torch.bfloat16)
    assert select_top_entropy(batch, entropy, fraction=0.5, name="unsure").extra["unsure"].tolist() == [[0, 0, 1]]


def test_what_is_wrong_is_named():
    batch, values = some_batch(), draw_values(some_batch(), 0)
    g = torch.Generator()
    clip_cov = lambda *a, **k: inspect.unwrap(select_clip_cov)(*a, generator=g, **k)
    for select in (select_kl_cov, select_top_entropy, clip_cov):
        for fraction in (0.0, -0.1, 1.1, NAN):
            with pytest.raises(ValueError, match=f"fraction is {fraction}"):
                select(batch, values, fraction=fraction)
        with pytest.raises(ValueError, match=r"has shape \(3, 3\), input_ids has \(3, 4\)"):
            select(batch, values[:, 1:])
        with pytest.raises(ValueError, match=r"row 0, column 1: (logprobs|entropy) is nan at a learned token"):
            select(batch, torch.full_like(values, NAN))
        with pytest.raises(ValueError, match="has dtype torch.int64; it needs floating point"):
            inspect.unwrap(select)(batch, batch.input_ids)
    for select in (select_kl_cov, clip_cov):
        with pytest.raises(ValueError, match=r"needs batch\.advantages"):
            select(batch._replace(advantages=None), values)
    with pytest.raises(ValueError, match="high is 0.5; it must be a number of at least 1.0"):
        select_clip_cov(batch, values, generator=g, high=0.5)
    with pytest.raises(ValueError, match="low is nan"):
        select_clip_cov(batch, values, generator=g, low=NAN)


def test_a_generator_is_needed():
    with pytest.raises(TypeError, match="generator"):
        select_clip_cov(some_batch(), draw_values(some_batch(), 0))


def test_a_choice_survives_the_layout():
    batch, values = some_batch(), draw_values(some_batch(), 0)
    batch = select_top_entropy(batch, values, fraction=0.5)
    targets = fnppo.pack_sequences(batch).targets
    assert torch.equal(targets.extra["selected"], batch.extra["selected"][batch.loss_mask])


@pytest.mark.parametrize("select", [select_kl_cov, select_top_entropy, select_clip_cov])
def test_batched_and_compiled(unchecked, select):
    """Shapes do not depend on values: one batch at a time, all at once, and compiled as a whole."""
    batch, values = some_batch(), torch.stack([draw_values(some_batch(), seed) for seed in range(3)])
    values = torch.where(batch.loss_mask, values, 0)
    numbers = {"fraction": 0.4}
    if select is select_clip_cov:  # all candidates: what is drawn does not depend on the generator
        numbers = {"generator": torch.Generator(), "fraction": 1.0, "low": -0.2, "high": 9.0}
    column = lambda v: list(select(batch, v, **numbers).extra.values())[-1]
    one_by_one = torch.stack([column(v) for v in values])
    assert 0 < one_by_one.sum() < one_by_one.numel()
    assert torch.equal(torch.func.vmap(column, randomness="same")(values), one_by_one)
    if select is not select_clip_cov:  # torch.compile does not take generators
        compiled = torch.compile(column, fullgraph=True, backend="eager")
        assert torch.equal(torch.stack([compiled(v) for v in values]), one_by_one)
