"""A model small enough for examples and tests."""

from typing import Any

import torch


def tiny_llama(*, vocab_size: int = 13, seed: int = 0, **config: Any) -> Any:
    """A random Llama from transformers with two layers of eight dimensions; `config` overrides its configuration.

    >>> sum(parameter.numel() for parameter in tiny_llama().parameters())
    1336
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **(sizes | special | config)))
