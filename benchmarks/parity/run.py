"""fnppo's losses, KL estimators and advantages beside those of verl and TRL, on the same batches.

    make parity                                                   writes docs/pages/parity.md
    python benchmarks/parity/run.py --only k3 --peers verl-0.9.1  prints what has k3 in its name

Each peer runs in an environment of its own, build/parity/NAME, which `make parity` creates. It ends with an error where
fnppo and a peer differ and `differences` does not say so, or where it says so and they agree.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import differences
import rows
import torch
from batches import SEEDS, SHAPES, random_batch
from compare import RowResult, Shown, compare, difference_faults, numbers, row_faults, with_our_numbers
from page import body, page

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs/pages/parity.md"
MAP = ROOT / "docs/pages/from-verl.md"
PEERS = ["verl-0.7.0", "verl-0.8.0", "verl-0.9.1", "trl-1.16.0"]


def python_of(peer: str) -> Path:
    """The interpreter of its environment."""
    python = ROOT / "build/parity" / peer / "bin/python"
    if peer not in PEERS:
        sys.exit(f"{peer} is not compared. Name some of {' '.join(PEERS)}.")
    if not python.exists():
        sys.exit(f"There is no environment of {peer}: {python} is missing. Run `make parity`, which installs it.")
    return python


def ask(peer: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the peer's functions return for the cases."""
    python = python_of(peer)
    side = HERE / f"{peer.partition('-')[0]}_side.py"
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "cases.pt", Path(folder) / "results.pt"
        torch.save(cases, files[0])
        done = subprocess.run([python, side, *files], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{peer} failed:\n{done.stderr[-3000:]}")
        found = torch.load(files[1])
    if found["version"] != peer.partition("-")[2]:
        sys.exit(f"{python} has version {found['version']}. Remove {python.parent.parent} and run `make parity`.")
    return found["results"]


def unmapped(names: list[str]) -> list[str]:
    """Those of verl's names that `from-verl.md` does not mention."""
    spans = re.findall(r"`([^`]+)`", MAP.read_text())
    words = {word for span in spans for word in re.findall(r"\w+", span)}
    return [name for name in names if name not in words]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="what has the text in its name; printed, and no page is written")
    parser.add_argument("--peers", nargs="*", default=PEERS, metavar="NAME", help=f"some of {' '.join(PEERS)}")
    arguments = parser.parse_args()
    for peer in arguments.peers:
        python_of(peer)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".* is alone in group .*")  # one of the differences

    def wanted(peer: str, *names: str) -> bool:
        asked = any(peer == each.partition("-")[0] for each in arguments.peers)
        return asked and (not arguments.only or any(arguments.only in name for name in names))

    table = {
        title: [RowResult(row, {}) for row in section if wanted(row.peer, row.theirs, row.ours)]
        for title, section in rows.SECTIONS.items()
    }
    listed = {
        title: [with_our_numbers(each) for each in section if wanted(each.peer, each.name, each.title)]
        for title, section in differences.SECTIONS.items()
    }
    all_rows, all_listed = [*chain(*table.values())], [*chain(*listed.values())]
    faults: list[str] = []
    for peer in arguments.peers:
        library = peer.partition("-")[0]
        mine = [result for result in all_rows if result.row.peer == library]
        shown = [each for result in all_listed if result.difference.peer == library for each in result.shown]
        faults += run_beside(peer, mine, shown)
    faults += chain(*map(row_faults, all_rows), *map(difference_faults, all_listed))

    if arguments.only or set(arguments.peers) != set(PEERS):
        print(body(table, listed))
    else:
        PAGE.write_text(page(table, listed))
        print(f"written: {PAGE.relative_to(ROOT)}")
    if faults:
        sys.exit("not as rows and differences say:\n" + "\n".join(faults))


def run_beside(peer: str, results: list[RowResult], shown: list[Shown]) -> list[str]:
    """Fill in what the peer gives; returns its names that `from-verl.md` lacks."""
    start = time.perf_counter()
    drawn = [random_batch(shape, seed) for shape in SHAPES for seed in range(SEEDS)]
    prepared = [[result.row.prepare(batch) for batch in drawn] for result in results]
    cases = [
        {"kind": result.row.kind, "options": result.row.options, "columns": batch}
        for result, batches in zip(results, prepared, strict=True)
        for batch in batches
    ]
    cases += [{"kind": each.call.kind, "options": each.call.options, "columns": each.call.columns} for each in shown]
    cases += [{"kind": "names", "options": {}, "columns": {}}]
    print(f"{peer}: {len(cases)} calls", end="", flush=True)
    found = iter(ask(peer, cases))
    for result, batches in zip(results, prepared, strict=True):
        result.lines[peer] = compare(result.row, batches, [next(found) for _ in batches])
    for each in shown:
        each.theirs[peer] = numbers(next(found), each.call.output)
    print(f", {time.perf_counter() - start:.0f} s", flush=True)
    return [f"{MAP.name} does not mention {name} of {peer}" for name in unmapped(next(found)["names"])]


if __name__ == "__main__":
    main()
