"""Replay: one step of a training, written to a file and made again to the bit, and the rollout that caused its spike.

A training runs until its gradient norm jumps (here a sampler reports wrong log-probs for one rollout at step 12). No function
changes its inputs, so those of the step are still there when the spike is seen, and go to a file. `--replay FILE` reads it in
another process, makes the step again, and asks which micro-batch, row and tokens the norm comes from. PaLM (arXiv:2204.02311,
section 5.1) met spikes that came from certain batches in certain states of the parameters: the file holds both.

python examples/10_replay.py
"""

import argparse
import subprocess
import sys
import tempfile
from statistics import median

import optree
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="few rows, for tests")
parser.add_argument("--replay", metavar="FILE", help="only make the step of this file again, and look into it")
parser.add_argument("--record", metavar="FILE", help="where the inputs of the step go (a temporary file)")
args = parser.parse_args()
STEPS, BROKEN, RESPONSES, MAX_TOKENS = (6, 4, 4, 40) if args.small else (16, 12, 32, 160)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config))
optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(3e-3))


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets, dual_clip=None)


def split(batch):
    plan = fnppo.plan_microbatches(fnppo.lengths(batch), max_tokens=MAX_TOKENS)
    return plan, [fnppo.pack_sequences(fnppo.select_rows(batch, rows)) for rows in plan]


def step_of(params, opt_state, batch):
    return fnppo.train_step(params, opt_state, split(batch)[1], loss_fn=loss_fn, optimizer=optimizer)


def rollouts(params, step):
    batch = generate(
        params, [[1, 7], [2, 9]], policy=policy, max_new_tokens=8, num_responses=RESPONSES, seed=step, eos_token_id=0
    )
    rewards = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).float().sum(1)
    advantages = on_every_token(fnppo.grpo_advantages(rewards, batch.groups), batch.loss_mask)
    if step == BROKEN:  # the sampler's log-probs of one response are far too low
        shift = 4.0 * (torch.arange(len(rewards)) == advantages.amin(1).argmin())
        batch = batch._replace(old_logprobs=batch.old_logprobs - shift[:, None])
    return fnppo.token_mean(batch._replace(advantages=advantages))


def train(file):
    """Until a spike; then what its step was given, and what came out of it, go to the file."""
    now, norms = [params, optimizer.init(params)], []
    for step in range(STEPS):
        batch = rollouts(now[0], step)
        *after, metrics = step_of(*now, batch)
        norms.append(fnppo.summarize(metrics)["grad_norm"])
        spike = step >= 3 and norms[-1] > 4 * median(norms)
        print(f"step {step:2d}   gradient norm {norms[-1]:7.3f}" + "   <- spike, recorded" * spike)
        if spike:
            trees = {"before": optree.tree_leaves(now), "after": optree.tree_leaves(after)}
            return torch.save({"step": step, "batch": batch._asdict(), **trees}, file)
        now = after
    raise SystemExit("there was no spike")


def norm_of(params, batch):
    _, gradients = fnppo.value_and_grad(loss_fn)(params, fnppo.pack_sequences(batch))
    return fnppo.global_norm(gradients).item()


def replay(file):
    saved = torch.load(file, weights_only=True)
    batch = fnppo.PaddedBatch(**saved["batch"])
    now = optree.tree_structure([params, optimizer.init(params)]).unflatten(saved["before"])
    *after, _ = step_of(*now, batch)
    same = all(map(torch.equal, optree.tree_leaves(after), saved["after"]))
    print(f"\nstep {saved['step']} again, in another process: {'the same bits' if same else 'OTHER BITS'}")

    print("\nmicro-batch   rows   tokens   gradient norm   largest ratio")
    worst = []
    for number, (rows, micro_batch) in enumerate(zip(*split(batch), strict=True)):
        (_, metrics), gradients = fnppo.value_and_grad(loss_fn)(now[0], micro_batch)
        norm, found = fnppo.global_norm(gradients).item(), fnppo.summarize(metrics)
        worst = max(worst, [norm, rows])
        print(f"{number:11d} {len(rows):6d} {found['tokens']:8.0f} {norm:15.3f} {found['ratio_max']:15.2f}")
    rows = sorted(((norm_of(now[0], fnppo.select_rows(batch, [row])), row) for row in worst[1]), reverse=True)
    print("\nits rows with the largest gradients: " + ", ".join(f"row {row} {norm:.3f}" for norm, row in rows[:3]))

    row = rows[0][1]
    stats = fnppo.compute_logprobs(now[0], batch, policy=policy, temperature=1.0, max_tokens=MAX_TOKENS)
    print(f"\nrow {row}   advantage   log-prob of the sampler   of the trainer")
    for column in batch.loss_mask[row].nonzero()[:, 0].tolist():
        columns = batch.input_ids, batch.advantages, batch.old_logprobs, stats.logprobs
        print("token {:3d} {:8.2f} {:25.3f} {:16.3f}".format(*(each[row, column] for each in columns)))
    rest = fnppo.select_rows(batch, [other for other in range(len(batch.groups)) if other != row])
    print(f"\ngradient norm: {norm_of(now[0], batch):.3f}, without row {row}: {norm_of(now[0], rest):.3f}")


if args.replay:
    replay(args.replay)
    raise SystemExit
with tempfile.TemporaryDirectory() as folder:
    train(file := args.record or f"{folder}/step.pt")
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "--replay", file, *["--small"] * args.small], check=True)
