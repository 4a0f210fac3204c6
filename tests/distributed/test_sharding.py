"""The readable path: a tree of DTensors, gathered in the loss, with and without tokens that are split over ranks."""

import math

import optree
import pytest
from batches import some_batch
from programs import loss_function, model, pure_gradients, slices, stray_factors
from test_actor import apart
from tiny import tiny

import fnppo
from fnppo.distributed.ulysses import check_heads
from fnppo.layouts import sharing
from fnppo.testing import float64_everywhere


@pytest.mark.parametrize(
    ("shape", "family", "layout"),
    [
        ((1, 2, 1), "tied", fnppo.packed),
        ((1, 1, 2), "gpt2", sharing(least_shared=1)),
        ((1, 1, 4), "gemma2", fnppo.packed),
        ((1, 2, 2), "gpt_oss", sharing(least_shared=1)),
        ((2, 2, 1), "phi", fnppo.packed),
    ],
    ids=["shards", "sequence of 2", "sequence of 4", "shards and sequence", "replicas"],
)
def test_gradients_of_shards(shape, family, layout, pools):
    """F2: losses of data ranks add up, those of sequence ranks are one; no factor is missing or too much."""
    data_ranks = shape[0] * shape[1]
    for seed, loss in enumerate(("ppo", "gspo")):
        batch = fnppo.token_mean(some_batch(4, seed))
        parts = [fnppo.select_rows(batch, list(range(4))[rank::data_ranks]) for rank in range(data_ranks)]
        each = [parts[rank // shape[2]] for rank in range(math.prod(shape))]
        found = pools(math.prod(shape)).run(pure_gradients, shape, family, loss, layout, each=each)
        with float64_everywhere():
            policy, params = fnppo.functional_policy(model(family))
            run = fnppo.value_and_grad(loss_function(policy, loss))
            expected = [run(params, layout.lay(part)) for part in parts]
            grads = optree.tree_map(lambda *parts: sum(parts), *(grads for _, grads in expected))
            for rank, (value, per_step, stats, kl, own) in enumerate(found):
                (wanted, metrics), _ = expected[rank // shape[2]]
                micro_batch = layout.lay(each[rank])
                right = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=0.8)
                other = {name: p * 0.9 for name, p in params.items()}
                exact = fnppo.exact_kl(params, other, micro_batch, policy=policy, temperature=0.8)
                assert apart([value, per_step, stats, kl, own], [wanted, metrics.per_step, right, exact, grads]) < 1e-10


def test_no_stray_factor(pools):
    """F2 by hand: loss = Σ w x / 4 over x = [1, 2, 3, 4] has gradient 2.5, over however many ranks the x are dealt."""
    for size in (2, 4):
        assert pools(size).run(stray_factors) == [2.5] * size


def test_slices_of_the_axis(pools):
    """F4: six tokens over two ranks are three each; seven are four each, the last one a filler."""
    assert pools(2).run(slices, 6) == [(6, 0, 3), (6, 3, 6)]
    assert pools(2).run(slices, 7) == [(8, 0, 4), (8, 4, 8)]


def test_heads_that_can_be_shared():
    """F1: query heads are divided; key/value heads are divided or repeated."""
    for heads, kv_heads, ranks in ((8, 2, 4), (8, 4, 4), (8, 8, 4), (8, 1, 8), (6, 3, 3)):
        check_heads(heads, kv_heads, ranks)
    with pytest.raises(ValueError, match="6 query heads, which 4 sequence ranks"):
        check_heads(6, 2, 4)
    with pytest.raises(ValueError, match="3 key/value heads, which 2 sequence ranks"):
        check_heads(6, 3, 2)


def test_what_cannot_be_split_is_refused(pools):
    """F1, F3: at construction, on every rank."""
    from programs import refused_construction

    assert tiny("gpt2").config.n_head == 2
    for error in pools(4).run(refused_construction, (1, 1, 4), "gpt2"):
        assert "2 query heads, which 4 sequence ranks cannot share evenly" in error
    for error in pools(2).run(refused_construction, (1, 1, 2), "mamba"):
        assert "reads padded batches only, whose tokens cannot be split over ranks" in error
