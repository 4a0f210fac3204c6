"""Kill a process that saves checkpoints, at random moments, again and again; after each kill, load.

python tests/distributed/kills.py FOLDER KILLS SEED

It prints how many kills there were and at how many different steps; its exit status is 1 where a checkpoint was lost, or was
not what had been saved.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fnppo.distributed.checkpoint import begin_save, checkpoints, load

torch.set_num_threads(1)


def alone(folder):
    """A process group of one rank, for a process that was just forked."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{os.getpid()}", 1), rank=0, world_size=1)
    return dist.group.WORLD


def tree(step):
    return {"params": {name: torch.full((50, 7), float(step)) for name in "abc"}, "step": torch.tensor(step)}


def in_child(function, *args):
    if (child := os.fork()) == 0:
        status = 1
        try:
            status = function(*args)
        finally:
            os._exit(status)
    return child


def save_on(folder, saved):
    """Go on from the last checkpoint, without end; note each step whose checkpoint is complete."""
    group = alone(folder)
    restored = load(folder / "run", tree(0), group=group)
    step = 0 if restored is None else restored.step + 1
    while True:
        begin_save(folder / "run", tree(step), step=step, position={"at": step}, keep=2, group=group).wait()
        with open(saved, "a") as file:
            file.write(f"{step}\n")
        step += 1


def last_saved(saved):
    lines = saved.read_text().splitlines() if saved.exists() else []
    return int(lines[-1]) if lines else -1


def loads(folder, least):
    """0 if the last complete checkpoint is the one that was noted last, or the next, and whole."""
    found = tree(-1)
    restored = load(folder / "run", found, group=alone(folder))
    if restored is None:
        return 0 if least == -1 else 1
    right = tree(restored.step)
    same = all(torch.equal(found["params"][name], right["params"][name]) for name in "abc")
    good = same and int(found["step"]) == restored.step == restored.position["at"]
    return 0 if good and restored.step in (least, least + 1) else 1


def main(folder, kills, seed):
    saved, draw, seen = folder / "saved", random.Random(seed), set()
    for kill in range(kills):
        child = in_child(save_on, folder, saved)
        time.sleep(draw.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        least = last_saved(saved)
        if os.waitpid(in_child(loads, folder, least), 0)[1] != 0:
            there = [path.name for path in checkpoints(folder / "run")]
            sys.exit(f"after kill {kill}: step {least} was saved last, and there are {there}")
        seen.add(least)
    print(f"{kills} kills, at {len(seen)} different steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
