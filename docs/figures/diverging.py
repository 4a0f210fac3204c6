"""Metrics of a healthy run and of three that are not, on the task of docs/pages/how-to/diverging.md."""

import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import fnppo
from fnppo.rollout import generate
from fnppo.testing import tiny_llama

plt.rcParams |= {"svg.hashsalt": "fnppo", "font.size": 9}
PROMPTS = [[1, 7], [2, 9], [3, 5], [4, 11]]
sizes = dict(vocab_size=16, hidden_size=32, num_hidden_layers=1, initializer_range=0.1)
policy, initial = fnppo.functional_policy(tiny_llama(**sizes).double())


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets)


def run(advantages_of=fnppo.grpo_advantages, learning_rate=1e-2):
    optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(learning_rate))
    params, state = initial, optimizer.init(initial)
    for seed in range(8):
        batch = generate(params, PROMPTS, policy=policy, max_new_tokens=3, num_responses=8, seed=seed, eos_token_id=())
        rewards = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).double().sum(1)
        column = fnppo.advantages.on_every_token(advantages_of(rewards, batch.groups), batch.loss_mask)
        params, state, metrics = fnppo.update_policy(
            params, state, batch._replace(advantages=column), loss_fn=loss_fn, optimizer=optimizer, mini_batch_size=16,
            max_tokens=1000, seed=seed,
        )  # fmt: skip
        yield metrics | {"reward": rewards.mean().item()}


runs = {"healthy": {}, "rate 0.1": {"learning_rate": 0.1}, "wrong sign": {"advantages_of": lambda r, g: -fnppo.grpo_advantages(r, g)},
        "no baseline": {"advantages_of": lambda r, g: r + 10}}  # fmt: skip
figure, axes = plt.subplots(1, 4, figsize=(6.5, 2.6), layout="constrained")
for (name, how), style in zip(runs.items(), ("-", "--", ":", "-."), strict=True):
    log = list(run(**how))
    for axis, metric in zip(axes, ("reward", "approx_kl", "entropy", "grad_norm"), strict=True):
        axis.plot([round(metrics[metric], 2) for metrics in log], style, label=name)
        axis.set_title(metric)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
figure.savefig(f"{sys.argv[1]}/diverging.svg", metadata={"Date": None})
