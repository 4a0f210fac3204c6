"""What the tests need when mutmut runs them."""

import gc
import json
from pathlib import Path

from tiny import tiny

for family in ("llama", "gpt2", "mistral"):  # built once, before the process forks for each mutant
    tiny(family)


def pytest_collection_modifyitems(items):
    """The fastest test first: most mutants need no second one."""
    stats = Path("mutmut-stats.json")
    seconds = json.loads(stats.read_text())["duration_by_test"] if stats.exists() else {}
    items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))
    for item in items:
        item._nodeid = item.nodeid  # mutmut 3.8 reads a name that pytest 9 no longer has


def pytest_collection_finish():
    gc.freeze()  # else each process walks over, and so copies, what it has from the one that it forked from
