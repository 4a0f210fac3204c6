"""`fnppo.plan_microbatches` beside what verl 0.7.0 does with `use_dynamic_bsz`, on row lengths as the field has them.

    python benchmarks/planner.py                                   prints the table
    python benchmarks/planner.py --rows 300 2000 --only bimodal    a part of it
    python benchmarks/planner.py --write                           writes docs/pages/planner.md

Each plan is made in a process of its own. verl's functions are its own, from the wheel in build/parity/verl-0.7.0, which
`make parity` installs; without it only fnppo's lines are filled.
"""

import argparse
import datetime
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/pages/planner.md"
VERL = ROOT / "build/parity/verl-0.7.0/bin/python"
MAX_TOKENS = 16_384
MIB = 2**20


def lengths_of(name: str, rows: int) -> list[int]:
    """Tokens of each row, prompt and response, at most `MAX_TOKENS`."""
    generator = torch.Generator().manual_seed(0)

    def whole(least: int, most: int, count: int = rows) -> torch.Tensor:
        return torch.randint(least, most + 1, (count,), generator=generator)

    def lognormal(median: float, sigma: float, most: int) -> torch.Tensor:
        drawn = (torch.randn(rows, generator=generator) * sigma).exp() * median
        return drawn.clamp(1, most).long()

    def often(share: float) -> torch.Tensor:
        return torch.rand(rows, generator=generator) < share

    return {
        "skewed": lambda: whole(50, 400) + lognormal(665, 0.8, 8192),
        "uniform": lambda: whole(1, 8192),
        "bimodal": lambda: torch.where(often(0.1), whole(4096, 8192), whole(50, 600)),
        "at the cap": lambda: torch.where(often(0.9), whole(MAX_TOKENS - 200, MAX_TOKENS), whole(100, MAX_TOKENS)),
        "short": lambda: whole(16, 128),
        "long prompts": lambda: (
            whole(512, 4096, math.ceil(rows / 8)).repeat_interleave(8)[:rows] + lognormal(245, 0.6, 2048)
        ),
    }[name]().tolist()


NAMES = {
    "skewed": "prompts of 50 to 400 tokens, responses lognormal with median 665 and σ 0.8",
    "uniform": "1 to 8,192 tokens",
    "bimodal": "a tenth of 4,096 to 8,192 tokens, the rest of 50 to 600",
    "at the cap": "nine tenths within 200 tokens of the limit, the rest anywhere",
    "short": "16 to 128 tokens",
    "long prompts": "groups of 8 rows with a prompt of 512 to 4,096 tokens, responses lognormal with median 245",
}


class Plan(NamedTuple):
    """What a table shows of a plan. `failed` says why there is none."""

    groups: int = 0
    over: int = 0
    fullest: int = 0
    balance: float = 0.0
    seconds: float = 0.0
    mib: float = 0.0
    failed: str = ""


def plan_by_fnppo(lengths: list[int]) -> list[list[int]]:
    from fnppo import plan_microbatches

    return plan_microbatches(lengths, max_tokens=MAX_TOKENS)


def plan_by_verl(lengths: list[int]) -> list[list[int]]:
    """The part of `rearrange_micro_batches` that chooses rows, on one rank; without the copies of the rows themselves."""
    from verl.utils.seqlen_balancing import calculate_workload, ceildiv, get_seqlen_balanced_partitions

    count = min(len(lengths), ceildiv(sum(lengths), MAX_TOKENS))
    workloads = calculate_workload(torch.tensor(lengths)).tolist()
    return get_seqlen_balanced_partitions(workloads, count, equal_size=False)


