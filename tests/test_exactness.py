"""The promise of the library: any layout and any split gives the numbers of the naive oracle, gradients included."""

from functools import cache, partial

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, tiny

import fnppo
from fnppo.layouts import sharing
from fnppo.testing import branching_batches, float64_everywhere, oracle_loss, oracle_stats, padded_batches, splits

SLOW = pytest.mark.slow
FAMILIES = ["llama", "gpt2", "mistral"]
MORE_FAMILIES = ["tied", "gemma2", "gpt_oss", "granite", "cohere", "phi"]
LOSS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "entropy_coef": 0.05, "kl_coef": 0.1}
TOLERANCE = 1e-10


@cache
def policy_of(family, **options):
    with float64_everywhere():
        return fnppo.functional_policy(tiny(family), **options)


def differences(a, b):
    """The largest difference of two trees, in units of their largest number where that is above 1.

    NaN on either side is NaN. A k3 term of a random model can have gradients of 10⁴; float64 keeps sixteen digits of them, not ten after the point.
    """
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    apart, largest = [torch.zeros(())], [torch.ones(())]
    for x, y in pairs:
        apart.append((x - y).detach().abs().flatten())
        largest.append(y.detach().abs().flatten())
    return float(torch.cat([x.reshape(-1) for x in apart]).max() / torch.cat([x.reshape(-1) for x in largest]).max())


def loss_and_grads(family, batches, *, temperature, options=(), chunk_size=None, seen=None):
    """((loss, metrics), grads) of the library; the list `seen` gets the stats of each batch."""
    policy, params = policy_of(family, **dict(options))

    def loss_fn(params, batch):
        stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=temperature, chunk_size=chunk_size)
        if seen is not None:
            seen.append(stats)
        return fnppo.ppo_loss(stats, batch.targets, **LOSS)

    with float64_everywhere():
        return fnppo.accumulate_gradients(loss_fn, params, batches)


def oracle(family, batch, *, temperature):
    """(stats, loss, grads) of the oracle, with token-mean weights counted by hand."""
    params = {name: value.detach().requires_grad_() for name, value in tiny(family).named_parameters()}
    with float64_everywhere():
        stats = oracle_stats(tiny(family), params, batch, temperature=temperature)
        loss = oracle_loss(stats, batch, dict.fromkeys(stats, 1 / max(len(stats), 1)), **LOSS)
        if not stats:
            return stats, loss, {name: torch.zeros_like(value) for name, value in params.items()}
        grads = torch.autograd.grad(loss, [*params.values()], materialize_grads=True)
    return stats, loss.detach(), dict(zip(params, grads, strict=True))


def check_layout(family, batch, temperature, layout, options=()):
    """Log-probs, entropy, loss and gradients of a layout are those of the oracle."""
    stats, loss, grads = oracle(family, batch, temperature=temperature)
    model_batch = layout(fnppo.token_mean(batch))
    places = list(zip(model_batch.targets.rows.tolist(), model_batch.targets.columns.tolist(), strict=True))
    assert places == sorted(stats)
    (our_loss, metrics), our_grads = loss_and_grads(
        family, [model_batch], temperature=temperature, options=options, seen=(seen := [])
    )
    (ours,) = seen
    for place, logprob, entropy in zip(places, ours.logprobs.tolist(), ours.entropy.tolist(), strict=True):
        assert abs(logprob - stats[place][0].item()) <= TOLERANCE
        assert abs(entropy - stats[place][1].item()) <= TOLERANCE
    assert differences(our_loss, loss) <= TOLERANCE
    assert differences(metrics.per_step["loss"], loss) <= TOLERANCE
    assert differences(our_grads, grads) <= TOLERANCE


LAYOUTS = {
    "packed": fnppo.pack_sequences,
    "padded": fnppo.pad_sequences,
    "packed with filler": partial(fnppo.pack_sequences, pad_to=40),
    "shared prefixes": partial(fnppo.pack_sequences, share_prefixes=True, least_shared=1),
    "shared with filler": partial(fnppo.pack_sequences, share_prefixes=True, least_shared=1, pad_to=40),
}
TEMPERATURES = st.sampled_from([0.5, 1.0, 1.7])
BRANCHES = branching_batches(vocab_size=VOCAB)


@pytest.mark.core
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@given(batch=padded_batches(vocab_size=VOCAB), temperature=TEMPERATURES)
def test_every_layout_is_the_oracle(family, layout, batch, temperature):
    """B3, B5, B7, B9, B10, B11, B13, B14, B16, B17, F7, J6, and NaN in every masked slot."""
    check_layout(family, batch, temperature, LAYOUTS[layout])


@pytest.mark.core
@pytest.mark.parametrize("layout", ["packed", "padded", "shared prefixes"])
@pytest.mark.parametrize("family", MORE_FAMILIES)
@given(batch=padded_batches(vocab_size=VOCAB, max_rows=3))
def test_tied_softcap_sinks_scale_and_bias(family, layout, batch):
    """G4 and the transforms that attention and head may have."""
    check_layout(family, batch, 0.8, LAYOUTS[layout])


