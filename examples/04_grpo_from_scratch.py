"""GRPO on a model of its own: a tiny Llama, made at random, learns to sort four digits from right or wrong alone.

It first sees a few solved examples (a supervised step is the same update, with an advantage of 1 on a given response),
after which 3 samples in 100 are right. From there on it gets no solution any more: it samples, the reward is 1 if all
four tokens are right and else 0, and GRPO (Shao et al. 2024, arXiv:2402.03300) does the rest. A tenth of all prompts is
never trained on and is the test.

python examples/04_grpo_from_scratch.py --plot grpo.svg
"""

import argparse
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="a few steps, for tests")
parser.add_argument("--plot", metavar="FILE", help="write the curves to an SVG")
parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (0)")
args = parser.parse_args()

LENGTH, SEPARATOR = 4, 10  # tokens 0 to 9 are the digits
SUPERVISED, STEPS, EVERY = (4, 2, 1) if args.small else (16, 120, 10)
PROMPTS, RESPONSES, TESTS = (8, 4, 20) if args.small else (128, 4, 200)  # of a step, to each prompt, of the test

torch.manual_seed(args.seed)
draw = random.Random(args.seed)
config = LlamaConfig(vocab_size=11, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config))


def questions(count, *, test=False):
    """Random prompts: digits and the separator. A prompt is of the test or of the training, never of both."""
    found = []
    while len(found) < count:
        digits = [draw.randrange(10) for _ in range(LENGTH)]
        if (sum(digit * 7**place for place, digit in enumerate(digits)) % 10 == 0) == test:
            found.append([*digits, SEPARATOR])
    return found


def sample(params, prompts, **options):
    """Responses, and a reward for each: 1 if it is its prompt in order, else 0."""
    batch = generate(params, prompts, policy=policy, max_new_tokens=LENGTH, eos_token_id=(), **options)
    digits, response = batch.input_ids[:, :LENGTH], batch.input_ids[:, -LENGTH:]
    return batch, (response == digits.sort(1).values).all(1).float()


def supervised_loss(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets, surrogate=fnppo.surrogates.gpg)  # -A log π


def grpo_loss(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets, clip_high=0.28, kl_coef=0.01)


optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(2e-3, weight_decay=0.0))
opt_state = optimizer.init(params)
for _ in range(SUPERVISED):
    prompts = questions(32)
    batch = fnppo.padded_batch(prompts, [sorted(prompt[:LENGTH]) for prompt in prompts], advantages=[1.0] * 32)
    params, opt_state, _ = fnppo.update_policy(
        params, opt_state, batch, loss_fn=supervised_loss, optimizer=optimizer, mini_batch_size=32, max_tokens=4096
    )

reference, test = params, questions(TESTS, test=True)  # no function changes params, so a second name is a copy
optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(7e-4, weight_decay=0.0))
opt_state, curve = optimizer.init(params), []
print("       right, sampled   right, greedy   entropy    kl to the   clipped")
print("step      in training     on the test             reference")
for step in range(STEPS + 1):
    batch, rewards = sample(params, questions(PROMPTS), num_responses=RESPONSES, seed=step)
    advantages = fnppo.grpo_advantages(rewards, batch.groups)
    ref = fnppo.compute_logprobs(reference, batch, policy=policy, temperature=1.0, max_tokens=4096).logprobs
    batch = batch._replace(advantages=on_every_token(advantages, batch.loss_mask), ref_logprobs=ref)
    _, tested = sample(params, test, seed=0, greedy=True) if step % EVERY == 0 else (None, None)
    params, opt_state, metrics = fnppo.update_policy(
        params, opt_state, batch, loss_fn=grpo_loss, optimizer=optimizer, mini_batch_size=len(rewards) // 2,
        max_tokens=4096,
    )  # fmt: skip
    if tested is not None:
        curve.append((step, rewards.mean().item(), tested.mean().item()))
        print(
            f"{step:4d} {rewards.mean():16.1%} {tested.mean():15.1%} {metrics['entropy']:9.2f} {metrics['kl']:12.3f} "
            f"{metrics['clamped_fraction']:9.1%}",
            flush=True,
        )

if args.plot:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "fnppo"
    figure, axes = pyplot.subplots(figsize=(6.5, 3), layout="constrained")
    steps, sampled, tested = zip(*curve, strict=True)
    axes.plot(steps, sampled, label="sampled, in training")
    axes.plot(steps, tested, label="greedy, on the test")
    axes.set(xlabel="GRPO steps", ylabel="share that is right", ylim=(0, 1))
    axes.legend()
    figure.savefig(args.plot, metadata={"Date": None})
