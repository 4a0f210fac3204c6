"""The same numbers on any mesh: log-probs, metrics, parameters and moments of `FSDPActor` and of a single process."""

import math

import optree
import pytest
import torch
from batches import some_batch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from programs import OPTIMIZER, fresh_logprobs, loss_function, model, prepared, update
from tiny import VOCAB

import fnppo
from fnppo.distributed import balanced, in_turn
from fnppo.layouts import sharing
from fnppo.testing import float64_everywhere, padded_batches

SHAPES = [
    *((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4)),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 4, 1), (2, 1, 2))),
]
"""(replicate, shard, sequence) of one, two and four ranks."""
FAMILIES = {1: ["llama", "gpt2", "tied", "gemma2", "gpt_oss"], 2: ["llama", "gpt2", "gpt_oss"], 4: ["llama", "gemma2"]}
"""By sequence ranks: models whose heads they can share."""


def single(batch, family, loss, options):
    """What `update` of the programs does, in one process with the pure functions."""
    with float64_everywhere():
        policy, params = fnppo.functional_policy(model(family))
        stats = fnppo.compute_logprobs(
            params, batch, policy=policy, temperature=0.8, entropy=True, max_tokens=options["max_tokens"]
        )
        params, opt_state, metrics = fnppo.update_policy(
            params, OPTIMIZER.init(params), batch,
            loss_fn=loss_function(policy, loss), optimizer=OPTIMIZER, **options | {"layout": fnppo.packed},
        )  # fmt: skip
    return stats, metrics, params, opt_state


def apart(found, expected):
    """The largest difference of any leaf, relative where numbers are above 1."""
    leaves, others = optree.tree_leaves(found), optree.tree_leaves(expected)
    assert optree.tree_structure(found) == optree.tree_structure(expected)
    largest = 0.0
    for a, b in zip(leaves, others, strict=True):
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        assert a.shape == b.shape
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1))
        assert bool(error.isfinite().all())
        largest = max(largest, float(error.max()) if error.numel() else 0.0)
    return largest


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])  # of a second each
@given(data=st.data())
def test_the_same_numbers_on_any_mesh(shape, pools, data):
    """G3: also the gradients, which the moments hold; A4, A5: whoever has which rows, and how many ranks share their tokens."""
    family = data.draw(st.sampled_from(FAMILIES[shape[2]]))
    batch = data.draw(padded_batches(vocab_size=VOCAB, max_rows=6))
    data_ranks = shape[0] * shape[1]
    owners = torch.tensor(
        data.draw(st.lists(st.integers(0, data_ranks - 1), min_size=(n := batch.input_ids.shape[0]), max_size=n))
    )
    order = owners.argsort(stable=True)
    parts = [fnppo.select_rows(batch, (owners == rank).nonzero()[:, 0].tolist()) for rank in range(data_ranks)]
    loss = data.draw(st.sampled_from(["ppo", "gspo"]))
    longest = max(1, *fnppo.lengths(batch))
    options = {
        "mini_batch_size": data.draw(st.integers(-(-n // 2), n)),
        "max_tokens": data.draw(st.integers(longest, 3 * longest)),
        "num_epochs": data.draw(st.integers(1, 2)),
        "weights": data.draw(st.sampled_from([fnppo.token_mean, fnppo.sequence_mean, fnppo.group_token_mean])),
        "seed": data.draw(st.integers(0, 9)),
        "layout": data.draw(
            st.sampled_from([fnppo.packed, sharing(least_shared=1)] + [fnppo.padded] * (shape[2] == 1))
        ),
    }
    # Layers that compute in float32 would do so when they are recomputed: autograd does not know of `float64_everywhere`.
    engine = {
        "remat": family == "gpt2" and data.draw(st.booleans()),
        "deal": data.draw(st.sampled_from([balanced, in_turn])),
    }
    each = [parts[rank // shape[2]] for rank in range(math.prod(shape))]
    found = pools(math.prod(shape)).run(update, shape, family, loss, options, engine, each=each)
    expected = single(fnppo.select_rows(batch, order.tolist()), family, loss, options)
    place = 0
    for rank, (stats, *rest) in enumerate(found):
        assert apart(rest, list(expected[1:])) < 1e-10
        if rank % shape[2] == 0:
            rows = slice(place, place + each[rank].input_ids.shape[0])
            assert apart(stats, optree.tree_map(lambda x: x[rows], expected[0])) < 1e-10
            place = rows.stop


def test_prepare_sees_the_rows_of_all_ranks(pools):
    """It is called with the current policy before every step, and what it asks of it is the same on every rank."""
    batch, options = some_batch(4), {"mini_batch_size": 3, "max_tokens": 12, "num_epochs": 2}
    parts = [fnppo.select_rows(batch, [0]), fnppo.select_rows(batch, [1, 2, 3])]
    with float64_everywhere():
        policy, params = fnppo.functional_policy(model("llama"))
        expected, *_ = fnppo.update_policy(
            params, OPTIMIZER.init(params), batch,
            loss_fn=loss_function(policy, "ppo"), optimizer=OPTIMIZER, prepare=fresh_logprobs(policy), **options,
        )  # fmt: skip
    for found in pools(2).run(prepared, (1, 2, 1), options, each=parts):
        assert apart(found, expected) < 1e-10
