"""Metrics add over any split and are divided once."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from fnppo import Metrics, merge_metrics, summarize
from fnppo.testing import splits


def test_kl_is_a_mean_over_tokens_not_over_micro_batches():
    """I2: sums 2 over 1 token and 2 over 3 tokens give 1.0; the last micro-batch alone would give 0.67."""
    parts = [Metrics(per_token={"kl": tensor(2.0)}, totals={"tokens": tensor(n)}) for n in (1, 3)]
    assert summarize(merge_metrics(*parts))["kl"] == 1.0


def test_what_was_optimised_is_divided_by_steps_only():
    """I1: 4.0 in each of two steps is 4.0."""
    step = Metrics(per_step={"policy_loss": tensor(4.0)}, totals={"tokens": tensor(4), "steps": tensor(1)})
    assert summarize(merge_metrics(step, step))["policy_loss"] == 4.0


def test_extremes_and_keys_of_one_side_only():
    a = Metrics(minima={"low": tensor(1.0)}, maxima={"high": tensor(1.0)}, totals={"tokens": tensor(1)})
    b = Metrics(minima={"low": tensor(-2.0)}, maxima={"high": tensor(3.0), "mine": tensor(5.0)})
    assert summarize(merge_metrics(a, b)) == {"low": -2.0, "high": 3.0, "mine": 5.0, "tokens": 1.0}
    assert merge_metrics(Metrics(), a) == a


def test_means_over_nothing():
    summary = summarize(
        Metrics(per_token={"kl": tensor(0.0)}, minima={"low": tensor(torch.inf)}, totals={"tokens": tensor(0)})
    )
    assert math.isnan(summary["kl"])
    assert math.isnan(summary["low"])
    assert summary["tokens"] == 0.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_order_of_merging_does_not_matter(order):
    parts = [
        Metrics(per_token={"x": tensor(2.0**i)}, totals={"tokens": tensor(i + 1)}, maxima={"m": tensor(float(i))})
        for i in range(3)
    ]
    a, b, c = (parts[i] for i in order)
    expected = {"x": 7 / 6, "tokens": 6.0, "m": 2.0}
    assert summarize(merge_metrics(merge_metrics(a, b), c)) == expected
    assert summarize(merge_metrics(a, merge_metrics(b, c))) == expected


def of_tokens(values, weights):
    """What a loss hands over for these tokens."""
    values, weights = tensor(values, dtype=torch.float64), tensor(weights, dtype=torch.float64)
    return Metrics(
        {"loss": (weights * values).sum()}, {"mean": values.sum()}, {"tokens": tensor(len(values))},
        {"low": values.amin()}, {"high": values.amax()},
    )  # fmt: skip


@pytest.mark.core
@given(st.data(), st.lists(st.tuples(st.floats(-9, 9), st.floats(0, 1)), min_size=1, max_size=8))
def test_any_split_has_the_metrics_of_the_whole(data, tokens):
    """I1, I2: sums, means and extremes over tokens in any order and any number of micro-batches."""
    pieces = [[tokens[i] for i in group] for group in data.draw(splits(len(tokens)))]
    merged = summarize(reduce(merge_metrics, (of_tokens(*zip(*piece, strict=True)) for piece in pieces)))
    values = [value for value, _ in tokens]
    assert merged == pytest.approx(
        {
            "loss": sum(value * weight for value, weight in tokens),
            "mean": sum(values) / len(values),
            "low": min(values),
            "high": max(values),
            "tokens": len(values),
        },
        rel=1e-12,
        abs=1e-12,
    )
