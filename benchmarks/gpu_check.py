"""What only a GPU can tell. It is made to take under five minutes.

    python benchmarks/gpu_check.py                        on a GPU: parity, remat, speed and memory
    python benchmarks/gpu_check.py --small --device cpu   the same code on tiny models, to test this script
    python benchmarks/gpu_check.py --json check.json      and the table as data

Parity: log-probs, entropies and gradients of each attention backend against math attention in float64. A backend may be
four times as far from it as math attention is in the same dtype, or 16 eps of the dtype. Speed: a whole update, in
bfloat16 over float32 parameters, of models with random weights; MFU is of the matrix-product peak that the same run
measures, not of what a data sheet says. The exit status is 1 where something is wrong.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from arithmetic import matmul_rate, timed, work_of
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import fnppo

BACKENDS = (fnppo.sdpa_attention, fnppo.varlen_attention, fnppo.flash_attention)
TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
FAMILIES = {
    "grouped queries": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "window": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=7)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**TINY, sliding_window=7)),
}
SHAPES = {  # (hidden, intermediate, layers, heads, key-value heads) of Qwen2.5
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "tiny": (128, 256, 2, 2, 1),
}
ROUNDINGS, FLOOR = 4, 16


class Line(NamedTuple):
    """A row of the table."""

    check: str
    verdict: str
    found: str


def rollouts(prompts: int, responses: int, *, prompt: int, response: int, vocab: int, device: str) -> fnppo.PaddedBatch:
    """Groups of one prompt each; responses have between a tenth of `response` tokens and all of them."""
    g = torch.Generator().manual_seed(0)

    def tokens(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (), generator=g))
        return torch.randint(3, vocab, (length,), generator=g).tolist()

    asked = [tokens(prompt // 2, prompt) for _ in range(prompts)]
    batch = fnppo.padded_batch(
        [question for question in asked for _ in range(responses)],
        [tokens(max(response // 10, 1), response) for _ in range(prompts * responses)],
    )
    noise = torch.randn(2, *batch.loss_mask.shape, generator=g)
    old = noise[0] * 0.1 - torch.tensor(float(vocab)).log()
    batch = batch._replace(old_logprobs=old, advantages=noise[1])
    return optree.tree_map(lambda column: column.to(device), fnppo.token_mean(batch))


def loss_of(policy: fnppo.Policy, dtype: torch.dtype) -> Any:
    """The PPO loss with entropy, computed in `dtype`."""

    def loss_fn(params: Any, micro_batch: fnppo.ModelBatch) -> Any:
        stats = fnppo.forward_logprobs(fnppo.cast(params, dtype), micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets, clip_high=0.28, entropy_coef=0.01)

    return loss_fn


def measure(policy: fnppo.Policy, params: Any, micro_batch: fnppo.ModelBatch, dtype: torch.dtype) -> list[torch.Tensor]:
    """Log-probs, entropies, and all gradients as one vector, in float64."""
    with torch.no_grad():
        stats = fnppo.forward_logprobs(fnppo.cast(params, dtype), micro_batch, policy=policy, temperature=1.0)
    _, grads = fnppo.accumulate_gradients(loss_of(policy, dtype), params, [micro_batch])
    vector = torch.cat([leaf.flatten().double() for leaf in optree.tree_leaves(grads)])
    return [stats.logprobs.double(), stats.entropy.double(), vector]


def apart(found: list[torch.Tensor], reference: list[torch.Tensor]) -> tuple[float, float]:
    """(nats of log-probs and entropies, distance of the gradients in units of the reference's norm); NaN where there is one."""
    logprobs, entropies, grads = (a - b for a, b in zip(found, reference, strict=True))
    return torch.cat([logprobs, entropies]).abs().max().item(), (grads.norm() / reference[2].norm()).item()


def parity(device: str) -> Any:
    """A line for every backend, family, layout and dtype."""
    for family, make in FAMILIES.items():
        torch.manual_seed(0)
        module = make().double().to(device)
        policy, params = fnppo.functional_policy(module)
        backends = {backend: dataclasses.replace(policy, attention=backend) for backend in BACKENDS}
        math = dataclasses.replace(policy, attention=fnppo.math_attention)
        batch = rollouts(3, 3, prompt=20, response=30, vocab=512, device=device)
        expected = measure(math, params, fnppo.packed.lay(batch), torch.float64)
        remat, _ = fnppo.functional_policy(module, remat=True)
        same = {"remat, packed": (remat, "packed"), "remat, shared": (remat, "shared"), "shared": (math, "shared")}
        for name, (policy, layout) in same.items():
            found = measure(policy, params, getattr(fnppo, layout).lay(batch), torch.float64)
            # norms and softmax are in float32
            yield judged(f"{name}, {family}, float64", apart(found, expected), (1e-5, 1e-5))
        for layout in ("packed", "shared"):
            micro_batch = getattr(fnppo, layout).lay(batch)
            reference = measure(math, params, micro_batch, torch.float64)
            for dtype in (torch.float32, torch.bfloat16):
                own = apart(measure(math, params, micro_batch, dtype), reference)
                allowed = [max(ROUNDINGS * error, FLOOR * torch.finfo(dtype).eps) for error in own]
                for backend, policy in backends.items():
                    name = f"{backend.__name__}, {family}, {layout}, {str(dtype).removeprefix('torch.')}"
                    try:
                        found = measure(policy, params, micro_batch, dtype)
                    except Exception as error:
                        why = str(error).partition("cannot be used: ")[2].partition(". ")[0]
                        if isinstance(error, ValueError) and why:  # the backend says what it cannot do
                            yield Line(name, "cannot", why)
                        else:
                            yield failed(name, error)
                        continue
                    yield judged(name, apart(found, reference), allowed)


def judged(name: str, found: Any, allowed: Any) -> Line:
    """NaN is wrong, too."""
    good = all(error <= limit for error, limit in zip(found, allowed, strict=True))
    said = ", gradient ".join(f"{error:.0e} of {limit:.0e}" for error, limit in zip(found, allowed, strict=True))
    return Line(name, "ok" if good else "WRONG", f"nats {said}")


def failed(name: str, error: Exception) -> Line:
    """What should have run."""
    return Line(name, "WRONG", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def model_of(shape: str, vocab: int) -> Qwen2ForCausalLM:
    """Qwen2 with random weights, in float32."""
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
        )
    )  # fmt: skip


