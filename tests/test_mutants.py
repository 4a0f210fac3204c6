"""Deliberately broken copies, each caught by a check that the real function passes."""

import pytest
import torch
from test_exactness import TOLERANCE, check_layout, differences, loss_and_grads, policy_of
from tiny import VOCAB

import fnppo
from fnppo import attention, logprobs, packing, prefixes, segments

PROMPTS, RESPONSES = [[3, 1, 4], [1], [5, 9]], [[2, 6, 5], [3, 5, 8, 9], [7]]


def batch(prompts=PROMPTS, responses=RESPONSES):
    g = torch.Generator().manual_seed(0)
    padded = fnppo.padded_batch(prompts, responses)
    draw = lambda: torch.randn(padded.input_ids.shape, generator=g, dtype=torch.float64)
    return padded._replace(advantages=draw(), old_logprobs=draw() * 0.3 - 2.5, ref_logprobs=draw() * 0.3 - 2.5)


def no_block_mask(monkeypatch):
    """Attention is causal over the whole packed axis."""

    def leaky(inputs):
        n = inputs.input_ids.numel()
        return segments.Segments(
            torch.zeros(1, n).long(), torch.arange(n)[None], segments.PackedSegments((n,), (n,), None)
        )

    monkeypatch.setattr("fnppo.policy.segments_of", leaky)


def no_position_restart(monkeypatch):
    """Positions count on from one row to the next."""
    original = packing.pack_sequences

    def mutant(batch):
        inputs, targets = original(batch)
        return fnppo.ModelBatch(inputs._replace(position_ids=torch.arange(inputs.input_ids.numel())), targets)

    return mutant


def shift_off_by_one(monkeypatch):
    """A token is predicted by itself."""

    def mutant(batch):
        inputs, targets = packing.pack_sequences(batch)
        return fnppo.ModelBatch(inputs, targets._replace(predictors=targets.predictors + 1))

    return mutant


def flat_shift(monkeypatch):
    """Labels are rolled over the packed axis, so the last prompt token of a row scores the first of the next."""

    def mutant(batch):
        inputs, targets = packing.pack_sequences(batch)
        return fnppo.ModelBatch(inputs, targets._replace(token_ids=inputs.input_ids.roll(-2)[targets.predictors]))

    return mutant


def prompt_token_as_target(monkeypatch):
    """The loss mask is one column too wide on the left."""

    def mutant(batch):
        wide = batch.loss_mask | batch.loss_mask.roll(-1, 1)
        first = batch.attention_mask & (batch.attention_mask.cumsum(1) == 1)
        return packing.pack_sequences(batch._replace(loss_mask=wide & ~first))

    return mutant


def entropy_from_untempered_logits(monkeypatch):
    original = logprobs.chunked_logprobs

    def mutant(*args, temperature, **options):
        untempered = original(*args, temperature=1.0, **options)
        return original(*args, temperature=temperature, **options)._replace(entropy=untempered.entropy)

    monkeypatch.setattr(logprobs, "chunked_logprobs", mutant)


def a_window_that_is_ignored(monkeypatch):
    original = attention.choose_attention

    def mutant(query, key, value, segments, **asked):
        return original(query, key, value, segments, **asked | {"window": None})

    policy, params = policy_of("mistral")
    import dataclasses

    monkeypatch.setattr(
        "test_exactness.policy_of", lambda family, **_: (dataclasses.replace(policy, attention=mutant), params)
    )


MUTANTS = [
    no_block_mask, no_position_restart, shift_off_by_one, flat_shift, prompt_token_as_target,
    entropy_from_untempered_logits, a_window_that_is_ignored,
]  # fmt: skip


def family_for(mutant):
    """Rotary positions hide a missing restart, and only a window shows that it is ignored."""
    return {no_position_restart: "gpt2", a_window_that_is_ignored: "mistral"}.get(mutant, "llama")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_layouts_and_heads_are_caught(mutant, monkeypatch):
    family = family_for(mutant)
    check_layout(family, batch(), 0.7, fnppo.pack_sequences)
    layout = mutant(monkeypatch) or fnppo.pack_sequences
    with pytest.raises(AssertionError):
        check_layout(family, batch(), 0.7, layout)


def test_a_missing_restart_is_invisible_to_rotary_positions():
    """Why the tests have a model with absolute positions: the same mutant passes on a Llama."""
    check_layout("llama", batch(), 0.7, no_position_restart(None))


def tree():
    """Two rollouts that fork two tokens into their response, a third turn after the second, and another prompt."""
    return batch([[3, 1], [3, 1], [5], [3, 1, 4, 2, 8, 8]], [[4, 2, 6, 7], [4, 2, 8, 8], [3, 4], [9, 7]])


def share(batch):
    return packing.pack_sequences(batch, share_prefixes=True, least_shared=1)


def of_inputs(change):
    def mutant(batch):
        inputs, targets = share(batch)
        return fnppo.ModelBatch(inputs._replace(**change(inputs)), targets)

    return mutant


# Segments of the tree: 0 is 3 1 4 2, 1 and 2 fork from it as 6 7 and 8 8, 3 is the other prompt, 4 goes on from 2 as 9 7.
def a_child_reads_its_sibling(monkeypatch):
    return of_inputs(lambda inputs: {"parents": torch.tensor([-1, 0, 1, -1, 2])})


