"""One update of the demo's kind, by fnppo and by a plain padded loop over transformers, alternating in one run.

    python benchmarks/demo_update.py [--model smollm2] [--rounds 3]

Prints the median of the ratios, and checks that all contenders have the same loss and gradient norm.
"""

import argparse
import statistics
import time
from functools import partial

import torch

import fnppo
from fnppo.demo.chat import encode
from fnppo.demo.task import questions
from fnppo.pretrained import load_model, load_tokenizer
from fnppo.rollout import generate

MAX_TOKENS = 1024


def plain(module, batch):
    """What a careful user writes: padded micro-batches, logits of the response only, token mean over the whole batch."""
    width = int((batch.loss_mask.sum(0) > 0).sum())  # responses stand at the right
    rows, total = MAX_TOKENS // batch.input_ids.shape[1], batch.loss_mask.sum()
    module.requires_grad_(True).zero_grad()
    loss_sum = 0.0
    for start in range(0, len(batch.input_ids), rows):
        ids, mask, learned, old, advantages = (
            column[start : start + rows]
            for column in (batch.input_ids, batch.attention_mask, batch.loss_mask, batch.old_logprobs, batch.advantages)
        )
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = module(ids, attention_mask=mask.long(), position_ids=positions, use_cache=False, logits_to_keep=width + 1)
        logp = out.logits[:, :-1].log_softmax(-1)
        new = logp.gather(-1, ids[:, -width:, None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        ratio = (new - old[:, -width:]).exp()
        gain = torch.minimum(ratio * advantages[:, -width:], ratio.clamp(0.8, 1.28) * advantages[:, -width:])
        loss = ((-gain - 0.001 * entropy) * learned[:, -width:]).sum() / total
        loss.backward()
        loss_sum += loss.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
    module.zero_grad(set_to_none=True)
    return loss_sum, norm.item()


def ours(params, policy, batch, *, layout):
    """The same by fnppo."""

    loss_of = partial(fnppo.ppo_loss, clip_high=0.28, dual_clip=None, entropy_coef=0.001)

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0, loss=loss_of)
        return loss_of(stats, micro_batch.targets)

    batch = fnppo.token_mean(batch)
    micro_batches = (layout.lay(fnppo.select_rows(batch, rows)) for rows in layout.plan(batch, MAX_TOKENS))
    (loss, _), grads = fnppo.accumulate_gradients(loss_fn, params, micro_batches)
    return loss.item(), fnppo.global_norm(grads).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--responses", type=int, default=8)
    options = parser.parse_args()
    tokenizer, module = load_tokenizer(options.model), load_model(options.model)
    policy, params = fnppo.functional_policy(module)
    asked = [encode(tokenizer, q.text) for q in questions(held_out=False, count=options.prompts, seed=0)]
    batch = generate(
        params,
        asked,
        policy=policy,
        max_new_tokens=16,
        num_responses=options.responses,
        seed=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    batch = batch._replace(advantages=torch.where(batch.loss_mask, noise, 0.0))
    print(
        f"{len(batch.input_ids)} rows, {sum(fnppo.lengths(batch))} tokens, {int(batch.loss_mask.sum())} learned",
        flush=True,
    )

    contenders = {"plain padded": partial(plain, module)} | {
        f"fnppo {name}": partial(ours, params, policy, layout=getattr(fnppo, name))
        for name in ("padded", "packed", "shared")
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    results = {}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            results[name] = run(batch)
            seconds[name].append(time.perf_counter() - start)
    expected = results["plain padded"]
    for name, (loss, norm) in results.items():
        if abs(loss - expected[0]) > 1e-4 or abs(norm / expected[1] - 1) > 1e-4:
            raise SystemExit(f"{name} has loss {loss} and gradient norm {norm}, plain padded {expected}")
        ratio = statistics.median(a / b for a, b in zip(seconds["plain padded"], seconds[name], strict=True))
        print(
            f"{name:14s} {statistics.median(seconds[name]):6.1f} s   {ratio:4.1f}x   loss {loss:+.6f}   gradient norm {norm:.6f}"
        )


if __name__ == "__main__":
    main()
