"""Cases that cut across modules, and the list of all: what users of other trainers have met as bugs, each held by a test."""

import ast
import io
import re
from pathlib import Path

import optree
import pytest
import torch
from test_exactness import policy_of
from test_train import OPTIMIZER, loss_for, some_batch
from tiny import VOCAB, tiny
from torch import tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fnppo
from fnppo import Metrics
from fnppo.checkpoint import load_checkpoint, save_checkpoint, save_pretrained
from fnppo.layouts import Layout

IN_SCOPE = """
    A1 A2 A3 A4 A5 A6 A7 A8 A10 A11 A12 A13 A15 A16 A17
    B1 B2 B3 B4 B5 B6 B7 B9 B10 B11 B13 B14 B16 B17 B19
    C1 C2 C3 C4 C5 C6 C7 C8 C11 C12 C13 C14 C15 C16 C17 C18 C21 C22 C24
    D1 D2 D3 D5 D6 D8 D10
    E1 E2 E3 E4 E5 E6 E8 E9 E12
    F1 F2 F3 F4 F6 F7
    G1 G2 G2b G3 G4 G5 G7 G8 G9 G11 G12 G13 G14 G15
    H1 H3 H5 H6 H7 H10 H11 H12
    I1 I2 I4
    J1 J3 J4 J5 J6 J7 J9
    T1 T2 T3 T4 T5 T6 T7 T8
"""


def cases_in(text):
    """A1, C13-C15 -> {A1, C13, C14, C15}."""
    found = set()
    for letter, first, b, last in re.findall(r"\b([A-JT])(\d+)(b?)(?:-\1(\d+))?\b", text or ""):
        found |= {f"{letter}{n}" for n in range(int(first), int(last or first) + 1)} if not b else {letter + first + b}
    return found


def test_every_case_has_a_test():
    """Each id stands in the docstring of a test; those of several ranks are in tests/distributed."""
    found = set()
    for file in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= cases_in(ast.get_docstring(node))
    assert cases_in("A1 and C13-C15, G2b.") == {"A1", "C13", "C14", "C15", "G2b"}
    assert not set(IN_SCOPE.split()) - found


def run_update(batch, **options):
    params, loss_fn = loss_for("gpt2")
    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mini_batch_size": 6, "max_tokens": 100} | options
    return fnppo.update_policy(params, OPTIMIZER.init(params), batch, **options)


def test_the_callers_old_logprobs_are_used():
    """T1: also with one mini-batch and one epoch, where others put their own in place of them. Ratios are then e^0.5."""
    policy, params = policy_of("gpt2")
    batch = some_batch()
    stats = fnppo.compute_logprobs(params, batch, policy=policy, temperature=0.8, max_tokens=100)
    _, _, metrics = run_update(batch._replace(old_logprobs=stats.logprobs - 0.5), num_epochs=1)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((1.648721, 1.648721), abs=1e-5)


def toy_update(rows, losses=None, **options):
    """Losses that each step saw, for rows of one token with the given losses (1 each)."""
    seen = []

    def loss_fn(params, batch):
        loss, metrics = fnppo.ppo_loss(fnppo.TokenStats(params["w"].expand(batch.targets.rows.shape)), batch.targets)
        seen.append(loss.item())
        return loss, metrics

    advantages = [-1.0] * rows if losses is None else [-x for x in losses]
    batch = fnppo.padded_batch([[1]] * rows, [[1]] * rows, advantages=advantages, old_logprobs=[[0.0]] * rows)
    params, optimizer = {"w": torch.zeros(())}, fnppo.sgd(0.0)
    _, _, metrics = fnppo.update_policy(
        params, optimizer.init(params), batch, loss_fn=loss_fn, optimizer=optimizer, **options
    )
    return seen, metrics


def test_counts_are_real():
    """T2, T3 (A12, A13): micro-batches of 4 and 2 of a mini-batch of 6 add to 1; the last of 10 rows in fours is 1, too."""
    uneven = Layout(lambda batch, max_tokens: [[0, 1, 2, 3], [4, 5]], fnppo.pack_sequences)
    seen, _ = toy_update(6, mini_batch_size=6, max_tokens=8, layout=uneven)
    assert seen == pytest.approx([2 / 3, 1 / 3])
    seen, metrics = toy_update(10, mini_batch_size=4, max_tokens=100)
    assert seen == pytest.approx([1.0, 1.0, 1.0])
    assert metrics["loss"] == pytest.approx(1.0)


