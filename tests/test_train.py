"""Steps and updates: splits, epochs, order of rows, determinism, donation, metrics."""

import math

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exactness import LOSS, WEIGHTS, differences, policy_of
from tiny import VOCAB, tiny

import fnppo
from fnppo.layouts import sharing
from fnppo.surrogates import clipped_surrogate, selected
from fnppo.surrogates.selection import select_top_entropy
from fnppo.testing import float64_everywhere, oracle_stats, padded_batches


def loss_for(family, **options):
    policy, params = policy_of(family)

    def loss_fn(params, batch):
        stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=0.8)
        return fnppo.ppo_loss(stats, batch.targets, **{**LOSS, **options})

    return params, loss_fn


def some_batch(rows=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (rows, 2), generator=g).tolist()
    draw = lambda n: torch.randint(VOCAB, (n,), generator=g).tolist()
    batch = fnppo.padded_batch(
        [draw(p) for p, _ in sizes], [draw(r) for _, r in sizes], groups=[i // 2 for i in range(rows)]
    )
    shape = batch.input_ids.shape
    normal = lambda: torch.randn(shape, generator=g, dtype=torch.float64)
    return batch._replace(old_logprobs=normal() * 0.3 - 2.5, advantages=normal(), ref_logprobs=normal() * 0.3 - 2.5)


OPTIMIZER = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-3))


@pytest.mark.core
@pytest.mark.parametrize("weights", WEIGHTS)
@given(data=st.data())
def test_micro_batches_and_layout_do_not_change_an_update(weights, data):
    """A13, A16, C22: two steps with Adam, whatever the token cap and the layout."""
    params, loss_fn = loss_for("gpt2")
    batch = some_batch(rows=5, seed=data.draw(st.integers(0, 2**32 - 1)))
    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mini_batch_size": 3, "weights": WEIGHTS[weights], "seed": 1}
    with float64_everywhere():
        one = fnppo.update_policy(params, OPTIMIZER.init(params), batch, max_tokens=10**6, **options)
        many = fnppo.update_policy(
            params, OPTIMIZER.init(params), batch, **options,
            max_tokens=data.draw(st.integers(10, 30)),
            layout=data.draw(st.sampled_from([fnppo.packed, fnppo.padded, sharing(least_shared=1)])),
        )  # fmt: skip
    # Adam divides by √v, which may be tiny: a difference of 1e-16 in a gradient becomes more in a parameter.
    assert differences(one[0], many[0]) <= 1e-9
    assert one[2] == pytest.approx(many[2], abs=1e-9)


def test_the_metric_is_the_quantity_that_was_optimised():
    """I1: 4.0 for 1 or 2 micro-batches and for 1 or 2 epochs, with a learning rate of 0."""
    params = {"w": torch.zeros((), dtype=torch.float64)}

    def loss_fn(params, batch):
        stats = fnppo.TokenStats(params["w"].expand(batch.targets.rows.shape))
        return fnppo.ppo_loss(stats, batch.targets)

    batch = fnppo.padded_batch([[1], [1]], [[1, 1, 1], [1]], old_logprobs=[[0, 0, 0], [0]])
    batch = batch._replace(advantages=-torch.tensor([[0.0, 1, 2, 3], [0, 10, 0, 0]], dtype=torch.float64))
    for max_tokens in (4, 100):
        for num_epochs in (1, 2):
            _, _, metrics = fnppo.update_policy(
                params, (state := fnppo.sgd(0.0)).init(params), batch, loss_fn=loss_fn, optimizer=state,
                mini_batch_size=2, max_tokens=max_tokens, num_epochs=num_epochs,
            )  # fmt: skip
            assert metrics["policy_loss"] == metrics["loss"] == 4.0
            assert metrics["steps"] == num_epochs
            assert metrics["tokens"] == 4 * num_epochs
            assert metrics["rows"] == 2 * num_epochs


