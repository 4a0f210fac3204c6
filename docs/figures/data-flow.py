"""One update: what the data is at each stage, and the function that takes it to the next."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

plt.rcParams["svg.hashsalt"] = "fnppo"

# what it is, and the function that leads on from it
STAGES = [
    [("PaddedBatch\n[batch, seq]", "token_mean"), ("loss weights\n[batch, seq]", "plan_microbatches"),
     ("rows of a\nmicro-batch", "pack_sequences"), ("ModelBatch\ninputs, targets", "")],
    [("TokenStats\n[targets]", "ppo_loss"), ("loss, Metrics\nsums", "value_and_grad"),
     ("gradients\nadd up", "optimizer.update"), ("new params,\nnew opt_state", "")],
]  # fmt: skip

figure, axes = plt.subplots(figsize=(8.0, 2.6), layout="constrained")
for row, stages in enumerate(STAGES):
    for column, (name, function) in enumerate(stages):
        x, y = 2.6 * column, -1.5 * row
        axes.text(
            x,
            y,
            name,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round", "fc": "#eaf1f8", "ec": "#47729e"},
        )
        if function:
            axes.annotate("", (x + 1.88, y), (x + 0.72, y), arrowprops={"arrowstyle": "->", "color": "#47729e"})
            axes.text(x + 1.3, y + 0.12, function, ha="center", fontsize=7.5, family="monospace")
line = {"color": "#47729e", "linewidth": 1}
axes.plot([7.8, 7.8, 0, 0], [-0.27, -0.75, -0.75, -0.95], **line)
axes.annotate("", (0, -1.25), (0, -0.75), arrowprops={"arrowstyle": "->", "color": "#47729e"})
axes.text(3.9, -0.65, "forward_logprobs", ha="center", fontsize=7.5, family="monospace")
axes.set(xlim=(-1, 8.8), ylim=(-2.0, 0.7))
axes.axis("off")
figure.savefig(Path(sys.argv[1]) / f"{Path(__file__).stem}.svg", metadata={"Date": None})