def test_one_rule_for_the_divisor():
    """T7 (A16): a mini-batch size above the number of rows gives the bits of one that is exactly it."""
    exact, above = run_update(some_batch(), mini_batch_size=6), run_update(some_batch(), mini_batch_size=1000)
    for a, b in zip(optree.tree_leaves(exact), optree.tree_leaves(above), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_terms_of_the_loss():
    """T4, T5, T6, T8 (I4, C14, C6, A2): nothing is subtracted in place, capped, clamped or divided by a count of its own.

    Two tokens of weight 1/4: policy 1 each, entropy 0.5 each, d = -25 for the KL k3 of the second.
    """
    index = torch.zeros(2, dtype=torch.long)
    column = lambda *x: tensor(x, dtype=torch.float64)
    targets = fnppo.Targets(
        index, index, index, index, loss_weights=column(0.25, 0.25), old_logprobs=column(0, 0), advantages=column(-1, -1),
        ref_logprobs=column(0, 25),
    )  # fmt: skip
    logprobs = column(0, 0).requires_grad_()
    loss, metrics = fnppo.ppo_loss(
        fnppo.TokenStats(logprobs, column(0.5, 0.5)), targets, entropy_coef=0.6, kl_coef=1e-10
    )
    k3 = 72004899311.0  # e^25 - 1 - 25
    assert metrics.per_step["policy_loss"].item() == 0.5
    assert loss.item() == pytest.approx(0.5 - 0.6 * 0.25 + 1e-10 * k3 / 4, rel=1e-9)
    slope = torch.autograd.grad(loss, logprobs)[0]
    assert slope.tolist() == pytest.approx([0.25, 0.25 - 1e-10 * (k3 + 25) / 4], rel=1e-9)
    for temperature in (0.0, 1e-9):  # 1e-9 is a temperature, and 0 is none
        run = lambda t: fnppo.logits_to_stats(column(0, 1e-9)[None], tensor([0]), temperature=t).logprobs
        if temperature:
            assert run(temperature).item() == pytest.approx(-1.313262, abs=1e-6)
        else:
            with pytest.raises(ValueError, match=r"temperature is 0\.0"):
                run(temperature)


def test_what_an_update_will_do_is_told_in_counts():
    """J1: 10 rows, mini-batches of 4 rows, micro-batches of 3 rows (of 2 tokens), 2 epochs."""
    batch = fnppo.padded_batch([[1]] * 10, [[1]] * 10)
    told = fnppo.describe_update(batch, mini_batch_size=4, max_tokens=6, num_epochs=2)
    assert told.splitlines() == [
        "10 rows, 2 epochs, mini_batch_size 4, max_tokens 6: 6 optimizer steps, 10 forwards",
        "step 1: 4 rows, 8 tokens, micro-batches of 2 + 2 rows",
        "step 2: 4 rows, 8 tokens, micro-batches of 2 + 2 rows",
        "step 3: 2 rows, 4 tokens, micro-batches of 2 rows",
        "step 4: 4 rows, 8 tokens, micro-batches of 2 + 2 rows",
        "step 5: 4 rows, 8 tokens, micro-batches of 2 + 2 rows",
        "step 6: 2 rows, 4 tokens, micro-batches of 2 rows",
    ]
    seen, metrics = toy_update(10, mini_batch_size=4, max_tokens=6, num_epochs=2)
    assert (metrics["steps"], len(seen)) == (6.0, 10)


def test_numbers_of_groups_that_do_not_divide():
    """E8: 3 rows in 2 groups, and in 5, of which two are empty; every row is once in a plan, whatever is asked for."""
    assert fnppo.plan_microbatches([5, 5, 5], max_tokens=5) == [[0], [1], [2]]
    assert fnppo.plan_microbatches([5, 5, 5], max_tokens=10) == [[0, 2], [1]]
    assert fnppo.plan_microbatches([5, 5, 5], max_tokens=1000) == [[0, 1, 2]]
    assert fnppo.plan_microbatches([5, 5, 5], max_tokens=1000, min_groups=2) == [[0, 2], [1]]
    assert fnppo.plan_microbatches([5, 5, 5], max_tokens=1000, min_groups=5) == [[0], [1], [2], [], []]


def test_tied_weights_stay_tied(tmp_path):
    """G5: in a tree they are one tensor, so there is no tie to lose; in a model on disk transformers ties them again."""
    from transformers import AutoModelForCausalLM

    policy, params = policy_of("tied")
    score = lambda p: fnppo.compute_logprobs(p, some_batch(), policy=policy, temperature=1.0, max_tokens=100).logprobs
    save_checkpoint(tmp_path / "c.pt", params, step=1)
    loaded, _ = load_checkpoint(tmp_path / "c.pt", like=params)
    assert policy.head.weight == "model.embed_tokens.weight" in loaded
    assert "lm_head.weight" not in loaded
    assert torch.equal(score(loaded), score(params))
    save_pretrained(tmp_path / "model", params, policy=policy)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    again, again_params = fnppo.functional_policy(module)
    assert torch.equal(again_params[again.head.weight], params[policy.head.weight])


def test_the_norm_is_that_of_all_numbers_at_once():
    """G7: there is one norm, √ Σ x²; an infinity norm cannot be asked for. Its parts could be added up wrongly."""
    tree = {"a": tensor([[3.0, 0.0]]), "b": [tensor([4.0]), tensor(12.0)]}
    assert fnppo.global_norm(tree).item() == 13.0
    with pytest.raises(TypeError):
        fnppo.global_norm(tree, float("inf"))


def test_training_a_part_of_the_parameters():
    """G13: W is frozen and A, B trained, as in LoRA: the loss merges the trees, so only A and B have gradient and state."""
    policy, frozen = policy_of("llama")
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    trained = {"A": draw(2, 8), "B": draw(VOCAB, 2)}
    before = {name: p.clone() for name, p in frozen.items()}

    def loss_fn(trained, batch):
        params = frozen | {"lm_head.weight": frozen["lm_head.weight"] + trained["B"] @ trained["A"]}
        stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, batch.targets)

    state = OPTIMIZER.init(trained)
    options = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "mini_batch_size": 6, "max_tokens": 100}
    new, state, _ = fnppo.update_policy(trained, state, some_batch(), **options)
    assert set(new) == set(state[1].first_moment) == set(state[1].second_moment) == {"A", "B"}
    assert not torch.equal(new["A"], trained["A"])
    assert not torch.equal(new["B"], trained["B"])
    assert all(torch.equal(p, before[name]) for name, p in frozen.items())


