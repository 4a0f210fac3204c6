"""A policy update in under forty lines: a tiny random model learns to say one token, on a CPU, in seconds.

python examples/01_first_update.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.rollout import generate

torch.manual_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config))
optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(3e-3))
opt_state = optimizer.init(params)


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
    return fnppo.ppo_loss(stats, micro_batch.targets, clip_high=0.28)


for step in range(20):
    batch = generate(
        params, [[1, 2], [3]], policy=policy, max_new_tokens=8, num_responses=16, seed=step, eos_token_id=()
    )
    rewards = ((batch.input_ids == 7) & batch.loss_mask).float().sum(1)  # how often it says token 7
    advantages = fnppo.grpo_advantages(rewards, batch.groups)
    batch = fnppo.token_mean(batch._replace(advantages=advantages[:, None].expand(batch.input_ids.shape)))

    plan = fnppo.plan_microbatches(fnppo.lengths(batch), max_tokens=100)
    micro_batches = [fnppo.pack_sequences(fnppo.select_rows(batch, rows)) for rows in plan]
    params, opt_state, metrics = fnppo.train_step(
        params, opt_state, micro_batches, loss_fn=loss_fn, optimizer=optimizer
    )
    print(f"step {step:2d}  reward {rewards.mean():.2f} of 8  entropy {fnppo.summarize(metrics)['entropy']:.2f}")
