"""Many seeds and learning rates trained at once: `torch.vmap` over sampling, reward, advantages and `train_step`.

Forty tiny Llamas learn to count on (4 -> 5 6 7), each with weights, samples and a learning rate of its own. A step is a pure
function of parameters, learning rate and noise, so a step of all runs is that function under vmap. Some are also made alone.

python examples/06_many_seeds.py --plot seeds.svg
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.testing import float64_everywhere

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="few runs and steps, for tests")
parser.add_argument("--plot", metavar="FILE", help="write the rewards to an SVG")
args = parser.parse_args()

RATES = [1e-3, 1e-2] if args.small else [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
SEEDS, STEPS = (2, 2) if args.small else (8, 40)
DIGITS, LENGTH, RESPONSES = 10, 3, 8  # prompts are the ten digits; tokens of a response; responses to a prompt
config = LlamaConfig(vocab_size=10, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
policy, _ = fnppo.functional_policy(LlamaForCausalLM(config).double())

# The layout is prepared once, outside of vmap. It is that of every step, only tokens and advantages change.
prompts = [[digit] for digit in range(DIGITS) for _ in range(RESPONSES)]
batch = fnppo.padded_batch(prompts, [[0] * LENGTH] * len(prompts), groups=[digit for (digit,) in prompts])
layout = fnppo.pad_sequences(fnppo.token_mean(batch))


def sample(params, noise):
    """Token ids [rows, 1 + LENGTH]: the largest of logits + Gumbel noise is a draw from their softmax."""
    ids = batch.input_ids
    for place in range(LENGTH):  # what stands behind `place` is not seen
        hidden = policy.hidden_states(params, layout.inputs._replace(input_ids=ids)).reshape(*ids.shape, -1)
        drawn = (policy.head.bind(params).logits(hidden[:, place]) + noise[:, place]).argmax(-1, keepdim=True)
        ids = torch.cat([ids[:, : place + 1], drawn, ids[:, place + 2 :]], 1)
    return ids


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0, entropy=False)
    return fnppo.ppo_loss(stats, micro_batch.targets, surrogate=fnppo.surrogates.gpg)


def iteration(params, opt_state, learning_rate, noise):
    """One step of GRPO, sampling included: new params, new opt_state, mean reward."""
    ids = sample(params, noise)
    rewards = (ids[:, 1:] == (ids[:, :-1] + 1) % DIGITS).double().mean(1)
    advantages = on_every_token(fnppo.grpo_advantages(rewards, batch.groups), batch.loss_mask)[:, 1:].flatten()
    targets = layout.targets._replace(token_ids=ids[:, 1:].flatten(), advantages=advantages)
    micro_batch = fnppo.ModelBatch(layout.inputs._replace(input_ids=ids), targets)
    optimizer = fnppo.adamw(learning_rate, weight_decay=0.0)
    params, opt_state, _ = fnppo.train_step(params, opt_state, [micro_batch], loss_fn=loss_fn, optimizer=optimizer)
    return params, opt_state, rewards.mean()


def first_params(seed):
    torch.manual_seed(seed)
    return fnppo.functional_policy(LlamaForCausalLM(config).double())[1]


def gumbel(step, seed):
    generator = torch.Generator().manual_seed(1000 * step + seed)
    return -torch.empty(len(prompts), LENGTH, DIGITS, dtype=torch.float64).exponential_(generator=generator).log()


def train(params, learning_rate, noise_of, transform=lambda function: function):
    """The last parameters, and the reward of each step."""
    opt_state, rewards = transform(fnppo.adamw(0.0).init)(params), []
    for step in range(STEPS):
        params, opt_state, reward = transform(iteration)(params, opt_state, learning_rate, noise_of(step))
        rewards += [reward]
    return params, torch.stack(rewards)


runs = [(rate, seed) for rate in RATES for seed in range(SEEDS)]
with float64_everywhere():
    firsts = [first_params(seed) for _, seed in runs]
    stacked = {name: torch.stack([first[name] for first in firsts]) for name in firsts[0]}
    rates = torch.tensor([rate for rate, _ in runs], dtype=torch.float64)
    noises = lambda step: torch.stack([gumbel(step, seed) for _, seed in runs])  # noqa: E731
    began = time.process_time()
    last, rewards = train(stacked, rates, noises, torch.vmap)
    at_once, alone, difference = time.process_time() - began, 0.0, 0.0
    for run in range(0, len(runs), SEEDS):  # the first seed of each rate
        began = time.process_time()
        one, _ = train(firsts[run], runs[run][0], lambda step, seed=runs[run][1]: gumbel(step, seed))
        alone += time.process_time() - began
        difference = max(difference, *((last[name][run] - one[name]).abs().max().item() for name in one))

of_run = rewards.reshape(STEPS, len(RATES), SEEDS)
print(f"               share right in the last steps, {SEEDS} seeds   half are right")
print("learning rate          mean     worst      best                 after")
for rate, found, curve in zip(RATES, of_run[-5:].mean(0), of_run.mean(2).T, strict=True):
    after = f"{(curve > 0.5).nonzero()[0].item()} steps" if (curve > 0.5).any() else "never"
    print(f"{rate:13.4f} {found.mean():13.3f} {found.min():9.3f} {found.max():9.3f} {after:>21}")
print(f"\n{len(RATES)} of the runs one by one: no parameter differs by more than {difference:.0e} at the end")
print(f"CPU seconds: {len(runs)} runs at once {at_once:.0f}, {len(RATES)} runs one by one {alone:.0f}")

if args.plot:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "fnppo"
    figure, axes = pyplot.subplots(figsize=(6.5, 3), layout="constrained")
    for rate, curves in zip(RATES, of_run.unbind(1), strict=True):
        (line,) = axes.plot(curves.mean(1), label=f"{rate:g}")
        axes.fill_between(range(STEPS), curves.amin(1), curves.amax(1), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel=f"reward: mean, worst, best of {SEEDS}", ylim=(0, 1))
    axes.legend(title="learning rate", fontsize="small")
    figure.savefig(args.plot, metadata={"Date": None})
