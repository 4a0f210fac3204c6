"""Critics: values of every layout are the oracle's, the clipped loss is the formula, and one trunk serves two heads."""

import copy
import inspect
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exactness import FAMILIES, LAYOUTS, LOSS, TOLERANCE, differences
from tiny import VOCAB, tiny
from torch import nn, tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

import fnppo
from fnppo import Metrics, Targets, accumulate_gradients, summarize
from fnppo.critic import functional_actor_critic, functional_critic
from fnppo.layouts import sharing
from fnppo.losses import add_losses
from fnppo.rollout import generate
from fnppo.testing import float64_everywhere, oracle_loss, oracle_stats, padded_batches, splits
from fnppo.values import compute_values, explained_variance, forward_logprobs_and_values, forward_values, value_loss

F64 = torch.float64
CLIP = 0.5
BATCH = fnppo.padded_batch([[1, 2], [3]], [[4, 5], [6]])


@cache
def classifier(family, labels=1):
    """A tiny token classifier in float64. Shared between tests: never change it."""
    import transformers as t

    config = copy.deepcopy(tiny(family).config)
    config.num_labels, config.pad_token_id = labels, 0
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = {"llama": t.LlamaForTokenClassification, "gpt2": t.GPT2ForTokenClassification}[family](config)
        for parameter in module.to(F64).eval().parameters():
            nn.init.normal_(parameter, std=0.5)
    return module.requires_grad_(False)


