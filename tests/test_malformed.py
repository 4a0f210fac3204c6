"""Malformed input ends in a ValueError that names the place, the value, the limit and the way out.

The run-time checker of types and shapes in conftest.py would answer in the library's place. So these tests, which are in
malformed_input.py, run in a child process without it, where the library is what users meet.
"""

import os
import subprocess
import sys
from pathlib import Path


def test_malformed_input_is_refused_as_users_meet_it():
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    child = subprocess.run(
        [*command, Path(__file__).with_name("malformed_input.py")],
        env=os.environ | {"FNPPO_WITHOUT_CHECKER": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stdout[-10_000:] + child.stderr[-1000:]
    assert "passed" in child.stdout