def test_a_short_mini_batch_is_divided_by_its_own_size():
    """A12: 10 rows of loss 1 in mini-batches of 4 give losses 1, 1, 1."""
    seen = []
    params = {"w": torch.zeros(())}

    def loss_fn(params, batch):
        stats = fnppo.TokenStats(params["w"].expand(batch.targets.rows.shape))
        loss, metrics = fnppo.ppo_loss(stats, batch.targets)
        seen.append(loss.item())
        return loss, metrics

    batch = fnppo.padded_batch([[1]] * 10, [[1]] * 10, advantages=[-1.0] * 10, old_logprobs=[[0.0]] * 10)
    fnppo.update_policy(
        params,
        fnppo.sgd(0.0).init(params),
        batch,
        loss_fn=loss_fn,
        optimizer=fnppo.sgd(0.0),
        mini_batch_size=4,
        max_tokens=100,
    )
    assert seen == pytest.approx([1.0, 1.0, 1.0])


def test_epochs_reach_the_loop():
    """G14."""
    params, loss_fn = loss_for("llama")
    _, state, metrics = fnppo.update_policy(
        params,
        OPTIMIZER.init(params),
        some_batch(),
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        mini_batch_size=4,
        max_tokens=50,
        num_epochs=2,
    )
    assert int(state[1].step) == metrics["steps"] == 4


def test_the_same_bits_twice_and_with_donation():
    params, loss_fn = loss_for("llama")
    results = []
    for donate in (False, False, True):
        fresh = {name: p.clone() for name, p in params.items()}
        state = OPTIMIZER.init(fresh)
        results.append(
            fnppo.update_policy(
                fresh, state, some_batch(), loss_fn=loss_fn, optimizer=OPTIMIZER,
                mini_batch_size=4, max_tokens=20, num_epochs=2, seed=5, donate=donate,
            )
        )  # fmt: skip
        places = [{leaf.data_ptr() for leaf in optree.tree_leaves(tree)} for tree in ((fresh, state), results[-1][:2])]
        steps = {state[1].step.data_ptr(), results[-1][1][1].step.data_ptr()}
        assert (places[0] - steps == places[1] - steps) is donate
    for other in results[1:]:
        for a, b in zip(optree.tree_leaves(results[0][:2]), optree.tree_leaves(other[:2]), strict=True):
            assert torch.equal(a, b)
        assert other[2] == results[0][2]


def test_the_seed_orders_the_rows():
    params, loss_fn = loss_for("llama")
    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mini_batch_size": 2, "max_tokens": 20}
    one, other = (
        fnppo.update_policy(params, OPTIMIZER.init(params), some_batch(), seed=s, **options)[0] for s in (0, 1)
    )
    assert differences(one, other) > 1e-5


