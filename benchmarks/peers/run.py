"""fnppo's log-probs and update beside those of verl's actor, TRL's log-prob path and a plain padded loop.

    make bench                                            writes docs/pages/benchmark.md; some half an hour
    python benchmarks/peers/run.py --workloads W2 --rounds 1 --only fnppo plain
    make bench ARGS="--workloads W2 --keep build/bench.json"    measures W2 again, and writes the page with both

Every contender is a process of its own (see `serve.py`), with the same weights, batch and limit of tokens, in float32.
They work in turn, and what counts is the ratio within a round. The log-probs, entropies and clipped gradients of their first
round are compared. verl and TRL run in the environments that `make parity` creates.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from arithmetic import work_of
from page import write_page
from transformers import LlamaConfig, LlamaForCausalLM
from workload import MODEL, WORKLOADS, rollouts

import fnppo

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CONTENDERS = {
    "fnppo shared": (None, "fnppo_side.py", "shared"),
    "fnppo packed": (None, "fnppo_side.py", "packed"),
    "verl padded": ("verl-0.7.0", "verl_side.py", "padded"),
    "verl rmpad": ("verl-0.7.0", "verl_side.py", "rmpad"),
    "trl": ("trl-1.16.0", "trl_side.py", "-"),
    "plain": (None, "plain_side.py", "-"),
}
"""Name: (environment in build/parity, script, its mode)."""
STANDARD = ["W1", "W2"]
PAGE = ROOT / "docs/pages/benchmark.md"
AGREE = 1e-4


class Side:
    """A contender's process."""

    def __init__(self, name: str, workload: Path) -> None:
        peer, script, mode = CONTENDERS[name]
        python = ROOT / "build/parity" / peer / "bin/python" if peer else Path(sys.executable)
        if not python.exists():
            sys.exit(f"There is no environment of {peer}: {python} is missing. Run `make bench`, which installs it.")
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, it lives as long as the process
        self.process = subprocess.Popen(
            [python, HERE / script, workload, mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        self.version = self.read()["version"]

    def ask(self, work: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"{self.name} failed:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def prepare(name: str, file: Path, *, max_tokens: int, threads: int) -> fnppo.PaddedBatch:
    """Weights and batch in a file; `old_log_probs` are those of the weights. Returns the batch as fnppo has it."""
    torch.manual_seed(0)
    columns, module = rollouts(**WORKLOADS[name]), LlamaForCausalLM(LlamaConfig(**MODEL))
    width, responses = columns["input_ids"].shape[1], columns["responses"].shape[1]
    mask = torch.nn.functional.pad(columns["response_mask"], (width - responses, 0)).bool()
    batch = fnppo.PaddedBatch(columns["input_ids"], columns["attention_mask"].bool(), mask)
    policy, params = fnppo.functional_policy(module)
    old = fnppo.compute_logprobs(
        params, batch, policy=policy, temperature=1.0, max_tokens=max_tokens, layout=fnppo.padded
    )
    workload = {
        "config": MODEL, "params": module.state_dict(), "lr": 1e-5, "entropy_coef": 0.001, "max_tokens": max_tokens,
        "rows_per_micro_batch": most_rows(len(mask), max_tokens // width), "threads": threads,
        "columns": columns | {"old_log_probs": old.logprobs[:, -responses:]},
    }  # fmt: skip
    torch.save(workload, file)
    return batch


def most_rows(rows: int, fitting: int) -> int:
    """Of a padded micro-batch: a divisor of the rows, since verl divides by the number of full micro-batches."""
    return max(size for size in range(1, max(fitting, 1) + 1) if rows % size == 0)


def check(sides: list[Side], mask: torch.Tensor, folder: Path) -> dict[str, dict[str, float]]:
    """How far each is from the last one: in nats, and of gradients the length of the difference over the length."""
    found = {}
    for side in sides:
        side.ask(f"found {folder / 'found.pt'}")
        found[side.name] = torch.load(folder / "found.pt")
    reference = found[sides[-1].name]
    apart = {}
    for name, (logprobs, entropies, gradients) in found.items():
        difference = {n: gradients[n].double() - g.double() for n, g in reference[2].items()}
        apart[name] = {
            "logprobs": (logprobs - reference[0])[mask].abs().max().item(),
            "entropies": (entropies - reference[1])[mask].abs().max().item(),
            "gradients": (fnppo.global_norm(difference) / fnppo.global_norm(reference[2])).item(),
        }
        if wrong := {what: value for what, value in apart[name].items() if not value <= AGREE}:
            sys.exit(f"{name} and {sides[-1].name} differ by {wrong}, more than {AGREE}.")
    return apart


def peak_of_products(threads: int) -> float:
    """FLOP/s of products of square float32 matrices of 1024, the best of some."""
    torch.set_num_threads(threads)
    a, best = torch.randn(1024, 1024), 0.0
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * 1024**3 / (time.perf_counter() - start))
    return best


def measure(name: str, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each round, memory and differences, for one workload."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.pt"
        batch = prepare(name, file, max_tokens=options.max_tokens, threads=options.threads)
        responses = WORKLOADS[name]["response"]
        sides = [Side(each, file) for each in names]
        result: dict[str, Any] = {"work": {}, "peaks": [], "versions": {side.name: side.version for side in sides}}

        def in_turn(work: str) -> None:
            """All sides in every round, each round from another one on."""
            rounds: dict[str, list[float]] = {each: [] for each in names}
            memory: dict[str, float] = {}
            for number in range(options.rounds):
                result["peaks"].append(peak_of_products(options.threads))
                for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                    answer = side.ask(work)
                    rounds[side.name].append(answer["seconds"])
                    memory[side.name] = answer["peak"]
                    print(f"{name} {work}, round {number + 1}: {side.name} {answer['seconds']:.2f} s", flush=True)
            result["work"][work] = {"seconds": rounds, "memory": memory}

        in_turn("logprobs")
        in_turn("update")
        result["apart"] = check(sides, batch.loss_mask[:, -responses:], Path(folder))
        print(f"{name}: all agree to {AGREE}", flush=True)
        result["profile"] = {side.name: side.ask("profile")["kinds"] for side in sides if "fnppo" in side.name}
        for side in sides:
            side.end()
        result |= {
            "tokens": sum(fnppo.lengths(batch)),
            "targets": int(batch.loss_mask.sum()),
            "flops": sum(work_of(LlamaConfig(**MODEL), batch, fnppo.shared)),
        }
        result["padded"] = batch.input_ids.numel()
        result["date"] = str(date.today())
        result["median_peak"] = statistics.median(result["peaks"])
    return result


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """Of the earlier run in `options.keep`, the workloads that are not measured now. Its conditions must be those of now."""
    if options.keep is None:
        return {}
    run = json.loads(options.keep.read_text())
    now, then = ({"torch": torch.__version__} | vars(options)), ({"torch": run["torch"]} | run["options"])
    for name in ("torch", "only", "max_tokens", "threads"):
        if then[name] != now[name]:
            sys.exit(f"{options.keep} has {name} = {then[name]}, this run {now[name]}. Measure all workloads again.")
    found = run["workloads"].items()
    return {name: {"date": run["date"]} | figures for name, figures in found if name not in options.workloads}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=STANDARD, choices=list(WORKLOADS))
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TEXT", help="contenders that have a text in their name"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=4096, help="limit of tokens of a forward")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the figures as data")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="an earlier --json, for workloads that are not measured now"
    )
    options = parser.parse_args()
    names = [name for name in CONTENDERS if not options.only or any(text in name for text in options.only)]
    data: dict[str, Any] = {
        "torch": torch.__version__,
        "date": str(date.today()),
        "options": vars(options) | {"json": None, "keep": None},
    }
    earlier = kept(options)
    found = earlier | {name: measure(name, names, options) for name in options.workloads}
    data["workloads"] = {name: found[name] for name in WORKLOADS if name in found}
    if options.json:
        options.json.write_text(json.dumps(data))
    text = write_page(data, PAGE if names == list(CONTENDERS) and list(data["workloads"]) == STANDARD else None)
    print(text)


if __name__ == "__main__":
    main()
