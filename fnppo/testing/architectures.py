"""A tiny random model of any causal LM that transformers knows.

A configuration has a few hundred names in all, and most mean the same in each architecture. `SIZES` gives the small value
of each name and is applied where the configuration has that name; `EXCEPTIONS` is what is left, by architecture.
"""

import difflib
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    # width and depth
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "dim": 16, "intermediate_size": 24, "n_inner": 24, "ffn_dim": 24,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24,
    "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 24,
    # a causal decoder, also where the name is first that of an encoder
    "is_decoder": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    # windows, shorter than the rows of the tests
    "sliding_window": 4, "window_size": 4, "attention_chunk_size": 4, "use_sliding_window": True, "max_window_layers": 1,
    # one layer with rotary positions, one without
    "no_rope_layers": [1, 0],
    # latent attention
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "qk_head_dim": 8, "v_head_dim": 6,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 2, "num_expert_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12,
    "shared_intermediate_size": 12, "shared_experts_intermediate_size": 12, "first_k_dense_replace": 1, "num_dense_layers": 1,
    # recurrent state
    "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 4, "state_size": 4, "conv_kernel": 3, "expand": 2, "time_step_rank": 4, "chunk_size": 4,
    "linear_conv_kernel_dim": 3, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 4, "linear_num_heads": 4, "conv_L_cache": 3, "block_size": 4,
    "d_conv": 3, "rotary_dim": 2, "vocab_size_per_layer_input": 13, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0,
    # sparse attention
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
}  # fmt: skip

FULL_AND_LOCAL = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 13, "encoder_hash_byte_group_size": [3],
        **{name: {"hidden_size": 16, "hidden_size_global": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 13}
           for name in ("patcher_config", "encoder_config", "decoder_config", "global_config")},
    },
    "cohere_compass_text": {"rope_parameters": FULL_AND_LOCAL},
    "cpmant": {"dim_head": 4, "dim_ff": 24, "prompt_length": 2},
    "ctrl": {"dff": 24},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "electra": {"embedding_size": 16},
    "falcon": {"alibi": True},
    "falcon_h1": {"mamba_d_ssm": 32, "lm_head_multiplier": 0.5, "attention_out_multiplier": 0.7, "key_multiplier": 1.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "git": {"vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}},
    "jetmoe": {"kv_channels": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 24, "expert_ffn_hidden_size": 12, "zero_expert_num": 2},
    "mamba2": {"head_dim": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "crop_size": 28},
        "audio_config": {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 2, "num_attention_heads": 2, "ext_pw_out_channel": 16,
                         "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16},
    },
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 1, "num_decoder_attention_heads": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 4, "indexer_budget": 4, "indexer_compress_ratio": 2,
        "hc_lowrank": 4,
    },
    "reformer": {
        "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 8], "attention_head_size": 4, "feed_forward_size": 24,
        "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roc_bert": {"pronunciation_vocab_size": 13, "shape_vocab_size": 13, "pronunciation_embed_dim": 4, "shape_embed_dim": 4},
    "rwkv": {"rescale_every": 0},
    "xlm": {"emb_dim": 16, "causal": True},
    "xlnet": {"d_inner": 24},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 8},
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4,
        "attention_head_dim": 8, "adapter_rank": 4, "mamba_ngroups": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def causal_lms() -> list[str]:
    """The architectures (transformers' model types) that have a causal LM, in alphabetical order.

    >>> "llama" in causal_lms()
    True
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_causal_lm(architecture: str, *, vocab_size: int = 13, seed: int = 0, **config: Any) -> nn.Module:
    """A random causal LM from transformers: a few layers of sixteen dimensions, in evaluation mode and float32, eager attention.

    There are as many layers as it takes to hold every kind of layer that the architecture has by default. Windows and
    chunks of attention are four tokens long. The weights are large enough that attention and positions matter.

    Args:
        architecture: a model type ("qwen3_moe") or the name of a class ("Qwen3MoeForCausalLM").
        vocab_size: number of tokens.
        seed: of the weights; the global random state is left alone.
        config: overrides of the configuration.

    Raises:
        ValueError: transformers has no such causal LM.

    >>> type(tiny_causal_lm("gemma2")).__name__
    'Gemma2ForCausalLM'
    """
    import transformers

    settings, name = _tiny_config(_model_type(architecture), vocab_size, config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = getattr(transformers, name)._from_config(settings, attn_implementation="eager")
        model.set_experts_implementation("eager")
        randomize(model)
    return model.eval()


def randomize(model: nn.Module) -> None:
    """Fill every parameter with normal numbers in place, from the global generator; ones stay, as norms have them."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
        elif not bool((parameter == 1).all()):
            nn.init.normal_(parameter, std=0.1)


def _model_type(architecture: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    if architecture in classes:
        return architecture
    types = {name: model_type for model_type, name in reversed(classes.items())}
    if architecture not in types:
        close = difflib.get_close_matches(architecture, [*classes, *types], n=3)
        raise ValueError(
            f"transformers has no causal LM called {architecture!r}. "
            + (f"Did you mean {', '.join(close)}?" if close else "causal_lms() lists them.")
        )
    return types[architecture]


def _tiny_config(model_type: str, vocab_size: int, overrides: dict[str, Any]) -> tuple[Any, str]:
    """The configuration, and the name of the model's class. A composite one is replaced by that of its text model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    cls, name = transformers.CONFIG_MAPPING[model_type], classes[model_type]
    text = _text_config(cls)
    if text.model_type in classes or getattr(transformers, name).config_class is text:
        cls, name = text, classes.get(text.model_type, name)
    sizes = _sizes(cls, vocab_size) | EXCEPTIONS.get(cls.model_type, {}) | overrides
    return cls(**sizes), name


def _text_config(cls: Any) -> Any:
    default = cls()
    return type(default.decoder if hasattr(default, "audio_encoder") else default.get_text_config())


def _sizes(cls: Any, vocab_size: int) -> dict[str, Any]:
    """The entries of `SIZES` that the configuration has, and one layer of each kind."""
    names = set(cls().to_dict())
    # Windows that are off by default: with them the layers are of two types.
    default = cls(**{name: SIZES[name] for name in ("use_sliding_window", "sliding_window") if name in names})
    sizes = {name: value for name, value in SIZES.items() if name in names}
    sizes |= {name: vocab_size for name in ("vocab_size", "unpadded_vocab_size") if name in names}
    if "kv_lora_rank" in names:  # latent attention has no grouped queries
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    layers: dict[str, list[str]] = {}
    for name in ("layer_types", "mlp_layer_types"):
        if name in names and getattr(default, name, None):
            layers[name] = list(dict.fromkeys(getattr(default, name)))
    if layers:
        depth = max(2, *map(len, layers.values()))
        sizes |= {"num_hidden_layers": depth} | {n: [k[i % len(k)] for i in range(depth)] for n, k in layers.items()}
    return sizes
