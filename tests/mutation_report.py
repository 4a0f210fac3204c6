"""What mutmut has found, by module, and every survivor against the list of those that change nothing.

    python tests/mutation_report.py [--all]       after `mutmut run`

The list, `mutation_survivors.toml`, knows a mutant by its function and the lines it changes, so it holds when lines move.
The status is 1 where a mutant survives that is not in the list and, with `--all`, where an entry is out of date.
"""

import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")


def mutants():
    """(module, name, status) of each mutant that was run."""
    for path in sorted(walk_mutatable_files()):
        data = SourceFileMutationData(path=path)
        data.load()
        for name, code in data.exit_code_by_key.items():
            if code is not None:
                yield path, name, status_by_exit_code[code]


def changed_lines(path, name):
    """(module.function, lines before, lines after)."""
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    before, after = ("\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return f"{path.stem}.{orig_function_and_class_names_from_key(name)[0]}", before, after


def main():
    known = {(entry["in"], entry["was"], entry["mutant"]) for entry in tomllib.loads(SURVIVORS.read_text())["survivor"]}
    counts, found, unlisted = defaultdict(Counter), set(), []
    for path, name, status in mutants():
        counts[path.stem][status] += 1
        if status == "killed":
            continue
        change = changed_lines(path, name)
        found.add(change)
        if change not in known:
            unlisted.append((status, name, *change))
    counts["all"] = sum(counts.values(), Counter())
    print("| module | mutants | killed | survived | score |\n|---|---|---|---|---|")
    for module, count in counts.items():
        total, killed = count.total(), count["killed"]
        print(f"| {module} | {total} | {killed} | {total - killed} | {killed / max(total, 1):.1%} |")
    for status, name, function, before, after in unlisted:
        print(f"\n{status}, not in {SURVIVORS.name}: {name}\n{function}\n- {before}\n+ {after}")
    stale = known - found if "--all" in sys.argv else set()
    for function, before, after in sorted(stale):
        print(f"\nout of date in {SURVIVORS.name}, killed or gone: {function}\n- {before}\n+ {after}")
    return bool(unlisted or stale or not counts["all"])


if __name__ == "__main__":
    sys.exit(main())
