"""Tiny models of several families, in float64, with weights large enough that attention and positions matter."""

from functools import cache

import torch
from torch import nn

VOCAB = 13


@cache
def tiny(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A causal LM with its own eager attention, in evaluation mode. Shared between tests: never change it."""
    import transformers as t

    sizes = dict(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    make = {
        # rotary positions, grouped queries
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        # tied embeddings
        "tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=True)),
        # absolute positions, which show what rotary ones hide
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=VOCAB, n_embd=8, n_layer=2, n_head=2, n_positions=32, attn_implementation="eager",
                bos_token_id=1, eos_token_id=2,
            )
        ),
        # a window shorter than the sequences
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**sizes, sliding_window=3)),
        # windows on some layers, softcap in attention and head
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**sizes, head_dim=4, sliding_window=3, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
        ),
        # attention sinks
        "gpt_oss": lambda: t.GptOssForCausalLM(
            t.GptOssConfig(
                **sizes, head_dim=4, sliding_window=3, num_local_experts=2, num_experts_per_tok=2, experts_implementation="eager",
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        ),
        # scaled logits
        "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**sizes, logits_scaling=3.0)),
        "cohere": lambda: t.CohereForCausalLM(t.CohereConfig(**sizes, logit_scale=0.25)),
        # a bias in the head
        "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**sizes)),
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, family)))
        module = make[family]().to(dtype).eval()
        for parameter in module.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5)
            elif not bool((parameter == 1).all()):
                torch.nn.init.normal_(parameter, std=0.1)
    return module.requires_grad_(False)
