"""LoRA by `partition` and `combine`: low-rank adapters are trained, the model is frozen and is its own reference policy.

An adapter is two more tensors beside a weight, W + scale · up · down, and a function puts them in: no layer is replaced,
and a policy without adapters is the same function of other parameters. (Hu et al., 2106.09685)

python examples/12_lora.py
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.rollout import generate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rank", type=int, default=4, help="of the adapters (4)")
parser.add_argument("--steps", type=int, default=20, help="updates to make (20)")
parser.add_argument("--small", action="store_true", help="fewer steps, for a test")
args = parser.parse_args()

ADAPTED = ("q_proj.weight", "v_proj.weight", "down_proj.weight")
DOWN, UP = ".lora_down", ".lora_up"


def adapters(params, *, rank, seed):
    """Two tensors for each adapted weight: `down` at random, `up` of zeros, so that nothing changes at first."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, weight in params.items():
        if name.endswith(ADAPTED):
            rows, columns = weight.shape
            made[name + DOWN] = torch.randn(rank, columns, generator=generator) / columns**0.5
            made[name + UP] = torch.zeros(rows, rank)
    return made


def adapted(tree, scale=2.0):
    """The parameters that the model reads, from those of the model and of the adapters."""
    model, low_rank = fnppo.partition(tree, lambda name: not name.endswith((DOWN, UP)))
    return {
        name: weight + scale * low_rank[name + UP] @ low_rank[name + DOWN] if name + UP in low_rank else weight
        for name, weight in model.items()
    }


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    initializer_range=0.1,  # a head of small random numbers, once frozen, could not be sure of anything
)  # fmt: skip
policy, params = fnppo.functional_policy(LlamaForCausalLM(config))
tree = fnppo.combine(params, adapters(params, rank=args.rank, seed=0))
trained, frozen = fnppo.partition(tree, lambda name: name.endswith((DOWN, UP)))
optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(2e-2))
opt_state = optimizer.init(trained)  # moments of the adapters alone
counts = [sum(leaf.numel() for leaf in part.values()) for part in (trained, frozen)]
print(f"{counts[0]:,} numbers are trained beside {counts[1]:,} that are frozen")


def loss_fn(trained, micro_batch):
    params = adapted(fnppo.combine(trained, frozen))
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets, kl_coef=0.02)


for step in range(8 if args.small else args.steps):
    batch = generate(
        adapted(fnppo.combine(trained, frozen)), [[1, 2], [3]], policy=policy, max_new_tokens=8, num_responses=16,
        seed=step, eos_token_id=(),
    )  # fmt: skip
    rewards = ((batch.input_ids == 7) & batch.loss_mask).float().sum(1)  # how often it says token 7
    advantages = fnppo.grpo_advantages(rewards, batch.groups)
    reference = fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=1000)  # no adapters
    batch = batch._replace(
        advantages=advantages[:, None].expand(batch.input_ids.shape), ref_logprobs=reference.logprobs
    )
    trained, opt_state, metrics = fnppo.update_policy(
        trained, opt_state, batch, loss_fn=loss_fn, optimizer=optimizer, mini_batch_size=32, max_tokens=100
    )
    print(f"step {step:2d}  reward {rewards.mean():.2f} of 8  KL to the reference {metrics['kl']:.2f}")
