"""Metrics add over any split and are divided once."""

import math

import pytest
import torch
from torch import tensor

from fnppo import Metrics, merge_metrics, summarize


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
