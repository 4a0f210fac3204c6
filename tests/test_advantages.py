"""Advantages of responses: hand-computed values, oracles that loop over rows, and what all of them have in common."""

import math
import statistics
import warnings
from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import tensor
from torch.func import grad, vmap

from fnppo import grpo_advantages
from fnppo.advantages.outcome import (
    batch_std,
    dr_grpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    group_std,
    opo_advantages,
    remax_advantages,
    rloo_advantages,
)
from fnppo.advantages.pass_at_k import best_response_advantages, pass_at_k_advantages
from fnppo.advantages.row_filters import rewards_differ
from fnppo.testing import oracle_grpo_advantages

NAN = float("nan")
LENGTHS = tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
# Each takes rewards, groups and keep. Rows of a permuted batch keep their length and greedy reward: `extra` is one number a row.
RULES = {
    "grpo": lambda r, g, keep, extra: grpo_advantages(r, g, keep=keep),
    "batch": lambda r, g, keep, extra: grpo_advantages(r, g, scale=batch_std, keep=keep),
    "unscaled": lambda r, g, keep, extra: grpo_advantages(r, g, scale=None, keep=keep),
    "dr_grpo": lambda r, g, keep, extra: dr_grpo_advantages(r, g, keep=keep),
    "rloo": lambda r, g, keep, extra: rloo_advantages(r, g, keep=keep),
    "gpg": lambda r, g, keep, extra: gpg_advantages(r, g, keep=keep),
    "opo": lambda r, g, keep, extra: opo_advantages(r, g, extra, keep=keep),
    "best": lambda r, g, keep, extra: best_response_advantages(r, g, keep=keep),
    "best scaled": lambda r, g, keep, extra: best_response_advantages(r, g, scale=group_std, keep=keep),
    "gdpo": lambda r, g, keep, extra: gdpo_advantages(torch.stack([r, extra * r], 1), g, keep=keep),
}


def std(values):
    return statistics.stdev(values) if len(set(values)) > 1 else 0.0


def normal(i, rewards, eps=1e-6):
    return 0.0 if len(set(rewards)) == 1 else (rewards[i] - statistics.fmean(rewards)) / (std(rewards) + eps)


# (place in the group, rewards of the group, extras of the group, all groups as lists of rewards) -> advantage
ORACLES = {
    "grpo": lambda i, r, x, every: normal(i, r),
    "batch": lambda i, r, x, every: (r[i] - statistics.fmean(r)) / (std([x for g in every for x in g]) + 1e-6),
    "unscaled": lambda i, r, x, every: r[i] - statistics.fmean(r),
    "dr_grpo": lambda i, r, x, every: r[i] - statistics.fmean(r),
    "rloo": lambda i, r, x, every: r[i] - statistics.fmean(r[:i] + r[i + 1 :]),
    "gpg": lambda i, r, x, every: (
        (r[i] - statistics.fmean(r)) * len(every) / max(sum(len(set(g)) > 1 for g in every), 1)
    ),
    "opo": lambda i, r, x, every: r[i] - sum(a * b for a, b in zip(r, x, strict=True)) / sum(x),
    "best": lambda i, r, x, every: max(r) - max(r[:i] + r[i + 1 :]),
    "best scaled": lambda i, r, x, every: (max(r) - max(r[:i] + r[i + 1 :])) / (std(r) + 1e-6),
}


