"""Options of torch's FSDP2, frozen parameters, what is sent, and that the sharded policy cannot be used by mistake."""

import pytest
import torch
from batches import some_batch
from programs import MODEL_LAYERS, frozen, misused, options, traffic
from ranks import Failed
from test_actor import apart

import fnppo

PARTS = [some_batch(3, 0), some_batch(1, 1)]
UPDATE = {"mini_batch_size": 3, "max_tokens": 12, "num_epochs": 2}


def test_options_of_fully_shard(pools):
    """Resharding and offloading change no number; bfloat16 changes them by its rounding, over float32 masters."""
    (plain, resharded, offloaded, half), _ = pools(2).run(options, UPDATE, each=PARTS)
    assert apart(resharded, plain) < 1e-12
    assert apart(offloaded, plain) < 1e-12
    assert 1e-4 < apart(half[0], plain[0]) < 0.1
    assert all(value.dtype == torch.float32 for value in half[1].values())


def test_frozen_parameters_stay(pools):
    """G13: no gradients and no optimizer state for them; the others move as in one process."""
    before, after, trained, moments = pools(2).run(frozen, (1, 2, 1), UPDATE, each=PARTS)[0]
    assert moments == trained < before.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name not in trained)


def test_what_is_sent(pools):
    """G12: FSDP gathers each layer in forward and backward, the head once, and reduces each gradient once, a micro-batch.

    Ulysses sends each query, key, value and output once, forward and backward, less the part that stays.
    """
    for shape in ((1, 2, 1), (1, 1, 2)):
        found = pools(2).run(
            traffic, shape, fnppo.packed, each=[some_batch(2, 0), some_batch(2, 0 if shape[2] == 2 else 1)]
        )
        for sent, least in found:
            assert sent == least, (shape, MODEL_LAYERS)


def test_the_sharded_policy_outside_of_its_actor(pools):
    with pytest.raises(Failed, match="the policy is sharded, and runs inside of the methods of its FSDPActor only"):
        pools(2).run(misused, each=PARTS)
