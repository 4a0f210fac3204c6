"""Three rows padded and packed, the arrows from predictors to targets, and which tokens each token reads."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

import fnppo
from fnppo.segments import segments_of

plt.rcParams["svg.hashsalt"] = "fnppo"
COLOURS = ["#7fa3d6", "#f0b07f", "#8fcf9a"]

batch = fnppo.padded_batch([[1, 2], [1, 2], [3]], [[4, 5, 6], [7], [8, 9]])
inputs, targets = fnppo.pack_sequences(batch)
segment, position = (x[0] for x in segments_of(inputs)[:2])
figure, (cells, mask) = plt.subplots(1, 2, figsize=(6.5, 2.9), width_ratios=[1.75, 1])


def cell(x, y, text, colour, learned):
    style = {"edgecolor": "black" if learned else "white", "linewidth": 1.5 if learned else 0.5, "zorder": 2 + learned}
    cells.add_patch(plt.Rectangle((x, y), 0.92, 0.8, facecolor=colour, **style))
    cells.text(x + 0.46, y + 0.38, text, ha="center", va="center", fontsize=11, zorder=4)


for row, (tokens, there, learned) in enumerate(zip(*(x.tolist() for x in batch[:3]), strict=True)):
    for x, token in enumerate(tokens):
        cell(3 + x, 5.3 - 0.9 * row, token if there[x] else "", COLOURS[row] if there[x] else "#e4e4e4", learned[x])
for x, token in enumerate(inputs.input_ids.tolist()):
    cell(x, 1.3, token, COLOURS[segment[x]], x - 1 in targets.predictors)
    cells.text(x + 0.46, 0.85, int(position[x]), ha="center", va="center", fontsize=9)
for x in targets.predictors.tolist():
    arrow = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.6", "linewidth": 1.2}
    cells.annotate("", (x + 1.4, 2.2), (x + 0.5, 2.2), arrowprops=arrow)
for y, text in ((4.8, "padded"), (2.5, "predicts"), (1.7, "packed"), (0.85, "position")):
    cells.text(-0.2 if y < 4 else 2.8, y, text, ha="right", va="center", fontsize=9)
cells.set(xlim=(-2.3, 11.1), ylim=(0.4, 6.3))
cells.axis("off")
visible = (segment[:, None] == segment) & (position[:, None] >= position)
mask.imshow(visible * (segment + 1), cmap=ListedColormap(["#f4f4f4", *COLOURS]))
mask.set(xlabel="is read", ylabel="reads", xticks=range(11), yticks=range(11))
mask.set(xticklabels=inputs.input_ids.tolist(), yticklabels=inputs.input_ids.tolist())
figure.tight_layout(pad=0.3)
figure.savefig(Path(sys.argv[1]) / "packing.svg", metadata={"Date": None})
