"""Two trees of parameters, one of them trained: the numbers of the whole, and nothing for what is frozen."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny

import fnppo

NAMES = st.lists(st.text("ab.", max_size=4), unique=True, min_size=1, max_size=6)


@given(names=NAMES, data=st.data())
def test_parts_make_the_whole(names, data):
    params = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    trained, frozen = fnppo.partition(params, chosen.__contains__)
    assert list(trained) == [name for name in names if name in chosen]
    assert list(frozen) == [name for name in names if name not in chosen]
    assert fnppo.combine(trained, frozen) == params
    assert all(fnppo.combine(frozen, trained)[name] is leaf for name, leaf in params.items())


@pytest.mark.parametrize("chosen", ["norm", "lm_head", "layers.0"])
def test_what_is_trained_has_the_gradients_of_the_whole(chosen):
    """G13: to the bit; an update makes gradients and moments for it alone."""
    policy, params = fnppo.functional_policy(tiny("llama"))
    batch = fnppo.token_mean(
        fnppo.padded_batch([[1], [2, 3]], [[4, 5], [6]], old_logprobs=[[-2.0, -2.0], [-2.0]], advantages=[1.0, -1.0])
    )
    micro_batch = fnppo.pack_sequences(batch)

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets)

    trained, frozen = fnppo.partition(params, lambda name: chosen in name)
    partial_loss = lambda trained, micro_batch: loss_fn(fnppo.combine(trained, frozen), micro_batch)
    (loss, _), grads = fnppo.value_and_grad(partial_loss)(trained, micro_batch)
    (right, _), all_grads = fnppo.value_and_grad(loss_fn)(params, micro_batch)
    assert loss == right
    assert grads.keys() == trained.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, all_grads[name])

    optimizer = fnppo.adamw(1e-2)
    new, opt_state, _ = fnppo.train_step(
        trained, optimizer.init(trained), [micro_batch], loss_fn=partial_loss, optimizer=optimizer
    )
    assert opt_state.first_moment.keys() == new.keys() == trained.keys()
    assert not any(torch.equal(a, b) for a, b in zip(optree.tree_leaves(new), optree.tree_leaves(trained), strict=True))


def test_refusals():
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"no name of 2 is trained \(they begin with a, b\). Accept at least one"):
        fnppo.partition(params, lambda name: "lora" in name)
    with pytest.raises(ValueError, match="b is in part 1 and in one before it. Leave out of one part"):
        fnppo.combine(params, {"b": torch.ones(1)})
