"""How far log-probs, entropies and gradients in half precision are from float64, and a sampler from its trainer.

    python benchmarks/precision.py            SmolLM2 from its wheel; prints the tables
    python benchmarks/precision.py --write    and writes them to docs/pages/precision.md, and their data
    python benchmarks/precision.py --quick    a tiny random model, to test this script

Parameters are float32 masters, cast inside the loss. float16 runs under `dynamic_loss_scale`, and without it to compare.
"""

import argparse
import sys
from typing import Any, NamedTuple

import torch
from generated import add_write, in_words, publish, table

import fnppo
from fnppo.rollout import generate
from fnppo.testing import tiny_llama
from fnppo.types import Params
from fnppo.verify.measure import in_float64

LAYOUTS = {"packed": fnppo.packed, "padded": fnppo.padded}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WITHIN = {"float32": 1e-4, "bfloat16": 2.0**-2, "float16": 2.0**-5}
"""Nats that a log-prob may be from float64 and from its sampler's; in half precision 64 roundoffs. The page states them."""


class Found(NamedTuple):
    """Of all targets in the order of the rows, and of all parameters as one vector."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    gradient: torch.Tensor


def measure(
    policy: fnppo.Policy, params: Params, micro_batch: fnppo.ModelBatch, dtype: torch.dtype, *, scale: float = 1.0
) -> Found:
    """What an update computes with the layers in `dtype`; the gradient is that of scale · loss."""
    kept = {}

    def loss_fn(params: Params, micro_batch: fnppo.ModelBatch) -> Any:
        stats = fnppo.forward_logprobs(fnppo.cast(params, dtype), micro_batch, policy=policy, temperature=1.0)
        kept["stats"] = stats
        loss, metrics = fnppo.ppo_loss(stats, micro_batch.targets, entropy_coef=0.01)
        return loss * scale, metrics

    with in_float64(params):
        _, grads = fnppo.value_and_grad(loss_fn)(params, micro_batch)
    stats = kept["stats"]
    gradient = torch.cat([grads[name].detach().double().flatten() for name in sorted(grads)])
    return Found(stats.logprobs.detach().double(), stats.entropy.detach().double(), gradient)


def measure_scaled(
    policy: fnppo.Policy, params: Params, micro_batch: fnppo.ModelBatch, scale: float
) -> tuple[Found, float]:
    """In float16 under the scale that `dynamic_loss_scale` comes to from `scale`, and that scale."""
    optimizer = fnppo.dynamic_loss_scale(fnppo.sgd(1.0), initial=scale)
    one = {"w": torch.zeros(1)}
    state = optimizer.init(one)
    while True:
        scale = float(state.scale)
        found = measure(policy, params, micro_batch, torch.float16, scale=scale)
        print(
            f"float16, scale {scale:,.0f}: the largest gradient is {float(found.gradient.abs().max()):.1e}", flush=True
        )
        _, new = optimizer.update({"w": found.gradient.abs().sum()[None].float()}, state, one)
        if int(new.inner.skipped) == int(state.inner.skipped):
            return found._replace(gradient=found.gradient / scale), scale
        state = new


def compare(policy: fnppo.Policy, params: Params, batch: fnppo.PaddedBatch) -> list[dict[str, Any]]:
    """A row for each dtype and layout; without a scale, float16 packed alone, since a CPU is slow at it."""
    double = fnppo.cast(params, torch.float64)
    reference = measure(policy, double, fnppo.packed.lay(batch), torch.float64)
    del double
    rows, scale = [], 2.0**16

    def add(name: str, layout: str, scale: float | None, found: Found) -> None:
        logprobs, entropy = found.logprobs - reference.logprobs, found.entropy - reference.entropy
        gradient = (found.gradient - reference.gradient).norm() / reference.gradient.norm()
        lost = ((found.gradient == 0) & (reference.gradient != 0)).double().mean()
        row = {"dtype": name, "layout": layout, "scale": scale}
        row |= {"logprob_max": logprobs.abs().max(), "logprob_mean": logprobs.abs().mean()}
        row |= {"entropy_max": entropy.abs().max(), "entropy_mean": entropy.abs().mean()}
        row |= {"gradient": gradient, "lost": lost}
        rows.append({key: float(x) if isinstance(x, torch.Tensor) else x for key, x in row.items()})
        print(f"{name}, {layout}, scale {scale}: gradient {float(gradient):.1e}", flush=True)

    for name, dtype in DTYPES.items():
        for layout in LAYOUTS:
            micro_batch = LAYOUTS[layout].lay(batch)
            if dtype == torch.float16:
                found, scale = measure_scaled(policy, params, micro_batch, scale)
                add(name, layout, scale, found)
            if dtype != torch.float16 or layout == "packed":
                add(name, layout, None, measure(policy, params, micro_batch, dtype))
    return rows


def sampler_and_trainer(
    policy: fnppo.Policy, params: Params, prompts: list[list[int]], *, tokens: int, num_responses: int
) -> list[dict[str, Any]]:
    """Log-probs that transformers' `generate` had while it sampled, against those of the trainer for the same tokens."""
    rows = []
    for sampler, trainer in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")):
        batch = generate(
            fnppo.cast(params, DTYPES[sampler]), prompts, policy=policy, max_new_tokens=tokens,
            num_responses=num_responses, seed=0, eos_token_id=(),
        )  # fmt: skip
        for name, layout in LAYOUTS.items():
            with torch.no_grad():
                stats = fnppo.forward_logprobs(
                    fnppo.cast(params, DTYPES[trainer]),
                    layout.lay(batch),
                    policy=policy,
                    temperature=1.0,
                    entropy=False,
                )
            apart = stats.logprobs.double() - batch.old_logprobs[batch.loss_mask].double()
            k3 = float((apart.exp() - 1 - apart).mean())
            rows.append(
                {"sampler": sampler, "trainer": trainer, "layout": name, "max": float(apart.abs().max())}
                | {"mean": float(apart.abs().mean()), "kl": k3, "low": float(apart.min().exp())}
                | {"high": float(apart.max().exp())}
            )
    return rows


