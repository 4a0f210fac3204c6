"""Every advantage under grad, vmap and torch.compile, over its data and its numbers."""

import jaxtyping
import pytest
import torch
from test_advantages import LENGTHS, RULES
from torch import tensor
from torch.func import grad, jacrev, vmap
from torch.testing import assert_close

from fnppo import gae_advantages
from fnppo.advantages.gae import discounted_returns
from fnppo.advantages.outcome import grpo_advantages, remax_advantages
from fnppo.advantages.pass_at_k import pass_at_k_advantages
from fnppo.advantages.reward_kl import AdaptiveKL, adapt_kl, kl_in_reward
from fnppo.advantages.row_filters import rewards_differ
from fnppo.advantages.token_baseline import otb_advantages
from fnppo.advantages.token_columns import on_every_token, on_last_token
from fnppo.advantages.whitening import reinforce_plus_plus_advantages, reinforce_plus_plus_baseline_advantages, whiten

F64 = torch.float64
GROUPS, KEEP = tensor([4, -4, 4, -4, 9, 9]), tensor([1, 1, 1, 1, 1, 0])
DRAW = torch.Generator().manual_seed(1)
draw = lambda *shape: torch.rand(*shape, generator=DRAW, dtype=F64)
REWARDS = draw(3, 6)
MASK = tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0]])
COLUMN, OTHER, WEIGHTS = (draw(3, 6, 5) for _ in range(3))

PER_ROW = {name: lambda r, rule=rule: rule(r, GROUPS, KEEP, LENGTHS[:6]) for name, rule in RULES.items()}
PER_ROW |= {
    "remax": lambda r: remax_advantages(r, OTHER[0, :, 0], keep=KEEP),
    "every": lambda r: on_every_token(r, MASK),
    "last": lambda r: on_last_token(r, MASK),
    "baseline": lambda r: reinforce_plus_plus_baseline_advantages(r, GROUPS, MASK, keep=KEEP),
}
PER_TOKEN = {
    "gae": lambda c: gae_advantages(c, OTHER[0], MASK, gamma=0.9, lam=0.8),
    "values": lambda c: gae_advantages(OTHER[0], c, MASK, gamma=0.9, lam=0.8),
    "returns": lambda c: discounted_returns(c, MASK, gamma=0.9),
    "whiten": lambda c: whiten(c, MASK),
    "reinforce": lambda c: reinforce_plus_plus_advantages(c, MASK, gamma=0.9),
    "kl": lambda c: kl_in_reward(c, c, OTHER[0], MASK, kl_coef=0.1),
    "otb": lambda c: otb_advantages(
        c, GROUPS, MASK, logprobs=-c, sum_squared_probs=OTHER[0], importance_weights=WEIGHTS[0], lone_baseline=0.5
    ),
}
FUNCTIONS = PER_ROW | PER_TOKEN


@pytest.fixture(autouse=True)
def as_users_meet_it():
    """Without the checker of types, which torch.compile cannot read, and nothing compiled yet."""
    torch.compiler.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def flat(found):
    return torch.cat([x.flatten() for x in found]) if isinstance(found, tuple) else found.flatten()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_data(name):
    """vmap is one after the other, the Jacobian that of finite differences, and compiled the bits are the same."""
    data, run = REWARDS if name in PER_ROW else COLUMN, lambda x: flat(FUNCTIONS[name](x))
    assert_close(vmap(run)(data), torch.stack([run(x) for x in data]))
    slopes, step = jacrev(run)(data[0]).flatten(1), 1e-6
    for place in range(data[0].numel()):
        nudge = torch.zeros(data[0].numel(), dtype=F64).index_fill(0, tensor(place), step).reshape(data[0].shape)
        difference = (run(data[0] + nudge) - run(data[0] - nudge)) / (2 * step)
        assert_close(slopes[:, place], difference, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(data[0]), run(data[0]))