@pytest.mark.core
@pytest.mark.parametrize("layout", ["packed", "shared prefixes"])
@pytest.mark.parametrize("family", FAMILIES)
@given(batch=padded_batches(vocab_size=VOCAB, max_rows=3))
def test_math_attention(family, layout, batch):
    check_layout(family, batch, 1.0, LAYOUTS[layout], (("attention", fnppo.math_attention),))


@pytest.mark.core
@pytest.mark.parametrize("layout", ["packed", "padded", "shared prefixes"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "tied"])
@given(batch=padded_batches(vocab_size=VOCAB, max_rows=3) | BRANCHES)
def test_remat_changes_no_bit(family, layout, batch):
    """G2b: the second run of a layer sees the parameters of the first, and not the module's."""
    batch = LAYOUTS[layout](fnppo.token_mean(batch))
    results = []
    for remat in (False, True):
        policy, params = policy_of(family, remat=remat)
        params = {name: p + 0.25 for name, p in params.items()}  # no longer those of the module

        def loss_fn(params, batch, policy=policy):
            return fnppo.ppo_loss(
                fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0), batch.targets, **LOSS
            )

        (loss, _), grads = fnppo.value_and_grad(loss_fn)(params, batch)
        results.append((loss, grads))
    for a, b in zip(*map(optree.tree_leaves, results), strict=True):
        assert torch.equal(a, b)


@pytest.mark.core
@pytest.mark.parametrize("layout", ["shared prefixes", "shared with filler"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
@given(batch=BRANCHES, temperature=TEMPERATURES)
def test_dialogues_and_tree_searches(family, layout, batch, temperature):
    """Rows that go on from each other to any depth, with learned tokens in what they share, targets of one or of several."""
    check_layout(family, batch, temperature, LAYOUTS[layout])


@pytest.mark.core
@pytest.mark.parametrize("attention", [fnppo.math_attention, fnppo.sdpa_attention], ids=["math", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2"])
@given(batch=BRANCHES)
def test_dialogues_and_tree_searches_with_each_backend(family, attention, batch):
    """With windows and softcaps."""
    check_layout(family, batch, 1.0, LAYOUTS["shared prefixes"], (("attention", attention),))


@pytest.mark.core
@given(batch=BRANCHES, least=st.integers(1, 6))
def test_what_is_shared_changes_no_number(batch, least):
    layout = partial(fnppo.pack_sequences, share_prefixes=True, least_shared=least)
    check_layout("gpt2", batch, 1.0, layout)


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=SLOW), pytest.param("mistral", marks=SLOW)])
@given(batch=BRANCHES, spare=st.integers(0, 12), mini_batch_size=st.integers(1, 5))
def test_an_update_on_trees(family, batch, spare, mini_batch_size):
    """Two steps or more through `update_policy`, in micro-batches that cut trees, and rows in one piece as they are."""
    policy, params = policy_of(family)
    optimizer = fnppo.sgd(0.01)

    def loss_fn(params, batch):
        stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, batch.targets, **LOSS)

    def update(layout, max_tokens):
        return fnppo.update_policy(
            params, optimizer.init(params), batch, loss_fn=loss_fn, optimizer=optimizer, num_epochs=2, layout=layout,
            mini_batch_size=mini_batch_size, max_tokens=max_tokens,
        )  # fmt: skip

    with float64_everywhere():
        one = update(fnppo.padded, 10**6)
        many = update(sharing(least_shared=1), max(fnppo.lengths(batch)) + spare)
    scale = max(1.0, one[2]["grad_norm"])  # the second step is taken from where the first one, of this size, has led
    assert differences(one[0], many[0]) <= TOLERANCE * scale
    assert one[2] == pytest.approx(many[2], abs=1e-9, rel=1e-9, nan_ok=True)


WEIGHTS = {
    "token_mean": fnppo.token_mean,
    "token_sum": fnppo.token_sum,
    "sequence_mean": fnppo.sequence_mean,
    "sequence_sum": fnppo.sequence_sum,
    "constant_norm": partial(fnppo.constant_norm, horizon=5.0),
    "group_token_mean": fnppo.group_token_mean,
}