def subject(quick: bool, model: str) -> tuple[fnppo.Policy, Params, list[list[int]]]:
    """A policy, its parameters, and prompts."""
    if quick:
        return *fnppo.functional_policy(tiny_llama()), [[1, 5, 3], [4, 6]]
    from fnppo.demo.chat import encode
    from fnppo.demo.task import questions
    from fnppo.pretrained import load_model, load_tokenizer

    tokenizer = load_tokenizer(model)
    asked = [encode(tokenizer, q.text) for q in questions(held_out=False, count=3, seed=0)]
    return *fnppo.functional_policy(load_model(model)), asked


def check(errors: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    """End the script where a log-prob is farther off than the page says."""
    found = [(row["dtype"], row["dtype"], "float64", row["logprob_max"]) for row in errors]
    for row in pairs:
        least = max(row["sampler"], row["trainer"], key=lambda name: WITHIN[name])
        found.append((least, row["trainer"], f"a sampler in {row['sampler']}", row["max"]))
    for dtype, name, other, most in found:
        if not most <= WITHIN[dtype]:
            sys.exit(f"Log-probs in {name} are {most:.1e} nats from {other}, more than {WITHIN[dtype]}.")


def parts_of(data: dict[str, Any]) -> dict[str, str]:
    """The generated parts of the page."""
    errors = [
        [
            row["dtype"],
            row["layout"],
            f"{row['scale']:,.0f}" if row["scale"] else "none",
            *(
                f"{row[name]:.1e}"
                for name in ("logprob_max", "logprob_mean", "entropy_max", "entropy_mean", "gradient")
            ),
            f"{row['lost']:.1%}",
        ]
        for row in data["errors"]
    ]
    head = ["layers in", "layout", "loss scale", "log-prob, max", "mean", "entropy, max", "mean", "gradient", "lost"]
    pairs = [
        [
            row["sampler"],
            row["trainer"],
            row["layout"],
            *(f"{row[key]:.1e}" for key in ("max", "mean", "kl")),
            f"{row['low']:.3f} to {row['high']:.3f}",
        ]
        for row in data["pairs"]
    ]
    about = (
        f"{data['model']}: {data['parameters']:,} parameters, {data['rows']} rows, {data['targets']} learned tokens."
    )
    return {
        "errors": f"{about} {in_words(data['machine'])}\n\n" + table(head, errors),
        "sampler": table(["sampler in", "trainer in", "layout", "nats, max", "mean", "k3", "ratios"], pairs),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model: figures of no meaning")
    parser.add_argument(
        "--model", default="smollm2", help="a hub id, a folder, a .gguf file, or smollm2 from its wheel"
    )
    add_write(parser)
    options = parser.parse_args()
    policy, params, prompts = subject(options.quick, options.model)
    tokens, num_responses = 12, 2
    pairs = sampler_and_trainer(policy, params, prompts, tokens=tokens, num_responses=num_responses)
    batch = generate(
        params, prompts, policy=policy, max_new_tokens=tokens, num_responses=num_responses, seed=0, eos_token_id=()
    )
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0))
    batch = fnppo.token_mean(batch._replace(advantages=noise))
    errors = compare(policy, params, batch)
    data = {
        "model": "a tiny random Llama" if options.quick else options.model,
        "parameters": sum(leaf.numel() for leaf in params.values()),
        "rows": len(batch.input_ids), "targets": int(batch.loss_mask.sum()),
        "pairs": pairs, "errors": errors,
    }  # fmt: skip
    check(errors, pairs)
    publish("precision.md", data, parts_of, options.write)


if __name__ == "__main__":
    main()