@pytest.mark.parametrize("rule", RULES)
def test_over_groups(rule):
    """vmap over group ids alone and with the rewards; compiled, other ids are no reason to compile again."""
    run = lambda rewards, groups: RULES[rule](rewards, groups, KEEP, LENGTHS[:6])
    many = torch.stack([GROUPS, GROUPS.flip(0), GROUPS.sort().values])
    assert_close(vmap(run)(REWARDS, many), torch.stack([run(r, g) for r, g in zip(REWARDS, many, strict=True)]))
    assert_close(vmap(run, (None, 0))(REWARDS[0], many), torch.stack([run(REWARDS[0], g) for g in many]))
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for groups in many:
        assert torch.equal(compiled(REWARDS[0], groups), run(REWARDS[0], groups))


# name: (function of numbers, the numbers)
NUMBERS = {
    "gae": (lambda gamma, lam: gae_advantages(COLUMN[0], OTHER[0], MASK, gamma=gamma, lam=lam), (0.9, 0.8)),
    "gae at 0": (lambda gamma, lam: gae_advantages(COLUMN[0], OTHER[0], MASK, gamma=gamma, lam=lam), (0.5, 1e-3)),
    "returns": (lambda gamma: discounted_returns(COLUMN[0], MASK, gamma=gamma), (0.9,)),
    "grpo": (lambda eps: grpo_advantages(REWARDS[0], GROUPS, eps=eps), (0.5,)),
    "whiten": (lambda eps: whiten(COLUMN[0], MASK, eps=eps), (0.5,)),
    "reinforce": (lambda g, eps: reinforce_plus_plus_advantages(COLUMN[0], MASK, gamma=g, eps=eps), (0.9, 0.5)),
    "baseline": (lambda eps: reinforce_plus_plus_baseline_advantages(REWARDS[0], GROUPS, MASK, eps=eps), (0.5,)),
    "kl": (lambda coef: kl_in_reward(COLUMN[0], COLUMN[1], OTHER[0], MASK, kl_coef=coef), (0.3,)),
    "adapt": (
        lambda coef, kl, target, gain: adapt_kl(AdaptiveKL(coef), kl, target=target, gain=gain).coef,
        (0.3, 6.5, 6.0, 0.1),
    ),
    "adapt, bound": (lambda c, most: adapt_kl(AdaptiveKL(c), 9.0, target=6.0, max_error=most).coef, (0.3, 0.2)),
    "otb": (
        lambda lone: otb_advantages(
            COLUMN[0], GROUPS, MASK, logprobs=-COLUMN[1], sum_squared_probs=OTHER[0], lone_baseline=lone
        ),
        (0.5,),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_over_numbers(name):
    """Plain numbers and tensors give the same; so do vmap and loops, slopes and finite differences."""
    function, numbers = NUMBERS[name]
    run = lambda *numbers: flat(function(*numbers))
    tensors = [tensor(number, dtype=F64) for number in numbers]
    assert_close(run(*tensors), run(*numbers).double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(*tensors), run(*tensors))
    several = [torch.stack([number, 1.01 * number]) for number in tensors]
    assert_close(vmap(run)(*several), torch.stack([run(*each) for each in zip(*several, strict=True)]))
    for place, step in enumerate(1e-6 * torch.eye(len(numbers), dtype=F64)):
        up, down = (run(*torch.stack(tensors) + sign * step) for sign in (1, -1))
        assert_close(jacrev(run, argnums=place)(*tensors), (up - down) / 2e-6, rtol=1e-6, atol=1e-6)
        total = lambda *numbers: run(*numbers).square().sum()
        assert grad(total, argnums=place)(*tensors).isfinite()


def test_what_has_no_slope_is_compiled_and_batched_too():
    right = (REWARDS > 0.5).to(F64)
    for run in (lambda r: pass_at_k_advantages(r, GROUPS, k=2), lambda r: rewards_differ(r, GROUPS, keep=KEEP)):
        assert torch.equal(vmap(run)(right), torch.stack([run(r) for r in right]))
        assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(right[0]), run(right[0]))
