"""The smallest step that a ratio can make, if log-probs are held in float32, float16 or bfloat16."""

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

plt.rcParams["svg.hashsalt"] = "fnppo"

figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
nats = [2 ** (n / 8) for n in range(-24, 41)]  # 1/8 to 32
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    steps = [math.expm1(torch.finfo(dtype).eps * 2 ** math.floor(math.log2(x))) for x in nats]
    axes.plot(nats, steps, drawstyle="steps-post", label=f"log-probs in {str(dtype)[6:]}")
for name, clip in (("PPO's clip", 0.2), ("GSPO's clip", 3e-4)):
    axes.axhline(clip, color="gray", linestyle="--", linewidth=1)
    axes.text(0.13, clip * 1.3, name, fontsize=9, color="gray")
axes.set(xscale="log", yscale="log", xlabel="- log-prob of the token, nats", ylabel="step of its ratio")
axes.set(xlim=(0.12, 31.9), ylim=(1e-8, 1))
axes.set_xticks([0.125, 0.5, 2, 8, 32], ["1/8", "1/2", "2", "8", "32"])
axes.minorticks_off()
axes.legend(loc="center left", bbox_to_anchor=(0, 0.4), fontsize=9)
figure.savefig(Path(sys.argv[1]) / "numerics-steps.svg", metadata={"Date": None})
