"""Value of PPO's surrogate and its gradient in the log-prob against the ratio, for an advantage of 1 and of -1."""

import sys
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import fnppo
from fnppo import surrogates

plt.rcParams["svg.hashsalt"] = "fnppo"

ratios = torch.linspace(0.02, 4, 400, dtype=torch.float64)
index = torch.zeros(400, dtype=torch.long)
ppo = partial(surrogates.clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
unclipped = partial(surrogates.clipped_surrogate, clip_low=torch.inf, clip_high=torch.inf, dual_clip=None)
figure, (value, gradient) = plt.subplots(1, 2, figsize=(6.5, 3.0))
for advantage, colour in ((1.0, "#4c72b0"), (-1.0, "#c44e52")):
    columns = {"old_logprobs": 0 * ratios, "advantages": torch.full_like(ratios, advantage)}
    for surrogate, style, label in ((unclipped, ":", None), (ppo, "-", f"A = {advantage:+.0f}")):
        logprobs = ratios.log().requires_grad_()
        losses, _ = surrogate(fnppo.TokenStats(logprobs), fnppo.Targets(index, index, index, index, **columns))
        value.plot(ratios, losses.detach(), style, color=colour, label=label)
        gradient.plot(ratios, torch.autograd.grad(losses.sum(), logprobs)[0], style, color=colour, label=label)
for axes, title in ((value, "loss of a token"), (gradient, "its gradient in log π")):
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="ratio π / π_old", xticks=[0, 0.8, 1.28, 2, 3, 4], xticklabels=["0", "0.8", "1.28", "2", "3", "4"])
    axes.tick_params("x", labelsize=8)
    axes.grid(alpha=0.3)
value.legend(loc="upper left", fontsize=9)
figure.tight_layout()
figure.savefig(Path(sys.argv[1]) / "surrogate.svg", metadata={"Date": None})