def quiet(run, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(*args)


def members(groups, keep):
    """{group: its rows that are kept}."""
    found = {}
    for row, (group, kept) in enumerate(zip(groups, keep, strict=True)):
        if kept:
            found.setdefault(group, []).append(row)
    return found


def oracle(rule, rewards, groups, keep, extra):
    found = members(groups, keep)
    every = [[rewards[row] for row in rows] for rows in found.values()]
    advantages = [0.0] * len(rewards)
    for rows in found.values():
        for place, row in enumerate(rows):
            if len(rows) > 1:
                advantages[row] = ORACLES[rule](place, [rewards[r] for r in rows], [extra[r] for r in rows], every)
    return advantages


# Steps of 1/64 and equal numbers now and then, so that groups have rewards that are equal, close and far.
REWARD = st.integers(-128, 128).map(lambda n: n / 64) | st.sampled_from([0.0, 1.0, 0.7])
ROWS = st.lists(
    st.tuples(REWARD, st.sampled_from([-7, 3, 10**12]), st.booleans() | st.just(True)), min_size=1, max_size=12
)


def columns(rows):
    """float64 rewards, groups, keep and lengths of drawn rows, with NaN for the rewards of rejected ones."""
    rewards = tensor([r if k else NAN for r, _, k in rows], dtype=torch.float64)
    return rewards, tensor([g for _, g, _ in rows]), tensor([k for _, _, k in rows]), LENGTHS[: len(rows)]


def test_equal_rewards_give_exactly_zero():
    """H1: in float32 the mean of seven 0.7 is not 0.7. Beside them stands a group with other rewards."""
    for reward, n in ((0.7, 7), (0.1, 8), (0.3, 3), (1e15, 7), (-0.7, 7)):
        rewards, groups = tensor([reward] * n + [1.0, 0.0]), tensor([0] * n + [1] * 2)
        for name, rule in RULES.items():
            found = rule(rewards, groups, None, LENGTHS[: n + 2]) if name != "gdpo" else gdpo_advantages(
                torch.stack([rewards, 3 * rewards], 1), groups
            )  # fmt: skip
            assert found[:n].tolist() == [0.0] * n, name
            assert found[n] > 0, name


def test_a_lone_response():
    """H3: 0 and a warning; a filter of warnings makes it an error. Rejecting the others is no reason for one."""
    rewards, groups = tensor([0.9, 1.0, 0.0]), tensor([5, 1, 1])
    for name, rule in RULES.items():
        with pytest.warns(UserWarning, match="row 0 is alone in group 5") as caught:
            assert rule(rewards, groups, None, LENGTHS[:3])[0] == 0.0, name
        assert len(caught) == 1, name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="row 0 is alone in group 5"):
            grpo_advantages(rewards, groups)
        for name, rule in RULES.items():
            assert rule(rewards[1:], tensor([2, 2]), tensor([True, False]), LENGTHS[:2]).tolist() == [0.0, 0.0], name


def test_per_group():
    """H5: members of a group stand apart."""
    r = 0.7071
    rewards, groups = tensor([1.0, 10, 0, 8]), tensor([0, 1, 0, 1])
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx([r, r, -r, -r], abs=1e-4)
    assert grpo_advantages(tensor([]), tensor([], dtype=torch.long)).shape == (0,)


def test_three_scales():
    """H12: by the group, the batch or nothing; three results, and an error for what is no scale."""
    rewards, groups, r = tensor([1.0, 0, 4, 0]), tensor([0, 0, 1, 1]), 0.5**0.5
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx([r, -r, r, -r], abs=1e-5)
    assert grpo_advantages(rewards, groups, scale=None).tolist() == [0.5, -0.5, 2, -2]
    b = 0.5 / (43 / 12) ** 0.5  # variance of 1, 0, 4, 0 around 5/4
    by_batch = grpo_advantages(rewards, groups, scale=batch_std).tolist()
    assert by_batch == pytest.approx([b, -b, 4 * b, -4 * b], abs=1e-5)
    for wrong in ("none", "batch", False, 1.0):
        with pytest.raises(ValueError, match=f"scale is {wrong!r}; .* Use group_std, batch_std or None"):
            unwrap(grpo_advantages)(rewards, groups, scale=wrong)
    one_for_all = grpo_advantages(rewards, groups, scale=lambda rewards, groups, kept: rewards.amax(), eps=1e-30)
    assert one_for_all.tolist() == [0.125, -0.125, 0.5, -0.5]
    with pytest.raises(ValueError, match=r"scale gave shape \(1,\) for 4 rows"):
        grpo_advantages(rewards, groups, scale=lambda rewards, groups, kept: rewards[:1])