def live_head(params):
    """Other weights than the zeros that a new head begins with."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda value: torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return {name: draw(value) if name.startswith("value_head") else value for name, value in params.items()}


@cache
def critic_of(family):
    with float64_everywhere():
        critic, params = functional_critic(tiny(family))
    return critic, live_head(params)


@cache
def critic_of_classifier(family):
    with float64_everywhere():
        return functional_critic(classifier(family))


@cache
def actor_critic_of(family, **options):
    with float64_everywhere():
        policy, critic, params = functional_actor_critic(tiny(family), **options)
    return policy, critic, live_head(params)


def with_columns(batch):
    """Returns and old values, NaN where nothing is learned, as all columns of the strategy."""
    return batch._replace(extra={"returns": batch.advantages, "values": batch.extra["column"]})


def oracle_values(module, params, batch):
    """{(row, column): V}: the value head on the last hidden state of the token before, one row at a time."""
    values = {}
    trunk = {name: value for name, value in params.items() if not name.startswith("value_head")}
    for row in range(batch.input_ids.shape[0]):
        columns = [t for t in range(batch.input_ids.shape[1]) if batch.attention_mask[row, t]]
        if not columns:
            continue
        inputs = {"input_ids": batch.input_ids[row, columns][None], "use_cache": False, "output_hidden_states": True}
        output = functional_call(module, trunk, kwargs=inputs)
        for before, t in enumerate(columns[1:]):
            if batch.loss_mask[row, t]:
                if "value_head.weight" in params:
                    hidden = output.hidden_states[-1][0, before]
                    values[row, t] = hidden.dot(params["value_head.weight"][0]) + params["value_head.bias"][0]
                else:
                    values[row, t] = output.logits[0, before, 0]
    return values


def oracle_value_loss(values, batch, *, clip):
    """Mean over the learned tokens of the formula, token by token."""
    total = torch.zeros((), dtype=F64)
    for place, value in values.items():
        old, target = float(batch.extra["values"][place]), float(batch.extra["returns"][place])
        worst = (value - target) ** 2
        if clip is not None and not old - clip <= value.item() <= old + clip:
            bound = min(max(value.item(), old - clip), old + clip)
            worst = max(worst, tensor((bound - target) ** 2, dtype=F64), key=torch.Tensor.item)
        total = total + 0.5 * worst / len(values)
    return total


def gradients_of(loss, params):
    if not loss.requires_grad:
        return {name: torch.zeros_like(value) for name, value in params.items()}
    return dict(zip(params, torch.autograd.grad(loss, list(params.values()), materialize_grads=True), strict=True))


def leaves(params):
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def check_values(module, critic, params, batch, layout):
    """Values, loss and gradients of a layout are those of the oracle."""
    batch = with_columns(batch)
    with float64_everywhere():
        slow = leaves(params)
        expected = oracle_values(module, slow, batch)
        loss = oracle_value_loss(expected, batch, clip=CLIP)
        model_batch = layout(fnppo.token_mean(batch))
        values = forward_values(params, model_batch, critic=critic)

        def loss_fn(params, batch):
            return value_loss(forward_values(params, batch, critic=critic), batch.targets, clip=CLIP)

        (our_loss, _), our_grads = accumulate_gradients(loss_fn, params, [model_batch])
    places = zip(model_batch.targets.rows.tolist(), model_batch.targets.columns.tolist(), strict=True)
    assert values.dtype == F64
    assert dict(zip(places, values.tolist(), strict=True)) == pytest.approx(
        {place: value.item() for place, value in expected.items()}, abs=TOLERANCE, rel=TOLERANCE
    )
    assert differences(our_loss, loss.detach()) <= TOLERANCE
    assert differences(our_grads, gradients_of(loss, slow)) <= TOLERANCE


@pytest.mark.core
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [*FAMILIES, "tied"])
@given(batch=padded_batches(vocab_size=VOCAB, max_rows=3))
def test_every_layout_is_the_oracle(family, layout, batch):
    """A11, B16, H7, J6, and NaN in every masked slot."""
    module = tiny(family)
    check_values(module, *critic_of(family), batch, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["packed", "padded", "shared prefixes"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@given(batch=padded_batches(vocab_size=VOCAB, max_rows=3))
def test_a_token_classifier_is_a_critic(family, layout, batch):
    check_values(classifier(family), *critic_of_classifier(family), batch, LAYOUTS[layout])


@pytest.mark.core
@pytest.mark.parametrize("family", [*FAMILIES, "tied"])
@given(data=st.data(), batch=padded_batches(vocab_size=VOCAB, max_rows=3))
def test_the_gradient_of_one_trunk_is_the_sum_of_both(family, data, batch):
    """The oracle's two losses, its trunk run apart for each, against one forward."""
    batch, module = with_columns(batch), tiny(family)
    layout = LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))]
    policy, critic, params = actor_critic_of(family)
    with float64_everywhere():
        slow = leaves(params)
        values = oracle_values(module, slow, batch)
        trunk = {name: value for name, value in slow.items() if not name.startswith("value_head")}
        stats = oracle_stats(module, trunk, batch, temperature=0.7)
        weights = dict.fromkeys(stats, 1 / max(len(stats), 1))
        loss = oracle_loss(stats, batch, weights, **LOSS) + 0.3 * oracle_value_loss(values, batch, clip=CLIP)

        def loss_fn(params, batch):
            stats, values = forward_logprobs_and_values(params, batch, policy=policy, critic=critic, temperature=0.7)
            return add_losses(
                fnppo.ppo_loss(stats, batch.targets, **LOSS), value_loss(values, batch.targets, clip=CLIP), coef=0.3
            )

        (our_loss, metrics), grads = accumulate_gradients(loss_fn, params, [layout(fnppo.token_mean(batch))])
    assert differences(our_loss, loss.detach()) <= TOLERANCE
    assert differences(metrics.per_step["loss"], loss.detach()) <= TOLERANCE
    assert differences(grads, gradients_of(loss, slow)) <= TOLERANCE


