"""Actor-critic PPO, from one tree of parameters for both and from two trees: on a CPU, in seconds.

A tiny random model is asked for a token and rewarded each time it says it. The critic learns what is still to come, and
the advantages (GAE) tell which tokens did better than that.

python examples/02_actor_critic.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.critic import functional_actor_critic, functional_critic
from fnppo.losses import add_losses
from fnppo.rollout import generate
from fnppo.values import compute_values, explained_variance, forward_logprobs_and_values, forward_values, value_loss

STEPS = 12
UPDATE = dict(mini_batch_size=16, max_tokens=100, num_epochs=2)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
module = LlamaForCausalLM(config)
optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(3e-3))


def sample(params, policy, step):
    """Responses of 8 tokens to prompts that end with the token that is asked for, and the reward of each token."""
    batch = generate(
        params, [[1, 7], [2, 9]], policy=policy, max_new_tokens=8, num_responses=16, seed=step, eos_token_id=()
    )
    return batch, ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).float()


def with_advantages(batch, rewards, values):
    """The columns that the losses read. `values` stay those from before the update, all through it."""
    advantages, returns = fnppo.gae_advantages(rewards, values, batch.loss_mask, gamma=0.9, lam=0.9)
    return batch._replace(advantages=advantages, extra={"values": values, "returns": returns})


def shared_tree():
    """One trunk, one forward, one loss, one optimizer."""
    policy, critic, params = functional_actor_critic(module)
    opt_state = optimizer.init(params)

    def loss_fn(params, mb):
        stats, values = forward_logprobs_and_values(params, mb, policy=policy, critic=critic, temperature=1.0)
        return add_losses(ppo_loss(stats, mb), value_loss(values, mb.targets, clip=0.5), coef=0.5)

    for step in range(STEPS):
        batch, rewards = sample(params, policy, step)
        values = compute_values(params, batch, critic=critic, max_tokens=1000)
        batch = with_advantages(batch, rewards, values)
        params, opt_state, metrics = fnppo.update_policy(
            params, opt_state, batch, loss_fn=loss_fn, optimizer=optimizer, **UPDATE
        )
        yield rewards, metrics


def separate_trees():
    """Two models, each with a loss and an optimizer of its own."""
    policy, params = fnppo.functional_policy(module)
    critic, critic_params = functional_critic(module)
    opt_state, critic_opt_state = optimizer.init(params), optimizer.init(critic_params)

    def actor_loss(params, mb):
        return ppo_loss(fnppo.forward_logprobs(params, mb, policy=policy, temperature=1.0), mb)

    def critic_loss(params, mb):
        return value_loss(forward_values(params, mb, critic=critic), mb.targets, clip=0.5)

    for step in range(STEPS):
        batch, rewards = sample(params, policy, step)
        values = compute_values(critic_params, batch, critic=critic, max_tokens=1000)
        batch = with_advantages(batch, rewards, values)
        params, opt_state, _ = fnppo.update_policy(
            params, opt_state, batch, loss_fn=actor_loss, optimizer=optimizer, **UPDATE
        )
        critic_params, critic_opt_state, metrics = fnppo.update_policy(
            critic_params, critic_opt_state, batch, loss_fn=critic_loss, optimizer=optimizer, **UPDATE
        )
        yield rewards, metrics


def ppo_loss(stats, mb):
    return fnppo.ppo_loss(stats, mb.targets, entropy_coef=0.01)


def describe(rewards, metrics):
    return f"reward {rewards.sum(1).mean():.2f} of 8, explained variance {explained_variance(metrics):5.2f}"


for step, results in enumerate(zip(shared_tree(), separate_trees(), strict=True)):
    shared, separate = (describe(*result) for result in results)
    print(f"step {step:2d}   one tree: {shared}   two trees: {separate}")
