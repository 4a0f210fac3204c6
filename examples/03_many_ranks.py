"""The first example on many ranks, sharded by FSDP2: on two processes of a CPU, or on any number of GPUs.

torchrun --standalone --nproc-per-node 2 examples/03_many_ranks.py

Killed and started again, it goes on from its last checkpoint and ends with the same bits. With --max-restarts 3 torchrun
starts it again by itself. Eight GPUs of one machine: --nproc-per-node 8. Several machines: docs/pages/many-ranks.md.
"""

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.distributed import FSDPActor, make_mesh, start
from fnppo.rollout import generate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--folder", default="runs/many-ranks", help="checkpoints and, at the end, the model (runs/many-ranks)"
)
parser.add_argument("--steps", type=int, default=20, help="updates to make (20)")
parser.add_argument("--sequence", type=int, default=1, help="ranks that share the tokens of a row (1)")
args = parser.parse_args()

device = start()
mesh = make_mesh(sequence=args.sequence)
ranks, rank = dist.get_world_size() // args.sequence, dist.get_rank() // args.sequence  # that have rows of their own
responses = max(16 // ranks, 4)  # of a rank to a prompt

torch.manual_seed(0)  # the same weights on every rank
config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
module = LlamaForCausalLM(config).to(device)
sampler, _ = fnppo.functional_policy(module)
actor = FSDPActor(module, fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(3e-3)), mesh=mesh)


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=actor.policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets, clip_high=0.28)


restored = actor.load(f"{args.folder}/checkpoints")
for step in range(0 if restored is None else restored.step, args.steps):
    params = dict(actor.gathered())  # a large model would go to a server that samples
    batch = generate(
        params, [[1, 2], [3]], policy=sampler, max_new_tokens=8, num_responses=responses, seed=step * ranks + rank,
        eos_token_id=(),
    )  # fmt: skip
    rewards = ((batch.input_ids == 7) & batch.loss_mask).float().sum(1)  # how often it says token 7
    advantages = fnppo.grpo_advantages(rewards, batch.groups)
    groups = batch.groups + 2 * rank  # numbered over all ranks
    batch = batch._replace(advantages=advantages[:, None].expand(batch.input_ids.shape), groups=groups)
    metrics = actor.update_policy(batch, loss_fn=loss_fn, mini_batch_size=2 * responses * ranks, max_tokens=100)
    reward = rewards.mean()
    dist.all_reduce(reward)
    if dist.get_rank() == 0:
        print(
            f"step {step:2d}  reward {reward / dist.get_world_size():.2f} of 8  entropy {metrics['entropy']:.2f}",
            flush=True,
        )
    if (step + 1) % 5 == 0:
        actor.save(f"{args.folder}/checkpoints", step=step + 1, keep=2, wait=step + 1 == args.steps)
actor.export(f"{args.folder}/model")
dist.destroy_process_group()