@pytest.mark.core
@given(data=st.data(), batch=padded_batches(vocab_size=VOCAB, max_rows=5))
def test_any_split_gives_the_same(data, batch):
    """A2: the value loss has the weights of the mini-batch, as all others."""
    batch = fnppo.token_mean(with_columns(batch))
    critic, params = critic_of("gpt2")

    def run(batches):
        loss_fn = lambda params, b: value_loss(forward_values(params, b, critic=critic), b.targets, clip=CLIP)
        with float64_everywhere():
            return accumulate_gradients(loss_fn, params, batches)

    (loss, metrics), grads = run([fnppo.pack_sequences(batch)])
    groups = data.draw(splits(batch.input_ids.shape[0]))
    layouts = [LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))] for _ in groups]
    (loss2, metrics2), grads2 = run(
        [layout(fnppo.select_rows(batch, rows)) for layout, rows in zip(layouts, groups, strict=True)]
    )
    assert differences(loss, loss2) <= TOLERANCE
    assert differences(grads, grads2) <= TOLERANCE
    summary, summary2 = summarize(metrics), summarize(metrics2)
    assert summary == pytest.approx(summary2, abs=TOLERANCE, rel=TOLERANCE, nan_ok=True)
    assert explained_variance(summary) == pytest.approx(explained_variance(summary2), rel=1e-6, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("layout", [fnppo.packed, fnppo.padded, sharing(least_shared=1)])
@given(batch=padded_batches(vocab_size=VOCAB), max_tokens=st.sampled_from([8, 11, 100]))
def test_compute_values(layout, batch, max_tokens):
    """E6: rows in the order of the input, whatever the micro-batches."""
    critic, params = critic_of("llama")
    with float64_everywhere():
        expected = oracle_values(tiny("llama"), params, batch)
        values = compute_values(params, batch, critic=critic, max_tokens=max_tokens, layout=layout)
    assert values.shape == batch.input_ids.shape
    assert not values.requires_grad
    for row, column in torch.ones_like(batch.loss_mask).nonzero().tolist():
        place = (row, column)
        assert abs(values[place] - expected.get(place, 0)) <= TOLERANCE
        assert place in expected or values[place] == 0


def test_of_no_rows_there_are_no_values():
    critic, params = functional_critic(tiny("llama"))
    nothing = fnppo.select_rows(BATCH, [])
    assert compute_values(params, nothing, critic=critic, max_tokens=9).shape == (0, 4)
    assert fnppo.packed.plan(nothing, 9) == []


# --- the value loss by hand


def targets_of(returns, *, values=None, weights=None, rows=None):
    n = len(returns)
    index = torch.arange(n)
    extra = {"returns": tensor(returns, dtype=F64)}
    if values is not None:
        extra["values"] = tensor(values, dtype=F64)
    return Targets(
        index, index, index if rows is None else tensor(rows), index, extra=extra,
        loss_weights=tensor([1 / max(n, 1)] * n if weights is None else weights, dtype=F64),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (1.1, 1.0, 3.0, 1.805, -1.9, False),  # within the clip: the plain square
        (2.0, 1.0, 3.0, 1.62, 0.0, True),  # towards the return by more than 0.2: held at 1.2
        (3.0, 1.0, 3.0, 1.62, 0.0, True),
        (4.0, 1.0, 3.0, 1.62, 0.0, True),  # past it, and still nearer to it than 1.2 is
        (5.5, 1.0, 3.0, 3.125, 2.5, False),  # past it by more than that
        (0.0, 1.0, 3.0, 4.5, -3.0, False),  # away from it
        (-1.0, 1.0, -3.0, 7.22, 0.0, True),  # the same below
    ],
)
def test_the_loss_by_hand(value, old, target, loss, slope, clipped):
    values = tensor([value], dtype=F64, requires_grad=True)
    total, metrics = value_loss(values, targets_of([target], values=[old]), clip=0.2)
    assert total.item() == pytest.approx(loss)
    assert torch.autograd.grad(total, values)[0].item() == pytest.approx(slope)
    summary = summarize(metrics)
    assert summary["value_clip_fraction"] == float(clipped)
    assert summary["loss"] == summary["value_loss"] == total.item()
    plain = value_loss(values, targets_of([target]), clip=None)
    assert plain[0].item() == pytest.approx(0.5 * (value - target) ** 2)
    assert summarize(plain[1])["value_clip_fraction"] == 0
    assert torch.equal(value_loss(values, targets_of([target], values=[old]), clip=math.inf)[0], plain[0])


def test_on_the_edge_of_the_clip_the_gradient_is_alive():
    """As `torch.clamp` has it; and where the value is as far from the return as the bound on its other side."""
    for value, slope in ((1.25, -1.75), (4.75, 1.75)):
        values = tensor([value], dtype=F64, requires_grad=True)
        total, metrics = value_loss(values, targets_of([3.0], values=[1.0]), clip=0.25)
        assert total.item() == 0.5 * 1.75**2
        assert torch.autograd.grad(total, values)[0].item() == slope
        assert metrics.per_token["value_clip_fraction"] == 0


