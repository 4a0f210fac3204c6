"""How time and memory of one update grow with tokens, rows, responses, vocabulary and layers.

    python benchmarks/cost.py            all sweeps: writes docs/pages/cost.md, its plots, and their data
    python benchmarks/cost.py --quick    the same on tiny sizes, to test this script; give an --out for it

One update is `train_step`: forward, backward, AdamW with donation, on a random Llama in float32. The sizes of a sweep are
run in turn, round by round, and the median of each counts. Beside it stands a lower bound: the operations of the matrix
products that must be done (benchmarks/arithmetic.py), over the rate of square products that the same run has measured.
Memory is counted (fnppo.testing.LiveBytes): the most bytes above parameters, moments and batch at one time.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arithmetic import matmul_rate, peak_of, timed, work_of
from cost_page import draw, parts_of
from generated import PAGES, write_data, write_parts
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo
from fnppo.layouts import Layout
from fnppo.testing import LiveBytes


class Sizes(NamedTuple):
    """Of all sweeps."""

    hidden: int = 256
    inner: int = 704
    layers: int = 4
    vocab: int = 8192
    length: int = 128
    """Tokens of a row, half of them learned."""
    tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    most_tokens: int = 512
    """Of a micro-batch, in the curve that has several."""
    rows: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    tokens_of_rows: int = 2048
    responses: tuple[int, ...] = (1, 2, 4, 8, 16)
    vocabs: tuple[int, ...] = (1024, 4096, 16384, 65536)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    targets: tuple[int, ...] = (128, 512, 2048, 8192)
    vocab_of_targets: int = 50_000


QUICK = Sizes(
    hidden=16, inner=32, layers=2, vocab=64, length=16, tokens=(32, 64), most_tokens=32, rows=(2, 4), tokens_of_rows=64,
    responses=(1, 2, 4), vocabs=(32, 64), depths=(1, 2), targets=(8, 32), vocab_of_targets=100,
)  # fmt: skip


class Point(NamedTuple):
    """One size of a sweep: x of a curve."""

    series: str
    x: int
    batch: fnppo.PaddedBatch
    layout: Layout = fnppo.packed
    max_tokens: int | None = None
    """Of a micro-batch; None is all rows in one."""
    layers: int | None = None
    vocab: int | None = None


def sweeps(sizes: Sizes) -> dict[str, tuple[str, list[Point]]]:
    """The axis and the points of each sweep."""
    half = sizes.length // 2
    draw = partial(rollouts, vocab=sizes.vocab)

    def of_tokens(tokens: int) -> fnppo.PaddedBatch:
        return draw(tokens // sizes.length, prompt=half, response=half)

    everything = [Point("one micro-batch", n, of_tokens(n)) for n in sizes.tokens]
    capped = f"micro-batches of {sizes.most_tokens:,} tokens"
    cut = [Point(capped, n, of_tokens(n), max_tokens=sizes.most_tokens) for n in sizes.tokens]
    rows = [
        Point("packed", n, draw(n, prompt=sizes.tokens_of_rows // n // 2, response=sizes.tokens_of_rows // n // 2))
        for n in sizes.rows
    ]
    quarter = sizes.length // 4
    groups = [draw(sizes.responses[-1], group=n, prompt=3 * quarter, response=quarter) for n in sizes.responses]
    responses = [
        Point(name, n, batch, getattr(fnppo, name))
        for name in ("packed", "shared")
        for n, batch in zip(sizes.responses, groups, strict=True)
    ]
    some = rollouts(1024 // sizes.length or 1, prompt=half, response=half, vocab=sizes.vocabs[0])
    vocabs = [Point("packed", n, some, vocab=n) for n in sizes.vocabs]
    middle = of_tokens(sizes.tokens[len(sizes.tokens) // 2])
    layers = [Point("packed", n, middle, layers=n) for n in sizes.depths]
    return {
        "tokens": ("tokens of the batch", everything + cut),
        "rows": (f"rows, of {sizes.tokens_of_rows:,} tokens together", rows),
        "responses": (f"responses per prompt, of {sizes.responses[-1]} rows", responses),
        "vocab": ("tokens of the vocabulary", vocabs),
        "layers": ("layers", layers),
    }


def rollouts(rows: int, *, prompt: int, response: int, vocab: int, group: int = 1) -> fnppo.PaddedBatch:
    """Random rows of one length, in groups that have a prompt in common."""
    generator = torch.Generator().manual_seed(0)
    asked = torch.randint(3, vocab, (rows // group, prompt), generator=generator).repeat_interleave(group, 0)
    answers = torch.randint(3, vocab, (rows, response), generator=generator)
    batch = fnppo.padded_batch(asked.tolist(), answers.tolist())
    noise = torch.randn(2, *batch.loss_mask.shape, generator=generator)
    old = 0.1 * noise[0] - math.log(vocab)
    return fnppo.token_mean(batch._replace(old_logprobs=old, advantages=noise[1]))


class Updates:
    """Models of all shapes that a sweep has, each with its parameters and moments, which an update donates."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-6))
        self.held: dict[Any, Any] = {}

    @cache  # noqa: B019
    def config(self, layers: int | None, vocab: int | None) -> Any:
        return LlamaConfig(
            vocab_size=vocab or self.sizes.vocab, hidden_size=self.sizes.hidden,
            intermediate_size=self.sizes.inner, num_hidden_layers=layers or self.sizes.layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8192,
        )  # fmt: skip

    def prepare(self, point: Point) -> None:
        """Make the model, where there is none of its shape yet."""
        shape = point.layers, point.vocab
        if shape not in self.held:
            torch.manual_seed(0)
            policy, params = fnppo.functional_policy(LlamaForCausalLM(self.config(*shape)))
            self.held[shape] = policy, params, self.optimizer.init(params)

    def run(self, point: Point) -> None:
        """One update."""
        shape = point.layers, point.vocab
        policy, params, state = self.held[shape]

        def loss_fn(params: Any, micro_batch: fnppo.ModelBatch) -> Any:
            stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
            return fnppo.ppo_loss(stats, micro_batch.targets, clip_high=0.28, entropy_coef=0.01)

        micro_batches = self.micro_batches(point)
        params, state, _ = fnppo.train_step(
            params, state, micro_batches, loss_fn=loss_fn, optimizer=self.optimizer, donate=True
        )
        self.held[shape] = policy, params, state

    @staticmethod
    def micro_batches(point: Point) -> Iterator[fnppo.ModelBatch]:
        groups = point.layout.plan(point.batch, point.max_tokens or 2**62)
        return (point.layout.lay(fnppo.select_rows(point.batch, rows)) for rows in groups)

    def expected_peak(self, point: Point) -> float:
        """Bytes, by the formula."""
        sizes = [(mb.inputs.input_ids.numel(), mb.targets.token_ids.numel()) for mb in self.micro_batches(point)]
        tokens, targets = max(sizes)
        parameters = sum(leaf.numel() for leaf in self.held[point.layers, point.vocab][1].values())
        config = self.config(point.layers, point.vocab)
        return peak_of(config, tokens=tokens, targets=targets, parameters=parameters, several=len(sizes) > 1)