def check_against_the_whole(lengths: list[int], plan: list[list[int]]) -> None:
    """`plan_by_verl` is what verl's `rearrange_micro_batches` gives for a batch of such rows."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    batch = TensorDict({"input_ids": mask, "attention_mask": mask}, [len(lengths)])
    found = rearrange_micro_batches(batch, max_token_len=MAX_TOKENS)[1]
    assert sorted(map(sorted, found)) == sorted(map(sorted, plan)), "verl's rearrange_micro_batches plans otherwise"


def measure(side: str, name: str, rows: int, repeat: int, max_gib: int, max_seconds: int) -> dict[str, Any]:
    """In a process of its own: the plan of one side in numbers, the least CPU time of several, the memory of the first.

    Memory is the growth of the peak over what was resident before the call, when the list of lengths was there.
    """
    plan_by = {"fnppo": plan_by_fnppo, "verl": plan_by_verl}[side]
    lengths = lengths_of(name, rows)
    plan_by([1, 2, 3])  # imports
    if max_gib:
        resource.setrlimit(resource.RLIMIT_AS, (max_gib << 30, max_gib << 30))
        most = math.ceil(time.process_time()) + max_seconds  # what the imports took does not count
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    seconds = []
    for turn in range(repeat):
        start = time.process_time()
        plan = plan_by(lengths)
        seconds.append(time.process_time() - start)
        if turn == 0:
            growth = resident("VmHWM") - before
    if side == "verl" and rows <= 300:
        check_against_the_whole(lengths, plan)
    tokens = [sum(lengths[row] for row in group) for group in plan]
    works = [sum(n + n * n / 24576 for n in (lengths[row] for row in group)) for group in plan]
    over = sum(each > MAX_TOKENS for each in tokens)
    balance = max(works) * len(works) / sum(works)
    return Plan(len(plan), over, max(tokens), balance, min(seconds), growth / MIB)._asdict()


def resident(field: str) -> int:
    """Bytes, from /proc/self/status: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def in_a_child(side: str, name: str, rows: int, arguments: argparse.Namespace) -> Plan:
    """`measure` under the interpreter of a side, with limits of CPU time and memory for verl."""
    python, numbers = sys.executable, (arguments.repeat, 0, 0)
    if side == "verl":
        python, numbers = arguments.verl, (1, arguments.gib, arguments.seconds)
    child = [python, __file__, "--measure", side, name, *map(str, (rows, *numbers))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(child, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return Plan(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode == -signal.SIGXCPU:
        return Plan(failed=f"over {arguments.seconds} s")
    if "MemoryError" in done.stderr:
        return Plan(failed=f"over {arguments.gib} GiB")
    sys.exit(f"{side} failed with {done.returncode}:\n{done.stderr[-3000:]}")


def line(name: str, rows: int, ours: Plan, theirs: Plan) -> str:
    """A row of the table."""
    lengths = lengths_of(name, rows)
    bound = max(math.ceil(sum(lengths) / MAX_TOKENS), sum(2 * n > MAX_TOKENS for n in lengths))
    assert ours.over == 0, "a micro-batch of fnppo is over the limit"
    cells = [
        name,
        f"{rows:,}",
        f"{bound:,}",
        f"{ours.groups:,}",
        f"{ours.balance:.3f}",
        time_of(ours),
        f"{ours.mib:.0f}",
    ]
    if theirs.failed:
        cells += [theirs.failed, *[""] * 5]
    else:
        most = f"{theirs.fullest / MAX_TOKENS - 1:+.1%}" if theirs.over else ""
        cells += [f"{theirs.groups:,}", f"{theirs.over:,}", most, f"{theirs.balance:.3f}", time_of(theirs)]
        cells += [f"{theirs.mib:.0f}"]
    return "| " + " | ".join(cells) + " |"


def time_of(plan: Plan) -> str:
    return f"{plan.seconds:.4f}" if plan.seconds < 0.01 else f"{plan.seconds:.2f}"


HEAD = (
    "| lengths | rows | lower bound | fnppo: micro-batches | work, max/mean | s | MiB "
    "| verl: micro-batches | over the limit | the fullest | work, max/mean | s | MiB |\n" + "|--" * 13 + "|\n"
)


def page(lines: list[str], calibration: float, arguments: argparse.Namespace) -> str:
    """The document."""
    kinds = "\n".join(f"- *{name}*: {kind}" for name, kind in NAMES.items())
    return f"""# The planner

`plan_microbatches(lengths, max_tokens=...)` puts the rows of a mini-batch into micro-batches, each of which is one
forward. Written by `python benchmarks/planner.py --write`.

## What it promises

- No micro-batch has more than `max_tokens` real tokens. A row that alone has more is refused by name.
- Every row is in exactly one micro-batch.
- There are few: within 2% of a lower bound, or as many as best fit needs, from the longest row to the shortest. The bound
  is the larger of all tokens by `max_tokens`, rounded up, and the number of rows with over half of `max_tokens`.
- They are of like work, where a row of n tokens is n + n² / (12 · hidden_size) of it, attention being the second term.
- The order is stable: the same lengths give the same plan, rows ascend within a micro-batch, and micro-batches come in the
  order of their first rows.
- `min_groups=k` makes at least k. On several ranks, plan once, take the largest number of micro-batches of any rank, and
  plan again with that as `min_groups`: each rank has as many, and a micro-batch without rows adds exactly nothing to loss
  and gradients (`test_ranks_run_as_many_micro_batches` in `tests/test_exactness.py`).

A plan changes memory and time, never a number: the weights of the loss are made before it.

## How it works

1. The number of micro-batches to begin with is the lower bound.
2. From the longest row to the shortest, each goes to the micro-batch with the least work, as long as that has room
   (Graham, *Bounds on multiprocessing timing anomalies*, 1969).
3. From the first row on for which it has none, each goes to the fullest micro-batch that has room, or to a new one (best
   fit decreasing; Johnson et al., *Worst-case performance bounds for simple one-dimensional packing algorithms*, 1974).
4. Where that makes over 2% more than the bound, best fit alone is tried too, and the plan with fewer micro-batches is
   taken.
5. Many rows are dealt in one step: in 2, one each to all micro-batches whose turn comes before any has a second one; in
   3, all rows of one length to all micro-batches with the same room. Micro-batches hold as many tokens as if one row were
   dealt after the other.

## Beside verl

With `use_dynamic_bsz`, verl 0.7.0 makes as many micro-batches as all tokens by the limit, rounded up (at most as many as
there are rows), and divides the work over them by Karmarkar and Karp's differencing method (`rearrange_micro_batches` in
`verl/utils/seqlen_balancing.py`). The limit takes part in their number only: what a micro-batch then holds is not compared
with it. So the work is balanced better, and micro-batches exceed the limit. It asserts that no row is longer than the limit
(that the width is not, where the batch is padded). The time is without the copies of the rows.

Row lengths, with a limit of {MAX_TOKENS:,} tokens:

{kinds}

*over the limit* counts micro-batches (fnppo has none), *the fullest* is how far the largest goes over it. *s* is CPU time
of one plan, of fnppo the least of {arguments.repeat}. *MiB* is how far the peak of resident memory grows in the call, in a process of
its own; the list of lengths was there before (a million of them are some 40 MiB). verl was stopped where it took over
{arguments.seconds} s of CPU time or {arguments.gib} GiB, and larger batches of that kind were then left out.

{HEAD}{chr(10).join(lines)}

Measured on {datetime.date.today().isoformat()}, on a machine with {os.cpu_count()} CPU cores, of which a plan uses one. A Python loop of 3 million
additions took {calibration:.2f} s of CPU time in the same minutes.

## The source

::: fnppo.grouping
"""


def additions() -> float:
    """Seconds for 3 million additions in a loop: how fast the machine is now."""
    start, total = time.process_time(), 0
    for number in range(3_000_000):
        total += number
    return time.process_time() - start


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[300, 2_000, 20_000, 1_000_000], help="sizes of a batch")
    parser.add_argument("--only", nargs="+", choices=list(NAMES), default=list(NAMES), help="distributions of lengths")
    parser.add_argument("--repeat", type=int, default=3, help="calls of fnppo, of which the fastest counts (verl: 1)")
    parser.add_argument("--seconds", type=int, default=120, help="limit of CPU time of a process of verl")
    parser.add_argument("--gib", type=int, default=8, help="limit of memory of a process of verl")
    parser.add_argument("--verl", type=Path, default=VERL, help="interpreter of the environment that has verl 0.7.0")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        side, name, *numbers = arguments.measure
        print(json.dumps(measure(side, name, *map(int, numbers))))
        return
    if not arguments.verl.exists():
        told = f"There is no {arguments.verl}. `make build/parity/verl-0.7.0/.ready` installs verl; now fnppo alone."
        print(told, file=sys.stderr)
    lines, calibrations, failed = [], [], set()
    print(HEAD, end="")
    for rows in sorted(arguments.rows):
        for name in arguments.only:
            calibrations.append(additions())
            ours = in_a_child("fnppo", name, rows, arguments)
            theirs = Plan(failed="–")
            if arguments.verl.exists() and name not in failed:
                theirs = in_a_child("verl", name, rows, arguments)
            if theirs.failed:
                failed.add(name)
            lines.append(line(name, rows, ours, theirs))
            print(lines[-1], flush=True)
    calibrations.sort()
    print(f"3 million additions in a Python loop: {calibrations[0]:.2f} to {calibrations[-1]:.2f} s")
    if arguments.write:
        PAGE.write_text(page(lines, calibrations[len(calibrations) // 2], arguments))


if __name__ == "__main__":
    main()
