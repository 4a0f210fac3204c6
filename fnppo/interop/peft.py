"""PEFT: adapters are trained as a tree of their own, and written as PEFT writes them.

    model = get_peft_model(base, LoraConfig(...))
    policy, params = functional_policy(model)                     # names as in the base model
    trained, frozen = partition(params, trained_by(model))        # adapters; the rest
    with model.disable_adapter():
        reference, _ = functional_policy(model)                   # of the same params, without adapters
    ...
    save_adapter("adapter", combine(trained, frozen), model)      # PeftModel.from_pretrained(base, "adapter")
    save_merged("model", combine(trained, frozen), model)         # plain transformers

So one set of weights is policy and reference.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from fnppo.checkpoint import check_parameters, checked_place, replacing
from fnppo.types import Params


def trained_by(model: Any) -> Callable[[str], bool]:
    """For `partition`: whether PEFT trains the parameter of that name, as its `requires_grad` says.

    Raises:
        ValueError: `model` is no PeftModel.
    """
    names = {name for name, parameter in _base(model).named_parameters() if parameter.requires_grad}
    return names.__contains__


def save_adapter(path: str | os.PathLike[str], params: Params, model: Any) -> None:
    """A folder that `PeftModel.from_pretrained(base, path)` loads: the adapter's config and its weights in `params`.

    It is complete or not there. Other files of a folder that is there already stay in it, but for weights.

    Args:
        params: all parameters, or at least those of the adapter, by their names in the base model.
        model: the PeftModel that the policy was made from; it stays as it is.

    Raises:
        ValueError: `model` is no PeftModel, or `params` lacks a parameter that it trains, has one more or one of another
            shape; it has an adapter that is not named default, or trains what PEFT does not save with one; or `path` is a
            folder with something else than an adapter in it. Frozen parameters are neither saved nor compared.
    """
    trained = trained_by(model)
    _check(params, model, [name for name, _ in _base(model).named_parameters() if trained(name)])
    path = checked_place(path, "adapter_config.json", "an adapter")
    if list(model.peft_config) != ["default"]:
        raise ValueError(
            f"model has the adapters {', '.join(model.peft_config)}; one named default is known, which from_pretrained finds. Delete "
            "the others, or save with PEFT."
        )
    saved = _saved(model)
    if unsaved := [name for name in params if trained(name) and name not in saved]:
        raise ValueError(
            f"{unsaved[0]} is trained, and PEFT does not save it with the adapter. Freeze it, or use modules_to_save."
        )
    prefix = _prefix(model)
    with replacing(path) as temporary:
        model.save_pretrained(temporary, state_dict={prefix + name: leaf.detach() for name, leaf in params.items()})


def save_merged(path: str | os.PathLike[str], params: Params, model: Any, *, tokenizer: Any = None) -> None:
    """A folder that plain transformers loads: the model with the adapters of `params` added to its weights.

    Args, raises: as in `save_adapter`, with all parameters in `params`. A copy of the whole model is in memory meanwhile.
    """
    _check(params, model, [name for name, _ in _base(model).named_parameters()])
    path = checked_place(path, "config.json", "a model")
    merged = copy.deepcopy(model)
    own = dict(_base(merged).named_parameters())
    for name, leaf in params.items():
        own[name].data = leaf.detach().clone()
    merged = merged.merge_and_unload()
    merged.tie_weights()
    with replacing(path) as temporary:
        merged.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)


def _check(params: Params, model: Any, needed: list[str]) -> None:
    """That `params` holds what is needed, and nothing that the model does not have."""
    for name in needed:
        if name not in params:
            raise ValueError(f"params lacks {name}, which is to be saved. Give combine(trained, frozen).")
    check_parameters(params, dict(_base(model).named_parameters()))


def _saved(model: Any) -> set[str]:
    """Names of parameters that PEFT writes: it knows them by where their memory is."""
    from peft import get_peft_model_state_dict

    places = {tensor.data_ptr() for tensor in get_peft_model_state_dict(model).values()}
    return {name for name, parameter in _base(model).named_parameters() if parameter.data_ptr() in places}


def _base(model: Any) -> nn.Module:
    if not hasattr(model, "get_base_model"):
        raise ValueError(f"model is a {type(model).__name__}, no PeftModel. Wrap it with peft.get_peft_model.")
    base: nn.Module = model.get_base_model()
    return base


def _prefix(model: Any) -> str:
    """What PEFT's names have before those of the base model."""
    base = _base(model)
    return next(name for name, module in model.named_modules() if module is base) + "."
