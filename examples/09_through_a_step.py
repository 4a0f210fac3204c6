"""Differentiating through `train_step`: how the policy after three updates depends on their learning rate and their loss.

A step with `sgd` is a pure function of parameters, batch and hyper-parameters, so `torch.func.grad` goes through it, through
the gradient inside it, and through several steps in a row. The outcome is the loss on other rollouts after the last step, its
derivative the meta-gradient of Xu et al. 2018 (arXiv:1805.09801), here checked against central differences. That of the clip
is zero: a clipped token has no gradient, whatever the bound.

python examples/09_through_a_step.py --plot through.svg
"""

import argparse

import torch
from torch.func import grad_and_value
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate
from fnppo.surrogates import sapo
from fnppo.testing import float64_everywhere

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="few rows and one step, for tests")
parser.add_argument("--plot", metavar="FILE", help="write the outcome over the learning rate, with tangents, to an SVG")
args = parser.parse_args()
ROWS, STEPS, DESCENTS = (8, 2, 2) if args.small else (32, 3, 12)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
policy, start = fnppo.functional_policy(LlamaForCausalLM(config).double())


def rollouts(seed):
    batch = generate(
        start, [[1, 7], [2, 9]], policy=policy, max_new_tokens=6, num_responses=ROWS // 2, seed=seed, eos_token_id=()
    )
    rewards = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).float().sum(1)
    advantages = on_every_token(fnppo.grpo_advantages(rewards, batch.groups), batch.loss_mask)
    old = fnppo.compute_logprobs(start, batch, policy=policy, temperature=1.0, max_tokens=4000).logprobs
    batch = batch._replace(advantages=advantages, old_logprobs=old, ref_logprobs=old)
    return fnppo.pack_sequences(fnppo.token_mean(batch))


def outcome(knobs, surrogate, other):
    """-Σ w A ρ on other rollouts, after steps on `train` whose numbers are the knobs, {name: tensor}."""
    numbers = {name: value for name, value in knobs.items() if name != "learning_rate"}

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets, surrogate=surrogate, **numbers)

    params, optimizer = start, fnppo.sgd(knobs["learning_rate"])
    opt_state = optimizer.init(params)
    for _ in range(STEPS):
        params, opt_state, _ = fnppo.train_step(params, opt_state, [train], loss_fn=loss_fn, optimizer=optimizer)
    stats = fnppo.forward_logprobs(params, other, policy=policy, temperature=1.0, entropy=False)
    return fnppo.ppo_loss(stats, other.targets, clip_low=1.0, clip_high=torch.inf, dual_clip=None)[0]


def central_difference(knobs, surrogate, name):
    step = 1e-4 * knobs[name]
    up, down = (outcome(knobs | {name: knobs[name] + sign * step}, surrogate, valid) for sign in (1, -1))
    return (up - down) / (2 * step)


def as_tensors(**numbers):
    return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}


with float64_everywhere():
    train, valid, fresh = rollouts(0), rollouts(1), rollouts(2)
    common = {"learning_rate": 0.3, "entropy_coef": 0.01, "kl_coef": 0.1}
    cases = [
        (fnppo.clipped_surrogate, as_tensors(**common, clip_low=0.2, clip_high=0.2)),
        (sapo, as_tensors(**common, tau_pos=1.0, tau_neg=1.05)),
    ]
    print("surrogate           number          value   meta-gradient   central difference")
    for surrogate, knobs in cases:
        gradients, _ = grad_and_value(outcome)(knobs, surrogate, valid)
        for name, value in knobs.items():
            found = f"{gradients[name]:15.9f} {central_difference(knobs, surrogate, name):20.9f}"
            print(f"{surrogate.__name__:19s} {name:13s} {value:7.2f} {found}")

    # The library's own optimizer descends on the logarithms of the last case's numbers, by these gradients.
    logs, optimizer = {name: value.log() for name, value in knobs.items()}, fnppo.adamw(0.3, weight_decay=0.0)
    opt_state = optimizer.init(logs)

    def of_logs(logs, other):
        return outcome({name: log.exp() for name, log in logs.items()}, sapo, other)

    print("\n         learning  entropy                             outcome, on the rollouts")
    print("descent      rate     coef  kl_coef  tau_pos  tau_neg   descended on       unseen")
    for descent in range(DESCENTS + 1):
        gradients, value = grad_and_value(of_logs)(logs, valid)
        if descent % (DESCENTS // 2) == 0:
            numbers = "".join(f"{log.exp():9.4f}" for log in logs.values())
            print(f"{descent:7d} {numbers} {value:14.4f} {of_logs(logs, fresh):12.4f}")
        updates, opt_state = optimizer.update(gradients, opt_state, logs)
        logs = fnppo.apply_updates(logs, updates)

    if args.plot:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot

        pyplot.rcParams["svg.hashsalt"] = "fnppo"
        figure, axes = pyplot.subplots(figsize=(6.5, 3), layout="constrained")
        for surrogate, knobs in cases:
            rates = torch.linspace(0.02, 1.2, 60, dtype=torch.float64)
            of_rate = lambda rate: outcome(knobs | {"learning_rate": rate}, surrogate, valid)  # noqa: B023, E731
            (line,) = axes.plot(rates, [of_rate(rate) for rate in rates], label=surrogate.__name__, alpha=0.5)
            for rate in rates[4::10]:
                (slope, value), ends = grad_and_value(of_rate)(rate), torch.stack([rate - 0.06, rate + 0.06])
                axes.plot(ends, value + slope * (ends - rate), color=line.get_color(), linewidth=2.5)
        axes.set(xlabel="learning rate of three steps of SGD", ylabel="loss on other rollouts")
        axes.legend()
        figure.savefig(args.plot, metadata={"Date": None})