@pytest.mark.core
@pytest.mark.parametrize("weights", WEIGHTS)
@given(data=st.data(), batch=padded_batches(vocab_size=VOCAB, max_rows=5))
def test_any_split_gives_the_same(weights, data, batch):
    """A1-A5, A13, A16, A17, C22, D1, E2, E6, I1, I2: any order, any micro-batches, mixed layouts, any chunk size."""
    batch = WEIGHTS[weights](batch)
    (loss, metrics), grads = loss_and_grads("gpt2", [fnppo.pack_sequences(batch)], temperature=0.7)
    groups = data.draw(splits(batch.input_ids.shape[0]))
    layouts = [LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))] for _ in groups]
    pieces = [layout(fnppo.select_rows(batch, rows)) for layout, rows in zip(layouts, groups, strict=True)]
    (loss2, metrics2), grads2 = loss_and_grads(
        "gpt2", pieces, temperature=0.7, chunk_size=data.draw(st.sampled_from([1, 3, None]))
    )
    assert differences(loss, loss2) <= TOLERANCE
    assert differences(grads, grads2) <= TOLERANCE
    summary, summary2 = fnppo.summarize(metrics), fnppo.summarize(metrics2)
    assert summary == pytest.approx(summary2, abs=TOLERANCE, rel=TOLERANCE, nan_ok=True)


@pytest.mark.core
@pytest.mark.parametrize("layout", [fnppo.packed, fnppo.padded, fnppo.shared], ids=["packed", "padded", "shared"])
@given(data=st.data(), batch=padded_batches(vocab_size=VOCAB, max_rows=5))
def test_ranks_run_as_many_micro_batches(layout, data, batch):
    """E8, I1: `min_groups` is the most that a rank needs; what is empty on the others changes no bit, and all ranks add up."""
    batch = fnppo.token_mean(batch)
    all_rows = range(batch.input_ids.shape[0])
    rank_of = [data.draw(st.integers(0, 2)) for _ in all_rows]
    ranks = [fnppo.select_rows(batch, [row for row in all_rows if rank_of[row] == rank]) for rank in range(3)]
    lengths = [fnppo.lengths(rank) for rank in ranks]
    plan = partial(fnppo.plan_microbatches, max_tokens=max(12, *fnppo.lengths(batch)))
    most = max(1, *(len(plan(each)) for each in lengths))
    plans = [plan(each, min_groups=most) for each in lengths]
    assert [len(groups) for groups in plans] == [most] * 3
    run = lambda batches: loss_and_grads("gpt2", batches, temperature=0.7)
    results = []
    for rank, groups in zip(ranks, plans, strict=True):
        pieces = [layout.lay(fnppo.select_rows(rank, rows)) for rows in groups]
        results.append(run(pieces))
        full = [piece for piece, rows in zip(pieces, groups, strict=True) if rows]
        if 0 < len(full) < most:
            (loss, metrics), grads = run(full)
            (with_empty, metrics_with_empty), grads_with_empty = results[-1]
            same = zip(*(optree.tree_leaves(x) for x in ((loss, grads), (with_empty, grads_with_empty))), strict=True)
            assert all(torch.equal(a, b) for a, b in same)
            assert fnppo.summarize(metrics) == pytest.approx(
                fnppo.summarize(metrics_with_empty), abs=0, rel=0, nan_ok=True
            )
        elif not full:
            assert not any(leaf.any() for leaf in optree.tree_leaves((results[-1][0][0], results[-1][1])))
    (loss, _), grads = run([fnppo.pack_sequences(batch)])
    assert differences(sum(each[0][0] for each in results), loss) <= TOLERANCE
    assert differences(optree.tree_map(lambda *leaves: sum(leaves), *(each[1] for each in results)), grads) <= TOLERANCE


@pytest.mark.core
@given(batch=padded_batches(vocab_size=VOCAB), temperature=TEMPERATURES)
def test_inputs_and_global_random_state_are_left_alone(batch, temperature):
    """C7."""
    policy, params = policy_of("llama")
    before = optree.tree_map(torch.clone, (batch, params))
    random_state = torch.get_rng_state()
    model_batch = fnppo.pack_sequences(fnppo.token_mean(batch))
    model_batch_before = optree.tree_map(torch.clone, model_batch)
    loss_and_grads("llama", [model_batch], temperature=temperature)
    for now, then in (((batch, params), before), (model_batch, model_batch_before)):
        for a, b in zip(optree.tree_leaves(now), optree.tree_leaves(then), strict=True):
            assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.mark.core
@given(data=st.data(), batch=padded_batches(vocab_size=VOCAB))
def test_pad_amount_and_id_do_not_matter(data, batch):
    left, right = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    pad = torch.nn.functional.pad

    def wider(column):
        fill = {torch.bool: False, torch.int64: data.draw(st.sampled_from([-1, 0, 999]))}.get(
            column.dtype, float("nan")
        )
        return pad(column, (left, right), value=fill)

    columns = {k: wider(v) for k, v in batch._asdict().items() if isinstance(v, torch.Tensor) and v.dim() == 2}
    wide = batch._replace(**columns, extra={k: wider(v) for k, v in batch.extra.items()})
    (loss, _), grads = loss_and_grads("gpt2", [fnppo.pack_sequences(fnppo.token_mean(batch))], temperature=1.0)
    (loss2, _), grads2 = loss_and_grads("gpt2", [fnppo.pad_sequences(fnppo.token_mean(wide))], temperature=1.0)
    assert differences(loss, loss2) <= TOLERANCE
    assert differences(grads, grads2) <= TOLERANCE
