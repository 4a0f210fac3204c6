"""From an nn.Module to pure functions of its parameters.

`functional_policy(module)` returns a `Policy`, which holds the architecture and no weights, and the parameters as a
plain dict. The module that the caller holds is not touched.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from fnppo import attention_interface
from fnppo.attention import Attention, choose_attention
from fnppo.policy import Head, Policy
from fnppo.remat import rematerialize
from fnppo.self_checks import check_against, is_random
from fnppo.types import Params


def functional_policy(
    module: Any,
    *,
    attention: Attention = choose_attention,
    remat: bool = False,
    train: bool = False,
    dropout_seed: int | None = None,
) -> tuple[Policy, Params]:
    """A causal LM from transformers as a pure policy and its parameters.

    A model whose attention goes through transformers' attention interface, and that mixes tokens nowhere else, reads
    packed batches. Any other causal model (a recurrent state, an attention of its own) reads padded ones, with the
    attention it came with: `Policy.padded_only` says why. Which it is, is found by running a few tokens.

    Args:
        module: any causal LM from transformers, or a PeftModel around one (see `fnppo.interop.peft`).
        attention: a backend from `fnppo.attention`; the default chooses by device, dtype and what the model asks.
        remat: recompute each layer in the backward (gradient checkpointing), so that memory grows with one layer's
            activations and not with all of them. The numbers stay the same.
        train: run the module in training mode. False turns dropout off.
        dropout_seed: where training mode has dropout, the seed from which each forward draws it. The same seed and the
            same batch give the same masks; pass another seed each step (`policy.with_dropout_seed`). Masks depend on
            the layout and on the split into micro-batches, so with dropout these do change the numbers.

    Returns:
        The policy, and its parameters, which share memory with the module's. Tied weights are in it once.

    Raises:
        ValueError: the model is no causal LM, reads later tokens, has a head that is not linear (up to bias, scale and
            softcap), has dropout in training mode and no seed, or cannot read what `attention`, if given, is for.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> policy, params = functional_policy(LlamaForCausalLM(config))
    >>> policy.head.weight, params[policy.head.weight].shape
    ('lm_head.weight', torch.Size([11, 8]))
    """
    module = without_wrapper(module)
    return functional_model(
        module, vocabulary_head(module), attention=attention, remat=remat, train=train, dropout_seed=dropout_seed
    )


def functional_model(
    module: Any, head: Head, *, attention: Attention, remat: bool, train: bool, dropout_seed: int | None
) -> tuple[Policy, Params]:
    """`functional_policy` for a head that has been read off the module already."""
    if not callable(attention):
        raise ValueError(
            f"attention is a {type(attention).__name__}; a function is needed. Use one of fnppo.attention, or leave it out."
        )
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    policy = _choose(module, head, attention, params)
    skeleton = _skeleton(module, packed=policy.padded_only is None).train(train)
    policy = dataclasses.replace(policy, skeleton=skeleton, dropout_seed=dropout_seed)
    if train and dropout_seed is None and is_random(policy, params):
        raise ValueError(
            f"{type(module).__name__} is random in training mode (dropout, layer drop or jitter), so old and new log-probs "
            "would differ by chance. Pass dropout_seed, or leave train=False."
        )
    if remat:
        rematerialize(policy.skeleton)
    return policy, params


def _choose(module: Any, head: Head, attention: Attention, params: Params) -> Policy:
    """The policy that packs, if the model allows it, else the one that pads; checked against the module itself."""
    own = getattr(module.config, "_attn_implementation", "eager")
    try:
        policy = Policy(_skeleton(module, packed=True).eval(), head, attention, None, own)
        check_against(module, policy, params)
        return policy
    except (attention_interface.Impossible, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a model may fail in any way on what it does not know
        if attention is not choose_attention:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(module).__name__} fails on packed tokens: "
        reason = kind + str(error).strip().split("\n")[0]
    policy = Policy(_skeleton(module, packed=False).eval(), head, attention, None, own, reason)
    try:
        check_against(module, policy, params)
    except ValueError as error:
        raise ValueError(reason if str(error) == reason else f"{reason} Padded: {error}") from None
    return policy


def _skeleton(module: Any, *, packed: bool) -> nn.Module:
    """A copy of the module whose parameters are on the meta device; to read packed tokens, with our attention."""
    _refuse_what_no_layout_reads(module)
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    skeleton: Any = copy.deepcopy(module, memo)
    if not packed:
        return skeleton
    attention_interface.register()
    skeleton.set_attn_implementation(attention_interface.NAME)
    if skeleton.config._attn_implementation != attention_interface.NAME:
        raise ValueError(
            f"{type(module).__name__} does not take its attention from transformers' attention interface, so sequences "
            "cannot be kept apart in it."
        )
    refuse_what_cannot_be_packed(module)
    return skeleton


def _refuse_what_no_layout_reads(module: Any) -> None:
    """What the configuration tells and a few tokens would not: log-probs that depend on the rest of the batch."""
    name, config = type(module).__name__, module.config
    if rope := sorted(_rope_types(module) & {"dynamic", "longrope"}):
        raise attention_interface.Impossible(
            f"{name} has {rope[0]} rotary embeddings, which change with the longest row of a batch, so "
            "log-probs would depend on what else is in it. Load it with rope_type 'default', 'linear', 'yarn' or 'llama3'."
        )
    if getattr(config, "rescale_every", 0):
        raise attention_interface.Impossible(
            f"{name} divides its weights in place when it runs (rescale_every is {config.rescale_every}), and so would "
            "change the parameters. Set rescale_every in its config to 0."
        )
    if sparse := sorted(
        _layer_types(module) & {"indexed_attention", "compressed_sparse_attention", "minimax_m3_sparse"}
    ):
        raise attention_interface.Impossible(
            f"{name} has layers of type {', '.join(sparse)}, which choose a few keys by a score. Among equal scores the "
            "choice changes with the length of the batch's rows, so log-probs would depend on what else is in it."
        )
    if "lsh" in (getattr(config, "attn_layers", None) or ()):
        raise attention_interface.Impossible(
            f"{name} has layers of type lsh, which choose keys by random hashes, also in evaluation mode, once a row is "
            f"longer than lsh_attn_chunk_length ({config.lsh_attn_chunk_length}). Only attn_layers of type local can be used."
        )


def refuse_what_cannot_be_packed(module: Any) -> None:
    """What mixes packed sequences only from some length on, so that short probes cannot see it."""
    name = type(module).__name__
    # A pattern that chooses among many tokens chooses all of a few.
    if strange := sorted(
        _layer_types(module) - {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}
    ):
        raise ValueError(
            f"{name} has layers of type {', '.join(strange)}, which do not know where a packed sequence ends."
        )
    # Their scale grows with the place on the packed axis, in steps of floor_scale tokens: it is 1 for the first of them.
    if any(
        getattr(child, "attn_temperature_tuning", False) and not getattr(child, "use_rope", True)
        for child in module.modules()
    ):
        raise ValueError(
            f"{name} has layers without rotary positions whose attn_temperature_tuning counts tokens from the start of the "
            "packed axis and not of a sequence."
        )


def _layer_types(module: Any) -> set[str]:
    return set(getattr(module.config.get_text_config(), "layer_types", None) or [])


def _rope_types(module: nn.Module) -> set[str]:
    """Kinds of rotary embeddings; some models have one a layer type."""
    kinds = [getattr(child, "rope_type", None) or {} for child in module.modules()]
    return {kind for found in kinds for kind in ([found] if isinstance(found, str) else found.values())}


def without_wrapper(module: Any) -> Any:
    """The model that PEFT has put adapters into, and any other module as it is."""
    if any(hasattr(parameter, "to_local") for parameter in getattr(module, "parameters", list)()):
        raise ValueError(
            f"the parameters of {type(module).__name__} are DTensors: it has been sharded. Give the module as it was before "
            "to FSDPActor, which shards it."
        )
    if not hasattr(module, "get_base_model"):
        if type(module).__name__ == "PeftMixedModel":
            raise ValueError(
                "module is a PeftMixedModel, whose adapters are mixed. Use peft.get_peft_model without mixed."
            )
        return module
    config = module.peft_config[module.active_adapter]
    if getattr(config, "alora_invocation_tokens", None) is not None:
        raise ValueError(
            "alora_invocation_tokens is set: such an adapter depends on where tokens stand in a row, which a policy does not "
            "read. Use LoRA without them."
        )
    if config.is_prompt_learning:
        raise ValueError(
            f"{config.peft_type.value} puts tokens or keys before those of a row, which a policy does not read. Use an adapter "
            "of weights, such as LoRA."
        )
    return module.get_base_model()


def vocabulary_head(module: Any) -> Head:
    """Read the head off a causal LM: tied weights get the name under which `named_parameters` knows them."""
    is_module = isinstance(module, nn.Module)
    if not is_module:
        raise ValueError(
            f"module is a {type(module).__name__}, no causal LM. Load one with AutoModelForCausalLM.from_pretrained(...)."
        )
    if not hasattr(module, "get_output_embeddings") or not hasattr(module, "base_model"):
        raise ValueError(f"{type(module).__name__} is no causal LM from transformers: it has no output embeddings.")
    linear = module.get_output_embeddings()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if linear is None or id(getattr(linear, "weight", None)) not in names:
        raise ValueError(f"{type(module).__name__} has no linear output head, so it is no causal LM.")
    if more := [name for name, _ in linear.named_parameters() if name not in ("weight", "bias")]:
        raise ValueError(
            f"the output head of {type(module).__name__} has {', '.join(more)}; only a weight and a bias are read, so the rest "
            "would never be trained. Leave the head out of the adapter's target_modules and modules_to_save."
        )
    config = module.config.get_text_config()
    scale = 1.0
    for name, power in (
        ("logit_scale", 1), ("logits_scaling", -1), ("lm_head_multiplier", 1), ("logits_mup_width_multiplier", -1),
    ):  # fmt: skip
        scale *= (getattr(config, name, None) or 1.0) ** power
    softcaps = [
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    ]
    bias = getattr(linear, "bias", None)
    return Head(
        names[id(linear.weight)],
        None if bias is None else names[id(bias)],
        scale,
        next((softcap for softcap in softcaps if softcap is not None), None),
    )