def measure(points: list[Point], sizes: Sizes, rounds: int) -> tuple[list[dict[str, Any]], float]:
    """(a row for each point, the best rate of matrix products in FLOP/s)."""
    updates, peaks = Updates(sizes), []
    for point in points:  # the first run is not timed
        updates.prepare(point)
        with LiveBytes() as memory:
            updates.run(point)
        peaks.append(memory.peak)
    seconds: list[list[float]] = [[] for _ in points]
    rates = []
    for number in range(rounds):
        rates.append(matmul_rate("cpu", torch.float32, size=min(1024, 8 * sizes.hidden)))
        order = range(len(points)) if number % 2 == 0 else reversed(range(len(points)))
        for place in order:
            seconds[place].append(timed("cpu", partial(updates.run, points[place])))
    rows = []
    for point, times, peak in zip(points, seconds, peaks, strict=True):
        work = work_of(updates.config(point.layers, point.vocab), point.batch, point.layout)
        rows.append(
            {"series": point.series, "x": point.x, "seconds": statistics.median(times), "times": times, "peak": peak}
            | {"expected": updates.expected_peak(point), "flops": work._asdict()}
        )
    return rows, max(rates)


def measure_head(sizes: Sizes) -> list[dict[str, Any]]:
    """Bytes of forward and backward of the head by itself, and of one copy of its logits."""
    rows, vocab = [], sizes.vocab_of_targets
    weight = torch.randn(vocab, sizes.hidden).requires_grad_()
    for targets in sizes.targets:
        hidden, ids = torch.randn(targets, sizes.hidden).requires_grad_(), torch.arange(targets) % vocab
        with LiveBytes() as memory:
            stats = fnppo.chunked_logprobs(hidden, ids, weight=weight)
            torch.autograd.grad((stats.logprobs + stats.entropy).sum(), (hidden, weight))
        rows.append({"x": targets, "peak": memory.peak, "logits": 4 * targets * vocab, "weight": weight.nbytes})
    return rows


def measure_process(sizes: Sizes) -> dict[str, float]:
    """What the system says: by how much the peak of a process grows from the smallest batch of `tokens` to the largest."""
    points = [point for point in sweeps(sizes)["tokens"][1] if point.max_tokens is None]
    updates, grown = Updates(sizes), []
    for point in (points[0], points[0], points[-1]):
        updates.prepare(point)
        updates.run(point)
        grown.append(peak_of_process())
    return {"from": points[0].x, "to": points[-1].x, "resident": grown[-1] - grown[1]}


def peak_of_process() -> int:
    """Bytes, on Linux. Not `ru_maxrss`, which begins with that of the process that started this one."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def measured(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """All that the page says, as data."""
    start, found = time.perf_counter(), {}
    rates = []
    for name, (axis, points) in sweeps(sizes).items():
        rows, rate = measure(points, sizes, options.rounds)
        found[name] = {"axis": axis, "rows": rows}
        rates.append(rate)
        print(f"{name}: {len(points)} points, after {time.perf_counter() - start:.0f} s", flush=True)
    again = [sys.executable, __file__, "--process", *(["--quick"] if options.quick else [])]
    process = json.loads(subprocess.run(again, capture_output=True, text=True, check=True).stdout)
    data = {"rounds": options.rounds, "rate": max(rates), "sweeps": found, "head": measure_head(sizes)}
    data |= {"process": process, "sizes": sizes._asdict(), "minutes": (time.perf_counter() - start) / 60}
    return data


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: figures of no meaning")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=PAGES, metavar="FOLDER", help="where page, plots and data go")
    parser.add_argument("--draw", action="store_true", help="measure nothing: page and plots from plots/cost.json")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.process:
        print(json.dumps(measure_process(sizes)))
        return
    file = options.out / "plots/cost.json"
    if not options.draw:
        write_data(measured(options, sizes), file)
    data = json.loads(file.read_text())
    draw(data, options.out)
    write_parts("cost.md", parts_of(data), out=options.out)


if __name__ == "__main__":
    main()