NUMBERS = st.floats(-3, 3, width=32)


@pytest.mark.core
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.floats(0, 1)), max_size=5), st.sampled_from([0.0, 0.2, 1.0]))
def test_the_loss_is_the_formula(tokens, clip):
    """Against plain Python, token by token, and torch's gradient of the formula as it is written."""
    columns = [list(column) for column in zip(*tokens, strict=True)] or [[], [], [], []]
    start, old, target, weights = (tensor(column, dtype=F64) for column in columns)
    targets = targets_of(columns[2], values=columns[1], weights=columns[3])
    values = start.clone().requires_grad_()
    loss, _ = value_loss(values, targets, clip=clip)
    by_hand = sum(w * 0.5 * max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2) for v, o, r, w in tokens)
    assert loss.item() == pytest.approx(by_hand, abs=1e-12)
    again = start.clone().requires_grad_()
    bounded = torch.clamp(again, old - clip, old + clip)
    a, b = (again - target) ** 2, (bounded - target) ** 2
    written = (weights * 0.5 * torch.where(a >= b, a, b)).sum()  # torch.max halves the gradient of a tie
    assert_close(*(torch.autograd.grad(x, y)[0] for x, y in ((loss, values), (written, again))), atol=1e-12, rtol=0)


def test_the_normaliser_is_the_mini_batchs():
    """A2: losses [[1, 2, 3], [10]] are 4.0 in one micro-batch and in two, with the same gradients."""
    batch = fnppo.padded_batch([[1], [1]], [[2, 3, 4], [5]])
    returns = (2 * tensor([[0.0, 1, 2, 3], [0, 10, 0, 0]])).sqrt()
    batch = fnppo.token_mean(batch._replace(extra={"returns": returns}))
    loss_fn = lambda v, b: value_loss(v["v"].expand(b.targets.rows.numel()), b.targets, clip=None)
    results = []
    for groups in ([[0, 1]], [[0], [1]], [[1], [0]]):
        pieces = [fnppo.pack_sequences(fnppo.select_rows(batch, rows)) for rows in groups]
        (loss, metrics), grads = accumulate_gradients(loss_fn, {"v": torch.zeros(1)}, pieces)
        assert loss.item() == pytest.approx(4.0)
        assert summarize(metrics)["value_loss"] == pytest.approx(4.0)
        assert {name: summarize(metrics)[name] for name in ("tokens", "rows")} == {"tokens": 4, "rows": 2}
        results.append(grads["v"])
    for grads in results:
        assert grads.item() == pytest.approx(-sum(math.sqrt(2 * x) for x in (1, 2, 3, 10)) / 4)


def test_metrics_and_explained_variance_by_hand():
    metrics = value_loss(
        tensor([1.0, 2.0, 2.5], dtype=F64), targets_of([1.0, 3.0, 2.0], values=[1.0, 1.0, 1.0]), clip=0.2
    )[1]
    summary = summarize(metrics)
    assert summary["value_mean"] == pytest.approx(5.5 / 3)
    assert summary["return_mean"] == pytest.approx(2.0)
    assert summary["value_clip_fraction"] == pytest.approx(2 / 3)
    errors, mean = [0.0, 1.0, -0.5], 0.5 / 3
    left = sum((e - mean) ** 2 for e in errors) / 3
    assert explained_variance(summary) == pytest.approx(1 - left / (2 / 3))
    constant = summarize(value_loss(tensor([1.0, 2.0]), targets_of([0.1, 0.1]), clip=None)[1])
    assert math.isnan(explained_variance(constant))


def test_explained_variance_of_returns_far_from_zero():
    """In float32 the squares of 1000.1 and 999.9 differ by less than their rounding."""
    returns = [1000.1, 999.9, 1000.0, 1000.0]
    targets = targets_of(returns)
    targets = targets._replace(extra={"returns": targets.extra["returns"].float()})
    for values, expected in ((returns, 1.0), ([1000.0] * 4, 0.0), ([1000.05, 999.95, 1000.0, 1000.0], 0.75)):
        summary = summarize(value_loss(tensor(values), targets, clip=None)[1])
        assert explained_variance(summary) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("value", [1e30, -1e30, math.inf])
