"""The micro-batches of a mini-batch, dealt to four ranks by `share_of`: as many forwards on each."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import fnppo
from fnppo.distributed import share_of

plt.rcParams["svg.hashsalt"] = "fnppo"

RANKS, LIMIT = 4, 512
lengths = torch.randint(30, 300, (26,), generator=torch.Generator().manual_seed(3)).tolist()
batch = fnppo.padded_batch([[1]] * len(lengths), [[2] * (length - 1) for length in lengths])
plans = [share_of(fnppo.packed, rank=rank, ranks=RANKS).plan(batch, LIMIT) for rank in range(RANKS)]

figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
for rank, plan in enumerate(plans):
    for forward, rows in enumerate(plan):
        place, done = forward * (RANKS + 1) + rank, 0
        for row in rows:
            axes.bar(place, lengths[row], bottom=done, color=f"C{rank}", edgecolor="white", width=0.9)
            axes.text(place, done + lengths[row] / 2, row, ha="center", va="center", color="white", fontsize=8)
            done += lengths[row]
axes.axhline(LIMIT, color="grey", linestyle="--")
axes.annotate("max_tokens", (-0.5, LIMIT + 8), fontsize=8)
axes.set_xticks(
    [forward * (RANKS + 1) + 1.5 for forward in range(len(plans[0]))],
    [f"forward {forward}\nranks 0 1 2 3" for forward in range(len(plans[0]))],
)
axes.set(ylabel="tokens", ylim=(0, LIMIT * 1.1))
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(Path(sys.argv[1]) / "ranks.svg", metadata={"Date": None})
