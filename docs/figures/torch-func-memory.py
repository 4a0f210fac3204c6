"""Live memory over the operations of a forward and a backward, with torch.autograd.grad and with torch.func.grad."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from fnppo.testing import LiveBytes

plt.rcParams["svg.hashsalt"] = "fnppo"


class Trace(LiveBytes):
    """Remembers the bytes that are there after each operation."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(func, types, args, kwargs)
        self.trace.append(self.live / 2**10)
        return results


def loss(weights, x):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.square().sum()


weights, data = [torch.ones(64, 64) / 64 for _ in range(8)], torch.ones(512, 64)
figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
with Trace() as plain:
    leaves = [weight.requires_grad_() for weight in weights]
    torch.autograd.grad(loss(leaves, data), leaves)
with Trace() as functional:
    torch.func.grad(loss)([weight.detach() for weight in weights], data)
axes.plot(functional.trace, label="torch.func.grad")
axes.plot(plain.trace, label="torch.autograd.grad")
axes.set(xlabel="operation", ylabel="live memory, KiB", ylim=(0, None))
axes.legend()
figure.savefig(Path(sys.argv[1]) / "torch-func-memory.svg", metadata={"Date": None})
