"""The gradient of each sequence by vmap of grad: which one pulls hardest, how noisy they are, each clipped by itself.

A batch's gradient is a sum over its rows. Seen one by one, the rows show what the sum hides: an outlier (here a row whose
sampler reported log-probs 2 nats too low); what is left of it when each row's gradient is clipped before they are added;
and the gradient noise scale tr(Σ) / |G|² (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.9), the number of prompts in a
batch beyond which more of them help little.

python examples/07_sequence_gradients.py
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.advantages import on_every_token
from fnppo.rollout import generate
from fnppo.testing import float64_everywhere

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--small", action="store_true", help="few prompts and steps, for tests")
args = parser.parse_args()
PROMPTS, RESPONSES, STEPS, FRESH = (4, 4, 4, 2) if args.small else (32, 8, 60, 8)
PROMPT, RESPONSE = 2, 12  # tokens

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
policy, params = fnppo.functional_policy(LlamaForCausalLM(config).double())
optimizer = fnppo.adamw(1e-2, weight_decay=0.0)


def rollouts(params, seed):
    """Rows that end where token 0 is drawn; the reward is the share of their tokens that are the prompt's last one."""
    asked = torch.randint(2, 6, (PROMPTS,), generator=torch.Generator().manual_seed(seed)).tolist()
    batch = generate(
        params, [[1, token] for token in asked], policy=policy, max_new_tokens=RESPONSE, num_responses=RESPONSES,
        seed=seed, eos_token_id=0,
    )  # fmt: skip
    said = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).sum(1)
    advantages = fnppo.grpo_advantages(said / batch.loss_mask.sum(1), batch.groups)
    old = fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=4000).logprobs
    return fnppo.sequence_mean(
        batch._replace(old_logprobs=old, advantages=on_every_token(advantages, batch.loss_mask).double())
    )


def loss_fn(params, micro_batch):
    stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0, entropy=False)
    return fnppo.ppo_loss(stats, micro_batch.targets, dual_clip=None)


# Under vmap all rows have one shape, whose layout is prepared once. A shorter response goes on with targets of weight 0.
one_row = fnppo.pad_sequences(fnppo.padded_batch([[0] * PROMPT], [[0] * RESPONSE]))


def loss_of_row(params, input_ids, loss_weights, old_logprobs, advantages):
    ids, weights, old, advantages = (c[PROMPT:] for c in (input_ids, loss_weights, old_logprobs, advantages))
    targets = one_row.targets._replace(token_ids=ids, loss_weights=weights, old_logprobs=old, advantages=advantages)
    return loss_fn(params, fnppo.ModelBatch(one_row.inputs._replace(input_ids=input_ids[None]), targets))[0]


def gradients_of_rows(params, batch):
    """[rows, parameters]: the gradient of each row, flat."""
    columns = (batch.input_ids, batch.loss_weights, batch.old_logprobs, batch.advantages)
    found = torch.vmap(torch.func.grad(loss_of_row), (None, 0, 0, 0, 0))(params, *columns)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], 1)


def gradients_of_prompts(params, batch):
    """[prompts, parameters], with the batch's gradient as mean. Rows of a prompt share a baseline: a sample is a prompt."""
    return PROMPTS * gradients_of_rows(params, batch).reshape(PROMPTS, RESPONSES, -1).sum(1)


with float64_everywhere():
    batch = rollouts(params, seed=0)
    clean, bad = gradients_of_rows(params, batch), int(batch.advantages.amin(1).argmin())
    shift = 2.0 * (torch.arange(len(batch.groups)) == bad)
    broken = batch._replace(old_logprobs=batch.old_logprobs - shift[:, None])
    rows = gradients_of_rows(params, broken)
    _, packed = fnppo.value_and_grad(loss_fn)(params, fnppo.pack_sequences(broken))
    packed = torch.cat([g.flatten() for g in packed.values()])
    print(f"{len(rows)} gradients add up to that of the packed batch, up to {(rows.sum(0) - packed).abs().max():.0e}\n")

    norms, towards = rows.norm(dim=1), torch.cosine_similarity(rows, packed[None], dim=1)
    print("  row   tokens   advantage   norm   norm / median   cosine with the sum")
    for row in norms.argsort(descending=True)[:4].tolist():
        tokens, advantage = int(batch.loss_mask[row].sum()), batch.advantages[row, PROMPT]
        print(
            f"{row:5d} {tokens:8d} {advantage:11.2f} {norms[row]:6.3f} {norms[row] / norms.median():15.1f} "
            f"{towards[row]:21.2f}" + "   <- broken" * (row == bad)
        )

    def clip(rows):
        return rows * (norms.median() / rows.norm(dim=1, keepdim=True)).clamp(max=1)

    print("\nthe sum of all rows       norm   norm if the row were right   cosine of the two")
    for name, how in (("as they are", lambda rows: rows), ("clipped to the median", clip)):
        a, b = how(rows).sum(0), how(clean).sum(0)
        print(f"{name:23s} {a.norm():6.3f} {b.norm():28.3f} {torch.cosine_similarity(a, b, dim=0):19.4f}")

    print("\n                      noise scale,   variance of a batch's gradient:")
    print("step   reward    |G|    in prompts   from one batch   of fresh batches")
    opt_state = optimizer.init(params)
    for step in range(STEPS + 1):
        batch = rollouts(params, seed=step)
        if step % (STEPS // 4) == 0:
            fresh = torch.stack([gradients_of_prompts(params, rollouts(params, 1000 + n)) for n in range(FRESH)])
            trace = fresh.flatten(0, 1).var(0).sum()  # of Σ; |G|² without the part that is noise:
            square = (fresh.mean((0, 1)).square().sum() - trace / (FRESH * PROMPTS)).clamp(min=0)
            predicted = gradients_of_prompts(params, batch).var(0).sum() / PROMPTS
            reward = ((batch.input_ids == batch.input_ids[:, 1:2]) & batch.loss_mask).sum() / batch.loss_mask.sum()
            print(
                f"{step:4d} {reward:8.2f} {square.sqrt():6.3f} {trace / square:13.0f} {predicted:16.4f} "
                f"{fresh.mean(1).var(0).sum():18.4f}"
            )
        params, opt_state, _ = fnppo.train_step(
            params, opt_state, [fnppo.pack_sequences(batch)], loss_fn=loss_fn, optimizer=optimizer
        )
