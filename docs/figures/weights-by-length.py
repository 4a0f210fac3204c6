"""What a token and a response weigh under three modes, against the length of the response, from `fnppo.weights`."""

import sys
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import fnppo

plt.rcParams["svg.hashsalt"] = "fnppo"

lengths = [2**power for power in range(3, 12)]
batch = fnppo.padded_batch([[1]] * len(lengths), [[2] * length for length in lengths])
modes = {
    "token_mean": (fnppo.token_mean, "o-"),
    "sequence_mean": (fnppo.sequence_mean, "s-"),
    "constant_norm(2048)": (partial(fnppo.constant_norm, horizon=2048), "^--"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(6.5, 3), layout="constrained")
for name, (weigh, style) in modes.items():
    weights = weigh(batch).loss_weights
    left.loglog(lengths, weights.amax(1), style, label=name, markersize=4)
    right.loglog(lengths, weights.sum(1), style, label=name, markersize=4)
left.set_title("one token", fontsize=10)
right.set_title("all tokens of the response", fontsize=10)
for axes in (left, right):
    axes.set_xlabel("learned tokens of the response")
    axes.set_xticks([8, 64, 512, 2048], ["8", "64", "512", "2048"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
left.set_ylabel("weight")
right.legend(fontsize=8)
figure.savefig(Path(sys.argv[1]) / "weights-by-length.svg", metadata={"Date": None})
