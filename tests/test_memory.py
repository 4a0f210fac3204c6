"""Peak memory of the head, in child processes: it does not grow with vocabulary x targets."""

import subprocess
import sys

import pytest

CHILD = """
import resource, sys, torch
from fnppo.logprobs import chunked_logprobs, logits_to_stats
torch.set_num_threads(1)
vocab, hidden_size, targets, chunked = 150_000, 16, int(sys.argv[1]), sys.argv[2] == "chunked"
weight = torch.randn(vocab, hidden_size, requires_grad=True)
hidden = torch.randn(targets, hidden_size, requires_grad=True)
ids = torch.randint(vocab, (targets,))
def run(n):
    if chunked:
        stats = chunked_logprobs(hidden[:n], ids[:n], weight=weight)
    else:
        stats = logits_to_stats(hidden[:n] @ weight.T, ids[:n])
    torch.autograd.grad((stats.logprobs + stats.entropy).sum(), (hidden, weight))
run(100)  # more than one chunk: what the machinery needs once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(targets)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def growth_in_mib(targets, how):
    return int(
        subprocess.run(
            [sys.executable, "-c", CHILD, str(targets), how], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.parametrize("targets", [400, 1200])
def test_peak_memory_of_forward_and_backward_does_not_grow_with_the_logits(targets):
    """D1, D2, D3 at a vocabulary of 150k. The logits of 400 and 1200 targets would be 230 and 690 MiB."""
    assert growth_in_mib(targets, "chunked") < 64


def test_the_measurement_sees_what_it_should():
    assert growth_in_mib(400, "plain") > 400
