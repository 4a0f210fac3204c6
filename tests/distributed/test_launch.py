"""The example under torchrun: it learns, and a rank that is killed comes back and ends with the same bits."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SCRIPT = str(ROOT / "examples" / "03_many_ranks.py")


def start(folder, *options, restarts=0):
    command = [
        *COMMAND,
        "--max-restarts",
        str(restarts),
        "--monitor-interval",
        "0.1",
        SCRIPT,
        "--folder",
        str(folder),
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def steps(lines):
    return [int(line.split()[1]) for line in lines if line.startswith("step ")]


def rank_one(launcher):
    """The process of rank 1 under this torchrun."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if parent == str(launcher.pid) and b"\0RANK=1\0" in b"\0" + (folder / "environ").read_bytes():
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError("there is no rank 1")


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds a rank among the processes of Linux")
def test_a_killed_rank_comes_back(tmp_path):
    through = start(tmp_path / "through", "--steps", "9")
    out = through.communicate(timeout=200)[0]
    assert through.returncode == 0, out
    assert steps(out.splitlines()) == list(range(9))
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", out)]
    assert rewards[-1] > rewards[0] + 1

    killed, lines = start(tmp_path / "killed", "--steps", "9", restarts=1), []
    for line in killed.stdout:
        lines.append(line)
        if line.startswith("step  6") and len(steps(lines)) == 7:
            os.kill(rank_one(killed), signal.SIGKILL)
    assert killed.wait(timeout=200) == 0, "".join(lines)
    again = steps(lines)[7:]
    assert again[-4:] == [5, 6, 7, 8]  # it went on from the checkpoint of step 5, maybe after it had begun with step 7
    assert 0 not in again
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("through", "killed")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_ranks_share_the_tokens_of_a_row(tmp_path):
    run = start(tmp_path, "--steps", "2", "--sequence", "2")
    out = run.communicate(timeout=200)[0]
    assert run.returncode == 0, out
    assert steps(out.splitlines()) == [0, 1]