def speed(device: str, shape: str, *, vocab: int, rounds: int, max_tokens: int, work: dict[str, int]) -> Any:
    """A line for each layout, with and without remat: the medians of whole updates."""
    cuda = device.startswith("cuda")
    peak = matmul_rate(device, torch.bfloat16, size=8192 if cuda else 512)
    yield Line("matrix products in bfloat16", "ok", f"{peak / 1e12:.3g} TFLOP/s")
    batch = rollouts(**work, vocab=vocab, device=device)
    optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-6))
    first = None
    for remat in (False, True):
        module = model_of(shape, vocab)
        policy, params = fnppo.functional_policy(module.to(device), remat=remat)
        loss_fn, state = loss_of(policy, torch.bfloat16), optimizer.init(params)
        for name in ("packed", "shared"):
            layout = getattr(fnppo, name)

            def update() -> Any:
                rows = layout.plan(batch, max_tokens)  # noqa: B023
                micro_batches = (layout.lay(fnppo.select_rows(batch, group)) for group in rows)  # noqa: B023
                return fnppo.train_step(params, state, micro_batches, loss_fn=loss_fn, optimizer=optimizer)  # noqa: B023

            line = f"update, {shape}, {name}{', remat' if remat else ''}"
            try:
                metrics = fnppo.summarize(update()[2])  # the first run is for the allocator
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds = statistics.median(timed(device, update) for _ in range(rounds))
            except Exception as error:  # out of memory, say
                yield failed(line, error)
                continue
            memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
            found = metrics["policy_loss"], metrics["entropy"], metrics["grad_norm"]
            first = first or found
            flops = sum(work_of(module.config, batch, layout))
            same = all(abs(a - b) < 0.02 * max(abs(b), 1) for a, b in zip(found, first, strict=True))
            yield Line(
                line,
                "ok" if same else "WRONG",
                f"{seconds:.2f} s, {sum(fnppo.lengths(batch)) / seconds:,.0f} tokens/s, MFU "
                f"{flops / seconds / peak:.0%}{memory}, gradient norm {found[2]:.4f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="*", default=["0.5B", "1.5B"], choices=list(SHAPES), help="models to time")
    parser.add_argument("--small", action="store_true", help="a tiny model and a tiny batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="where to put the table as data")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("There is no CUDA device. Run with --small --device cpu to test the script itself.")
    if options.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(options.device).index or 0)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    print(f"{name}, torch {torch.__version__}, {date.today()}\n\n| check | verdict | found |\n|---|---|---|")
    work = {"prompts": 8, "responses": 8, "prompt": 512, "response": 1024}
    parts = [parity(options.device)]
    if options.small:
        work = {"prompts": 2, "responses": 2, "prompt": 12, "response": 12}
        parts.append(speed(options.device, "tiny", vocab=512, rounds=1, max_tokens=64, work=work))
    else:
        parts += [
            speed(options.device, shape, vocab=151_936, rounds=options.rounds, max_tokens=16_384, work=work)
            for shape in options.shapes
        ]
    lines = []
    for part in parts:
        for line in part:
            print(f"| {' | '.join(line)} |", flush=True)
            lines.append(line)
            if options.json:
                data = {"device": name, "torch": torch.__version__, "lines": [line._asdict() for line in lines]}
                Path(options.json).write_text(json.dumps(data))
    if wrong := [line.check for line in lines if line.verdict == "WRONG"]:
        sys.exit(f"{len(wrong)} checks are wrong, first: {wrong[0]}")


if __name__ == "__main__":
    main()
