"""From an nn.Module to a value function: the trunk of a language model with a head of one output.

`functional_critic(module)` gives one with a trunk of its own; `functional_actor_critic(module)` gives a policy and a value
function over one trunk, in one tree of parameters.
"""

import dataclasses
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from fnppo.attention import Attention, choose_attention
from fnppo.functional import functional_model, functional_policy
from fnppo.logit_chunks import precise
from fnppo.policy import Head, Policy
from fnppo.types import Params

VALUE_HEAD = "value_head"
"""What the head is called in a tree of parameters that comes from a causal LM: `value_head.weight`, `value_head.bias`."""


@dataclasses.dataclass(frozen=True)
class Critic:
    """A value function without weights: what `Policy` is for log-probs."""

    model: Policy
    """The architecture. Its head has one output, so it gives values and no log-probs."""

    def values(self, params: Params, hidden: Float[Tensor, "targets hidden"]) -> Float[Tensor, " targets"]:
        """V = weight · hidden + bias. In float32 or better: rounded to bfloat16, a difference of values is mostly noise."""
        return self.model.head.bind(params).logits(hidden.to(precise(hidden.dtype))).squeeze(-1)

    def with_dropout_seed(self, seed: int) -> "Critic":
        """The same value function with other dropout masks."""
        return Critic(self.model.with_dropout_seed(seed))


def functional_critic(
    module: Any,
    *,
    attention: Attention = choose_attention,
    remat: bool = False,
    train: bool = False,
    dropout_seed: int | None = None,
) -> tuple[Critic, Params]:
    """A value function with a trunk of its own, and its parameters.

    Args:
        module: a causal LM, whose vocabulary head is left out and a value head put in its place, initialised to zeros
            (so V = 0 before the first step); or a token classifier with one label, whose head is used as it is. Both
            from transformers.
        attention, remat, train, dropout_seed: as in `functional_policy`.

    Returns:
        The critic, and its parameters, which share memory with the module's, but for a head that is new.

    Raises:
        ValueError: the model has more than one label, has dropout on the way to its head in training mode, or as in
            `functional_policy`.

    >>> from fnppo.testing import tiny_llama
    >>> critic, params = functional_critic(tiny_llama())
    >>> {name: tuple(value.shape) for name, value in params.items() if "head" in name}
    {'value_head.weight': (1, 8), 'value_head.bias': (1,)}
    """
    options: dict[str, Any] = dict(attention=attention, remat=remat, train=train, dropout_seed=dropout_seed)
    if (head := _classifier(module, train)) is not None:
        model, params = functional_model(module, head, **options)
        return Critic(model), params
    policy, critic, params = functional_actor_critic(module, **options)
    names = {id(parameter): name for name, parameter in policy.skeleton.named_parameters()}
    _remove_vocabulary_head(policy.skeleton)
    # A tied weight may have had the name of the head that is gone.
    left = {name: params[names[id(parameter)]] for name, parameter in policy.skeleton.named_parameters()}
    return critic, left


def functional_actor_critic(
    module: Any,
    *,
    attention: Attention = choose_attention,
    remat: bool = False,
    train: bool = False,
    dropout_seed: int | None = None,
) -> tuple[Policy, Critic, Params]:
    """A policy and a value function over one trunk, and one tree of parameters for both.

    Every function that takes the policy, and every one that takes the critic, takes the whole tree. To run the trunk
    once for both, use `forward_logprobs_and_values`.

    Args:
        module: any causal LM from transformers. The value head is put beside its vocabulary head, initialised to zeros.
        attention, remat, train, dropout_seed: as in `functional_policy`.

    Raises:
        ValueError: as in `functional_policy`.

    >>> from fnppo.testing import tiny_llama
    >>> policy, critic, params = functional_actor_critic(tiny_llama())
    >>> {name: tuple(value.shape) for name, value in params.items() if "head" in name}
    {'lm_head.weight': (13, 8), 'value_head.weight': (1, 8), 'value_head.bias': (1,)}
    """
    policy, params = functional_policy(module, attention=attention, remat=remat, train=train, dropout_seed=dropout_seed)
    like = params[policy.head.weight]
    policy.skeleton.add_module(VALUE_HEAD, nn.Linear(like.shape[1], 1, dtype=like.dtype, device="meta"))
    head = Head(f"{VALUE_HEAD}.weight", f"{VALUE_HEAD}.bias", 1.0, None)
    params |= {head.weight: like.new_zeros(1, like.shape[1]), f"{VALUE_HEAD}.bias": like.new_zeros(1)}
    return policy, Critic(dataclasses.replace(policy, head=head)), params


def _classifier(module: Any, train: bool) -> Head | None:
    """The head of a token classifier; None where the model is none."""
    if not hasattr(module, "get_output_embeddings") or module.get_output_embeddings() is not None:
        return None
    name = next((name for name in ("score", "classifier") if isinstance(getattr(module, name, None), nn.Linear)), None)
    if name is None:
        return None
    linear, kind = getattr(module, name), type(module).__name__
    if linear.out_features != 1:
        raise ValueError(
            f"{kind} has {linear.out_features} labels, and a value is one number. Load it with num_labels=1."
        )
    dropout = getattr(module, "dropout", None)
    if train and isinstance(dropout, nn.Dropout) and dropout.p > 0:
        raise ValueError(
            f"{kind} has dropout of {dropout.p} before its head, which a critic leaves out. Set classifier_dropout in its "
            "config to 0, or leave train=False."
        )
    return Head(f"{name}.weight", None if linear.bias is None else f"{name}.bias", 1.0, None)


def _remove_vocabulary_head(skeleton: Any) -> None:
    """So that no optimizer holds states for it. A tied weight stays, as the embedding."""
    linear = skeleton.get_output_embeddings()
    places = [
        (parent, name) for parent in skeleton.modules() for name, child in parent.named_children() if child is linear
    ]
    for parent, name in places:
        setattr(parent, name, nn.Identity())
