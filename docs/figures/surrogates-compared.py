"""How strongly a token is pushed, against its ratio, by PPO, CISPO and SAPO, for both signs of the advantage."""

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
shown = {
    "PPO": partial(surrogates.clipped_surrogate, clip_high=0.28),
    "CISPO, weight at most 2": partial(surrogates.cispo, clip_high=1.0),
    "SAPO": surrogates.sapo,
}
figure, panels = plt.subplots(1, 2, figsize=(6.5, 3.0), sharey=True)
for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
    columns = {"old_logprobs": 0 * ratios, "advantages": torch.full_like(ratios, advantage)}
    for (name, surrogate), style in zip(shown.items(), ("-", "--", "-."), strict=True):
        logprobs = ratios.log().requires_grad_()
        losses, _ = surrogate(fnppo.TokenStats(logprobs), fnppo.Targets(index, index, index, index, **columns))
        (grads,) = torch.autograd.grad(losses.sum(), logprobs)
        axes.plot(ratios, -grads / advantage, style, label=name)
    axes.set_title(f"A = {advantage:+.0f}", fontsize=10)
    axes.set(xlabel="ratio π / π_old", xticks=range(5))
    axes.grid(alpha=0.3)
panels[0].set_ylabel("factor of A ∇log π")
panels[0].legend(loc="upper left", fontsize=8)
figure.tight_layout()
figure.savefig(Path(sys.argv[1]) / "surrogates-compared.svg", metadata={"Date": None})
