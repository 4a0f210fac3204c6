"""What torch.compile gains on ragged micro-batches, what it costs to warm up, and whether the numbers stay.

    python benchmarks/compile.py            writes the table of docs/pages/compile.md, and its data
    python benchmarks/compile.py --quick    tiny, without code generation, to test this script; give an --out for it

Forward and backward of the same micro-batches, eager and compiled in turn, round by round. Each micro-batch has another
number of tokens and targets, as packing makes them.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import optree
import torch
from arithmetic import timed
from generated import PAGES, in_words, table, write_data, write_parts
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo

PARTS = {"layers": "the layers of the policy", "loss": "`ppo_loss`", "head": "`chunked_logprobs`"}
DYNAMIC = {"True": True, "None": None, "False": False}
MODEL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def micro_batches(vocab: int, *, count: int, rows: int, longest: int) -> list[fnppo.ModelBatch]:
    """Packed rows of random lengths."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = torch.randint(2, longest, (rows,), generator=generator).tolist()
        answers = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
        batch = fnppo.padded_batch([[1] * (longest // 2)] * rows, answers)
        noise = torch.randn(3, *batch.loss_mask.shape, generator=generator)
        batch = batch._replace(old_logprobs=noise[0] - 8, advantages=noise[1], ref_logprobs=noise[2] - 8)
        made.append(fnppo.pack_sequences(fnppo.token_mean(batch)))
    return made


def loss(stats: fnppo.TokenStats, targets: fnppo.Targets) -> Any:
    return fnppo.ppo_loss(stats, targets, kl_coef=0.1, entropy_coef=0.01)


def contenders(part: str, config: dict[str, int], options: dict[str, Any]) -> list[Callable[..., Any]]:
    """[eager, compiled]: each takes a micro-batch and gives (loss, gradients). `options` are those of torch.compile."""
    generator = torch.Generator().manual_seed(0)
    if part == "layers":
        torch.manual_seed(0)
        module = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=4, num_key_value_heads=2))
        made = []
        for wanted in (False, True):
            policy, params = fnppo.functional_policy(module)
            if wanted:
                for layer in policy.skeleton.model.layers:
                    layer.compile(**options)

            def loss_fn(params: Any, micro_batch: fnppo.ModelBatch, policy: Any = policy) -> Any:
                return loss(
                    fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0), micro_batch.targets
                )

            made.append(partial(with_gradients, loss_fn, params))
        return made
    weight = torch.randn(config["vocab_size"], config["hidden_size"], generator=generator)

    def of_stats(run: Callable[..., Any], micro_batch: fnppo.ModelBatch) -> Any:
        logprobs = micro_batch.targets.old_logprobs + 0.1
        leaves = {"logprobs": logprobs, "entropy": -logprobs}
        return with_gradients(lambda p, mb: run(fnppo.TokenStats(**p), mb.targets), leaves, micro_batch)

    def of_hidden(run: Callable[..., Any], micro_batch: fnppo.ModelBatch) -> Any:
        ids = micro_batch.targets.token_ids
        hidden = torch.randn(len(ids), weight.shape[1], generator=torch.Generator().manual_seed(1))

        def loss_fn(p: Any, mb: fnppo.ModelBatch) -> Any:
            stats = run(p["hidden"], ids, weight=p["weight"])
            return (stats.logprobs * mb.targets.advantages + stats.entropy).sum(), ()

        return with_gradients(loss_fn, {"hidden": hidden, "weight": weight}, micro_batch)

    of, function = (of_stats, loss) if part == "loss" else (of_hidden, fnppo.chunked_logprobs)
    return [partial(of, function), partial(of, torch.compile(function, **options))]


def with_gradients(loss_fn: Any, params: Any, micro_batch: fnppo.ModelBatch) -> Any:
    (value, _), grads = fnppo.value_and_grad(loss_fn)(params, micro_batch)
    return value, grads


def measure(part: str, dynamic: str, batches: Any, *, config: Any, backend: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    torch.compiler.reset()
    counters.clear()
    eager, compiled = contenders(part, config, {"dynamic": DYNAMIC[dynamic], "backend": backend})
    expected = [eager(batch) for batch in batches]
    start, graphs, apart = time.perf_counter(), [], []
    for batch, right in zip(batches, expected, strict=True):
        found = compiled(batch)
        graphs.append(counters["stats"]["unique_graphs"])
        apart.append(difference(found, right))
    warm_up = time.perf_counter() - start
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    for _ in range(rounds):
        for name, run in (("eager", eager), ("compiled", compiled)):
            seconds[name].append(timed("cpu", lambda run=run: [run(batch) for batch in batches]))
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    breaks = len(counters["graph_break"])
    again = sum(now > before for before, now in pairwise(graphs))
    return {"part": part, "dynamic": dynamic, "ratio": ratio, "warm_up": warm_up, "apart": max(apart), "again": again} | {
        "eager": statistics.median(seconds["eager"]), "graphs": graphs[-1], "breaks": breaks,
    }  # fmt: skip


def difference(found: Any, right: Any) -> float:
    """The largest, of loss and gradients, in units of the largest number of each tensor."""
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(right), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def part_of(data: dict[str, Any]) -> str:
    """The generated part of the page."""
    lines = [
        [
            PARTS[row["part"]],
            f"`{row['dynamic']}`",
            f"{row['ratio']:.2f}",
            f"{row['warm_up']:.0f}",
            str(row["graphs"]),
            str(row["again"]),
            str(row["breaks"]),
            "0" if row["apart"] == 0 else f"{row['apart']:.0e}",
        ]
        for row in data["rows"]
    ]
    head = [
        "compiled",
        "`dynamic`",
        "eager / compiled",
        "warm-up, s",
        "graphs",
        "compiled again at",
        "kinds of breaks",
        "apart",
    ]
    sizes = ", ".join(map(str, data["tokens"]))
    return (
        f"{in_words(data['machine'])} Backend {data['backend']}; micro-batches of {sizes} tokens; medians of "
        f"{data['rounds']} rounds.\n\n" + table(head, lines)
    )


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All rows, as data."""
    config = TINY if options.quick else MODEL
    sizes = {"count": 3, "rows": 2, "longest": 9} if options.quick else {"count": 4, "rows": 8, "longest": 120}
    batches, rows = micro_batches(config["vocab_size"], **sizes), []
    for part in PARTS:
        for dynamic in ["True"] if options.quick else DYNAMIC:
            rounds = 1 if options.quick else options.rounds
            row = measure(part, dynamic, batches, config=config, backend=options.backend, rounds=rounds)
            print(f"{part}, dynamic={dynamic}: {row['ratio']:.2f}, warm-up {row['warm_up']:.0f} s", flush=True)
            rows.append(row)
    tokens = [batch.inputs.input_ids.numel() for batch in batches]
    return {"rows": rows, "tokens": tokens, "backend": options.backend, "rounds": options.rounds}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: figures of no meaning")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--backend", help="of torch.compile; default: inductor where there is a C++ compiler, else aot_eager"
    )
    parser.add_argument("--out", type=Path, default=PAGES, metavar="FOLDER", help="where page and data go")
    options = parser.parse_args()
    has_compiler = shutil.which("g++") or shutil.which("clang++")
    options.backend = options.backend or ("eager" if options.quick else "inductor" if has_compiler else "aot_eager")
    file = options.out / "plots/compile.json"
    write_data(measured(options), file)
    write_parts("compile.md", {"table": part_of(json.loads(file.read_text()))}, out=options.out)


if __name__ == "__main__":
    main()
