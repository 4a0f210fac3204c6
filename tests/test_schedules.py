"""Schedules at their corners."""

import pytest
import torch
from torch.func import vmap

from fnppo import constant, cosine, linear, warmup_stable_decay


def values(schedule, steps):
    return [round(float(schedule(torch.tensor(step))), 6) for step in steps]


def test_corners():
    assert values(constant(2.0), [0, 7]) == [2.0, 2.0]
    assert values(constant(2.0, warmup=2), [0, 1, 2]) == [1.0, 2.0, 2.0]
    assert values(linear(1.0, 0.2, steps=4), [0, 2, 4, 9]) == [1.0, 0.6, 0.2, 0.2]
    assert values(linear(1.0, 0.0, steps=4, warmup=2), [0, 1, 2, 4, 6]) == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert values(cosine(1.0, steps=4, final=0.1), [0, 1, 2, 4, 9]) == [1.0, 0.868198, 0.55, 0.1, 0.1]
    assert values(cosine(1.0, steps=2, warmup=2), [0, 1, 2, 3, 4]) == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert values(warmup_stable_decay(1.0, warmup=2, stable=3, decay=2, final=0.5), [0, 1, 4, 5, 6, 7, 9]) == [
        0.5,
        1.0,
        1.0,
        1.0,
        0.75,
        0.5,
        0.5,
    ]


def test_no_first_step_is_wasted_on_a_rate_of_zero():
    """G14."""
    for schedule in (
        constant(1.0, warmup=100),
        cosine(1.0, steps=5, warmup=9),
        warmup_stable_decay(1.0, warmup=7, stable=1, decay=1),
    ):
        assert float(schedule(torch.tensor(0))) > 0


def test_a_schedule_is_a_pure_function_of_the_step():
    for schedule in (
        constant(1.0, warmup=3),
        linear(1.0, 0.0, steps=5),
        cosine(1.0, steps=5),
        warmup_stable_decay(1.0, warmup=1, stable=1, decay=3),
    ):
        steps = torch.arange(6)
        assert torch.equal(vmap(schedule)(steps), torch.stack([schedule(step) for step in steps]))


def test_empty_schedules_are_refused():
    for make in (
        lambda: linear(1, 0, steps=0),
        lambda: cosine(1, steps=0),
        lambda: warmup_stable_decay(1, warmup=1, stable=1, decay=0),
    ):
        with pytest.raises(ValueError, match="is 0; .* A schedule needs at least 1 step"):
            make()