def test_huge_values_give_no_nan(value, dtype):
    """Where the clip has taken a value away, and where the square is infinite."""
    targets = targets_of([1.0, value], values=[0.0, 0.0], weights=[1.0, 1.0])
    targets = targets._replace(
        extra={k: v.to(dtype) for k, v in targets.extra.items()}, loss_weights=targets.loss_weights.to(dtype)
    )
    values = tensor([0.5, value if math.isfinite(value) else 0.0], dtype=dtype, requires_grad=True)
    loss, metrics = value_loss(values, targets, clip=0.2)
    slopes = torch.autograd.grad(loss, values)[0]
    assert not loss.isnan()
    assert slopes[0] == 0.0
    assert not slopes.isnan().any()
    assert metrics.per_token["value_clip_fraction"] >= 1


def test_nan_is_not_hidden():
    """C12."""
    for value, target, old in ((math.nan, 1.0, 0.0), (1.0, math.nan, 0.0), (1.0, 1.0, math.nan)):
        values = tensor([value], dtype=F64, requires_grad=True)
        loss, _ = value_loss(values, targets_of([target], values=[old]))
        assert loss.isnan()
        assert torch.autograd.grad(loss, values)[0].isnan()


# --- transforms


def test_the_loss_under_transforms():
    targets = targets_of([1.0, -1.0, 3.0], values=[0.5, 0.0, 0.1])
    values = tensor([[0.9, -0.15, 0.4], [5.0, -0.3, 0.2]], dtype=F64)
    loss = lambda v, clip: value_loss(v, targets, clip=clip)[0]

    def slopes(v, clip):
        v = v.clone().requires_grad_()
        return torch.autograd.grad(loss(v, clip), v)[0]

    assert_close(grad(loss)(values[0], 0.2), slopes(values[0], 0.2))
    assert_close(vmap(grad(loss), (0, None))(values, 0.2), torch.stack([slopes(v, 0.2) for v in values]))
    clips = tensor([0.05, 0.2, 1.0], dtype=F64)
    assert_close(vmap(loss, (None, 0))(values[0], clips), torch.stack([loss(values[0], float(c)) for c in clips]))
    assert_close(jvp(lambda v: loss(v, 0.2), (values[0],), (values[1],))[1], slopes(values[0], 0.2) @ values[1])
    # ½ (bound - R)² with bound = old ± clip, for the tokens that are clipped
    step = 1e-6
    numeric = (loss(values[0], 0.1 + step) - loss(values[0], 0.1 - step)) / (2 * step)
    assert_close(grad(loss, 1)(values[0], tensor(0.1, dtype=F64)), numeric, atol=1e-6, rtol=0)
    assert numeric.abs() > 0.1


COMPILED = """
import torch
from fnppo import Targets
from fnppo.losses import add_losses
from fnppo.values import value_loss

index, one = torch.arange(3), torch.ones(3)
targets = Targets(index, index, index, index, loss_weights=one / 3, extra={"returns": 2 * one, "values": one})
for clip in (0.2, None):
    def loss(values):
        pair = value_loss(values, targets, clip=clip)
        return add_losses(pair, (pair[0] * 2, pair[1]._replace(per_step={}, per_token={})), coef=0.5)
    values = torch.tensor([1.1, 1.9, 0.0])
    (eager, metrics), (compiled, same) = loss(values), torch.compile(loss, fullgraph=True, backend="eager")(values)
    assert torch.equal(eager, compiled)
    assert torch.equal(metrics.per_token["value_mean"], same.per_token["value_mean"])
"""


def test_the_loss_compiles():
    """In a process without the run-time checker, which torch.compile cannot read."""
    root = Path(__file__).parent.parent
    child = subprocess.run([sys.executable, "-c", COMPILED], cwd=root, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]