def test_by_hand():
    """The formula of each paper, for rewards 1, 0, 0.5 of one group and two equal ones of another."""
    rewards, groups = tensor([1.0, 0.0, 0.5, 2.0, 2.0]), tensor([8, 8, 8, -1, -1])
    assert dr_grpo_advantages(rewards, groups).tolist() == [0.5, -0.5, 0, 0, 0]
    assert rloo_advantages(rewards, groups).tolist() == [0.75, -0.75, 0, 0, 0]
    assert gpg_advantages(rewards, groups).tolist() == [1, -1, 0, 0, 0]
    assert opo_advantages(rewards, groups, tensor([1, 2, 2, 3, 4])).tolist() == pytest.approx([0.6, -0.4, 0.1, 0, 0])
    assert remax_advantages(rewards, tensor([0.5, 0.5, 0.5, 1.0, 3.0])).tolist() == [0.5, -0.5, 0, 1, -1]
    assert best_response_advantages(rewards, groups).tolist() == [0.5, 0, 0, 0, 0]


@pytest.mark.core
@pytest.mark.parametrize("rule", ORACLES)
@given(rows=ROWS)
def test_against_loops_over_groups(rule, rows):
    rewards, groups, keep, lengths = columns(rows)
    found = quiet(RULES[rule], rewards, groups, keep, lengths)
    expected = oracle(rule, rewards.tolist(), groups.tolist(), keep.tolist(), lengths.tolist())
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    everyone = torch.nan_to_num(rewards)
    assert torch.equal(
        quiet(RULES[rule], everyone, groups, None, lengths),
        quiet(RULES[rule], everyone, groups, torch.ones_like(keep), lengths),
    )


@pytest.mark.core
@given(ROWS, st.booleans())
def test_grpo_against_the_public_oracle(rows, normalize):
    rewards, groups, *_ = columns([(r, g, True) for r, g, _ in rows])
    found = quiet(lambda: grpo_advantages(rewards, groups, scale=group_std if normalize else None))
    expected = oracle_grpo_advantages(rewards.tolist(), groups.tolist(), normalize=normalize)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.core
@pytest.mark.parametrize("rule", RULES)
@given(rows=ROWS, data=st.data())
def test_what_all_have_in_common(rule, rows, data):
    """The order of rows and the names of groups do not matter, rejecting a row is dropping it, rejected rows have 0."""
    rewards, groups, keep, lengths = columns(rows)
    run = lambda *args: quiet(RULES[rule], *args)
    found = run(rewards, groups, keep, lengths)
    near = lambda other: pytest.approx(other.tolist(), rel=1e-9, abs=1e-9)
    assert not found[~keep].any()
    order = tensor(data.draw(st.permutations(range(len(rows)))))
    assert run(rewards[order], groups[order], keep[order], lengths[order]).tolist() == near(found[order])
    assert torch.equal(run(rewards, -3 * groups + 5, keep, lengths), found)
    if keep.any():
        assert run(rewards[keep], groups[keep], None, lengths[keep]).tolist() == near(found[keep])


