"""Memory, in counted bytes and in child processes: what an update holds at most, and what does not make it hold more."""

import subprocess
import sys
import weakref
from functools import cache

import optree
import pytest
import torch

import fnppo
from fnppo.testing import LiveBytes, tiny_llama

CHILD = """
import resource, sys, torch
from fnppo.head import chunked_logprobs, logits_to_stats
torch.set_num_threads(1)
vocab, hidden_size, targets, how = 150_000, 16, int(sys.argv[1]), sys.argv[2]
chunk_size = None if how == "chunked" else 20
weight = torch.randn(vocab, hidden_size, requires_grad=True)
hidden = torch.randn(targets, hidden_size, requires_grad=True)
ids = torch.randint(vocab, (targets,))
def run(n):
    if how != "plain":
        stats = chunked_logprobs(hidden[:n], ids[:n], weight=weight, chunk_size=chunk_size)
    else:
        stats = logits_to_stats(hidden[:n] @ weight.T, ids[:n])
    torch.autograd.grad((stats.logprobs + stats.entropy).sum(), (hidden, weight))
run(100)  # more than one chunk: what the machinery needs once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(targets)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


MODEL = """
import resource, torch, fnppo
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=150_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config))
def run(n):
    batch = fnppo.padded_batch([[1]] * 10, [[2] * (n // 10)] * 10, advantages=[1.0] * 10, old_logprobs=[[0.0] * (n // 10)] * 10)
    batch = fnppo.pack_sequences(fnppo.token_mean(batch))
    def loss_fn(params, batch):
        return fnppo.ppo_loss(fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0), batch.targets, entropy_coef=0.1)
    fnppo.value_and_grad(loss_fn)(params, batch)
run(100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(1200)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def growth_in_mib(targets, how):
    return int(
        subprocess.run(
            [sys.executable, "-c", CHILD, str(targets), how], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.parametrize("how", ["chunked", "small chunks"])
@pytest.mark.parametrize("targets", [400, 1200])
def test_peak_memory_of_forward_and_backward_does_not_grow_with_the_logits(targets, how):
    """D1, D2, D3 at a vocabulary of 150k. The logits of 400 and 1200 targets would be 230 and 690 MiB."""
    assert growth_in_mib(targets, how) < 64


def test_a_model_and_its_head():
    """The same for forward_logprobs and its backward on a model with a vocabulary of 150k and 1200 targets."""
    assert int(subprocess.run([sys.executable, "-c", MODEL], capture_output=True, text=True, check=True).stdout) < 200


def test_the_measurement_sees_what_it_should():
    assert growth_in_mib(400, "plain") > 400


@cache
def small(**options):
    """A Llama whose activations and parameters are both much larger than what comes with them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    return fnppo.functional_policy(tiny_llama(vocab_size=64, **sizes), **options)


def rows(count, *, length=16):
    """A batch with weights, of equal rows, half of each learned."""
    half = length // 2
    batch = fnppo.padded_batch(
        [[1] * half] * count,
        [list(range(2, 2 + half))] * count,
        old_logprobs=[[-4.0] * half] * count,
        advantages=[(-1.0) ** row for row in range(count)],
    )
    return fnppo.token_mean(batch)


def micro_batches(count):
    batch = rows(2 * count)
    return [fnppo.pack_sequences(fnppo.select_rows(batch, [2 * i, 2 * i + 1])) for i in range(count)]


def loss_of(policy):
    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets, entropy_coef=0.1)

    return loss_fn


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in optree.tree_leaves(tree))


def counted(run):
    """(what it returns, the most bytes that it held at once)."""
    with LiveBytes() as memory:
        result = run()
    return result, memory.peak


def all_at_once(loss_fn, params, batches):
    """What not to do: add the losses up, then one backward."""
    params = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    loss = sum(loss_fn(params, batch)[0] for batch in batches)
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def lists_of_gradients(loss_fn, params, batches):
    """Nor this: the gradients of each micro-batch, then their sum."""
    grads = [fnppo.value_and_grad(loss_fn)(params, batch)[1] for batch in batches]
    return optree.tree_map(lambda *leaves: sum(leaves), *grads)


@pytest.mark.core
@pytest.mark.parametrize("remat", [False, True])
def test_micro_batches_take_no_memory(remat, unchecked):
    """D7: eight micro-batches need what four need, to the byte: gradients add up in place."""
    policy, params = small(remat=remat)
    loss_fn = loss_of(policy)
    few, many = (micro_batches(count) for count in (4, 8))
    (_, grads), four = counted(lambda: fnppo.accumulate_gradients(loss_fn, params, few))
    (_, found), eight = counted(lambda: fnppo.accumulate_gradients(loss_fn, params, many))
    _, alone = counted(lambda: fnppo.value_and_grad(loss_fn)(params, few[0]))
    assert eight == four
    # The sum beside what a micro-batch needs by itself, and some scalars.
    assert four <= alone + bytes_of(grads) + 1024
    for wrong in (all_at_once, lists_of_gradients):
        expected, most = counted(lambda: wrong(loss_fn, params, many))
        assert most > 1.2 * eight, wrong
        for name, leaf in found.items():
            torch.testing.assert_close(leaf, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.core
@pytest.mark.parametrize("remat", [False, True])
def test_a_graph_is_gone_before_the_next_is_built(remat, unchecked):
    """D8: nothing that a micro-batch saved or gave is there when the next is asked for, whatever its metrics hold."""
    policy, params = small(remat=remat)
    batches = micro_batches(6)
    given = {leaf.untyped_storage().data_ptr() for leaf in optree.tree_leaves((params, batches))}
    held, alive, live = [], [], []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in given:
            held.append(weakref.ref(tensor.untyped_storage()))
        return tensor.detach()  # a node that keeps its own output as it is would be a cycle, which nothing frees

    def loss_fn(params, micro_batch):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
            loss, metrics = fnppo.ppo_loss(stats, micro_batch.targets)
        held.extend(weakref.ref(tensor) for tensor in (*stats, loss))
        # A metric with a graph that no backward walks, and so none frees.
        return loss, metrics._replace(per_token=metrics.per_token | {"graph": stats.entropy.exp().sum()})

    def one_by_one():
        for micro_batch in batches:
            alive.append(sum(ref() is not None for ref in held))
            live.append(memory.live)
            held.clear()
            yield micro_batch
            assert len(held) > 20  # that there is something to be gone

    with LiveBytes() as memory:
        fnppo.accumulate_gradients(loss_fn, params, one_by_one())
    assert alive == [0] * 6
    # What is left is the sum of the gradients, and scalars: the sum of the metrics and the metrics before it.
    assert all(bytes_of(params) < now < bytes_of(params) + 1024 for now in live[1:])
    assert live[3] == live[4] == live[5]


def test_a_graph_that_is_kept_is_seen(unchecked):
    """The same counts on a loop that keeps a metric with its graph."""
    policy, params = small()
    aliases, kept, live = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}, [], []
    with LiveBytes() as memory:
        for micro_batch in micro_batches(3):
            stats = fnppo.forward_logprobs(aliases, micro_batch, policy=policy, temperature=1.0)
            kept.append(stats.entropy.exp().sum())
            live.append(memory.live)
    assert live[0] < live[1] < live[2]


@pytest.mark.core
@pytest.mark.parametrize(("clip", "saved"), [(False, 2), (True, 3)])
def test_donation_saves_what_it_reuses(clip, saved, unchecked):
    """D9: parameters and moments stay where they are, with the same bits. Both moments, and the clipped gradients, are
    not made anew beside the gradients and the updates; when the step is over, nothing new is there.
    """
    policy, params = small()
    adamw = fnppo.adamw(1e-2)
    optimizer = fnppo.chain(fnppo.clip_by_global_norm(0.01), adamw) if clip else adamw
    batches, size = micro_batches(1), bytes_of(params)
    results, peaks, left = {}, {}, {}
    for donate in (False, True):
        old_params = {name: leaf.clone() for name, leaf in params.items()}
        old_state = optimizer.init(old_params)
        places = [leaf.data_ptr() for leaf in optree.tree_leaves((old_params, old_state)) if leaf.dim()]
        with LiveBytes() as memory:
            new_params, state, _ = fnppo.train_step(
                old_params, old_state, batches, loss_fn=loss_of(policy), optimizer=optimizer, donate=donate
            )
        results[donate], peaks[donate], left[donate] = (new_params, state), memory.peak, memory.live
        found = [leaf.data_ptr() for leaf in optree.tree_leaves((new_params, state)) if leaf.dim()]
        assert found == places if donate else not set(found) & set(places)
    for kept, donated in zip(*map(optree.tree_leaves, results.values()), strict=True):
        assert torch.equal(kept, donated)
    assert peaks[False] - peaks[True] == saved * size
    assert 2 * size <= peaks[True] < 2 * size + 1024
    assert left[True] < 1024
    assert 3 * size <= left[False] < 3 * size + 1024


@pytest.mark.core
def test_remat_keeps_the_input_of_a_layer(unchecked):
    """D10: one more layer adds its input to what remat holds at once, and all its activations to what is held without."""
    peaks, tokens, hidden = {}, 512, 32
    batch = fnppo.pack_sequences(rows(tokens // 16))
    for remat in (False, True):
        for layers in (2, 4, 6):
            module = tiny_llama(vocab_size=64, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers)
            policy, params = fnppo.functional_policy(module, remat=remat)
            _, peaks[remat, layers] = counted(lambda: fnppo.value_and_grad(loss_of(policy))(params, batch))
    assert peaks[True, 6] - peaks[True, 4] == peaks[True, 4] - peaks[True, 2] == 2 * tokens * hidden * 4
    one_layer = (peaks[False, 6] - peaks[False, 2]) / 4
    assert one_layer > 10 * tokens * hidden * 4
    # With remat, the activations of the layer that runs again, and the inputs of the others.
    expected = peaks[False, 6] - 5 * (one_layer - tokens * hidden * 4)
    assert peaks[True, 6] == pytest.approx(expected, rel=0.05)
