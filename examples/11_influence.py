"""The influence of one rollout on the next policy: how much a step on it moves the log-prob of a sentence.

A weight ω of 1 stands before each rollout's loss. The policy after the step is a function of all ω, and the derivative of
log π(sentence) in ω is each rollout's influence (Koh & Liang 2017, arXiv:1703.04730; for one step of SGD, TracIn, Pruthi et al.
2020, arXiv:2002.08484). One derivative through `train_step` gives that of all rollouts. Beside it stands what it predicts: the
change when the step is made without a rollout (ω = 0, the other weights as they were), once for each, by vmap.

python examples/11_influence.py --plot influence.svg
"""

import argparse

import torch
from torch.func import grad, vmap
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate
from fnppo.testing import float64_everywhere

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="few rollouts, for tests")
parser.add_argument("--plot", metavar="FILE", help="write derivative against leaving out to an SVG")
args = parser.parse_args()
RESPONSES, TRAINED, RATES = (4, 1, [0.01, 0.1]) if args.small else (24, 4, [0.01, 0.1, 1.0])

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config).double())


def rollouts(params, seed):
    batch = generate(
        params, [[1, 7], [2, 9]], policy=policy, max_new_tokens=6, num_responses=RESPONSES, seed=seed, eos_token_id=()
    )
    rewards = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).float().sum(1)
    batch = batch._replace(advantages=on_every_token(fnppo.grpo_advantages(rewards, batch.groups), batch.loss_mask))
    return fnppo.token_mean(batch)


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0, entropy=False)
    return fnppo.ppo_loss(stats, fnppo.on_policy(micro_batch.targets, stats))


def after_a_step(omega, params, learning_rate):
    """log π(sentence) after one step of SGD on rollouts that are weighted by omega."""
    targets = micro_batch.targets
    weighted = targets._replace(loss_weights=targets.loss_weights * omega[targets.rows])
    optimizer = fnppo.sgd(learning_rate)
    params, _, _ = fnppo.train_step(
        params, optimizer.init(params), [micro_batch._replace(targets=weighted)], loss_fn=loss_fn, optimizer=optimizer
    )
    return fnppo.forward_logprobs(params, sentence, policy=policy, temperature=1.0, entropy=False).logprobs.sum()


with float64_everywhere():
    optimizer = fnppo.adamw(3e-3)
    opt_state = optimizer.init(params)
    for step in range(TRAINED):
        packed = fnppo.pack_sequences(rollouts(params, step))
        params, opt_state, _ = fnppo.train_step(params, opt_state, [packed], loss_fn=loss_fn, optimizer=optimizer)
    batch = rollouts(params, TRAINED)
    micro_batch = fnppo.pack_sequences(batch)
    sentence = fnppo.pack_sequences(fnppo.padded_batch([[1, 7]], [[7, 7, 7, 7, 7, 7]]))
    everyone = torch.ones(len(batch.groups), dtype=torch.float64)

    found = []
    print("learning rate   correlation   largest difference / largest influence")
    for rate in RATES:
        influence = grad(after_a_step)(everyone, params, rate)
        without = vmap(after_a_step, (0, None, None))(1 - torch.eye(len(everyone), dtype=torch.float64), params, rate)
        left_out = after_a_step(everyone, params, rate) - without
        found.append((rate, influence, left_out))
        correlation = torch.corrcoef(torch.stack([influence, left_out]))[0, 1]
        difference = (influence - left_out).abs().max() / influence.abs().max()
        print(f"{rate:13.2f} {correlation:13.5f} {difference:24.4f}")

rate, influence, left_out = found[1]
order = influence.argsort(descending=True).tolist()
print(f"\nlearning rate {rate}                                              by leaving")
print("rollout   prompt   response                  advantage  influence  it out")
for row in [*order[:4], *order[-4:]]:
    ids, advantage = batch.input_ids[row].tolist(), batch.advantages[row, 2]
    prompt, response = ("".join(f"{token:3d}" for token in part) for part in (ids[:2], ids[2:]))
    print(f"{row:7d} {prompt:>8s}   {response:22s} {advantage:11.2f} {influence[row]:10.4f} {left_out[row]:7.4f}")

if args.plot:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "fnppo"
    figure, panels = pyplot.subplots(1, len(found), figsize=(6.5, 2.7), layout="constrained")
    for axes, (rate, influence, left_out) in zip(panels, found, strict=True):
        ends = [min(*influence, *left_out), max(*influence, *left_out)]
        axes.plot(ends, ends, color="0.7", linewidth=1)
        axes.plot(influence, left_out, "o", markersize=3)
        axes.set(title=f"learning rate {rate}", xlabel="influence")
    panels[0].set_ylabel("change by leaving it out")
    figure.savefig(args.plot, metadata={"Date": None})
