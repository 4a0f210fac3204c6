"""What test_malformed.py runs in a process without the run-time checker; alone:

FNPPO_WITHOUT_CHECKER=1 pytest tests/malformed_input.py

messages.json holds each message in full, as users read it. After a change of words: FNPPO_WRITE_MESSAGES=1.
"""

import json
import math
import os
import re
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given
from hypothesis import strategies as st
from tiny import VOCAB, tiny
from torch import tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from trees import plan_prompts, tree_of

import fnppo
from fnppo import advantages, grpo_advantages
from fnppo.advantages.gae import discounted_returns
from fnppo.advantages.pass_at_k import best_response_advantages, pass_at_k_advantages
from fnppo.advantages.reward_kl import AdaptiveKL, adapt_kl, kl_in_reward
from fnppo.advantages.row_filters import mask_rows, rewards_differ
from fnppo.advantages.token_baseline import otb_advantages
from fnppo.advantages.token_columns import on_every_token, on_last_token
from fnppo.advantages.whitening import reinforce_plus_plus_advantages, whiten
from fnppo.checkpoint import load_checkpoint, save_checkpoint, save_pretrained
from fnppo.prefixes import tree_of_rows
from fnppo.rollout import generate
from fnppo.segments import segments_of
from fnppo.testing import padded_batches

NAN, INF = math.nan, math.inf
LIBRARY = Path(fnppo.__file__).parent
MESSAGES = Path(__file__).with_name("messages.json")
SEEN = []


