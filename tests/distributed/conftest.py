"""Ranks that the tests of this folder share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Pool


@pytest.fixture(scope="session")
def pools():
    """`pools(size)`: that many ranks, started once."""
    started = {}

    def pool(size):
        if size not in started or not all(process.is_alive() for process in started[size].processes):
            started[size] = Pool(size)
        return started[size]

    yield pool
    for each in started.values():
        each.close()
