"""Value and gradient of the estimators k1, k2 and k3 of the KL against the log-ratio to the reference."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import fnppo

plt.rcParams["svg.hashsalt"] = "fnppo"

distances = torch.linspace(-2.5, 2.5, 300, dtype=torch.float64)
figure, (value, gradient) = plt.subplots(1, 2, figsize=(6.5, 3.0))
for estimator, style in ((fnppo.kl_k1, ":"), (fnppo.kl_k2, "--"), (fnppo.kl_k3, "-")):
    logprobs = distances.clone().requires_grad_()
    values = estimator(logprobs, torch.zeros_like(distances))
    name = estimator.__name__.removeprefix("kl_")
    value.plot(distances, values.detach(), style, label=name)
    gradient.plot(distances, torch.autograd.grad(values.sum(), logprobs)[0], style, label=name)
for axes, title in ((value, "value"), (gradient, "gradient in log π")):
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="d = log π - log π_ref", ylim=(-3, 6) if axes is value else (-6, 3))
    axes.grid(alpha=0.3)
value.legend(fontsize=9)
figure.tight_layout()
figure.savefig(Path(sys.argv[1]) / "kl-estimators.svg", metadata={"Date": None})
