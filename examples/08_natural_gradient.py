"""The natural gradient: Fisher-vector products by jvp and vjp, conjugate gradient, and a trust region that is measured.

The KL between a policy and one a step d away is ½ dᵀF d and higher orders, F = E[∇log π ∇log πᵀ] the Fisher matrix. F has as
many rows as there are parameters, but F v is a jvp and a vjp through the log-probs. So F x = g is solved by conjugate gradient,
and the step goes along x until the predicted KL is δ: TRPO (Schulman et al. 2015, arXiv:1502.05477, appendix C). A line
search halves it while the measured KL is above 1.5 δ. Beside it stands a step along the plain gradient, for the same δ.

python examples/08_natural_gradient.py
"""

import argparse

import optree
import torch
from optree.integrations.torch import tree_ravel
from torch.func import grad, jvp, vjp
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate
from fnppo.testing import float64_everywhere

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="few rows and iterations, for tests")
args = parser.parse_args()
ROWS, TRAINED, ITERATIONS, DAMPING = (32, 3, 3, 1e-2) if args.small else (64, 12, 20, 1e-2)
BOUNDS = [1e-3] if args.small else [1e-4, 1e-3, 1e-2, 1e-1]

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config).double())


def rollouts(params, seed):
    batch = generate(
        params, [[1, 7], [2, 9]], policy=policy, max_new_tokens=6, num_responses=ROWS // 2, seed=seed, eos_token_id=()
    )
    rewards = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).float().sum(1)
    advantages = fnppo.grpo_advantages(rewards, batch.groups)
    old = fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=4000).logprobs
    batch = batch._replace(advantages=on_every_token(advantages, batch.loss_mask), old_logprobs=old)
    return fnppo.pack_sequences(fnppo.token_mean(batch))


def loss_fn(params, batch):
    """PPO's without a clip: -Σ w A ρ. Here the trust region is to hold the policy."""
    stats = fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0, entropy=False)
    return fnppo.ppo_loss(stats, batch.targets, clip_low=1.0, clip_high=torch.inf, dual_clip=None)


def kl(params, other, batch):
    """Mean KL(params ‖ other) over the positions that the rollouts came by, over the whole vocabulary."""
    return (batch.targets.loss_weights * fnppo.exact_kl(params, other, batch, policy=policy, temperature=1.0)).sum()


def fisher(flat, batch):
    """v -> F v, F = Jᵀ diag(w p) J, where J is the Jacobian of the log-probs of all tokens of the vocabulary: exact."""
    vocab, targets = policy.vocab_size, batch.targets  # a position predicts as many tokens as have a target there
    every = optree.tree_map(lambda column: column.repeat_interleave(vocab), targets)
    every = every._replace(token_ids=torch.arange(vocab).repeat(targets.rows.numel()))

    def logprobs(flat):
        mb = batch._replace(targets=every)
        return fnppo.forward_logprobs(unravel(flat), mb, policy=policy, temperature=1.0, entropy=False).logprobs

    values, pull_back = vjp(logprobs, flat)
    weights = every.loss_weights * values.exp()
    return lambda v: pull_back(weights * jvp(logprobs, (flat,), (v,))[1])[0]


def conjugate_gradient(product, g):
    """x with (F + DAMPING) x = g, nearly."""
    x, r, d = torch.zeros_like(g), g, g
    for _ in range(ITERATIONS):
        curved = product(d) + DAMPING * d
        step = r @ r / (d @ curved)
        x, r, before = x + step * d, r - step * curved, r @ r
        d = r + r @ r / before * d
    return x


with float64_everywhere():
    optimizer = fnppo.adamw(3e-3)
    opt_state = optimizer.init(params)
    for step in range(TRAINED):
        params, opt_state, _ = fnppo.train_step(
            params, opt_state, [rollouts(params, step)], loss_fn=loss_fn, optimizer=optimizer
        )
    batch = rollouts(params, TRAINED)
    flat, unravel = tree_ravel(params)
    loss = lambda flat: loss_fn(unravel(flat), batch)[0]  # noqa: E731
    g, fisher_times = grad(loss)(flat), fisher(flat, batch)
    hessian_of_kl = jvp(grad(lambda flat: kl(unravel(flat), params, batch)), (flat,), (g,))[1]
    print(f"F g is the Hessian of the exact KL times g, up to {(fisher_times(g) - hessian_of_kl).abs().max():.0e}\n")

    directions = {"natural": -conjugate_gradient(fisher_times, g), "plain": -g}
    print("curvature along   of the KL: dᵀFd / dᵀd   of the loss: dᵀHd / dᵀd")
    for name, d in directions.items():
        along_kl, along_loss = d @ fisher_times(d) / (d @ d), d @ jvp(grad(loss), (flat,), (d,))[1] / (d @ d)
        print(f"{name:15s} {along_kl:24.3f} {along_loss:25.3f}")

    print("\n                        KL              gain          after the line search")
    print("    δ   along      ½dᵀFd  measured    -gᵀd  measured   halved       KL    gain")
    for bound in BOUNDS:
        for name, d in directions.items():
            d, halved = d * (2 * bound / (d @ fisher_times(d))).sqrt(), 0
            of = lambda d: (kl(params, unravel(flat + d), batch), loss(flat) - loss(flat + d))  # noqa: E731
            found = searched = of(d)
            while searched[0] > 1.5 * bound or searched[1] < 0:
                halved += 1
                searched = of(d / 2**halved)
            print(
                f"{bound:7.4f} {name:8s} {d @ fisher_times(d) / 2:8.5f} {found[0]:9.5f} {-g @ d:7.3f} {found[1]:9.3f} "
                f"{halved:8d} {searched[0]:8.5f} {searched[1]:7.3f}"
            )