def test_a_tree_that_went_away_and_came_back():
    """G15: params and state are plain tensors on the device where they are; after a round trip the next step is the same."""
    params, loss_fn = loss_for("llama")
    batch = [fnppo.pack_sequences(fnppo.token_mean(some_batch()))]
    step = lambda p, s: fnppo.train_step(p, s, batch, loss_fn=loss_fn, optimizer=OPTIMIZER)[:2]
    once = step(params, OPTIMIZER.init(params))
    file = io.BytesIO()
    torch.save(optree.tree_leaves(once), file)
    file.seek(0)
    back = optree.tree_unflatten(optree.tree_structure(once), torch.load(file))
    for a, b in zip(*(optree.tree_leaves(step(*tree)) for tree in (once, back)), strict=True):
        assert torch.equal(a, b)
    away = optree.tree_map(lambda x: x.to("meta"), once[1])
    with pytest.raises(ValueError, match=r"on meta in opt_state, .* on cpu in params"):
        step(once[0], away)


def test_checkpoints_that_autograd_cannot_take_are_named():
    """G2: the reentrant kind works with no gradient of given inputs; torch says so by name, at top level and in torch.func."""
    reentrant = lambda p, x: (checkpoint(lambda y: y.sin().sin(), p["x"], use_reentrant=True), Metrics())
    other = lambda p, x: (checkpoint(lambda y: y.sin().sin(), p["x"], use_reentrant=False), Metrics())
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        fnppo.value_and_grad(reentrant)({"x": tensor(1.0)}, None)
    for loss_fn in (reentrant, other):
        with pytest.raises(RuntimeError):
            torch.func.grad(lambda p, loss_fn=loss_fn: loss_fn(p, None)[0])({"x": tensor(1.0)})