@pytest.mark.core
@given(ROWS, st.integers(1, 4))
def test_pass_at_k_is_the_mean_over_subsets(rows, k):
    """Each subset of k responses has reward 1 if one is right; the mean, less that of all subsets, over their std."""
    _, groups, keep, _ = columns(rows)
    rewards = tensor([float(r > 0) if k else NAN for r, _, k in rows], dtype=torch.float64)
    found = members(groups.tolist(), keep.tolist())
    if any(len(of_group) < k for of_group in found.values()):
        with pytest.raises(ValueError, match=rf"its group has \d responses that count, and k is {k}"):
            quiet(lambda: pass_at_k_advantages(rewards, groups, k=k, keep=keep))
        return
    expected = [0.0] * len(rows)
    for of_group in found.values():
        subsets = [(set(subset), max(rewards[row].item() for row in subset)) for subset in combinations(of_group, k)]
        mean, spread = (statistic([r for _, r in subsets]) for statistic in (statistics.fmean, statistics.pstdev))
        for row in of_group:
            own = statistics.fmean(reward for subset, reward in subsets if row in subset)
            expected[row] = (own - mean) / spread if spread else 0.0
    advantages = quiet(lambda: pass_at_k_advantages(rewards, groups, k=k, keep=keep))
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_pass_at_k_counts_right_and_wrong():
    with pytest.raises(ValueError, match=r"row 1: the reward is 0\.5; pass@k is about right and wrong responses"):
        pass_at_k_advantages(tensor([1.0, 0.5]), tensor([0, 0]), k=1)
    with pytest.raises(ValueError, match="k is 0; it must be a whole number of at least 1"):
        pass_at_k_advantages(tensor([1.0, 0.0]), tensor([0, 0]), k=0)
    assert pass_at_k_advantages(tensor([1, 0]), tensor([0, 0]), k=1).tolist() == pytest.approx([1, -1])


@pytest.mark.core
@given(ROWS, st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_several_rewards(rows, weights):
    """GDPO: each objective normalised in its group, added up, and normalised over the batch, mean included."""
    first, groups, keep, lengths = columns(rows)
    objectives = torch.stack([first, first * lengths.cos(), lengths.double() % 2], 1)
    kept = [row for row in range(len(rows)) if keep[row]]
    total = [0.0] * len(rows)
    for objective, weight in enumerate(weights):
        part = oracle("grpo", objectives[:, objective].tolist(), groups.tolist(), keep.tolist(), lengths.tolist())
        total = [a + weight * b for a, b in zip(total, part, strict=True)]
    mean, spread = (f([total[row] for row in kept] or [0.0]) for f in (statistics.fmean, std))
    assert abs(mean) < 1e-9
    assume(spread == 0 or spread > 1e-3)  # rounding of the inputs is divided by it
    found = quiet(lambda: gdpo_advantages(objectives, groups, weights=tensor(weights, dtype=torch.float64), keep=keep))
    expected = [(total[row] - mean) / (spread + 1e-6) if row in kept else 0.0 for row in range(len(rows))]
    assert found.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)


def test_weights_of_several_rewards():
    rewards, groups = torch.rand(4, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.long)
    assert torch.equal(gdpo_advantages(rewards, groups), gdpo_advantages(rewards, groups, weights=torch.ones(2)))
    one = gdpo_advantages(rewards, groups, weights=tensor([2.0, 0.0]))
    assert one.tolist() == pytest.approx(grpo_advantages(rewards[:, 0], groups).tolist(), abs=1e-5)
    for wrong in (torch.ones(1), torch.ones(3), torch.ones(1, 2)):
        with pytest.raises(ValueError, match="rewards has 2 objectives. Give each a weight"):
            unwrap(gdpo_advantages)(rewards, groups, weights=wrong)
    with pytest.raises(ValueError, match="weights is .*nan.*; it must be a finite number"):
        gdpo_advantages(rewards, groups, weights=tensor([1.0, NAN]))
    for wrong in (rewards[:, 0], rewards[:, :0]):
        with pytest.raises(ValueError, match="it needs .batch, objectives."):
            unwrap(gdpo_advantages)(wrong, groups)


@pytest.mark.core
@given(ROWS)
def test_remax_against_the_formula(rows):
    rewards, _, keep, lengths = columns(rows)
    greedy = torch.where(keep, lengths.cos().double(), NAN)
    expected = [a - b if k else 0.0 for a, b, k in zip(rewards.tolist(), greedy.tolist(), keep.tolist(), strict=True)]
    assert remax_advantages(rewards, greedy, keep=keep).tolist() == expected


@pytest.mark.core
@given(ROWS)
def test_rewards_that_differ(rows):
    """H6: which rows stand in a group with two different rewards."""
    rewards, groups, keep, _ = columns(rows)
    found = members(groups.tolist(), keep.tolist())
    several = lambda group: len({rewards[row].item() for row in found.get(group, [])}) > 1
    differ = [kept and several(group) for group, kept in zip(groups.tolist(), keep.tolist(), strict=True)]
    assert quiet(lambda: rewards_differ(rewards, groups, keep=keep)).tolist() == differ


