"""Trees of tensors and whole models on disk. A path holds either all that was written or what was there before.

A file is replaced in one step. A folder is not: a kill between its two renames leaves the old folder and the new one,
both whole, in a hidden folder beside the path.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from fnppo.arguments import check_count, check_tensor
from fnppo.policy import Policy
from fnppo.types import Params, PyTree


def save_checkpoint(path: str | os.PathLike[str], tree: PyTree, *, step: int) -> None:
    """Write the tensors of `tree` (such as `(params, opt_state)`) and the step to one file, atomically.

    Raises:
        ValueError: `path` is a folder, two leaves have the same name, a leaf is no tensor, or the step no count.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/c.pt", {"w": torch.tensor(2.0)}, step=7)
    ...     load_checkpoint(f"{folder}/c.pt", like={"w": torch.tensor(0.0)})
    ({'w': tensor(2.)}, 7)
    """
    path = Path(path).resolve()
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a checkpoint is one file. Name a file in it.")
    check_count("step", step, least=0, remedy="It counts steps.")
    for place, leaf in zip(optree.tree_paths(tree), optree.tree_leaves(tree), strict=True):
        check_tensor(_name(place), leaf)
    tensors = {_name(p): leaf for p, leaf in zip(optree.tree_paths(tree), optree.tree_leaves(tree), strict=True)}
    if len(tensors) < len(optree.tree_leaves(tree)):
        raise ValueError("two leaves of the tree have the same name, since a key holds a slash. Rename the key.")
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save({"fnppo_checkpoint": 1, "step": step, "tensors": tensors}, file)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(path: str | os.PathLike[str], like: PyTree) -> tuple[PyTree, int]:
    """The tree and the step that `save_checkpoint` wrote, bit for bit, in the structure of `like`.

    Raises:
        ValueError: the file is no checkpoint, or its names, shapes or dtypes are not those of `like`.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if content["fnppo_checkpoint"] != 1:
            raise ValueError(f"its version is {content['fnppo_checkpoint']}, and 1 is known")
        step = check_count("step", content["step"], least=0, remedy="It counts steps.")
        tensors = {str(name): tensor for name, tensor in content["tensors"].items()}
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is not a checkpoint of fnppo, or is damaged ({error}). Remove it to start anew."
        ) from error
    leaves = []
    for place, leaf in zip(optree.tree_paths(like), optree.tree_leaves(like), strict=True):
        check_tensor(f"like: {_name(place)}", leaf)
        found = tensors.pop(_name(place), None)
        if found is None or found.shape != leaf.shape or found.dtype != leaf.dtype:
            what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise ValueError(
                f"{path}: {_name(place)} is {what}, expected {tuple(leaf.shape)} {leaf.dtype}. It belongs to another run."
            )
        leaves.append(found.to(leaf.device, copy=True))
    if tensors:
        raise ValueError(f"{path} also holds {min(tensors)}, which this run does not have. It belongs to another run.")
    return optree.tree_unflatten(optree.tree_structure(like), leaves), step


def save_pretrained(path: str | os.PathLike[str], params: Params, *, policy: Policy, tokenizer: Any = None) -> None:
    """Write a folder that plain transformers loads with `from_pretrained`: config, safetensors and the tokenizer.

    Other files of a folder that is already there stay in it, but for weights.

    Raises:
        ValueError: `params` lacks a parameter, has one more or one of another shape; `path` is a folder with something else
            than a model in it; or the model has adapters, for which there is `fnppo.interop.peft`.
    """
    path = checked_place(path, "config.json", "a model")
    model: Any = policy.with_own_attention()
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(
            "the policy has adapters of PEFT in it, which from_pretrained does not know. Use save_adapter or save_merged of "
            "fnppo.interop.peft."
        )
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):  # a GGUF file was quantized; these parameters are not
            del config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    check_parameters(params, dict(model.named_parameters()))
    model.load_state_dict(params, assign=True, strict=False)
    model.tie_weights()
    if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"params lacks {missing[0]}. Give the whole tree that functional_policy returned.")
    with replacing(path) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)


def checked_place(path: str | os.PathLike[str], marker: str, kind: str) -> Path:
    """The absolute path, if it is free, or a folder with the file `marker`, which one of that kind has and may be replaced."""
    path = Path(path).resolve()
    if path.is_dir() and any(path.iterdir()) and not (path / marker).exists():
        raise ValueError(f"{path} is a folder without {marker}: it holds something else than {kind}. Name another.")
    return path


def check_parameters(params: Params, own: Mapping[str, Tensor]) -> None:
    """That all of `params` are among a model's `own`, with their shapes."""
    for name, value in params.items():
        check_tensor(name, value)
        if name not in own or own[name].shape != value.shape:
            expected = f"{tuple(own[name].shape)} there" if name in own else "not there"
            raise ValueError(
                f"params holds {name} of shape {tuple(value.shape)}, which is {expected} in the policy. Give the tree that "
                "functional_policy returned."
            )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary place beside `path` that takes its place once all is written, and is gone if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    new, old = folder / path.name, folder / "old"
    try:
        yield new
        if path.is_dir():  # a folder cannot be replaced in one step: move it aside, and back if anything goes wrong
            for kept in path.iterdir():
                if not (new / kept.name).exists() and not _holds_weights(kept.name):
                    (shutil.copytree if kept.is_dir() else shutil.copy2)(kept, new / kept.name)
            path.rename(old)
        new.replace(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        if path.exists() or not old.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _holds_weights(name: str) -> bool:
    """Files that, left beside new weights, would be loaded in their place."""
    return name.endswith((".safetensors", ".bin", ".index.json", ".gguf")) or name.startswith("adapter_")


def _name(place: tuple[Any, ...]) -> str:
    return "/".join(map(str, place))