def test_inputs_are_left_alone():
    params, loss_fn = loss_for("llama")
    state, batch = OPTIMIZER.init(params), fnppo.token_mean(some_batch())
    before = optree.tree_map(torch.clone, (params, state, batch))
    random_state = torch.get_rng_state()
    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER}
    once = fnppo.update_policy(params, state, batch, mini_batch_size=4, max_tokens=20, **options)
    _, _, metrics = fnppo.train_step(params, state, [fnppo.pack_sequences(batch)], **options)
    assert metrics.totals["steps"].dtype == metrics.totals["tokens"].dtype == torch.int64
    for a, b in zip(optree.tree_leaves((params, state, batch)), optree.tree_leaves(before), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(random_state, torch.get_rng_state())
    same = fnppo.update_policy(
        params,
        state,
        batch,
        mini_batch_size=4,
        max_tokens=20,
        num_epochs=1,
        seed=0,
        weights=fnppo.token_mean,
        **options,
    )
    assert differences(once[0], same[0]) == 0.0


@pytest.mark.core
@pytest.mark.parametrize("layout", [fnppo.packed, fnppo.padded, sharing(least_shared=1)])
@given(
    batch=padded_batches(vocab_size=VOCAB, max_rows=5), cap=st.integers(8, 20), temperature=st.sampled_from([0.5, 1.0])
)
def test_compute_logprobs_returns_rows_in_the_order_of_the_input(layout, batch, cap, temperature):
    """E6, B16, E2: log-probs and entropy at the place of their token, whatever the micro-batches."""
    policy, params = policy_of("gpt2")
    with float64_everywhere():
        stats = fnppo.compute_logprobs(
            params, batch, policy=policy, temperature=temperature, max_tokens=cap, entropy=True, layout=layout
        )
        oracle = oracle_stats(tiny("gpt2"), params, batch, temperature=temperature)
    assert stats.logprobs.shape == stats.entropy.shape == batch.input_ids.shape
    for row in range(batch.input_ids.shape[0]):
        for column in range(batch.input_ids.shape[1]):
            logprob, entropy = oracle.get((row, column), (0.0, 0.0))
            assert float(stats.logprobs[row, column]) == pytest.approx(float(logprob), abs=1e-10)
            assert float(stats.entropy[row, column]) == pytest.approx(float(entropy), abs=1e-10)


def test_compute_logprobs_makes_no_graph_and_no_entropy_unless_asked():
    policy, params = policy_of("gpt2")
    stats = fnppo.compute_logprobs(
        {n: p.requires_grad_() for n, p in params.items()}, some_batch(), policy=policy, temperature=1.0, max_tokens=50
    )
    assert not stats.logprobs.requires_grad
    assert stats.entropy is None
    for p in params.values():
        p.requires_grad_(False)


def test_ratio_is_one_on_the_first_step():
    """C21, C22: log-probs computed under another split give ratios of 1, and a model with dropout too."""
    policy, params = policy_of("gpt2")
    assert tiny("gpt2").config.resid_pdrop > 0
    batch = some_batch()
    old = fnppo.compute_logprobs(params, batch, policy=policy, temperature=0.8, max_tokens=10)
    params, loss_fn = loss_for("gpt2")
    _, _, metrics = fnppo.update_policy(
        params,
        OPTIMIZER.init(params),
        batch._replace(old_logprobs=old.logprobs),
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        mini_batch_size=6,
        max_tokens=100,
    )
    assert metrics["ratio_min"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clamped_fraction"] == 0.0


def test_bad_input_is_refused_before_anything_is_changed():
    """E3."""
    params, loss_fn = loss_for("llama")
    state = OPTIMIZER.init(params)
    common = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mini_batch_size": 4}
    with pytest.raises(ValueError, match="max_tokens is 3"):
        fnppo.update_policy(params, state, some_batch(), max_tokens=3, **common)
    with pytest.raises(ValueError, match=r"^the batch has no rows, and an update needs at least 1\. Skip it\.$"):
        fnppo.update_policy(params, state, fnppo.padded_batch([], []), max_tokens=3, **common)
    policy, _ = policy_of("llama")
    batch = some_batch()
    ids = batch.input_ids.clone()
    ids[2][batch.loss_mask[2]] = VOCAB
    with pytest.raises(
        ValueError, match=f"row 2, column .*: input_ids is {VOCAB}, but the model's vocabulary has {VOCAB}"
    ):
        fnppo.compute_logprobs(params, batch._replace(input_ids=ids), policy=policy, temperature=1.0, max_tokens=50)


def test_a_custom_loss_is_a_plain_function():
    """J7: with a column of its own."""
    policy, params = policy_of("llama")
    batch = some_batch()
    batch = batch._replace(extra={"mine": torch.ones(batch.input_ids.shape, dtype=torch.float64)})

    def loss_fn(params, batch):
        stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0, entropy=False)
        loss = -(batch.targets.loss_weights * batch.targets.extra["mine"] * stats.logprobs).sum()
        return loss, fnppo.Metrics(per_step={"nll": loss.detach()})

    for _ in range(20):
        params, _, metrics = fnppo.update_policy(
            params,
            fnppo.sgd(0.5).init(params),
            batch,
            loss_fn=loss_fn,
            optimizer=fnppo.sgd(0.5),
            mini_batch_size=6,
            max_tokens=50,
        )
    assert metrics["nll"] < 2.0 < math.log(VOCAB)
    assert set(metrics) == {"nll", "grad_norm", "steps"}


def test_all_masked_batches_and_chunks():
    """B9, D1: no target anywhere is log-probs of 0, a loss of 0 and unchanged momentum; chunks do not matter."""
    params, loss_fn = loss_for("llama")
    policy, _ = policy_of("llama")
    batch = some_batch()
    empty = batch._replace(
        attention_mask=torch.zeros_like(batch.attention_mask), loss_mask=torch.zeros_like(batch.loss_mask)
    )
    for layout in (fnppo.packed, fnppo.padded, sharing(least_shared=1)):
        stats = fnppo.compute_logprobs(
            params, empty, policy=policy, temperature=1.0, max_tokens=9, layout=layout, entropy=True
        )
        assert not stats.logprobs.any()
        assert not stats.entropy.any()
        new, _, metrics = fnppo.update_policy(
            params,
            fnppo.sgd(1.0).init(params),
            empty,
            loss_fn=loss_fn,
            optimizer=fnppo.sgd(1.0),
            mini_batch_size=6,
            max_tokens=9,
            layout=layout,
        )
        assert metrics["loss"] == metrics["grad_norm"] == metrics["tokens"] == 0.0
        assert differences(new, params) == 0.0
    for entropy in (True, False):
        nothing = fnppo.compute_logprobs(
            params, fnppo.select_rows(batch, []), policy=policy, temperature=1.0, max_tokens=9, entropy=entropy
        )
        assert nothing.logprobs.shape == (0, batch.input_ids.shape[1])
        assert (nothing.entropy is not None) is entropy
    one, many = (
        fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=50, chunk_size=c)
        for c in (None, 1)
    )
    assert differences(one, many) < 1e-6
    with pytest.raises(ValueError, match="chunk_size is 0"):
        fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=50, chunk_size=0)