def a_child_goes_on_from_its_grandparent(monkeypatch):
    return of_inputs(lambda inputs: {"parents": torch.tensor([-1, 0, 0, -1, 0])})


def parents_are_forgotten(monkeypatch):
    return of_inputs(lambda inputs: {"parents": None})


def positions_restart_in_a_child(monkeypatch):
    starts = torch.tensor([0, 4, 6, 8, 11, 13])
    return of_inputs(lambda inputs: {"position_ids": torch.cat([torch.arange(n) for n in starts.diff()])})


def positions_run_on_over_the_axis(monkeypatch):
    return of_inputs(lambda inputs: {"position_ids": torch.arange(inputs.input_ids.numel())})


def a_predictor_in_the_wrong_branch(monkeypatch):
    """Those of the second rollout's own tokens (6 and 7 on the axis) are taken from the first's (4 and 5)."""

    def mutant(batch):
        inputs, targets = share(batch)
        wrong = torch.where(
            (targets.predictors == 6) | (targets.predictors == 7), targets.predictors - 2, targets.predictors
        )
        return fnppo.ModelBatch(inputs, targets._replace(predictors=wrong))

    return mutant


def a_target_of_one_row_only(monkeypatch):
    """A token that two rows have learned is counted for the first of them."""

    def mutant(batch):
        inputs, targets = share(batch)
        seen, kept = set(), []
        for place, pair in enumerate(zip(targets.predictors.tolist(), targets.token_ids.tolist(), strict=True)):
            if pair not in seen:
                kept.append(place)
            seen.add(pair)
        columns = {name: column[kept] for name, column in targets._asdict().items() if isinstance(column, torch.Tensor)}
        return fnppo.ModelBatch(inputs, targets._replace(**columns))

    return mutant


def advantages_of_the_first_row(monkeypatch):
    """A token that two rows have learned has the advantage of the first of them in both."""

    def mutant(batch):
        inputs, targets = share(batch)
        pairs = list(zip(targets.predictors.tolist(), targets.token_ids.tolist(), strict=True))
        return fnppo.ModelBatch(
            inputs, targets._replace(advantages=targets.advantages[[pairs.index(pair) for pair in pairs]])
        )

    return mutant


def one_token_too_many_is_shared(monkeypatch):
    original = prefixes._common
    monkeypatch.setattr(prefixes, "_common", lambda a, b: min(original(a, b) + 1, len(a), len(b)))
    return share


def the_tokens_of_the_last_row(monkeypatch):
    """Where rows fork, both go on with the tokens of one."""

    def mutant(batch):
        inputs, targets = share(batch)
        ids = inputs.input_ids.clone()
        ids[4:6] = ids[6:8]
        return fnppo.ModelBatch(inputs._replace(input_ids=ids), targets)

    return mutant


TREE_MUTANTS = [
    a_child_reads_its_sibling, a_child_goes_on_from_its_grandparent, parents_are_forgotten, positions_restart_in_a_child,
    positions_run_on_over_the_axis, a_predictor_in_the_wrong_branch, a_target_of_one_row_only, advantages_of_the_first_row,
    one_token_too_many_is_shared, the_tokens_of_the_last_row,
]  # fmt: skip


@pytest.mark.parametrize("mutant", TREE_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_trees_are_caught(mutant, monkeypatch):
    inputs, _ = share(tree())
    assert inputs.input_ids.tolist() == [3, 1, 4, 2, 6, 7, 8, 8, 5, 3, 4, 9, 7]
    assert inputs.parents.tolist() == [-1, 0, 0, -1, 2]
    check_layout("gpt2", tree(), 0.7, share)
    layout = mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_layout("gpt2", tree(), 0.7, layout)


def check_split(weights_of_pieces):
    """Two micro-batches give the gradient of one batch."""
    (_, _), whole = loss_and_grads("llama", [fnppo.pack_sequences(fnppo.token_mean(batch()))], temperature=0.7)
    pieces = [fnppo.pack_sequences(piece) for piece in weights_of_pieces(batch())]
    (_, _), split = loss_and_grads("llama", pieces, temperature=0.7)
    assert differences(whole, split) <= TOLERANCE


def test_a_mean_per_micro_batch_is_caught():
    """A1: weights made after the split instead of before."""
    rows = [[0], [1, 2]]  # 3 and 5 targets
    check_split(lambda b: [fnppo.select_rows(fnppo.token_mean(b), r) for r in rows])
    with pytest.raises(AssertionError):
        check_split(lambda b: [fnppo.token_mean(fnppo.select_rows(b, r)) for r in rows])
    with pytest.raises(AssertionError):  # and averaged over micro-batches
        check_split(
            lambda b: [
                (w := fnppo.token_mean(fnppo.select_rows(b, r)))._replace(loss_weights=w.loss_weights / 2) for r in rows
            ]
        )


def test_the_vocabulary_of_the_tests_holds_the_tokens():
    assert max(max(map(max, PROMPTS)), max(map(max, RESPONSES))) < VOCAB
