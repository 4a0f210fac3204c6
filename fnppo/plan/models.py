"""A causal LM without weights: its configuration as a module on the meta device."""

import difflib
from typing import Any

import torch

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "qwen2",
        dict(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-7b": (
        "qwen2",
        dict(
            vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4,
        ),
    ),
    "qwen2.5-32b": (
        "qwen2",
        dict(
            vocab_size=152_064, hidden_size=5120, intermediate_size=27_648, num_hidden_layers=64, num_attention_heads=40,
            num_key_value_heads=8,
        ),
    ),
    "llama-3.1-70b": (
        "llama",
        dict(
            vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8,
        ),
    ),
}  # fmt: skip
"""Models that are known without a look at the hub: (architecture, sizes)."""


def empty_model(model: str) -> Any:
    """The module of a model, on the meta device: shapes and no numbers.

    Args:
        model: a name in `SHAPES`, a folder with a config.json, or a hub id, of which the configuration alone is read.

    Raises:
        ValueError: there is no such model, or transformers has no causal LM for its configuration.

    >>> sum(parameter.numel() for parameter in empty_model("qwen2.5-0.5b").parameters())
    494032768
    """
    return empty_module(_config(model))


def empty_module(config: Any) -> Any:
    """The same from a configuration of transformers."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).requires_grad_(True)
    except (ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(
            f"{type(config).__name__} is no configuration of a causal LM: {reason} Give that of its text model."
        ) from error


def _config(model: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if model in SHAPES:
        architecture, sizes = SHAPES[model]
        return CONFIG_MAPPING[architecture](**sizes)
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        close = difflib.get_close_matches(model.split("/")[-1].lower(), SHAPES, n=3)
        hint = f"Did you mean {', '.join(close)}?" if close else f"Known without the hub are {', '.join(SHAPES)}."
        raise ValueError(f"there is no configuration of {model}: {reason} {hint}") from error
