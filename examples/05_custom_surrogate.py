"""A surrogate and a metric of your own: SPO beside PPO's clip, on the same run.

A clip takes the gradient away from a token whose ratio ρ has left [1 - ε, 1 + ε]. It does not bring the ratio back, and
the other tokens go on moving it, since they share its parameters. Simple Policy Optimization (Xie et al., arXiv:2401.16025)
has a parabola in place of the clip, which is lowest at the bound and pulls back beyond it:

    l_t = -A_t ρ_t + |A_t| / (2 ε) · (ρ_t - 1)²

A surrogate is a function (stats, targets, **numbers) -> (one loss a target, clips), and `ppo_loss` takes it as it is. Its
numbers may be tensors, and it is summed in any layout and any micro-batches like those of the library.

python examples/05_custom_surrogate.py --plot spo.svg
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate
from fnppo.surrogates import column, log_ratio

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="a few steps, for tests")
parser.add_argument("--plot", metavar="FILE", help="write the curves to an SVG")
args = parser.parse_args()

EPS, STEPS, EPOCHS, RESPONSES = (0.2, 2, 2, 4) if args.small else (0.2, 16, 8, 32)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
policy, start = fnppo.functional_policy(LlamaForCausalLM(config))
optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-3, weight_decay=0.0))


def spo(stats, targets, *, eps):
    ratio, advantages = log_ratio(stats, targets).exp(), column("advantages", targets)
    return -advantages * ratio + advantages.abs() / (2 * eps) * (ratio - 1).square(), {}


def clipped(stats, targets, *, eps):
    return fnppo.clipped_surrogate(stats, targets, clip_low=eps, clip_high=eps, dual_clip=None)


def outside(stats, targets):
    """A metric of our own: targets whose ratio has left the interval, as a sum. `summarize` divides it, once."""
    return ((log_ratio(stats, targets).exp() - 1).abs() > EPS).float().sum()


def run(surrogate):
    """The training with one surrogate: the same first parameters, prompts and seeds for each."""

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
        loss, metrics = fnppo.ppo_loss(stats, micro_batch.targets, surrogate=surrogate, eps=EPS)
        mine = {"outside": outside(stats, micro_batch.targets)}
        return loss, metrics._replace(per_token=metrics.per_token | mine)

    params, opt_state = start, optimizer.init(start)
    for step in range(STEPS):
        batch = generate(
            params, [[1, 7], [2, 9]], policy=policy, max_new_tokens=8, num_responses=RESPONSES, seed=step,
            eos_token_id=(),
        )  # fmt: skip
        asked = batch.input_ids[:, 1:2]  # the prompt's last token, to be said as often as possible
        rewards = ((batch.input_ids == asked) & batch.loss_mask).float().sum(1)
        advantages = fnppo.grpo_advantages(rewards, batch.groups)
        batch = batch._replace(advantages=on_every_token(advantages, batch.loss_mask))
        params, opt_state, _ = fnppo.update_policy(
            params, opt_state, batch, loss_fn=loss_fn, optimizer=optimizer, num_epochs=EPOCHS, mini_batch_size=RESPONSES,
            max_tokens=1000,
        )  # fmt: skip
        _, metrics = loss_fn(params, fnppo.pack_sequences(fnppo.token_mean(batch)))  # once more, after the update
        yield rewards.mean().item(), fnppo.summarize(metrics)


print("      ----------- clipped ----------   ------------- spo ------------")
print("step   reward   outside   ratio up to   reward   outside   ratio up to")
curves = list(zip(run(clipped), run(spo), strict=True))
for step, row in enumerate(curves):
    cells = [f"{reward:9.2f} {found['outside']:9.1%} {found['ratio_max']:13.2f}" for reward, found in row]
    print(f"{step:4d}", *cells)

if args.plot:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "fnppo"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(6.5, 3), layout="constrained")
    for name, of_run in zip(("clipped", "SPO"), zip(*curves, strict=True), strict=True):
        left.plot([reward for reward, _ in of_run], label=name)
        right.plot([found["outside"] for _, found in of_run], label=name)
    left.set(xlabel="step", ylabel="reward, of 8")
    right.set(xlabel="step", ylabel=f"share of ratios beyond 1 ± {EPS}", ylim=(0, None))
    left.legend()
    figure.savefig(args.plot, metadata={"Date": None})
