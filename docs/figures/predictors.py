"""Targets and their predictors where three responses share one prompt."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import fnppo

plt.rcParams["svg.hashsalt"] = "fnppo"
COLOURS = ["#e4e4e4", "#7fa3d6", "#f0b07f", "#8fcf9a"]  # the prompt, and each row

batch = fnppo.padded_batch([[7, 8]] * 3, [[2, 6], [5, 9, 4], [3]])
inputs, targets = fnppo.pack_sequences(batch, share_prefixes=True, least_shared=1)
segment = [int((inputs.cu_seqlens[1:] <= place).sum()) for place in range(inputs.input_ids.numel())]
figure, axes = plt.subplots(figsize=(6.5, 2.7))


def cell(x, y, text, colour):
    axes.add_patch(plt.Rectangle((x, y), 0.9, 0.7, facecolor=colour, edgecolor="black", linewidth=0.8))
    axes.text(x + 0.45, y + 0.33, text, ha="center", va="center", fontsize=12)


for x, token in enumerate(inputs.input_ids.tolist()):
    cell(x, 2.4, token, COLOURS[segment[x]])
    axes.text(x + 0.45, 3.35, x, ha="center", va="center", fontsize=9, color="gray")
for i, (token, predictor, row) in enumerate(
    zip(targets.token_ids.tolist(), targets.predictors.tolist(), targets.rows.tolist(), strict=True)
):
    cell(1.5 + i, 0.3, token, COLOURS[row + 1])
    axes.plot([1.95 + i, predictor + 0.45], [1.0, 2.4], color="black", linewidth=1)
for y, text in ((3.35, "place"), (2.73, "what the model reads"), (1.7, "predictor"), (0.63, "targets")):
    axes.text(-0.3, y, text, ha="right", va="center", fontsize=10)
axes.set(xlim=(-3.7, 8.2), ylim=(0.1, 3.7))
axes.axis("off")
figure.tight_layout(pad=0.3)
figure.savefig(Path(sys.argv[1]) / "predictors.svg", metadata={"Date": None})
