"""The figures of `run.py` as a page."""

import statistics
from pathlib import Path
from typing import Any

OURS = "fnppo shared"
SAID = {
    "W1": "4 prompts of at most 256 tokens with 8 responses of at most 512 each",
    "W2": "2 prompts of at most 768 tokens with 16 responses of at most 256 each",
    "tiny": "a handful of tokens, to try the script",
}


def write_page(data: dict[str, Any], file: Path | None) -> str:
    """The page; written to `file`, if given."""
    first = next(iter(data["workloads"].values()))
    of = {name.partition(" ")[0]: version for name, version in first["versions"].items()}
    versions = ", ".join(f"{name.replace('plain', 'transformers')} {version}" for name, version in of.items())
    parts = [HEAD.format(versions=versions, torch=data["torch"], **data["options"])]
    for name, found in data["workloads"].items():
        parts.append(
            f"## {name}: {SAID[name]}\n\n{found['tokens']:,} real tokens in {found['padded']:,} padded ones, "
            f"{found['targets']:,} of them in responses. Products of two 1024 x 1024 matrices ran at "
            f"{found['median_peak'] / 1e9:.0f} GFLOP/s in the same minutes. "
            f"Measured on {found.get('date', data['date'])}.\n"
        )
        for work, title in (("logprobs", "Log-probs and entropies"), ("update", "Update, with entropy bonus")):
            rounds = len(next(iter(found["work"][work]["seconds"].values())))
            parts.append(
                f"{title}, {'one round' if rounds == 1 else f'medians of {rounds} rounds'}:\n\n" + table(found, work)
            )
        worst = {
            what: max(each[what] for each in found["apart"].values()) for what in next(iter(found["apart"].values()))
        }
        parts.append(
            f"In the first round all agreed: log-probs to {worst['logprobs']:.0e} and entropies to "
            f"{worst['entropies']:.0e} nats, gradients to {worst['gradients']:.0e} of their length.\n"
        )
        if "profile" in found:
            parts.append("Where the seconds of an update go:\n\n" + profile(found["profile"]))
    text = "\n".join(parts)
    if file is not None:
        file.write_text(text)
    return text


def table(found: dict[str, Any], work: str) -> str:
    """A line a contender."""
    seconds, memory = found["work"][work]["seconds"], found["work"][work]["memory"]
    ours = next(name for name in (OURS, *seconds) if name in seconds)
    share = 1 if work == "update" else 1 / 3
    lines = [
        "| | seconds | tokens/s | against " + ours + " | of the products' peak | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in seconds.items():
        median = statistics.median(rounds)
        ratio = statistics.median(other / own for other, own in zip(rounds, seconds[ours], strict=True))
        peak = found["flops"] * share / median / found["median_peak"]
        lines.append(
            f"| {name} | {median:.2f} | {found['tokens'] / median:,.0f} | {ratio:.2f}x | {peak:.0%} | "
            f"{memory[name] / 1024:.2f} GiB |"
        )
    return "\n".join(lines) + "\n"


def profile(found: dict[str, dict[str, float]]) -> str:
    """A column a contender, a line a kind of operation."""
    kinds = sorted(next(iter(found.values())), key=lambda kind: -next(iter(found.values()))[kind])
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for kind in kinds:
        lines.append(f"| {kind} | " + " | ".join(f"{each.get(kind, 0):.2f} s" for each in found.values()) + " |")
    return "\n".join(lines) + "\n"


HEAD = """# Benchmark: log-probs and update beside verl, TRL and a plain loop

`make bench` writes this page (some half an hour, and the package registry for verl and TRL on the first run). Torch
{torch}, {threads} threads, float32; {versions}.

The model is a small Llama (6 layers, hidden size 256, a vocabulary of 32,000). Every contender is a process of its own and
gets the same weights, the same GRPO batch and the same limit of {max_tokens} tokens a forward. They work in turn. A ratio
is the median over rounds of a contender's seconds over ours in the same round, since the machine's pace changes from minute
to minute. Peak memory is that of the whole process, with Python, torch and the weights (about 0.5 GiB) in it.

- **fnppo shared**, **fnppo packed**: `compute_logprobs` and `update_policy` with those layouts; the loss is told to the head.
- **verl padded**, **verl rmpad**: `DataParallelPPOActor`, with remove-padding and dynamic batches in the second. On a CPU
  its attention is transformers' SDPA under a mask; on a GPU it would be flash-attn's, which this page says nothing about.
- **trl**: the trainer's method for log-probs and entropies with its fused head, under a plain loss.
- **plain**: a padded loop over the model, with logits of responses only.

*Of the products' peak* is the work that has to be done (the matrix products and the causal attention of the tokens, shared
prompts counted once, the head on response tokens only; three times the forward for an update), over the seconds and over
what the machine's matrix products reach.
"""
