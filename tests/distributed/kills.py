"""Kill one of two ranks that save a checkpoint together, at a random moment, then the other; load; again and again.

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

import fsspec  # noqa: F401 - this and the two of torch once, not in each process that is forked
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fnppo.distributed.checkpoint import begin_save, checkpoints, load
from fnppo.dtensor import local

RANKS = 2

torch.set_num_threads(1)


def start(folder, name, rank, ranks):
    """The process group of a process that was just forked."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{name}", ranks), rank=rank, world_size=ranks)
    return dist.group.WORLD


def tree(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {name: torch.full((50, 7), float(step)) for name in "abc"}
    return {
        "params": {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in full.items()},
        "step": torch.tensor(step),
    }


def in_child(function, *args):
    if (child := os.fork()) == 0:
        status = 1
        try:
            status = function(*args)
        finally:
            os._exit(status)
    return child


def save_on(folder, saved, name, rank):
    """Go on from the last checkpoint, without end; note each step whose checkpoint is complete."""
    group = start(folder, name, rank, RANKS)
    restored = load(folder / "run", tree(0), group=group)
    step = 0 if restored is None else restored.step + 1
    (folder / f"begun-{name}").touch()
    while True:
        begin_save(folder / "run", tree(step), step=step, position={"at": step}, keep=2, group=group).wait()
        if rank == 0:
            with open(saved, "a") as file:
                file.write(f"{step}\n")
        step += 1


def last_saved(saved):
    lines = saved.read_text().splitlines() if saved.exists() else []
    return int(lines[-1]) if lines else -1


def loads(folder, name, least):
    """0 if the last complete checkpoint is the one that was noted last, or the next, and whole."""
    group = start(folder, name, 0, 1)
    found = tree(-1)
    restored = load(folder / "run", found, group=group)
    if restored is None:
        return 0 if least == -1 else 1
    right = tree(restored.step)
    same = all(torch.equal(local(found["params"][name]), local(right["params"][name])) for name in "abc")
    good = same and int(found["step"]) == restored.step == restored.position["at"]
    return 0 if good and restored.step in (least, least + 1) else 1


def main(folder, kills, seed):
    saved, draw, seen = folder / "saved", random.Random(seed), set()
    for kill in range(kills):
        ranks = [in_child(save_on, folder, saved, kill, rank) for rank in range(RANKS)]
        while not (folder / f"begun-{kill}").exists():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.4))
        draw.shuffle(ranks)
        for rank in ranks:  # the other goes on for a moment, as under torchrun
            os.kill(rank, signal.SIGKILL)
            time.sleep(draw.uniform(0.0, 0.05))
        for rank in ranks:
            os.waitpid(rank, 0)
        least = last_saved(saved)
        if os.waitpid(in_child(loads, folder, f"{kill}-load", least), 0)[1] != 0:
            there = [path.name for path in checkpoints(folder / "run")]
            sys.exit(f"after kill {kill}: step {least} was saved last, and there are {there}")
        seen.add(least)
    print(f"{kills} kills, at {len(seen)} different steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