def test_groups_without_variance_are_kept_or_dropped_as_told():
    """H6: losses 1, 1 | 0, 0, the second group with equal rewards: kept 0.5, dropped 1.0."""
    rewards, groups = tensor([1.0, 0.0, 1.0, 1.0]), tensor([0, 0, 1, 1])
    batch = fnppo.padded_batch([[1]] * 4, [[2]] * 4, groups=groups.tolist())
    losses = tensor([1.0, 1.0, 0.0, 0.0])
    total = lambda batch, losses: (fnppo.pack_sequences(fnppo.token_mean(batch)).targets.loss_weights * losses).sum()
    assert total(batch, losses).item() == 0.5
    rows = fnppo.grpo_advantages(rewards, groups).nonzero()[:, 0]
    assert total(fnppo.select_rows(batch, rows), losses[rows]).item() == 1.0


def test_estimators_are_called_with_what_they_have():
    """J9: there is no registry that could call with keywords an estimator lacks; a plain function of two columns works.

    What could still go wrong is another signature, which Python names.
    """
    batch = fnppo.padded_batch([[1]], [[2]], advantages=[0], old_logprobs=[[-1]], ref_logprobs=[[-2]])
    targets = fnppo.pack_sequences(fnppo.token_mean(batch)).targets
    stats = fnppo.TokenStats(tensor([-1.0]))
    loss, _ = fnppo.ppo_loss(stats, targets, kl_coef=1.0, kl=lambda a, b: (a - b).abs())
    assert loss.item() == 1.0
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'"):
        fnppo.ppo_loss(stats, targets, kl_coef=1.0, kl=lambda a, b, beta: a)


def test_both_layouts_hand_over_the_same():
    """J6: packed and padded, chunked and plain, in one batch with values: the same fields, shapes and numbers."""
    policy, params = policy_of("gpt2")
    batch = fnppo.token_mean(some_batch())
    results = []
    for layout in (fnppo.pack_sequences, fnppo.pad_sequences):
        for chunk_size in (1, None):
            laid = layout(batch)
            stats = fnppo.forward_logprobs(params, laid, policy=policy, temperature=1.0, chunk_size=chunk_size)
            loss, metrics = fnppo.ppo_loss(stats, laid.targets)
            results.append((*stats, loss, fnppo.summarize(metrics)))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-5, atol=1e-5)


def test_fillers_are_never_read():
    """B17: an old log-prob of 1.0 or 1e9 at tokens that are not learned changes no bit of loss and gradient."""
    params, loss_fn = loss_for("llama")
    batch = some_batch()
    observed = batch._replace(loss_mask=batch.loss_mask & (torch.arange(batch.input_ids.shape[1]) % 2 == 0))
    outcomes = []
    for filler in (1.0, 1e9, float("nan")):
        columns = ("old_logprobs", "advantages", "ref_logprobs")
        filled = {name: torch.where(observed.loss_mask, getattr(batch, name), filler) for name in columns}
        laid = fnppo.pack_sequences(fnppo.token_mean(observed._replace(**filled)))
        outcomes.append(fnppo.accumulate_gradients(loss_fn, params, [laid]))
    for other in outcomes[1:]:
        for a, b in zip(optree.tree_leaves(outcomes[0]), optree.tree_leaves(other), strict=True):
            assert torch.equal(a, b)


def test_the_tiny_models_are_what_the_cases_need():
    """C21, B5: a model with dropout, and one with absolute positions, or these cases would pass whatever the code does."""
    assert tiny("gpt2").config.resid_pdrop > 0
    assert policy_of("gpt2")[0].max_positions == 32
    assert policy_of("llama")[0].max_positions is None