def test_float32_logprobs_do_not_depend_on_the_split():
    """C22: in float32, micro-batches of one row and of all rows."""
    policy, params = fnppo.functional_policy(tiny("llama", torch.float32))
    batch = some_batch()
    one, many = (
        fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=c) for c in (10, 1000)
    )
    assert differences(one, many) <= 4e-6


def test_the_logits_of_a_micro_batch_are_gone_before_the_next(monkeypatch):
    """D5, with the real head."""
    import gc
    import weakref

    from fnppo import logit_chunks

    alive, original = [], logit_chunks.Workspace.__init__

    def counted(self, *args):
        gc.collect()
        held.append(sum(ref() is not None for ref in alive))
        original(self, *args)
        alive.extend(weakref.ref(buffer) for buffer in (self.chunk, *self.block))

    held = []
    monkeypatch.setattr(logit_chunks.Workspace, "__init__", counted)
    params, loss_fn = loss_for("llama")
    batch = fnppo.token_mean(some_batch())
    fnppo.accumulate_gradients(
        loss_fn, params, (fnppo.pack_sequences(fnppo.select_rows(batch, [row])) for row in range(6))
    )
    assert held == [0] * 12  # a forward and a backward for each of six


@pytest.mark.parametrize("layout", [fnppo.packed, fnppo.padded, sharing(least_shared=1)])
def test_the_default_device_is_not_used(layout):
    """Everything is made where batch and parameters are. On `meta`, the default here, tensors have no values."""
    params, loss_fn = loss_for("llama")
    policy, _ = policy_of("llama")
    batch = some_batch()

    def results():
        options = {"policy": policy, "temperature": 1.0, "max_tokens": 12, "layout": layout}
        stats = fnppo.compute_logprobs(params, batch, **options)
        nothing = fnppo.compute_logprobs(params, fnppo.select_rows(batch, []), **options, entropy=True)
        update = fnppo.update_policy(
            params, OPTIMIZER.init(params), batch, loss_fn=loss_fn, optimizer=OPTIMIZER, mini_batch_size=4,
            max_tokens=12, layout=layout,
        )  # fmt: skip
        return stats, nothing, update

    expected = results()
    with torch.device("meta"):
        found = results()
    for a, b in zip(optree.tree_leaves(found[:2]), optree.tree_leaves(expected[:2]), strict=True):
        assert torch.equal(a, b)
    assert differences(found[2][0], expected[2][0]) == 0.0
    assert found[2][2] == expected[2][2]


