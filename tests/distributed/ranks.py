"""Processes of a process group that stay: each `run` calls one function on all of them, and gives back what each returned.

So a property can draw hundreds of examples without starting processes, and a hang is an error after a while.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
SECONDS = 90  # that one call may take, on a busy machine


class Failed(Exception):
    """A rank has raised; the message is its traceback."""


class Pool:
    """`size` ranks under gloo on this machine."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.folder.name, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(300):
                raise TimeoutError("the ranks have not started within 300 s")
            pipe.recv()

    def run(
        self, function: Callable[..., Any], *args: Any, each: list[Any] | None = None, seconds: int = SECONDS
    ) -> list[Any]:
        """`function(*args)` on every rank, with `each[rank]` in front if given. A rank's exception is raised here."""
        found = self.outcomes(function, *args, each=each, seconds=seconds)
        for rank, (_, error) in enumerate(found):
            if error is not None:
                raise Failed(f"rank {rank}:\n{error[1]}")
        return [value for value, _ in found]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, each: list[Any] | None = None, seconds: int = SECONDS
    ) -> list[tuple[Any, tuple[str, str] | None]]:
        """(value, None) of each rank, or (None, (message, traceback))."""
        for rank, pipe in enumerate(self.pipes):
            pipe.send((function, args if each is None else (each[rank], *args)))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(seconds):
                self.close()
                raise TimeoutError(f"rank {rank} has not answered within {seconds} s: {function.__name__}")
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, size: int, folder: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    import programs  # noqa: F401

    pipe.send("ready")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args), None))
        except BaseException as error:
            pipe.send((None, (f"{type(error).__name__}: {error}", traceback.format_exc())))
