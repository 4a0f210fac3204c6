"""Peak memory of the head, in child processes: it does not grow with vocabulary x targets."""

import subprocess
import sys

import pytest

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
