"""Every causal LM architecture of the installed transformers against itself: which layouts are exact, and why not.

    python benchmarks/architectures.py                    writes docs/pages/architectures.md
    python benchmarks/architectures.py --only llama bloom    prints these lines

Each architecture is a tiny random model in float64. Every layout gives log-probs and entropies of all learned tokens and
the gradients of all parameters, which are compared with the model's own, one row at a time, as `fnppo verify` does.
"""

import argparse
import contextlib
import math
import multiprocessing
import multiprocessing.pool
import resource
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.progress import track

import fnppo
from fnppo.testing import causal_lms, float64_everywhere, tiny_causal_lm
from fnppo.verify.measure import by_the_library, by_the_model, grads_apart, nats_apart

PAGE = Path(__file__).parent.parent / "docs/pages/architectures.md"
VOCAB = 13
LAYOUTS = {
    "packed": fnppo.pack_sequences,
    "padded": fnppo.pad_sequences,
    "shared": partial(fnppo.pack_sequences, share_prefixes=True, least_shared=1),
}
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference: of log-probs and entropies in nats, of gradients relative. float32 where a model cannot do float64."""


class Result(NamedTuple):
    """One line of the table. `errors` is by layout; `refused` says why a layout, or the model, is not in it."""

    architecture: str
    errors: dict[str, float]
    refused: str = ""
    mechanisms: str = ""
    dtype: torch.dtype = torch.float64


def batch() -> fnppo.PaddedBatch:
    """Prompts that are shared, of length 1, padded on the left; responses longer than every window; an empty row."""
    generator = torch.Generator().manual_seed(0)

    def draw(*lengths: int) -> list[list[int]]:
        return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]

    prompts, responses = draw(6, 1, 3, 0), draw(7, 9, 2, 5, 0, 3)
    p = prompts
    rows = fnppo.padded_batch([p[0], p[0], p[1], p[2], p[3], p[2]], responses)
    mask = rows.loss_mask.clone()
    mask[0, -8] = False  # a tool's answer in the middle of a response
    weights = torch.randn(mask.shape, generator=generator)
    return rows._replace(loss_mask=mask, loss_weights=weights / mask.sum())


def compare(module: Any) -> tuple[dict[str, float], str]:
    """(largest difference by layout, reason of refusal) for a module in evaluation mode."""
    try:
        policy, params = fnppo.functional_policy(module)
    except ValueError as error:
        return {}, str(error)
    rows = batch()
    expected = by_the_model(policy.with_own_attention(), params, rows)
    errors, reason = {}, policy.padded_only or ""
    for name, layout in LAYOUTS.items():
        if policy.padded_only and name != "padded":
            continue
        found = by_the_library(policy, params, [layout(rows)])
        errors[name] = max(nats_apart(found, expected), grads_apart(found.grads, expected.grads))
    return errors, reason


def examine(architecture: str) -> Result:
    """The line of one architecture."""
    for dtype in LIMITS:
        try:
            with float64_everywhere() if dtype == torch.float64 else contextlib.nullcontext():
                module = tiny_causal_lm(architecture, vocab_size=VOCAB).to(dtype)
                errors, refused = compare(module)
            return Result(architecture, errors, refused, mechanisms(module), dtype)
        except Exception as error:  # whatever keeps a model from running is what its line says
            reason = f"a tiny model of it does not run on tokens alone: {type(error).__name__}: {error}"
    return Result(architecture, {}, reason)


def mechanisms(module: Any) -> str:
    """What a reader may look for, read off the configuration and the names of the parts."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    parts = {name.split(".")[-1] for name, _ in module.named_modules()} | {
        name.split(".")[-1] for name, _ in module.named_parameters()
    }

    def value(name: str) -> Any:
        try:
            return getattr(config, name, None)
        except Exception:  # a configuration that has it once a layer says so by an error of its own
            return "once a layer"

    def has(*names: str) -> bool:
        return any(value(name) not in (None, False, 1.0, 1) for name in names)

    classes = {type(child).__name__.lower() for child in module.modules()}
    rope = getattr(config, "rope_parameters", None) or {}
    found = {
        "MoE": "experts" in parts or any("moe" in name for name in classes),
        "MLA": has("kv_lora_rank"),
        "sliding": "sliding_attention" in kinds or (not kinds and has("sliding_window", "window_size")),
        "chunked": "chunked_attention" in kinds,
        "sparse": any("sparse" in kind or "indexed" in kind for kind in kinds),
        "softcap": has("attn_logit_softcapping", "final_logit_softcapping"),
        "sinks": bool(parts & {"sinks", "attention_sink_bias"}),
        "QK-norm": any("norm" in part and part[0] in "qk" for part in parts) or has("use_qk_norm", "qk_layernorm"),
        "multipliers": has(
            "logit_scale", "logits_scaling", "lm_head_multiplier", "embedding_multiplier", "residual_multiplier", "scale_emb"
        ),
        "absolute": bool(parts & {"wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed"}),
        "ALiBi": has("alibi") or module.config.model_type in ("bloom", "mpt"),
        "partial rotary": has("rotary_dim") or 0 < (rope.get("partial_rotary_factor") or 0) < 1,
        "recurrent": bool(kinds & {"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent"})
        or any(word in name for name in classes for word in ("mamba", "rwkv", "xlstm", "rglru")),
    }  # fmt: skip
    return ", ".join(name for name, there in found.items() if there)


