"""Three rows that begin alike as a tree of stretches, and what each token of the packed axis sees."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import fnppo
from fnppo.segments import segments_of

plt.rcParams["svg.hashsalt"] = "fnppo"

batch = fnppo.padded_batch([[1, 2], [1, 2, 4, 5, 3], [1, 2]], [[4, 5], [6, 8], [4, 7]])
tree = fnppo.prefix_tree(batch, least_shared=1)
inputs = fnppo.pack_sequences(batch, share_prefixes=True, least_shared=1).inputs
segments, ids = segments_of(inputs), inputs.input_ids.tolist()
owner = segments.ids[0]
visible = segments.ancestors[owner][:, owner] & (inputs.position_ids[:, None] >= inputs.position_ids)

figure, (left, right) = plt.subplots(1, 2, figsize=(6.5, 3), layout="constrained", width_ratios=[1.25, 1])
height = [0.0, 0.0, 0.0, -1.0]  # of each stretch
colours = [f"C{number}" for number in range(len(height))]
for stretch, (parent, start, stop) in enumerate(zip(tree.parents, tree.starts, tree.stops, strict=True)):
    y, first = height[stretch], int(inputs.cu_seqlens[stretch])
    if parent >= 0:
        left.plot([start - 0.7, start - 0.3], [height[parent], y], color="grey", zorder=0)
    left.plot([start - 0.08, stop - 0.92], [y, y], color=colours[stretch], linewidth=22, solid_capstyle="round")
    for place in range(start, stop):
        left.text(place, y, ids[first + place - start], ha="center", va="center", color="white", weight="bold")
for row, end in enumerate(tree.ends):
    left.annotate(
        f"row {row} ends",
        (tree.stops[end] - 1, height[end] + (-0.38 if height[end] else 0.22)),
        ha="center",
        fontsize=8,
    )
left.set(xlim=(-0.8, 7), ylim=(-1.6, 0.8), xlabel="position in the row", yticks=[])
left.spines[["top", "left", "right"]].set_visible(False)
for query, key in visible.nonzero().tolist():
    right.add_patch(plt.Rectangle((key - 0.45, query - 0.45), 0.9, 0.9, color=colours[int(owner[key])]))
right.set(xlim=(-0.6, len(ids) - 0.4), ylim=(len(ids) - 0.4, -0.6), aspect="equal")
right.set(xlabel="sees this token", ylabel="this token")
right.set_xticks(range(len(ids)), ids)
right.set_yticks(range(len(ids)), ids)
figure.savefig(Path(sys.argv[1]) / "prefix-tree.svg", metadata={"Date": None})