@pytest.fixture(autouse=True)
def messages_are_those_on_file(request):
    """Of tests that are the same every time; hypothesis draws others."""
    SEEN.clear()
    yield
    on_file = json.loads(MESSAGES.read_text())
    if "FNPPO_WRITE_MESSAGES" in os.environ and SEEN:
        on_file[request.node.name] = SEEN
        MESSAGES.write_text(json.dumps(on_file, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    assert on_file.get(request.node.name, []) == SEEN


def refused(run, *named):
    """`run` raises a ValueError of the library's own with all of `named` in it, and last a sentence with the way out."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run()
    message = str(caught.value)
    assert caught.type is ValueError
    assert Path(caught.traceback[-1].path).is_relative_to(LIBRARY), message
    for word in named:
        assert str(word) in message, (word, message)
    assert re.search(r"\. [A-Z].*\.$", message, re.DOTALL), message
    if not currently_in_test_context():
        SEEN.append(re.sub(r"/\S+/", "", message))  # without folders


def test_the_checker_is_off():
    assert not hasattr(fnppo.token_sum, "__wrapped__")


# Batches: one corruption each, and who has to see it.

SHAPES, MASK, VALUES, MODEL = "shapes", "attention mask", "values", "model"


def changed(batch, name, place, value, dtype=None):
    column = getattr(batch, name).clone().to(dtype or getattr(batch, name).dtype)
    column[place] = value
    return batch._replace(**{name: column})


def somewhere(draw, mask):
    """A (row, column) where the mask is set."""
    return tuple(draw(st.sampled_from(mask.nonzero().tolist())))


def at(place):
    return f"row {place[0]}, column {place[1]}"


COLUMNS = ["old_logprobs", "advantages", "ref_logprobs", "loss_weights", "attention_mask", "loss_mask", "extra"]


def with_column(batch, name, column):
    return batch._replace(**{name: {"mine": column} if name == "extra" else column})


def of(batch, name):
    column = batch.extra["column"] if name == "extra" else getattr(batch, name)
    return torch.zeros(batch.input_ids.shape) if column is None else column


def not_finite(draw, batch):
    name, value = draw(st.sampled_from(COLUMNS[:4])), draw(st.sampled_from([NAN, INF, -INF]))
    place = somewhere(draw, batch.loss_mask)
    batch = with_column(batch, name, of(batch, name))
    return changed(batch, name, place, value), VALUES, [at(place), name, value, "Clear loss_mask there, or mend"]


def no_mask(name, kind):
    def corrupt(draw, batch):
        place = draw(st.integers(0, batch.input_ids.shape[0] - 1)), draw(st.integers(0, batch.input_ids.shape[1] - 1))
        dtype = draw(st.sampled_from([torch.int64, torch.int8, torch.float32, torch.bfloat16]))
        value = draw(st.sampled_from([2, -1, 7] + ([0.5, NAN, INF, -INF] if dtype.is_floating_point else [])))
        bad = changed(batch, name, place, value, dtype)
        return bad, kind, [at(place), name, value, "give each sequence a row of its own"]

    return corrupt


def negative_id(draw, batch):
    place, value = somewhere(draw, batch.attention_mask), draw(st.integers(-(2**63), -1))
    return changed(batch, "input_ids", place, value), VALUES, [at(place), "input_ids", value, "use loss_mask"]


def unknown_id(draw, batch):
    place, value = somewhere(draw, batch.attention_mask), draw(st.integers(VOCAB, 2**63 - 1))
    return changed(batch, "input_ids", place, value), MODEL, [value, VOCAB, "tokenizer and model"]


def learned_but_absent(draw, batch):
    place = somewhere(draw, batch.loss_mask)
    return changed(batch, "attention_mask", place, False), VALUES, [at(place), "loss_mask", "Set attention_mask"]


def learned_but_first(draw, batch):
    row, _ = somewhere(draw, batch.loss_mask)
    place = row, int(batch.attention_mask[row].nonzero()[0])
    return changed(batch, "loss_mask", place, True), VALUES, [at(place), "first token", "BOS"]


def other_shape(draw, batch):
    name = draw(st.sampled_from(COLUMNS))
    column = of(batch, name)
    bad = draw(
        st.sampled_from(
            [column[:, 1:], column[1:], column[:1], column[:, :1], column.T, column.flatten(), column[None], column[0, 0],
             torch.cat([column, column]), torch.cat([column, column], 1)]
        )
    )  # fmt: skip
    assume(bad.shape != column.shape)
    named = "mine" if name == "extra" else name
    return with_column(batch, name, bad), SHAPES, [named, tuple(bad.shape), tuple(column.shape), "Pad response-only"]


def ids_of_another_shape(draw, batch):
    bad = draw(st.sampled_from([batch.input_ids[0], batch.input_ids[None], batch.input_ids[0, 0]]))
    return batch._replace(input_ids=bad), SHAPES, ["input_ids", tuple(bad.shape), "[batch, seq]", "Unsqueeze"]


def other_dtype(draw, batch):
    name, dtype = draw(
        st.sampled_from(
            [("input_ids", d) for d in (torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64)]
            + [(c, d) for c in COLUMNS[:4] for d in (torch.int64, torch.uint8, torch.bool, torch.complex64)]
            + [("groups", d) for d in (torch.float32, torch.float64, torch.complex64)]
        )
    )
    column = torch.zeros_like(of(batch, name).nan_to_num(), dtype=dtype)
    return batch._replace(**{name: column}), SHAPES, [name, dtype, "Call ." if name != "groups" else "Number them"]


def no_tensor(draw, batch):
    name = draw(st.sampled_from(["input_ids", "groups", *COLUMNS]))
    bad = draw(st.sampled_from([[[1, 2]], "text", 3, 0.5, of(batch, name).numpy()]))
    named = "mine" if name == "extra" else name
    return with_column(batch, name, bad), SHAPES, [named, type(bad).__name__, "Use torch.as_tensor"]


def required_is_none(draw, batch):
    name = draw(st.sampled_from(["input_ids", "attention_mask", "loss_mask"]))
    return batch._replace(**{name: None}), SHAPES, [name, "NoneType", "Use torch.as_tensor"]


def other_device(draw, batch):
    name = draw(st.sampled_from(["groups", *COLUMNS]))
    if draw(st.booleans()):
        bad, where = of(batch, name).to("meta"), "meta"
    else:
        with FakeTensorMode():  # a tensor that says it is on a GPU
            bad, where = torch.empty(of(batch, name).shape, dtype=of(batch, name).dtype, device="cuda"), "cuda:0"
    named = "mine" if name == "extra" else name
    return with_column(batch, name, bad), SHAPES, [named, where, "cpu", "Move one of them"]


def groups_of_another_shape(draw, batch):
    bad = draw(st.sampled_from([batch.groups[1:], batch.groups[None], batch.groups[0], torch.cat([batch.groups] * 2)]))
    return (
        batch._replace(groups=bad),
        SHAPES,
        ["groups", tuple(bad.shape), f"({len(batch.groups)},)", "Number the prompts"],
    )


def no_batch(draw, batch):
    bad = draw(st.sampled_from([None, batch._asdict(), tuple(batch), fnppo.pack_sequences(batch), batch.input_ids]))
    return bad, SHAPES, [type(bad).__name__, "PaddedBatch", "Make one with padded_batch(...)"]


CORRUPTIONS = {
    f.__name__: f
    for f in (
        not_finite, negative_id, unknown_id, learned_but_absent, learned_but_first, other_shape, ids_of_another_shape,
        other_dtype, no_tensor, required_is_none, other_device, groups_of_another_shape, no_batch,
    )
} | {"attention_mask": no_mask("attention_mask", MASK), "loss_mask": no_mask("loss_mask", VALUES)}  # fmt: skip


@cache
def policy_of(family="llama"):
    return fnppo.functional_policy(tiny(family, torch.float32))


def loss_fn(params, batch):
    stats = fnppo.forward_logprobs(params, batch, policy=policy_of()[0], temperature=1.0)
    return fnppo.ppo_loss(stats, batch.targets)


def compute(batch, **options):
    policy, params = policy_of()
    return fnppo.compute_logprobs(params, batch, **{"policy": policy, "temperature": 1.0, "max_tokens": 99} | options)


def update(batch, **options):
    _, params = policy_of()
    optimizer = fnppo.sgd(0.1)
    options = {"loss_fn": loss_fn, "optimizer": optimizer, "mini_batch_size": 9, "max_tokens": 99} | options
    return fnppo.update_policy(params, optimizer.init(params), batch, **options)


SEES_VALUES = {
    "pack_sequences": fnppo.pack_sequences,
    "shared": partial(fnppo.pack_sequences, share_prefixes=True, least_shared=1),
    "pad_sequences": fnppo.pad_sequences,
    "token_mean": fnppo.token_mean,
    "token_sum": fnppo.token_sum,
    "sequence_mean": fnppo.sequence_mean,
    "sequence_sum": fnppo.sequence_sum,
    "constant_norm": partial(fnppo.constant_norm, horizon=3.0),
    "group_token_mean": fnppo.group_token_mean,
    "prompt_groups": fnppo.prompt_groups,
    "prefix_tree": fnppo.prefix_tree,
    "layout.plan": partial(fnppo.shared.plan, max_tokens=99),
}
READS_MODEL = {
    "compute_logprobs": compute,
    "compute_logprobs padded": partial(compute, layout=fnppo.padded),
    "update_policy": update,
    "forward_logprobs": lambda b: loss_fn(policy_of()[1], fnppo.pack_sequences(fnppo.token_mean(b))),
    "forward_logprobs padded": lambda b: loss_fn(policy_of()[1], fnppo.pad_sequences(fnppo.token_mean(b))),
}
FUNCTIONS = SEES_VALUES | READS_MODEL | {"lengths": fnppo.lengths, "select_rows": lambda b: fnppo.select_rows(b, [0])}
WHO = {
    MODEL: READS_MODEL,
    VALUES: SEES_VALUES | READS_MODEL,
    MASK: {name: f for name, f in FUNCTIONS.items() if name != "select_rows"},
    SHAPES: FUNCTIONS,
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@given(data=st.data(), batch=padded_batches(vocab_size=VOCAB, max_rows=3, max_length=5, dtype=torch.float32))
def test_malformed_batches(corruption, data, batch):
    """B6, B19, C12: every corruption is named by every function that could be misled by it."""
    assume(batch.loss_mask.any())
    bad, kind, named = CORRUPTIONS[corruption](data.draw, batch)
    functions = WHO[kind]
    refused(partial(functions[data.draw(st.sampled_from(sorted(functions)))], bad), *named)
    if kind in (VALUES, MASK):  # what only moves rows about keeps the fault, for the next to see
        refused(lambda: fnppo.pack_sequences(fnppo.select_rows(bad, range(len(batch.groups)))), *named)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(batch=padded_batches(vocab_size=VOCAB, max_rows=3, max_length=5, dtype=torch.float32))
def test_what_is_not_malformed_passes(name, batch):
    """So that the tests above mean something: garbage in masked slots is no fault."""
    FUNCTIONS[name](batch)


# What is laid out: hand-built inputs and targets.


def laid_out():
    batch = fnppo.padded_batch([[1, 2], [3]], [[4, 5], [6]], advantages=[1, -1], old_logprobs=[[-2, -2], [-2]])
    return fnppo.pack_sequences(fnppo.token_mean(batch)), fnppo.pad_sequences(fnppo.token_mean(batch))


def forward(model_batch, family="llama", **options):
    policy, params = policy_of(family)
    return fnppo.forward_logprobs(params, model_batch, **{"policy": policy, "temperature": 1.0} | options)


def set_at(column, index, value):
    column = column.clone()
    column[index] = value
    return column


@pytest.mark.parametrize("padded", [0, 1])
@given(data=st.data())
def test_hand_built_targets(padded, data):
    """B19, G1: predictors and ids that are not there, and columns of other lengths, are no IndexError and no number."""
    batch = laid_out()[padded]
    inputs, targets = batch
    tokens = inputs.input_ids.numel()
    i = data.draw(st.integers(0, 2))
    bad = data.draw(st.sampled_from([-(2**63), -5, -1]) | st.integers(tokens, 2**63 - 1))
    refused(
        lambda: forward(batch._replace(targets=targets._replace(predictors=set_at(targets.predictors, i, bad)))),
        f"target {i}", bad, tokens, "of the same",
    )  # fmt: skip
    bad = data.draw(st.integers(-(2**63), -1) | st.integers(VOCAB, 2**63 - 1))
    refused(
        lambda: forward(batch._replace(targets=targets._replace(token_ids=set_at(targets.token_ids, i, bad)))),
        f"target {i}", bad, VOCAB, "tokenizer",
    )  # fmt: skip
    name = data.draw(st.sampled_from(["predictors", "rows", "columns", "old_logprobs", "advantages", "loss_weights"]))
    column = getattr(targets, name)
    short = data.draw(st.sampled_from([column[1:], column[:1], column[None], column[0], torch.cat([column, column])]))
    for run in (forward, lambda b: fnppo.ppo_loss(forward(batch), b.targets)):
        refused(
            lambda: run(batch._replace(targets=targets._replace(**{name: short}))),
            name, tuple(short.shape), "(3,)", "one entry a target",
        )  # fmt: skip
    floats = targets._replace(predictors=targets.predictors.float())
    refused(lambda: forward(batch._replace(targets=floats)), "predictors", "float32", "Call .long()")
    refused(lambda: forward(batch._replace(targets=None)), "NoneType", "Targets")
    refused(lambda: forward(batch._replace(inputs=tuple(inputs))), "tuple", "PackedInputs")
    for wrong in (inputs, None, fnppo.padded_batch([[1]], [[2]])):
        refused(lambda: forward(wrong), type(wrong).__name__, "ModelBatch", "pack_sequences")


@given(data=st.data())
def test_hand_built_packed_inputs(data):
    batch = laid_out()[0]
    share = fnppo.pack_sequences(fnppo.padded_batch([[1, 2]] * 2, [[3], [4, 5]]), share_prefixes=True, least_shared=1)

    def with_(base=batch, **columns):
        return base._replace(inputs=base.inputs._replace(**columns))

    inputs = batch.inputs  # cu_seqlens 0 4 6
    i, bad = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([-1, -100, VOCAB, 10**6]))
    refused(lambda: forward(with_(input_ids=set_at(inputs.input_ids, i, bad))), f"position {i}", bad, VOCAB)
    bad = data.draw(st.integers(-(2**31), -1))
    refused(lambda: forward(with_(position_ids=set_at(inputs.position_ids, i, bad))), f"position {i}", bad, "from 0")
    for bounds, where, value in (
        ([1, 4, 6], "boundary 0", 1), ([0, 4, 5], "boundary 2", 5), ([0, 4, 7], "boundary 2", 7), ([0, 7, 6], "boundary 1", 7),
        ([0, -1, 6], "boundary 0", 0), ([5], "boundary 0", 5), ([0], "boundary 0", 0),
    ):  # fmt: skip
        refused(lambda: forward(with_(cu_seqlens=tensor(bounds, dtype=torch.int32))), where, f"is {value} there", "6")
    refused(lambda: forward(with_(cu_seqlens=tensor([], dtype=torch.int32))), "cu_seqlens", "(0,)")
    refused(lambda: forward(with_(cu_seqlens=tensor([0.0, 6.0]))), "cu_seqlens", "float32")
    refused(lambda: forward(with_(position_ids=inputs.position_ids[1:])), "position_ids", "(5,)", "(6,)")
    refused(lambda: forward(with_(input_ids=inputs.input_ids[None])), "(1, 6)", "pack_sequences")
    refused(lambda: forward(with_(input_ids=inputs.input_ids[:0], position_ids=inputs.position_ids[:0])), "0 tokens")
    refused(lambda: forward(with_(position_ids=inputs.position_ids.to("meta"))), "position_ids", "meta", "Move one")
    i, bad = data.draw(st.sampled_from([(0, 0), (1, 1), (1, 5), (2, -2), (2, 2)]))
    parents = set_at(share.inputs.parents, i, bad)
    refused(lambda: forward(with_(share, parents=parents)), f"segment {i}", f"parent is {bad}")
    refused(lambda: forward(with_(share, parents=parents[1:])), "parents", "(2,)", "3 segments")


def test_hand_built_padded_inputs():
    batch = laid_out()[1]

    def with_(**columns):
        return batch._replace(inputs=batch.inputs._replace(**columns))

    inputs = batch.inputs
    refused(lambda: forward(with_(input_ids=set_at(inputs.input_ids, (1, 2), -3))), "row 1, column 2", -3, VOCAB)
    refused(lambda: forward(with_(position_ids=inputs.position_ids - 1)), "row 0, column 0", "position_ids is -1")
    refused(lambda: forward(with_(attention_mask=inputs.attention_mask * 2)), "row 0, column 0", "attention_mask is 2")
    refused(lambda: forward(with_(attention_mask=inputs.attention_mask[:1])), "attention_mask", "(1, 4)", "(2, 4)")


@pytest.mark.parametrize("layout", [fnppo.packed, fnppo.padded, fnppo.shared])
def test_rows_longer_than_the_model_has_positions(layout):
    """A model with 32 absolute positions reads rows of 32, and no more; rotary models have no such limit."""
    for length, family, fits in ((32, "gpt2", True), (33, "gpt2", False), (33, "llama", True)):
        batch = fnppo.padded_batch([[1], [1] * 5], [[2], [3] * (length - 5)])
        model_batch = layout.lay(fnppo.token_sum(batch))
        policy, params = policy_of(family)
        score = partial(
            fnppo.compute_logprobs, params, batch, policy=policy, temperature=1.0, max_tokens=99, layout=layout
        )
        sample = partial(
            generate, params, [[1], [1] * 5], policy=policy, max_new_tokens=length - 5, seed=0, eos_token_id=None
        )
        if fits:
            forward(model_batch, family)
            score()
            sample()
            continue
        refused(lambda: forward(model_batch, family), "position_ids is 32", "32 positions", "Shorten or drop the row")
        refused(score, "row 1", "33 tokens", "32 positions", "Shorten or drop the row")
        refused(sample, "prompt 1", "5 tokens", "28 new", "32 positions", "Lower max_new_tokens")


# Numbers: hyper-parameters and counts.

NO_COUNT = [0, -1, 0.5, 2.0, NAN, INF, "3", None, [1], 1j]
NO_NUMBER = [NAN, "1", None, [], 1j, {}]


def everything(name, run, bad, *named):
    for value in bad:
        refused(lambda: run(**{name: value}), name, *([] if value == [] or value == {} else [value]), *named)


@pytest.mark.parametrize("temperature", [0, -1.0, NAN, INF, -INF, "1", 1j, [], {}])
def test_temperatures(temperature):
    """C6."""
    batch = fnppo.padded_batch([[1]], [[2, 3]])
    policy, params = policy_of()
    for run in (
        partial(forward, fnppo.pack_sequences(batch)),
        partial(compute, batch),
        partial(generate, params, [[1]], policy=policy, max_new_tokens=1, seed=0, eos_token_id=None),
        partial(fnppo.chunked_logprobs, torch.zeros(1, 2), tensor([0]), weight=torch.zeros(3, 2)),
        partial(fnppo.logits_to_stats, torch.zeros(1, 2), tensor([0])),
    ):
        refused(lambda: run(temperature=temperature), "temperature is", temperature, "above 0")
    if isinstance(temperature, (int, float)):
        refused(
            lambda: forward(fnppo.pack_sequences(batch), temperature=tensor([1.0, temperature])), temperature, "above 0"
        )


def test_required_arguments_are_named_by_python():
    """J4."""
    policy, params = policy_of()
    for run, missing in (
        (lambda: fnppo.forward_logprobs(params, None, policy=policy), "temperature"),
        (lambda: fnppo.compute_logprobs(params, None, policy=policy, temperature=1.0), "max_tokens"),
        (
            lambda: fnppo.update_policy(params, None, None, loss_fn=None, optimizer=None, max_tokens=1),
            "mini_batch_size",
        ),
        (lambda: fnppo.constant_norm(None), "horizon"),
    ):
        with pytest.raises(TypeError, match=f"missing .*argument.*{missing}"):
            run()


def test_sizes_of_an_update():
    """E9, J1."""
    batch = fnppo.padded_batch([[1]], [[2]], advantages=[1], old_logprobs=[[-2]])
    for name in ("mini_batch_size", "num_epochs", "max_tokens"):
        everything(name, partial(update, batch), NO_COUNT, "whole number of at least 1")
    everything("seed", partial(update, batch), [0.5, NAN, "1", None, [1], 2**64])
    everything("max_tokens", partial(compute, batch), NO_COUNT, "whole number")
    everything("chunk_size", partial(compute, batch), [x for x in NO_COUNT if x is not None], "None chooses a size")
    everything("pad_to", partial(fnppo.pack_sequences, batch), [x for x in NO_COUNT if x is not None], "whole number")
    share = partial(fnppo.pack_sequences, batch, share_prefixes=True)
    everything("least_shared", share, NO_COUNT, "whole number of at least 1", "Use 1 to share whatever can be shared.")
    everything("least_shared", partial(fnppo.prefix_tree, batch), NO_COUNT, "whole number of at least 1")
    everything("horizon", partial(fnppo.constant_norm, batch), [*NO_NUMBER, 0, -1, INF], "above 0", "response tokens")
    refused(lambda: fnppo.pack_sequences(batch, pad_to=1), "2 tokens", "pad_to is 1", "Raise pad_to")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_plans(lengths, data):
    """E3, E9: a length that is no count would let a group grow over any limit."""
    row = data.draw(st.integers(0, len(lengths) - 1))
    bad = data.draw(st.sampled_from([-1, -100, 0.5, NAN, INF, None, "2"]))
    wrong = [*lengths[:row], bad, *lengths[row + 1 :]]
    refused(lambda: fnppo.plan_microbatches(wrong, max_tokens=99), f"row {row}", bad, "at least 0")
    plan_alone = lambda lengths, **options: plan_prompts(lengths, {(): list(range(len(lengths)))}, **options)
    for plan in (fnppo.plan_microbatches, plan_alone):
        everything("max_tokens", partial(plan, lengths), NO_COUNT, "whole number of at least 1")
        limited = partial(plan, lengths, max_tokens=99)
        everything("min_groups", limited, [-1, 0.5, NAN, INF, None, "2"], "whole number of at least 0")
        everything("hidden_size", limited, NO_COUNT, "whole number of at least 1")
        longest = max(lengths)
        if longest > 1:
            first = lengths.index(longest)
            refused(
                lambda: plan(lengths, max_tokens=longest - 1),
                f"row {first}",
                longest,
                longest - 1,
                "Raise max_tokens",
            )
    put = lambda column, value: [*column[:row], value, *column[row + 1 :]]
    tree = tree_of([[row, *range(length)] for row, length in enumerate(lengths)])
    for wrong, named in (
        (tree._replace(parents=put(tree.parents, row)), (f"stretch {row}", f"after stretch {row}")),
        (tree._replace(starts=put(tree.starts, 1)), (f"stretch {row}", "between 1 and", "prefix_tree(batch)")),
        (tree._replace(stops=put(tree.stops, -1)), (f"stretch {row}", "between 0 and -1")),
        (tree._replace(ends=put(tree.ends, len(lengths))), (f"row {row}", f"stretch {len(lengths)}")),
        (tree._replace(ends=put(tree.ends, -1)), (f"row {row}", "stretch -1")),
    ):
        refused(lambda: fnppo.plan_shared_microbatches(wrong, max_tokens=99), *named)
    everything("mini_batch_size", partial(fnppo.plan_minibatches, 3), NO_COUNT, "at least 1")
    everything("rows", partial(fnppo.plan_minibatches, mini_batch_size=1), [-1, 0.5, NAN, None], "at least 0")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("clip_low", [-0.1, *NO_NUMBER]), ("clip_high", [-0.1, *NO_NUMBER]), ("entropy_coef", [*NO_NUMBER, INF, -INF]),
        ("kl_coef", [*NO_NUMBER, -0.1, INF]), ("dual_clip", [x for x in [*NO_NUMBER, 1.0, 0, -3] if x is not None]),
    ],
)  # fmt: skip
def test_numbers_of_the_loss(name, bad):
    batch = laid_out()[0]
    stats = forward(batch)
    everything(name, partial(fnppo.ppo_loss, stats, batch.targets), bad)
    for value in (x for x in bad if isinstance(x, (int, float))):
        refused(lambda: fnppo.ppo_loss(stats, batch.targets, **{name: tensor(float(value))}), name)


def test_the_loss_does_not_broadcast():
    """B19."""
    batch = laid_out()[0]
    stats = forward(batch)
    for name in ("logprobs", "entropy"):
        column = getattr(stats, name)
        for bad in (column[:1], column[None], column[0], column[:, None], column[:0]):
            wrong = stats._replace(**{name: bad})
            refused(lambda: fnppo.ppo_loss(wrong, batch.targets), f"stats.{name}", tuple(bad.shape), "3 targets")
    with_ref = batch.targets._replace(ref_logprobs=stats.logprobs)
    refused(
        lambda: fnppo.ppo_loss(stats, with_ref, kl=lambda a, b: fnppo.kl_k3(a, b).mean()),
        "kl gave shape ()",
        "3 targets",
    )
    refused(lambda: fnppo.ppo_loss(stats, batch), "ModelBatch", "Targets")
    refused(lambda: fnppo.ppo_loss(stats._replace(logprobs=[0.0] * 3), batch.targets), "stats.logprobs", "list")
    short = batch.targets._replace(advantages=torch.zeros(1))
    refused(lambda: fnppo.clipped_surrogate(stats, short), "targets.advantages", "(1,)", "3 targets")
    one = stats._replace(logprobs=torch.zeros(1))
    refused(lambda: fnppo.clipped_surrogate(one, batch.targets), "stats.logprobs", "(1,)", "3 targets")


@given(
    place=st.integers(0, 2),
    value=st.sampled_from([NAN, INF, -INF]),
    name=st.sampled_from(["advantages", "loss_weights", "ref_logprobs"]),
)
def test_nan_that_comes_as_far_as_the_loss_surfaces(place, value, name):
    """C12: the loss looks at no values, for that would wait for the device; what is not finite makes it not finite."""
    batch = laid_out()[0]
    stats = forward(batch)
    targets = batch.targets._replace(ref_logprobs=stats.logprobs.detach())
    targets = targets._replace(**{name: set_at(getattr(targets, name), place, value)})
    loss, metrics = fnppo.ppo_loss(stats, targets, kl_coef=0.1)
    assert not math.isfinite(loss.item())
    assert not math.isfinite(fnppo.summarize(metrics)["loss"])


# Trees, optimizers, gradients, files.


@pytest.mark.parametrize(
    ("make", "name", "bad"),
    [
        (fnppo.adamw, "learning_rate", [-1e-3, INF, *NO_NUMBER]),
        (fnppo.sgd, "learning_rate", [-1e-3, INF, *NO_NUMBER]),
        (partial(fnppo.adamw, 0.1), "b1", [1, 1.5, -0.1, *NO_NUMBER]),
        (partial(fnppo.adamw, 0.1), "b2", [1, 1.5, -0.1, *NO_NUMBER]),
        (partial(fnppo.adamw, 0.1), "eps", [-1e-8, INF, *NO_NUMBER]),
        (partial(fnppo.adamw, 0.1), "weight_decay", [-0.1, INF, *NO_NUMBER]),
        (partial(fnppo.sgd, 0.1), "momentum", [1, -0.1, *NO_NUMBER]),
        (fnppo.clip_by_global_norm, "max_norm", [-1.0, *NO_NUMBER]),
        (fnppo.constant, "value", [-1.0, INF, *NO_NUMBER]),
        (partial(fnppo.constant, 1.0), "warmup", [-1, 0.5, NAN, None]),
        (partial(fnppo.linear, 1.0, 0.0), "steps", NO_COUNT),
        (partial(fnppo.cosine, 1.0), "steps", NO_COUNT),
        (partial(fnppo.cosine, 1.0, steps=2), "final", [-1.0, INF, *NO_NUMBER]),
        (partial(fnppo.warmup_stable_decay, 1.0, warmup=1, stable=1), "decay", NO_COUNT),
        (partial(fnppo.warmup_stable_decay, 1.0, warmup=1, decay=1), "stable", [-1, 0.5, NAN, None]),
    ],
)
def test_numbers_of_optimizers_and_schedules(make, name, bad):
    everything(name, make, bad)


OPTIMIZERS = {
    "adamw": lambda: fnppo.adamw(0.1),
    "sgd": lambda: fnppo.sgd(0.1),
    "momentum": lambda: fnppo.sgd(0.1, momentum=0.9),
    "chain": lambda: fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(0.1)),
    "skip": lambda: fnppo.skip_nonfinite(fnppo.sgd(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trees_that_do_not_belong_together(name):
    optimizer = OPTIMIZERS[name]()
    params = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    state = optimizer.init(params)
    for grads, named in (
        ({"a": params["a"]}, ["b"]),
        (params | {"c": torch.ones(1)}, ["c"]),
        (list(params.values()), ["tree"]),
        (params | {"b": torch.ones(1)}, ["b", (1,), (3,)]),  # would be broadcast
        (params | {"b": torch.ones(2, 3)}, ["b", (2, 3), (3,)]),
        (params | {"b": torch.ones(3, device="meta")}, ["b", "meta"]),
    ):
        if name != "chain" or "meta" not in named:  # the norm of a mixture of devices is torch's to refuse
            refused(lambda: optimizer.update(grads, state, params), *named, "params")
        refused(lambda: fnppo.apply_updates(params, grads), "updates", *named)
    others = [make().init(params) for make in OPTIMIZERS.values()]
    for other in [*(other for other in others if type(other) is not type(state)), None]:
        refused(lambda: optimizer.update(params, other, params), type(other).__name__, "init of this optimizer")


def test_losses_that_are_none():
    """J7: what a custom loss returns is looked at."""
    params = {"w": torch.ones(2)}
    metrics = fnppo.Metrics()
    for output, named in (
        (lambda p: p["w"].sum(), "(loss, metrics)"),
        (lambda p: (p["w"].sum(),), "(loss, metrics)"),
        (lambda p: (p["w"], metrics), "(2,)"),
        (lambda p: (1.0, metrics), "float"),
        (lambda p: (p["w"].sum(), {"loss": 1.0}), "fnppo.Metrics"),
        (lambda p: None, "NoneType"),
    ):
        for run in (
            lambda: fnppo.accumulate_gradients(lambda p, _: output(p), params, [0]),
            lambda: fnppo.train_step(
                params, fnppo.sgd(0.1).init(params), [0], loss_fn=lambda p, _: output(p), optimizer=fnppo.sgd(0.1)
            ),
        ):
            refused(run, named)
        if "Metrics" not in named:
            refused(lambda: fnppo.value_and_grad(lambda p: output(p))(params), named)
    good = lambda p, _: (p["w"].sum(), metrics)
    refused(lambda: fnppo.accumulate_gradients(good, params, []), "no micro-batch", "at least one")
    refused(lambda: fnppo.accumulate_gradients(good, params, 5), "batches is a int")
    for one in (laid_out()[0], fnppo.padded_batch([[1]], [[2]])):
        refused(lambda: fnppo.accumulate_gradients(good, params, one), type(one).__name__, "list")
    refused(lambda: fnppo.accumulate_gradients(5, params, [0]), "loss_fn is a int")
    refused(lambda: fnppo.value_and_grad(good)({"a": {"b": 1.0}}, 0), "params/a/b is float")
    for leaf, named in ((torch.ones(2).long(), "int64"), ("text", "str"), (1.0, "float")):
        refused(lambda: fnppo.accumulate_gradients(good, {"w": leaf}, [0]), "params/w", named)
        refused(lambda: fnppo.value_and_grad(good)({"w": leaf}, 0), "params/w", named)


@pytest.mark.parametrize("kind", fnppo.Metrics._fields)
@pytest.mark.parametrize(
    ("bad", "named"), [(torch.zeros(2), (2,)), (torch.zeros(0), (0,)), (1.0, "float"), (None, "NoneType")]
)
def test_metrics_that_are_no_number(kind, bad, named):
    refused(lambda: fnppo.summarize(fnppo.Metrics()._replace(**{kind: {"mine": bad}})), kind, "mine", named)


def test_trees_on_disk(tmp_path):
    path, tree = tmp_path / "c.pt", {"w": torch.ones(2)}
    everything("step", partial(save_checkpoint, path, tree), [-1, 0.5, NAN, "1", None, [1]], "at least 0")
    refused(lambda: save_checkpoint(path, {"w": 1.0}, step=0), "w", "float")
    assert not path.exists()
    for content in (
        [1], {}, {"step": 1}, {"step": 1, "tensors": {"w": torch.ones(2)}}, {"fnppo_checkpoint": 2, "step": 1, "tensors": {}},
        {"fnppo_checkpoint": 1, "step": -1, "tensors": {}}, {"fnppo_checkpoint": 1, "step": 1, "tensors": [torch.ones(2)]},
        {"fnppo_checkpoint": 1, "step": 1, "tensors": {"w": 1.0}},
    ):  # fmt: skip
        torch.save(content, path)
        refused(lambda: load_checkpoint(path, tree), path, "is not a checkpoint of fnppo", "Remove it")
    save_checkpoint(path, tree, step=3)
    refused(lambda: load_checkpoint(path, {"w": 1.0}), "w", "float")
    refused(lambda: load_checkpoint(path, {"w": torch.ones(3)}), "w", "(2,)", "(3,)")
    refused(lambda: load_checkpoint(tmp_path, tree), tmp_path, "is not a checkpoint")


def test_models_on_disk(tmp_path):
    policy, params = policy_of()
    some = next(iter(params))
    for wrong, named in (
        (params | {"mine": torch.ones(1)}, ["mine", (1,), "not there"]),
        (params | {some: torch.ones(1)}, [some, (1,)]),
        ({n: p for n, p in params.items() if n != some}, [f"params lacks {some}"]),
        (params | {some: None}, [some, "NoneType"]),
    ):
        refused(lambda: save_pretrained(tmp_path / "model", wrong, policy=policy), *named)
    assert not (tmp_path / "model").exists()


# Lists: prompts, rows, rewards.


@pytest.mark.parametrize("bad", [[0.5], [1, NAN], ["a"], "a", 5, None, [None], [[1]], [2**63], [1j], tensor([0.5])])
def test_token_ids_in_lists(bad):
    """A fraction would be cut off in silence."""
    refused(lambda: fnppo.padded_batch([[1], bad], [[2], [3]]), "prompts, row 1", "whole numbers")
    refused(lambda: fnppo.padded_batch([[1], [2]], [bad, [3]]), "responses, row 0", "whole numbers")
    policy, params = policy_of()
    sample = partial(generate, params, policy=policy, max_new_tokens=1, seed=0, eos_token_id=None)
    refused(lambda: sample([[1], bad]), "prompt 1", "Tokenize it first" if bad != [2**63] else "tokenizer and model")


def test_the_largest_and_the_smallest_number_of_64_bits():
    for number in (-(2**63), 2**63 - 1):
        assert fnppo.padded_batch([[number]], [[]]).input_ids.tolist() == [[number]]
    for number in (-(2**63) - 1, 2**63):
        refused(lambda number=number: fnppo.padded_batch([[number]], [[]]), "prompts, row 0", number, "64 bits")


def test_lists_of_rows():
    build = partial(fnppo.padded_batch, [[1], [2]], [[3], [4, 5]])
    refused(lambda: fnppo.padded_batch(None, []), "prompts is None")
    refused(lambda: fnppo.padded_batch([[1]], [[2], [3]]), "responses has 2 rows", "prompts has 1")
    for name in ("old_logprobs", "ref_logprobs"):
        refused(lambda: build(**{name: [[0.0], [0.0]]}), "row 1", "1", name, "2 response tokens", "one a token")
        refused(lambda: build(**{name: [[0.0], 1.0]}), f"{name}, row 1", "1.0")
        refused(lambda: build(**{name: [["x"], [0, 0]]}), f"{name}, row 0", "x")
    for bad in ([[1.0], [2.0]], [1.0, "x"], [None, 1.0]):
        refused(lambda: build(advantages=bad), "advantages, row", "numbers")
    for bad in ([0, 0.5], [NAN, 1], ["x", 1], [[0], [1]]):
        refused(lambda: build(groups=bad), "groups, row", "whole numbers")
    everything("pad_token_id", build, [None, 0.5, "x"], "never read")


@pytest.mark.parametrize("bad", ["x", None, [0.5], [[0]], 0, [3], [-1], [True], [[0], [1, 2]], [None], [1j]])
def test_rows_to_select(bad):
    refused(lambda: fnppo.select_rows(fnppo.padded_batch([[1]] * 3, [[2]] * 3), bad), "row")


def test_the_row_that_is_not_there_is_named():
    batch = fnppo.padded_batch([[1]] * 3, [[2]] * 3)
    refused(lambda: fnppo.select_rows(batch, [0, 3]), "rows[1] is 3")
    refused(lambda: fnppo.select_rows(batch, [1, 2, -1]), "rows[2] is -1")


@given(data=st.data())
def test_where_targets_go_back_to(data):
    targets = laid_out()[0].targets
    place = data.draw(st.integers(0, 2))
    for name, shape in (("rows", (2, 4)), ("columns", (2, 4))):
        bad = data.draw(st.sampled_from([-1, -100, shape[name == "columns"], 10**9]))
        wrong = targets._replace(**{name: set_at(getattr(targets, name), place, bad)})
        refused(lambda: fnppo.unpack_targets(torch.zeros(3), wrong, shape=shape), f"target {place}", bad, name[:-1])
    for shape in ((1, 4), (2, 3), (0, 0)):
        refused(lambda: fnppo.unpack_targets(torch.zeros(3), targets, shape=shape), "target", "Give the shape")
    for shape in ((2, -1), (2, 0.5), (2, None)):
        refused(lambda: fnppo.unpack_targets(torch.zeros(3), targets, shape=shape), shape[1], "(batch, seq)")
    refused(lambda: fnppo.unpack_targets(torch.zeros(3), targets, shape=(8,)), "(8,)", "(batch, seq)")
    for values in (torch.zeros(1), torch.zeros(3, 1), torch.zeros(()), torch.zeros(4)):
        refused(lambda: fnppo.unpack_targets(values, targets, shape=(2, 4)), tuple(values.shape), "3 targets")


def test_what_is_asked_of_the_sampler():
    policy, params = policy_of()
    options = {"policy": policy, "max_new_tokens": 1, "seed": 0, "eos_token_id": None}
    sample = lambda prompts=[[1]], **other: generate(params, prompts, **options | other)
    for name in ("max_new_tokens", "num_responses"):
        everything(name, sample, NO_COUNT, "at least 1")
    everything("seed", sample, [0.5, NAN, "x", None, 2**64])
    everything("pad_token_id", sample, [0.5, None], "never read")
    for bad in (VOCAB, -1, [1, VOCAB], [0.5], "x"):
        refused(lambda: sample(eos_token_id=bad), "eos_token_id")
    refused(lambda: sample([]), "0 prompts", "at least 1")
    refused(lambda: sample([[1], []]), "prompt 1 is empty", "BOS")
    refused(lambda: sample([[1], [VOCAB]]), "prompt 1", VOCAB, "tokenizer")


@given(st.integers(0, 3), st.sampled_from([NAN, INF, -INF, 1e30]))
def test_rewards(row, bad):
    rewards, groups = torch.zeros(4), tensor([0, 0, 1, 1])
    refused(lambda: fnppo.grpo_advantages(set_at(rewards, row, bad), groups), f"row {row}", "the reward is")
    for wrong in (groups[:3], groups[None], groups[0]):
        refused(lambda: fnppo.grpo_advantages(rewards, wrong), (4,), tuple(wrong.shape), "one value a row")
    refused(lambda: fnppo.grpo_advantages(rewards.reshape(2, 2), groups.reshape(2, 2)), (2, 2), "one value a row")
    refused(lambda: fnppo.grpo_advantages(rewards, groups.float()), "groups", "float32", "Number them")
    refused(lambda: fnppo.grpo_advantages(rewards, groups.to("meta")), "meta", "Move one")
    refused(lambda: fnppo.grpo_advantages([0.0] * 4, groups), "rewards is a list")
    for eps in (0, -1.0, NAN, INF, None, "x"):
        refused(lambda: fnppo.grpo_advantages(rewards, groups, eps=eps), "eps", eps, "above 0")


GROUP_RULES = {
    "grpo": grpo_advantages,
    "dr_grpo": advantages.dr_grpo_advantages,
    "rloo": advantages.rloo_advantages,
    "gpg": advantages.gpg_advantages,
    "opo": lambda rewards, groups, **options: advantages.opo_advantages(rewards, groups, torch.ones(4), **options),
    "gdpo": lambda rewards, groups, **options: advantages.gdpo_advantages(rewards[:, None], groups, **options),
    "pass_at_k": lambda rewards, groups, **options: pass_at_k_advantages(rewards, groups, k=1, **options),
    "best": best_response_advantages,
    "differ": rewards_differ,
}


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_rewards_groups_and_rejected_rows(rule):
    run, rewards, groups = GROUP_RULES[rule], torch.zeros(4), tensor([0, 0, 1, 1])
    refused(lambda: run(set_at(rewards, 2, NAN), groups), "row 2", "the reward is nan", "reject the row with keep")
    refused(lambda: run(set_at(rewards, 1, 1e30), groups), "row 1", "Scale the rewards")
    refused(lambda: run(rewards, groups[:3]), (4,), (3,), "one value a row")
    refused(lambda: run(rewards, groups.float()), "groups", "float32", "Number them")
    refused(lambda: run(rewards, groups.to("meta")), "meta", "Move one")
    refused(lambda: run(rewards, groups.tolist()), "groups is a list", "torch.as_tensor")
    refused(lambda: run(rewards, groups, keep=torch.ones(3)), "keep (3,)", "one value a row")
    refused(lambda: run(rewards, groups, keep=tensor([1, 1, 1, 3])), "row 3", "keep is 3", "True/False or 0/1")
    refused(lambda: run(rewards.to(torch.complex64), groups), "complex64", "Call .real")
    unread = run(set_at(rewards, 2, NAN), groups, keep=tensor([True, True, False, True]))
    assert unread.tolist() == [0.0] * 4


def test_numbers_and_columns_of_other_advantages():
    """Those that not all have: scales, weights, lengths, greedy rewards, k, coefficients, and columns of tokens."""
    rewards, groups, column, mask = torch.zeros(2), tensor([0, 0]), torch.zeros(2, 3), torch.ones(2, 3)
    refused(
        lambda: grpo_advantages(rewards, groups, scale="batch"), "scale is 'batch'", "Use group_std, batch_std or None"
    )
    refused(lambda: grpo_advantages(rewards, groups, scale=lambda r, g, kept: r[:1]), "(1,)", "2 rows")
    refused(lambda: advantages.gdpo_advantages(rewards, groups), "(2,)", "[batch, objectives]", "Stack")
    refused(lambda: advantages.gdpo_advantages(column, groups, weights=torch.ones(2)), "(2,)", "3 objectives")
    refused(lambda: advantages.gdpo_advantages(column, groups, weights=[1, 1, 1]), "weights is a list")
    refused(lambda: advantages.opo_advantages(rewards, groups, tensor([1, 0])), "row 1", "length is 0", "Reject")
    refused(lambda: advantages.opo_advantages(rewards, groups, torch.ones(3)), "lengths (3,)", "one value a row")
    refused(lambda: advantages.remax_advantages(rewards, torch.ones(3)), "greedy_rewards (3,)", "one value a row")
    refused(lambda: advantages.remax_advantages(rewards, tensor([0, NAN])), "row 1", "the greedy reward is nan")
    refused(lambda: pass_at_k_advantages(rewards, groups, k=3), "row 0", "has 2 responses", "k is 3", "Lower k")
    refused(lambda: pass_at_k_advantages(rewards + 0.5, groups, k=1), "row 0", "0.5", "Give 1 or 0")
    everything("k", partial(pass_at_k_advantages, rewards, groups), NO_COUNT, "at least 1")
    for run in (on_every_token, on_last_token):
        refused(lambda: run(torch.ones(3), mask), "(3,)", "2 rows")
        refused(lambda: run(tensor([1, NAN]), mask), "row 1", "its value is nan", "clear loss_mask")
        refused(lambda: run(torch.ones(2), mask[0]), "loss_mask (3,)", "[batch, seq]")
    for run in (whiten, discounted_returns, reinforce_plus_plus_advantages):
        refused(lambda: run(set_at(column, (1, 2), NAN), mask), at((1, 2)), "nan at a learned token")
        refused(lambda: run(column, mask[:, :1]), (2, 3), (2, 1), "token-aligned")
        refused(lambda: run(column.long(), mask), "int64", "Call .float()")
    everything("gamma", partial(discounted_returns, column, mask), [-0.1, 1.1, *NO_NUMBER, INF])
    everything("eps", partial(whiten, column, mask), [0, -1.0, *NO_NUMBER, INF], "above 0")
    run = partial(kl_in_reward, column, column, column, mask)
    everything("kl_coef", run, [-0.1, *NO_NUMBER, INF], "at least 0")
    refused(lambda: run(kl_coef=0.1, kl=lambda logprobs, ref: logprobs.sum()), "()", "6 tokens", "Do not reduce")
    run = partial(adapt_kl, AdaptiveKL(0.1), 1.0)
    everything("target", run, [0, -1.0, *NO_NUMBER, INF], "above 0")
    refused(lambda: run(target=6.0, gain=5.0), "gain * max_error is 1.0", "below 1")
    refused(lambda: adapt_kl(0.1, 1.0, target=6.0), "state is a float", "AdaptiveKL")
    run = partial(otb_advantages, column, groups, mask, logprobs=column, sum_squared_probs=column + 1)
    refused(lambda: run(importance_weights=mask[0]), "importance_weights (3,)")
    everything("lone_baseline", run, [NAN, INF, "x"])
    refused(lambda: mask_rows(fnppo.padded_batch([[1]], [[2]]), torch.ones(2)), "(2,)", "1 rows")


def test_the_warning_of_a_lone_response_points_at_the_caller():
    """H3."""
    rewards, groups, column = torch.zeros(4), tensor([5, 1, 1, 1]), torch.zeros(4, 2)
    runs = [lambda rule=rule: GROUP_RULES[rule](rewards, groups) for rule in ("grpo", "dr_grpo", "rloo", "gpg", "best")]
    runs.append(lambda: otb_advantages(column, groups, column + 1, logprobs=column, sum_squared_probs=column + 1))
    for run in runs:
        with pytest.warns(UserWarning, match="row 0 is alone in group 5, with nothing to be compared with") as caught:
            run()
        assert [warning.filename for warning in caught] == [__file__]


@given(st.integers(0, 1), st.integers(0, 2), st.sampled_from([NAN, INF, -INF]))
def test_rewards_and_values_of_tokens(row, column, bad):
    """H7: at a learned token; elsewhere they may hold anything."""
    rewards, values, mask = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    place = row, column
    refused(lambda: fnppo.gae_advantages(set_at(rewards, place, bad), values, mask), at(place), "rewards", bad)
    refused(lambda: fnppo.gae_advantages(rewards, set_at(values, place, bad), mask), at(place), "values", bad)
    unread = fnppo.gae_advantages(rewards, set_at(values, place, bad), set_at(mask, place, False))
    assert all(x.isfinite().all() for x in unread)
    refused(lambda: fnppo.gae_advantages(rewards, values, set_at(mask.long(), place, 2)), at(place), "loss_mask is 2")
    for wrong in (values[:1], values[:, :1], values[0], values.T):
        refused(lambda: fnppo.gae_advantages(rewards, wrong, mask), tuple(wrong.shape), (2, 3))
    refused(lambda: fnppo.gae_advantages(rewards, values.long(), mask), "values", "int64", "Call .float()")
    refused(lambda: fnppo.gae_advantages(rewards, values, mask.to("meta")), "loss_mask", "meta", "Move one")
    for name in ("gamma", "lam"):
        everything(name, partial(fnppo.gae_advantages, rewards, values, mask), [-0.1, 1.1, *NO_NUMBER, INF])


# The head by itself.


def test_shapes_of_the_head():
    hidden, weight, ids = torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.long)
    refused(lambda: fnppo.chunked_logprobs(hidden, ids, weight=weight.T), (3, 4), (4, 7), "Transpose")
    refused(lambda: fnppo.chunked_logprobs(hidden[None], ids, weight=weight), (1, 3, 4), "flatten")
    refused(lambda: fnppo.chunked_logprobs(hidden, ids, weight=weight, bias=torch.zeros(4)), "bias", (4,), "7 rows")
    for run in (
        partial(fnppo.chunked_logprobs, hidden, weight=weight),
        partial(fnppo.logits_to_stats, torch.zeros(3, 7)),
    ):
        for bad in (ids[:2], ids[None], ids[0], torch.zeros(4, dtype=torch.long)):
            refused(lambda: run(token_ids=bad), "token_ids", tuple(bad.shape), "3 targets")
        refused(lambda: run(token_ids=ids.float()), "float32", "Call .long()")
        for bad in (-1, 7, -100, 10**9):
            refused(lambda: run(token_ids=set_at(ids, 1, bad)), "target 1", bad, "7 entries")
        refused(lambda: run(token_ids=ids, temperature=torch.ones(2)), "temperature", (2,), "3 targets")
    refused(lambda: fnppo.logits_to_stats(torch.zeros(2, 3, 7), ids), (2, 3, 7), "Flatten")
    refused(lambda: fnppo.logits_to_stats(torch.zeros(3, 7).long(), ids), "logits", "int64", "Call .float()")
    refused(lambda: fnppo.chunked_logprobs(hidden, ids, weight=weight.to("meta")), "weight", "meta", "Move one")
    refused(lambda: fnppo.chunked_logprobs(hidden, ids.to("meta"), weight=weight), "token_ids", "meta", "Move one")
    refused(lambda: fnppo.chunked_logprobs(hidden[:0], ids[:0], weight=weight[:0]), (0, 4), "[vocab, hidden]")
    for name, bad in (("scale", [*NO_NUMBER, INF]), ("softcap", [NAN, 0, -1.0, INF])):
        everything(name, partial(fnppo.chunked_logprobs, hidden, ids, weight=weight), bad)
    for kl in (fnppo.kl_k1, fnppo.kl_k2, fnppo.kl_k3):
        refused(lambda: kl(torch.zeros(3), torch.zeros(1)), "ref_logprobs", (1,), (3,))
        refused(lambda: kl([0.0], torch.zeros(1)), "logprobs", "list")


# Things of another kind than asked for.


def test_parameters_that_are_not_the_models():
    """A name that is misspelt would be ignored in silence, and a norm's weight of one number would be broadcast."""
    policy, params = policy_of()
    batch = laid_out()[0]
    run = lambda params: fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0)
    some = "model.layers.0.self_attn.q_proj.weight"
    for wrong, named in (
        (params | {"model.norm.weight": torch.ones(1)}, ["model.norm.weight", (1,), (8,)]),
        (params | {"model.mine": torch.ones(1)}, ["model.mine", "does not exist"]),
        (params | {"lm_head.weight": torch.ones(5, 8)}, ["lm_head.weight", (5, 8), (VOCAB, 8)]),
        (params | {"model.norm.weight": [1.0]}, ["model.norm.weight", "list"]),
        ({n: p for n, p in params.items() if n != "model.norm.weight"}, ["params lacks model.norm.weight"]),
        ({n: p.to("meta") for n, p in params.items()}, ["meta", "Move one"]),
        (params | {some: params[some].double()}, [some, "float64", "float32", "Cast all"]),
        (params | {"model.norm.weight": params["model.norm.weight"].long()}, ["norm", "int64", "float()"]),
        (params | {"lm_head.weight": params["lm_head.weight"].long()}, ["lm_head", "int64", "float()"]),
        ({}, ["params lacks"]),
        (None, ["params", "NoneType", "dict"]),
    ):
        refused(lambda: run(wrong), *named)
        if wrong:
            refused(lambda: compute_with(wrong), *named)


def compute_with(params):
    batch = fnppo.padded_batch([[1]], [[2]])
    return fnppo.compute_logprobs(params, batch, policy=policy_of()[0], temperature=1.0, max_tokens=9)


def test_other_kinds():
    batch, laid = fnppo.padded_batch([[1]], [[2]], advantages=[1], old_logprobs=[[-2]]), laid_out()[0]
    policy, params = policy_of()
    for wrong in (None, tiny("llama"), (policy, params)):
        refused(lambda: forward(laid, policy=wrong), "policy", type(wrong).__name__, "functional_policy")
        refused(lambda: compute(batch, policy=wrong), "policy", type(wrong).__name__, "functional_policy")
    refused(lambda: forward(laid, loss=0.5), "loss", "float", "(stats, targets)")
    for wrong in (None, "packed", fnppo.pack_sequences):
        for run in (compute, update):
            refused(lambda: run(batch, layout=wrong), "layout", type(wrong).__name__, "fnppo.packed")
    for wrong in (None, "gpt2", 3):
        refused(lambda: fnppo.functional_policy(wrong), type(wrong).__name__, "from_pretrained")
    for wrong in (None, "sdpa"):
        refused(lambda: fnppo.functional_policy(tiny("llama"), attention=wrong), "attention", type(wrong).__name__)
    state = fnppo.sgd(0.1).init(params)
    step = partial(fnppo.train_step, params, state, [laid], loss_fn=loss_fn, optimizer=fnppo.sgd(0.1))
    refused(lambda: step(optimizer=None), "optimizer", "NoneType", "adamw")
    refused(lambda: step(loss_fn=None), "loss_fn", "NoneType")
    refused(
        lambda: fnppo.train_step(params, state, None, loss_fn=loss_fn, optimizer=fnppo.sgd(0.1)), "NoneType", "list"
    )
    for make in (fnppo.chain, fnppo.skip_nonfinite):
        refused(lambda: make(None), "optimizer", "NoneType", "adamw")
    for bad in ({"w": 1.0}, {"w": torch.ones(1).long()}):
        for run in (fnppo.adamw(0.1).init, fnppo.sgd(0.1, momentum=0.5).init, fnppo.global_norm, fnppo.all_finite):
            refused(lambda: run(bad), "w", "float")
    for bad in (None, 3):
        refused(lambda: fnppo.plan_microbatches(bad, max_tokens=3), "lengths", bad, "fnppo.lengths(batch)")
    refused(lambda: fnppo.plan_shared_microbatches([3], max_tokens=3), "tree", "list", "prefix_tree(batch)")
    refused(lambda: tree_of_rows([[1, 2]]), "a row is a list", "torch.as_tensor")
    refused(lambda: tree_of_rows([torch.ones(2)]), "a row", "float32", "Call .long()")
    refused(lambda: tree_of_rows([torch.ones(1, 2).long()]), "a row", "(1, 2)", "one row")
    refused(lambda: fnppo.pack_sequences(batch._replace(extra=None)), "extra", "NoneType", "{} for none")
    refused(
        lambda: fnppo.pack_sequences(batch._replace(input_ids=batch.input_ids.to_sparse())), "sparse", ".to_dense()"
    )
    refused(lambda: fnppo.merge_metrics(fnppo.Metrics(), {}), "dict", "fnppo.Metrics")
    refused(lambda: fnppo.ppo_loss(None, laid.targets), "stats", "NoneType", "forward_logprobs")
    for name in ("clip_low", "clip_high", "dual_clip", "entropy_coef", "kl_coef"):
        wrong = {name: torch.full((2,), 1.5)}
        refused(lambda: fnppo.ppo_loss(forward(laid), laid.targets, **wrong), name, (2,), "Give a number")
    assert fnppo.linear(1.0, 0.0, steps=4)(2).item() == 0.5  # a step that is an int is no fault


# The words of what else is refused, to the letter.


def test_plans_name_what_is_wrong():
    tree = tree_of([[1, 2], [1, 3]])
    refused(lambda: fnppo.plan_shared_microbatches(tree, max_tokens=1), "row 0 has 2 tokens", "Raise max_tokens")
    wrong = tree._replace(parents=[-1, 0, 2])
    refused(lambda: fnppo.plan_shared_microbatches(wrong, max_tokens=5), "stretch 2 lies between 1 and 2")
    refused(lambda: fnppo.plan_shared_microbatches(tree._replace(ends=[1, 3]), max_tokens=5), "row 1 ends at stretch 3")
    refused(lambda: fnppo.plan_shared_microbatches(tree._replace(rows=[0]), max_tokens=5), "3, 3, 3 and 1")
    refused(lambda: fnppo.plan_microbatches([3, -1], max_tokens=5), "-1", "fnppo.lengths")
    refused(lambda: fnppo.plan_minibatches(-1, mini_batch_size=1, num_epochs=1, seed=0), "rows is -1")


OTHER = {"a": {"b": torch.zeros(3)}}
TREE = {"a": {"b": torch.zeros(2)}}


@pytest.mark.parametrize("name", ["adamw", "sgd", "momentum", "skip"])
def test_optimizers_name_what_does_not_fit(name):
    optimizer = OPTIMIZERS[name]()
    state = optimizer.init(TREE)
    refused(lambda: optimizer.update(OTHER, state, TREE), "a/b is (3,) on cpu in grads, (2,)")
    refused(lambda: optimizer.update({"a": 1.0}, state, TREE), "grads has another tree")
    refused(lambda: optimizer.update({"a": {"b": 1.0}}, state, TREE), "a/b is a float in grads, and a Tensor in params")
    refused(lambda: optimizer.update(TREE, state, {"a": {"b": 1.0}}), "a/b is a Tensor in grads, and a float in params")


def test_optimizer_states_name_what_does_not_fit():
    adamw, momentum = fnppo.adamw(0.1), fnppo.sgd(0.1, momentum=0.9)
    for name in ("first_moment", "second_moment"):
        state = adamw.init(TREE)._replace(**{name: OTHER})
        refused(lambda state=state: adamw.update(TREE, state, TREE), "a/b is (3,) on cpu in opt_state")
    refused(lambda: momentum.update(TREE, momentum.init(TREE)._replace(momentum=OTHER), TREE), "in opt_state")
    both = fnppo.chain(adamw, momentum)
    refused(lambda: both.update(TREE, [1], TREE), "opt_state is a list, not one state for each of 2 optimizers")
    refused(lambda: fnppo.global_norm({"a": {"b": 1.0}}), "tree/a/b is a float")


def test_unpacking_names_what_does_not_fit():
    targets = fnppo.pack_sequences(fnppo.padded_batch([[5], [7, 8]], [[6], [9]])).targets
    values = torch.zeros(2)
    refused(lambda: fnppo.unpack_targets([0.0, 0.0], targets, shape=(2, 3)), "values is a list")
    refused(lambda: fnppo.unpack_targets(values, targets, shape=(-1, 3)), "shape[0] is -1")
    refused(lambda: fnppo.unpack_targets(values, targets, shape=(2, -1)), "shape[1] is -1")
    refused(lambda: fnppo.unpack_targets(values, targets, shape=(1, 3)), "row")
    refused(lambda: fnppo.unpack_targets(values, targets, shape=(2, 2)), "column")


def test_masks_are_named():
    batch = fnppo.padded_batch([[5]], [[6]])
    twos = batch._replace(attention_mask=batch.attention_mask.long() * 2)
    refused(lambda: fnppo.lengths(twos), "attention_mask is 2")
    refused(lambda: fnppo.prompt_groups(twos), "attention_mask is 2")


@pytest.mark.parametrize("backend", [fnppo.choose_attention, fnppo.math_attention, fnppo.sdpa_attention])
def test_attention_called_by_hand(backend):
    segments = segments_of(fnppo.pack_sequences(fnppo.padded_batch([[5], [7]], [[6], [8]])).inputs)
    good = {"query": torch.zeros(1, 4, 4, 2), "key": torch.zeros(1, 2, 4, 2), "value": torch.zeros(1, 2, 4, 3)}
    attend = lambda **bad: backend(**{**good, "segments": segments, "scaling": 1.0, **bad})
    assert attend().shape == (1, 4, 4, 3)
    for name in good:
        refused(lambda: attend(**{name: torch.zeros(1, 2, 3, 2)}), f"{name} has shape (1, 2, 3, 2)", "(1, 4)")
        refused(lambda: attend(**{name: torch.zeros(2, 4, 2)}), f"{name} has shape (2, 4, 2)")
        refused(lambda: attend(**{name: good[name].long()}), f"{name} has dtype torch.int64")
        refused(lambda: attend(**{name: None}), f"{name} is a NoneType")
    for name in ("key", "value"):
        refused(lambda: attend(**{name: good[name].double()}), f"{name} is torch.float64 on cpu, query torch.float32")
        refused(lambda: attend(**{name: torch.zeros(1, 1, 4, 2)}), "4 query heads")
    refused(lambda: attend(query=torch.zeros(1, 3, 4, 2)), "3 query heads, 2 of keys")
    refused(lambda: attend(key=torch.zeros(1, 2, 4, 3)), "queries have 2 dims, keys 3")
    refused(lambda: attend(segments=None), "segments is a NoneType", "segments_of")
    for window in (0, -1, 1.5):
        refused(lambda: attend(window=window), f"window is {window}", "at least 1")


def test_rows_out_of_order():
    """A sequence surrogate would take a row that comes back for another one."""
    batch = laid_out()[0]
    targets = batch.targets
    assert targets.rows[-1] > 0
    wrong = targets._replace(rows=targets.rows.flip(0))
    refused(lambda: forward(batch._replace(targets=wrong)), "its row is 0, after a higher one", "sort them")


def test_numbers_of_advantages_are_not_broadcast():
    columns, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    three, two = torch.full((3,), 0.5), torch.full((2,), 0.5)
    groups, rewards = tensor([0, 0]), tensor([1.0, 0.0])
    for name in ("gamma", "lam"):
        refused(lambda: fnppo.gae_advantages(columns, columns, mask, **{name: three}), f"{name} has shape (3,)")
    refused(lambda: advantages.discounted_returns(columns, mask, gamma=three), "gamma has shape (3,)")
    refused(lambda: advantages.kl_in_reward(columns, columns, columns, mask, kl_coef=three), "kl_coef has shape (3,)")
    refused(lambda: grpo_advantages(rewards, groups, eps=two), "eps has shape (2,)")
    refused(lambda: advantages.whiten(columns, mask, eps=three), "eps has shape (3,)")
    keep = tensor([True, True])
    of_three = lambda: advantages.reinforce_plus_plus_baseline_advantages(
        rewards, groups, torch.ones(3, 2) > 0, keep=keep
    )
    refused(of_three, "values has shape (2,)", "3 rows")


def test_rows_are_masked_before_they_are_weighed():
    batch = fnppo.token_mean(fnppo.padded_batch([[1], [1]], [[2], [3]]))
    refused(lambda: advantages.mask_rows(batch, tensor([True, False])), "the batch has loss_weights")


def test_surrogates_that_return_no_pair():
    batch = laid_out()[0]
    stats = forward(batch)
    for returned, kind in ((stats.logprobs, "Tensor"), ((stats.logprobs,), "tuple"), (None, "NoneType")):
        one = lambda *_, returned=returned: returned
        refused(lambda: fnppo.ppo_loss(stats, batch.targets, surrogate=one), f"surrogate returned a {kind}", "{}")


def test_losses_that_do_not_add():
    one = torch.ones(())
    pair = one, fnppo.Metrics({"loss": one, "value_loss": one})
    assert fnppo.add_losses((one, fnppo.Metrics({"loss": one})), pair, coef=0.5)[0].item() == 1.5
    other = one, fnppo.Metrics({"loss": one})
    refused(lambda: fnppo.add_losses(other, pair, coef=NAN), "coef is nan", "It weighs the second loss")
    refused(lambda: fnppo.add_losses(other, pair, coef=torch.ones(2)), "coef has shape (2,)")
    refused(lambda: fnppo.add_losses(one, pair, coef=1), "first is no (loss, metrics)")
    refused(lambda: fnppo.add_losses(other, [one], coef=1), "second is no (loss, metrics)")
    refused(lambda: fnppo.add_losses(pair, pair, coef=1), "both losses have a metric value_loss")
