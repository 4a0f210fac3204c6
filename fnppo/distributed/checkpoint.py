"""Checkpoints of many ranks: a folder of folders, each of which is complete or not there.

    folder/step-000012/      what all ranks wrote (torch's distributed checkpoint), and manifest.json
    folder/.step-000013/     being written; left over where a run was killed, and removed by the next save

Ranks write at once, each its shards, with the digests of its files. The first rank waits until all have, writes the manifest
and renames the folder, which is one step. A kill at any moment leaves the checkpoints that were complete before.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from fnppo.arguments import check_count
from fnppo.distributed.reduce import raise_together
from fnppo.types import PyTree

FORMAT = 2
MANIFEST = "manifest.json"
FAILED = "failed-"


class Restored(NamedTuple):
    """What a checkpoint says of its run: steps done, the caller's `position`, and whether random states were set.

    They are set where there are as many ranks as there were.
    """

    step: int
    position: dict[str, Any]
    rng: bool


class Saving:
    """A checkpoint that may still be on its way to the disk."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="fnppo-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when the checkpoint is complete. Raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            warnings.warn(f"a checkpoint was not written: {error}", stacklevel=2)


def begin_save(
    folder: str | os.PathLike[str],
    tree: PyTree,
    *,
    step: int,
    position: dict[str, Any],
    keep: int | None,
    group: dist.ProcessGroup,
    frozen: Mapping[str, int] = MappingProxyType({}),
) -> Saving:
    """Copy the tree to host memory, and write it in the background. Every rank calls it with its shards.

    Args:
        folder: on a file system that all ranks share.
        tree: tensors and DTensors; once copied, they may change.
        step: names the checkpoint.
        position: where in the data the run is: anything that JSON can hold. That of the first rank is kept.
        keep: how many of the last checkpoints stay; None keeps all.
        group: of all ranks, used by this function alone, and able to send host memory (gloo).
        frozen: a number for each tensor that is not saved, and must be the same where the checkpoint is loaded.

    Raises:
        ValueError: `step` is no count, `keep` is below 1, `position` cannot be written as JSON, or there is a checkpoint of
            that step already.
    """
    check_count("step", step, least=0, remedy="It counts steps.")
    if keep is not None:
        check_count("keep", keep, least=1, remedy="None keeps all.")
    try:
        text = json.dumps(position)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"position cannot be written as JSON: {error}. Use numbers, strings, lists and dicts."
        ) from error
    folder = Path(folder).resolve()
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}"
    rank, ranks = group.rank(), group.size()
    raise_together(_make_room(folder, final, partial) if rank == 0 else None, group)
    state = named(tree)
    about = {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in state.items()}
    state |= {f"rng/{rank}/{name}": value for name, value in _random_state().items()}
    written: Any = state_dict_saver.async_save(state, checkpoint_id=partial, process_group=group, no_dist=False)
    manifest = {
        "fnppo_sharded": FORMAT, "step": step, "position": json.loads(text), "ranks": ranks, "tensors": about,
        "frozen": dict(frozen), "rng": sorted(_random_state()),
    }  # fmt: skip

    def finish() -> None:
        written.result()
        _write(partial / f"digests-{rank}.json", {file.name: _digest(file) for file in partial.glob(f"__{rank}_*")})
        if rank != 0:
            _wait_for(lambda: final.exists(), partial)
            return
        parts = [partial / f"digests-{other}.json" for other in range(ranks)]
        _wait_for(lambda: all(part.exists() for part in parts), partial)
        files = {".metadata": _digest(partial / ".metadata")}
        for part in parts:
            files |= json.loads(part.read_text())
        _write(partial / MANIFEST, _sealed(manifest | {"files": files}))
        _sync(partial)
        partial.rename(final)
        _sync(folder)
        for old in checkpoints(folder)[: -keep if keep is not None else 0]:
            _remove(old)

    def finish_or_tell() -> None:
        try:
            finish()
        except BaseException as error:
            with contextlib.suppress(OSError):
                _write(partial / f"{FAILED}{rank}", str(error))
            raise

    return Saving(finish_or_tell)