def test_values_under_transforms():
    critic, params = critic_of("llama")
    batch = fnppo.pack_sequences(BATCH)
    total = lambda p: forward_values(p, batch, critic=critic).square().sum()
    (_, _), expected = fnppo.value_and_grad(lambda p: (total(p), Metrics()))(params)
    assert_close(grad(total)(params), expected, atol=1e-10, rtol=1e-6)
    stacked = optree.tree_map(lambda p: torch.stack([p, 2 * p]), params)
    assert_close(
        vmap(lambda p: forward_values(p, batch, critic=critic))(stacked)[0],
        forward_values(params, batch, critic=critic),
    )


# --- the trees


def test_a_new_head_says_zero_and_learns_at_once():
    critic, params = functional_critic(tiny("llama"))
    batch = fnppo.token_mean(BATCH._replace(extra={"returns": torch.ones(BATCH.input_ids.shape)}))
    loss_fn = lambda p, b: value_loss(forward_values(p, b, critic=critic), b.targets, clip=None)
    (loss, _), grads = accumulate_gradients(loss_fn, params, [fnppo.pack_sequences(batch)])
    assert loss.item() == pytest.approx(0.5)
    assert grads["value_head.bias"].item() == pytest.approx(-1.0)
    assert grads["value_head.weight"].abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "tied", "gpt2", "phi"])
def test_the_trees_of_parameters(family):
    """A critic of its own has no vocabulary head; a tied one stays, as the embedding. The module is left alone."""
    module = tiny(family)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    own = {name for name, _ in module.named_parameters()}
    critic, params = functional_critic(module)
    heads = {"value_head.weight", "value_head.bias"}
    assert set(params) == {name for name in own if not name.startswith("lm_head")} | heads
    policy, shared_critic, shared = functional_actor_critic(module)
    assert set(shared) == own | heads
    assert policy.skeleton is shared_critic.model.skeleton
    for name in own & set(params):
        assert params[name].data_ptr() == shared[name].data_ptr() == dict(module.named_parameters())[name].data_ptr()
    assert all(p.is_meta for p in critic.model.skeleton.parameters())
    assert {name: value.shape for name, value in before.items()} == {n: v.shape for n, v in module.state_dict().items()}
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert module.get_output_embeddings().weight.shape[0] == VOCAB


def test_a_tied_weight_that_has_the_name_of_the_head():
    """Where the head is the first of the two names, the tree of the critic has the embedding's."""
    module = copy.deepcopy(tiny("tied"))
    module._modules = {"lm_head": module.lm_head, "model": module.model}
    assert functional_actor_critic(module)[0].head.weight == "lm_head.weight"
    critic, params = functional_critic(module)
    params = live_head(params)
    assert params["model.embed_tokens.weight"].data_ptr() == module.lm_head.weight.data_ptr()
    with float64_everywhere():
        values = forward_values(params, fnppo.pack_sequences(BATCH), critic=critic)
        expected = oracle_values(tiny("tied"), critic_of("tied")[1], BATCH)
    assert values.tolist() == pytest.approx([value.item() for value in expected.values()], abs=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_the_policy_of_a_shared_tree_is_the_policy(family):
    """Whatever takes a policy takes the whole tree: log-probs, sampling."""
    policy, critic, params = functional_actor_critic(tiny(family))
    alone, own = fnppo.functional_policy(tiny(family))
    batch = generate(params, [[1, 2]], policy=policy, max_new_tokens=3, seed=0, eos_token_id=())
    same = generate(own, [[1, 2]], policy=alone, max_new_tokens=3, seed=0, eos_token_id=())
    assert torch.equal(batch.input_ids, same.input_ids)
    stats = fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=9)
    assert torch.equal(
        stats.logprobs, fnppo.compute_logprobs(own, batch, policy=alone, temperature=1.0, max_tokens=9)[0]
    )
    packed = fnppo.pack_sequences(batch)
    stats, values = forward_logprobs_and_values(
        params, packed, policy=policy, critic=critic, temperature=1.0, entropy=False
    )
    assert stats.entropy is None
    assert torch.equal(stats.logprobs, fnppo.forward_logprobs(params, packed, policy=policy, temperature=1.0).logprobs)
    assert torch.equal(values, forward_values(params, packed, critic=critic))


