"""How far log-probs, entropies and gradients in half precision are from float64, and a sampler from its trainer.

    python benchmarks/precision.py            SmolLM2 from its wheel: writes the tables of docs/pages/precision.md
    python benchmarks/precision.py --quick    a tiny random model, to test this script; give an --out for it

Parameters are float32 masters, cast inside the loss. float16 runs under `dynamic_loss_scale`, and without it to compare.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from generated import PAGES, in_words, table, write_data, write_parts

import fnppo
from fnppo.rollout import generate
from fnppo.testing import tiny_llama
from fnppo.types import Params
from fnppo.verify.measure import in_float64

LAYOUTS = {"packed": fnppo.packed, "padded": fnppo.padded}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Found(NamedTuple):
    """Of all targets in the order of the rows, and of all parameters as one vector."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    gradient: torch.Tensor
    scale: float = 1.0


def measure(
    policy: fnppo.Policy, params: Params, micro_batch: fnppo.ModelBatch, dtype: torch.dtype, *, scaled: bool = False
) -> Found:
    """What an update computes with the layers in `dtype`."""
    kept = {}

    def loss_fn(params: Params, micro_batch: fnppo.ModelBatch, scale: Any = 1.0) -> Any:
        stats = fnppo.forward_logprobs(fnppo.cast(params, dtype), micro_batch, policy=policy, temperature=1.0)
        kept["stats"] = stats
        loss, metrics = fnppo.ppo_loss(stats, micro_batch.targets, entropy_coef=0.01)
        return loss * scale, metrics

    optimizer = fnppo.dynamic_loss_scale(fnppo.sgd(1.0))
    state = optimizer.init(params)
    with in_float64(params):
        while True:
            scale = state.scale if scaled else torch.ones(())
            _, grads = fnppo.value_and_grad(loss_fn)(params, micro_batch, scale)
            if not scaled:
                break
            updates, new = optimizer.update(grads, state, params)
            if int(new.inner.skipped) == int(state.inner.skipped):
                grads = {name: -update for name, update in updates.items()}  # of sgd(1.0)
                break
            state = new  # a gradient was infinite: the next smaller scale
    stats = kept["stats"]
    gradient = torch.cat([grads[name].detach().double().flatten() for name in sorted(grads)])
    return Found(stats.logprobs.detach().double(), stats.entropy.detach().double(), gradient, float(scale))


def compare(policy: fnppo.Policy, params: Params, batch: fnppo.PaddedBatch) -> list[dict[str, Any]]:
    """A row for each dtype and layout."""
    double = fnppo.cast(params, torch.float64)
    reference = measure(policy, double, fnppo.packed.lay(batch), torch.float64)
    del double
    rows = []
    for name, dtype in DTYPES.items():
        for layout in LAYOUTS:
            for scaled in (True, False) if dtype == torch.float16 else (False,):
                micro_batch = LAYOUTS[layout].lay(batch)
                found = measure(policy, params, micro_batch, dtype, scaled=scaled)
                logprobs, entropy = found.logprobs - reference.logprobs, found.entropy - reference.entropy
                gradient = (found.gradient - reference.gradient).norm() / reference.gradient.norm()
                lost = ((found.gradient == 0) & (reference.gradient != 0)).double().mean()
                row = {"dtype": name, "layout": layout, "scale": found.scale if scaled else None}
                row |= {"logprob_max": logprobs.abs().max(), "logprob_mean": logprobs.abs().mean()}
                row |= {"entropy_max": entropy.abs().max(), "entropy_mean": entropy.abs().mean()}
                row |= {"gradient": gradient, "lost": lost}
                rows.append({key: float(x) if isinstance(x, torch.Tensor) else x for key, x in row.items()})
                print(f"{name}, {layout}, scale {row['scale']}: gradient {float(gradient):.1e}", flush=True)
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
        [row["sampler"], row["trainer"], row["layout"], *(f"{row[key]:.1e}" for key in ("max", "mean", "kl"))]
        + [f"{row['low']:.3f} to {row['high']:.3f}"]
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
    parser.add_argument("--out", type=Path, default=PAGES, metavar="FOLDER", help="where page and data go")
    options = parser.parse_args()
    policy, params, prompts = subject(options.quick, options.model)
    tokens, num_responses = 12, 2
    pairs = sampler_and_trainer(policy, params, prompts, tokens=tokens, num_responses=num_responses)
    batch = generate(
        params, prompts, policy=policy, max_new_tokens=tokens, num_responses=num_responses, seed=0, eos_token_id=()
    )
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0))
    batch = fnppo.token_mean(batch._replace(advantages=noise))
    data = {
        "model": "a tiny random Llama" if options.quick else options.model,
        "parameters": sum(leaf.numel() for leaf in params.values()),
        "rows": len(batch.input_ids), "targets": int(batch.loss_mask.sum()),
        "pairs": pairs, "errors": compare(policy, params, batch),
    }  # fmt: skip
    file = options.out / "plots/precision.json"
    write_data(data, file)
    write_parts("precision.md", parts_of(json.loads(file.read_text())), out=options.out)


if __name__ == "__main__":
    main()