def test_describing_an_update_has_the_defaults_of_making_it():
    batch = fnppo.padded_batch([[1]] * 6, [[2] * n for n in (1, 2, 3, 4, 5, 6)])
    sizes = {"mini_batch_size": 2, "max_tokens": 9}
    plain = fnppo.describe_update(batch, **sizes)
    assert plain == fnppo.describe_update(batch, **sizes, num_epochs=1, seed=0)
    assert plain != fnppo.describe_update(batch, **sizes, seed=1)
    assert "12 optimizer" not in plain
    assert "6 optimizer steps" in fnppo.describe_update(batch, **sizes, num_epochs=2)


def test_prepare_sees_each_mini_batch_once_with_the_current_params():
    """Before the weights, before any split, without gradients; what it adds reaches the loss."""
    policy, params = policy_of("llama")
    batch = some_batch(rows=5)
    seen = []
    of = lambda params, rows: fnppo.compute_logprobs(
        params, rows, policy=policy, temperature=0.8, max_tokens=99, entropy=True
    )

    def prepare(current, mini_batch):
        assert not torch.is_grad_enabled()
        assert mini_batch.loss_weights is None
        stats = of(current, mini_batch)
        seen.append((mini_batch.input_ids.shape[0], bool((stats.logprobs != of(params, mini_batch).logprobs).any())))
        return select_top_entropy(mini_batch, stats.entropy, fraction=0.5)

    def weights(mini_batch):
        assert "selected" in mini_batch.extra
        return fnppo.token_mean(mini_batch)

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=0.8)
        loss, metrics = fnppo.ppo_loss(stats, micro_batch.targets, surrogate=selected(clipped_surrogate))
        share = micro_batch.targets.extra["selected"].sum()
        return loss, metrics._replace(per_token=metrics.per_token | {"selected": share})

    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mini_batch_size": 3, "num_epochs": 2, "weights": weights}
    with float64_everywhere():
        one = fnppo.update_policy(params, OPTIMIZER.init(params), batch, max_tokens=10**6, prepare=prepare, **options)
        assert seen == [(3, False), (2, True), (3, True), (2, True)]  # rows, and whether the params have moved
        seen.clear()
        many = fnppo.update_policy(params, OPTIMIZER.init(params), batch, max_tokens=12, prepare=prepare, **options)
    assert seen == [(3, False), (2, True), (3, True), (2, True)]
    assert differences(one[0], many[0]) <= 1e-9
    assert one[2] == pytest.approx(many[2], abs=1e-9)
    assert 0.3 < one[2]["selected"] <= 0.5


def test_prepare_must_return_a_batch(unchecked):
    params, loss_fn = loss_for("gpt2")
    said = r"^what prepare returned is a NoneType; a PaddedBatch is needed\. Return the mini-batch, such as with a new column\.$"
    with pytest.raises(ValueError, match=said):
        fnppo.update_policy(
            params, OPTIMIZER.init(params), some_batch(), loss_fn=loss_fn, optimizer=OPTIMIZER, mini_batch_size=3,
            max_tokens=99, prepare=lambda params, mini_batch: None,
        )  # fmt: skip