def test_a_head_has_no_softcap_and_no_scale():
    for family in ("gemma2", "granite", "cohere"):
        head = functional_critic(tiny(family))[0].model.head
        assert (head.scale, head.softcap) == (1.0, None)


def test_values_of_a_half_precision_trunk_are_in_float32():
    """Rounded to bfloat16, 1000.5 and 1001 would be one value."""
    critic, params = functional_critic(tiny("llama", torch.bfloat16))
    assert params["value_head.weight"].dtype == torch.bfloat16
    packed = fnppo.pack_sequences(BATCH)
    params = live_head(params) | {"value_head.bias": torch.full((1,), 1000.0, dtype=torch.bfloat16)}
    values = forward_values(params, packed, critic=critic)
    assert values.dtype == torch.float32
    hidden = critic.model.hidden_states(params, packed.inputs)[packed.targets.predictors]
    exact = hidden.double() @ params["value_head.weight"].double().T + 1000
    assert_close(values, exact.squeeze(-1).float(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_remat_changes_no_bit(family):
    batch = fnppo.token_mean(BATCH._replace(extra={"returns": torch.ones(BATCH.input_ids.shape)}))
    results = []
    for remat in (False, True):
        critic, params = functional_critic(tiny(family), remat=remat)
        loss_fn = lambda p, b: value_loss(forward_values(p, b, critic=critic), b.targets, clip=None)
        results.append(accumulate_gradients(loss_fn, live_head(params), [fnppo.pack_sequences(batch)])[1])
    assert all(torch.equal(a, b) for a, b in zip(*map(optree.tree_leaves, results), strict=True))


def dropping(**numbers):
    module = copy.deepcopy(tiny("gpt2"))
    import transformers as t

    config = copy.deepcopy(module.config)
    config.num_labels = 1
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.5)
    for name, number in numbers.items():
        setattr(config, name, number)
    return t.GPT2ForTokenClassification(config)


def test_dropout_has_a_seed():
    """C21."""
    with pytest.raises(ValueError, match="Pass dropout_seed, or leave train=False"):
        functional_critic(dropping(classifier_dropout=0.0), train=True)
    critic, params = functional_critic(dropping(classifier_dropout=0.0), train=True, dropout_seed=1)
    batch = fnppo.pack_sequences(BATCH)
    once, again, other = (
        forward_values(params, batch, critic=c) for c in (critic, critic, critic.with_dropout_seed(2))
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


# --- what is refused


def test_models_that_are_refused():
    import transformers as t

    with pytest.raises(ValueError, match="has 2 labels, and a value is one number. Load it with num_labels=1"):
        functional_critic(classifier("llama", labels=2))
    with pytest.raises(
        ValueError, match="has dropout of 0.1 before its head.* Set classifier_dropout in its config to 0"
    ):
        functional_critic(dropping(), train=True, dropout_seed=0)
    config = copy.deepcopy(tiny("llama").config)
    config.num_labels = 1
    with pytest.raises(
        ValueError, match="LlamaForSequenceClassification gives one output a row.*AutoModelForTokenClass"
    ):
        functional_critic(t.LlamaForSequenceClassification(config))
    with pytest.raises(ValueError, match="module is a str, no causal LM"):
        functional_critic("llama")
    with pytest.raises(ValueError, match="LlamaModel has no linear output head"):
        functional_critic(tiny("llama").model)
    encoder = t.BertForTokenClassification(
        t.BertConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            num_labels=1,
        )
    )
    with pytest.raises(ValueError, match="BertForTokenClassification"):
        functional_critic(encoder)


def test_arguments_that_are_refused():
    policy, critic, params = functional_actor_critic(tiny("llama"))
    batch, both = fnppo.pack_sequences(BATCH), inspect.unwrap(forward_logprobs_and_values)
    values, computed = inspect.unwrap(forward_values), inspect.unwrap(compute_values)
    with pytest.raises(ValueError, match="critic is a Policy; a Critic is needed. Use what functional_critic"):
        values(params, batch, critic=policy)
    with pytest.raises(ValueError, match="policy is a Critic; a Policy is needed"):
        inspect.unwrap(fnppo.forward_logprobs)(params, batch, policy=critic, temperature=1.0)
    with pytest.raises(ValueError, match="params is a list"):
        values([], batch, critic=critic)
    with pytest.raises(ValueError, match="policy is a NoneType"):
        both(params, batch, policy=None, critic=critic, temperature=1.0)
    for other in (functional_critic(tiny("llama"))[0], critic.with_dropout_seed(1)):
        with pytest.raises(ValueError, match="policy and critic differ in more than their heads"):
            both(params, batch, policy=policy, critic=other, temperature=1.0)
    with pytest.raises(ValueError, match="params holds lm_head.weight .* does not exist in the model"):
        values(params, batch, critic=functional_critic(tiny("llama"))[0])
    headless = {name: value for name, value in params.items() if name != "value_head.bias"}
    with pytest.raises(ValueError, match="params lacks value_head.bias"):
        values(headless, batch, critic=critic)
    strange = BATCH._replace(input_ids=torch.where(BATCH.input_ids == 5, VOCAB, BATCH.input_ids))
    with pytest.raises(ValueError, match=f"holds {VOCAB}, but the model's vocabulary has {VOCAB} entries"):
        values(params, fnppo.pack_sequences(strange), critic=critic)
    with pytest.raises(ValueError, match=f"row 0, column 3: input_ids is {VOCAB}"):
        computed(params, strange, critic=critic, max_tokens=9)
    with pytest.raises(ValueError, match="row 0 has 4 tokens, max_tokens is 3"):
        computed(params, BATCH, critic=critic, max_tokens=3)


def test_columns_that_are_refused(unchecked):
    loss, one = value_loss, torch.ones(1, dtype=F64)
    targets = targets_of([1.0], values=[0.0])
    without = lambda name: targets._replace(extra={k: v for k, v in targets.extra.items() if k != name})
    with pytest.raises(ValueError, match="needs targets.extra\\['returns'\\]: put those of gae_advantages"):
        loss(one, without("returns"))
    with pytest.raises(ValueError, match="needs targets.extra\\['values'\\]: put those of compute_values.*clip=None"):
        loss(one, without("values"))
    with pytest.raises(ValueError, match="needs targets.loss_weights: call token_mean"):
        loss(one, targets._replace(loss_weights=None))
    with pytest.raises(ValueError, match="values has shape \\(2,\\); there are 1 targets"):
        loss(torch.ones(2), targets)
    with pytest.raises(ValueError, match="values is a list"):
        loss([1.0], targets)
    for clip in (-0.1, math.nan):
        with pytest.raises(ValueError, match="clip is .*It is a distance from the old value; None is no clip"):
            loss(one, targets, clip=clip)
    with pytest.raises(ValueError, match="clip has shape"):
        loss(one, targets, clip=torch.ones(1))


def test_losses_add():
    one = torch.ones(())
    counts = {"tokens": tensor(2), "rows": tensor(1)}
    first = one, Metrics({"loss": one, "policy_loss": one}, {"kl": one}, counts)
    second = 3 * one, Metrics({"loss": 3 * one, "value_loss": 3 * one}, {"value_mean": 4 * one}, counts)
    loss, metrics = add_losses(first, second, coef=0.5)
    assert loss == 2.5
    assert summarize(metrics) == {
        "loss": 2.5, "policy_loss": 1.0, "value_loss": 3.0, "kl": 0.5, "value_mean": 2.0, "tokens": 2.0, "rows": 1.0
    }  # fmt: skip
    assert grad(lambda c: add_losses(first, second, coef=c)[0])(one) == 3.0
    adding = inspect.unwrap(add_losses)
    with pytest.raises(ValueError, match="both losses have a metric policy_loss"):
        adding(first, first, coef=1.0)
    with pytest.raises(ValueError, match="second is no \\(loss, metrics\\)"):
        adding(first, one, coef=1.0)
    with pytest.raises(ValueError, match="coef is nan"):
        adding(first, second, coef=math.nan)
    with pytest.raises(ValueError, match="coef has shape"):
        adding(first, second, coef=torch.ones(1))