def load(
    folder: str | os.PathLike[str],
    tree: PyTree,
    *,
    group: dist.ProcessGroup,
    frozen: Mapping[str, int] = MappingProxyType({}),
) -> Restored | None:
    """Fill the tensors of `tree` from the last complete checkpoint; None where there is none. Every rank calls it.

    The run that wrote it may have had another number of ranks, and another mesh, but not other numbers in `frozen`.

    Raises:
        ValueError: on every rank: the checkpoint is damaged or was made of other tensors. `tree` is as it was.
    """
    rank, ranks = group.rank(), group.size()
    found: list[Any] = [checkpoints(Path(folder).resolve())[-1:]]  # as the first rank sees it: a shared disk may lag
    dist.broadcast_object_list(found, group_src=0, group=group)
    if not found[0]:
        return None
    (path,) = found[0]
    state, error = named(tree), None
    try:
        manifest = _manifest(path, state, frozen)
        for name in sorted(manifest["files"])[rank::ranks]:
            _compare(path / name, manifest["files"][name])
    except Exception as refused:
        error = str(refused)
    raise_together(error, group)
    own = _random_state()
    same = manifest["ranks"] == ranks and manifest["rng"] == sorted(own)
    rng = {f"rng/{rank}/{name}": value for name, value in own.items()} if same else {}
    state_dict_loader.load(state | rng, checkpoint_id=path, process_group=group)
    _set_random_state({name.rpartition("/")[2]: value for name, value in rng.items()})
    return Restored(manifest["step"], manifest["position"], same)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, from the first step to the last."""
    found = [
        path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and (path / MANIFEST).exists()
    ]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def named(tree: PyTree) -> dict[str, Tensor]:
    """The leaves of a tree by their paths."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {"/".join(map(str, path)): leaf for path, leaf in zip(paths, leaves, strict=True)}


def _manifest(path: Path, state: dict[str, Tensor], frozen: Mapping[str, int]) -> dict[str, Any]:
    """The manifest of a checkpoint, if it is one of these tensors, beside these frozen ones."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        version = manifest["fnppo_sharded"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint of fnppo, or its {MANIFEST} is damaged ({error}). Remove it to load the one before."
        ) from error
    if version != FORMAT:
        raise ValueError(f"{path} has version {version}; {FORMAT} is known. Load it with the fnppo that wrote it.")
    if _sealed(manifest) != manifest:
        raise ValueError(
            f"{path}: its {MANIFEST} has other content than was written. Remove it to load the one before."
        )
    tensors = manifest["tensors"]
    about = {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in state.items()}
    for name in sorted(about.keys() | tensors.keys()):
        here, there = (f"{side[name][1]} {side[name][0]}" if name in side else "nothing" for side in (about, tensors))
        if here != there:
            raise ValueError(
                f"{path}: {name} is {there}, expected {here}. It belongs to another run: name another folder."
            )
    for name in sorted(frozen.keys() | manifest["frozen"].keys()):
        if frozen.get(name) != manifest["frozen"].get(name):
            raise ValueError(
                f"{path}: {name} is frozen, so it was not saved, and has other values than in the run that wrote it. Start "
                "from the model that this run started from."
            )
    return manifest


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the digest of all else that is in it."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True).encode()
    return rest | {"digest": hashlib.blake2b(text, digest_size=16).hexdigest()}


def _compare(file: Path, digest: str) -> None:
    found = _digest(file) if file.exists() else "missing"
    if found != digest:
        what = "is missing" if found == "missing" else "has other content than was written"
        raise ValueError(f"{file} {what}: the checkpoint is damaged. Remove its folder to load the one before.")


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write(file: Path, content: Any) -> None:
    """A file that is whole once it has its name."""
    temporary = file.with_name(f"{file.name}.part")
    with open(temporary, "w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)


def _sync(folder: Path) -> None:
    """Make renames in a folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A checkpoint, which is gone in one step."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _make_room(folder: Path, final: Path, partial: Path) -> str | None:
    """An empty folder to write to, and nothing of what was killed; or what is in the way."""
    try:
        if (there := checkpoints(folder)) and _step(there[-1]) >= _step(final):
            return f"{there[-1]} is there already. Load it to go on from it, or name another folder."
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
        partial.mkdir()
    except OSError as error:
        return f"{folder} cannot be written to: {error}. Name another folder."
    return None


def _wait_for(condition: Callable[[], bool], partial: Path, *, seconds: float = 3600.0) -> None:
    """Wait for what other ranks write, until it is there, or one of them has failed."""
    limit = time.monotonic() + seconds
    while not condition():
        for failed in _failures(partial):
            said = json.loads(failed.read_text())
            raise ValueError(f"rank {failed.name.removeprefix(FAILED)} has not written its part: {said}")
        if time.monotonic() > limit:
            raise ValueError(f"another rank has not written its part within {seconds:.0f} s. Look at its messages.")
        time.sleep(0.01)


def _failures(partial: Path) -> list[Path]:
    """What ranks left that could not write. A folder that is gone has its final name by now."""
    try:
        names = sorted(os.listdir(partial))
    except FileNotFoundError:
        return []
    return [partial / name for name in names if re.fullmatch(rf"{FAILED}\d+", name)]


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