def test_bad_rewards():
    two = torch.zeros(2, dtype=torch.long)
    for rule in RULES.values():
        with pytest.raises(ValueError, match="row 1: the reward is nan"):
            rule(tensor([0.0, NAN]), two, None, LENGTHS[:2])
        with pytest.raises(ValueError, match="row 1: keep is 2; a mask of rows holds True/False or 0/1"):
            rule(tensor([0.0, 1.0]), two, tensor([1, 2]), LENGTHS[:2])
    rewards = torch.zeros(2)
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), groups \(3,\)"):
        unwrap(grpo_advantages)(rewards, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), keep \(1,\)"):
        unwrap(grpo_advantages)(rewards, two, keep=torch.ones(1))
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), lengths \(3,\)"):
        unwrap(opo_advantages)(rewards, two, torch.ones(3))
    with pytest.raises(ValueError, match="row 0: its length is 0; .* Reject the row with keep"):
        opo_advantages(rewards, two, tensor([0, 1]))
    assert opo_advantages(rewards, two, tensor([0, 1]), keep=tensor([False, True])).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), greedy_rewards \(3,\)"):
        unwrap(remax_advantages)(rewards, torch.ones(3))
    with pytest.raises(ValueError, match="row 1: the greedy reward is inf"):
        remax_advantages(rewards, tensor([0.0, math.inf]))
    for rule in (grpo_advantages, best_response_advantages):
        with pytest.raises(ValueError, match="eps is 0; it must be a finite number above 0"):
            rule(rewards, two, eps=0)


def test_dtypes():
    """Whole numbers and booleans count as float32, half precision is widened, float64 stays."""
    rewards, groups = tensor([1, 0, 1, 1]), torch.zeros(4, dtype=torch.int32)
    assert grpo_advantages(rewards, groups).tolist() == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-5)
    for name, rule in RULES.items():
        for dtype in (torch.bool, torch.long, torch.uint8, torch.bfloat16, torch.float32):
            assert rule(rewards.to(dtype), groups, tensor([1, 1, 1, 0]), LENGTHS[:4]).dtype == torch.float32, name
        assert rule(rewards.double(), groups, None, LENGTHS[:4]).dtype == torch.float64, name


def test_equal_rewards_have_no_infinite_gradient():
    """The slope of a standard deviation of 0 counts as 0, not as infinity."""
    for name, rule in RULES.items():
        slopes = grad(lambda r: rule(r, tensor([0, 0, 0]), None, LENGTHS[:3])[0])(torch.full((3,), 0.7))
        assert slopes.isfinite().all(), name


def test_eps_is_a_number_of_any_kind():
    """grad and vmap over eps; dA/deps = -A / (std + eps)."""
    rewards, groups = tensor([3.0, 1.0], dtype=torch.float64), tensor([0, 0])
    for rule in (grpo_advantages, lambda r, g, eps: best_response_advantages(r, g, scale=group_std, eps=eps)):
        run = lambda eps: rule(rewards, groups, eps=eps)[0]
        eps = tensor([0.5, 1.0], dtype=torch.float64)
        assert vmap(run)(eps).tolist() == pytest.approx([run(0.5).item(), run(1.0).item()])
        assert grad(run)(eps[0]).item() == pytest.approx(-run(0.5).item() / (2**0.5 + 0.5))
    run = lambda eps: gdpo_advantages(rewards[:, None], groups, eps=eps)[0]
    difference = (run(0.5 + 1e-6) - run(0.5 - 1e-6)) / 2e-6
    assert grad(run)(eps[0]).item() == pytest.approx(difference.item(), rel=1e-6)
    assert vmap(run)(eps).tolist() == pytest.approx([run(0.5).item(), run(1.0).item()])