def in_a_child(architecture: str, *, seconds: int) -> Result:
    """`examine` in a process of its own, with a limit of time and of memory."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        sender.send(examine(architecture))

    child = context.Process(target=work)  # type: ignore[attr-defined]
    child.start()
    sender.close()
    try:
        return (
            receiver.recv()
            if receiver.poll(seconds)
            else Result(architecture, {}, "not examined within the time limit")
        )
    except EOFError:
        return Result(architecture, {}, "not examined: its process ended early")
    finally:
        child.kill()
        child.join()


def verdict(result: Result, layout: str) -> str:
    """A cell of the table."""
    if layout not in result.errors:
        return "–"
    return "exact" if result.errors[layout] <= LIMITS[result.dtype] else "**wrong**"


def line(result: Result) -> str:
    """A row of the table."""
    largest = max(result.errors.values(), default=math.nan)
    error = "" if math.isnan(largest) else f"1e{max(math.ceil(math.log10(max(largest, 1e-300))), -12)}"
    reason = " ".join(result.refused.split()).replace("|", "/")
    reason = reason if len(reason) <= 220 else reason[:217] + "..."
    cells = [f"`{result.architecture}`", *(verdict(result, name) for name in LAYOUTS), error, result.mechanisms, reason]
    return "| " + " | ".join(cells) + " |"


def page(results: list[Result]) -> str:
    """The whole document."""
    count = {name: sum(verdict(result, name) == "exact" for result in results) for name in LAYOUTS}
    nothing = sum(not result.errors for result in results)
    wrong = sum("**wrong**" in line(result) for result in results)
    return f"""# Architectures

Every causal LM of transformers {transformers.__version__}, as a tiny random model in float64: log-probs, entropies and the gradients of all
parameters in each layout, against the model's own eager attention, one row at a time. Written by
`python benchmarks/architectures.py`.

**{len(results)} architectures: {count["packed"]} exact packed, {count["padded"]} exact padded, {count["shared"]} exact with shared prefixes; {nothing} refused in every
layout, {wrong} wrong.**

*exact*: the largest difference, in nats or of a parameter's largest gradient, is at most 1e-9 (1e-3 where a model runs in
float32 only). Its order is in the column *error*, where 1e-12 stands for that or less. *–*: refused, with the reason in the last column.

| architecture | packed | padded | shared | error | mechanisms | why refused |
|--|--|--|--|--|--|--|
""" + "".join(line(result) + "\n" for result in results)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", help="architectures to examine; the lines are printed, no page is written")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one architecture")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(100)
    torch.set_num_threads(1)
    examine("llama")  # so that a child finds the common parts imported
    names = arguments.only or causal_lms()
    with multiprocessing.pool.ThreadPool(arguments.jobs) as pool:
        found = pool.imap(partial(in_a_child, seconds=arguments.seconds), names)
        results = list(track(found, total=len(names), description="architectures"))
    if arguments.only:
        print("\n".join(line(result) for result in results))
    else:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
