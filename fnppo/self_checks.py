"""What a policy is put through when it is made: a few tokens, through it and through the model itself.

A model is refused by name where the two disagree, where a token sees those after it, and where sequences see each other.
"""

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from fnppo import attention_interface
from fnppo.attention import choose_attention, flash_attention, varlen_attention
from fnppo.policy import Policy
from fnppo.seeding import seeded
from fnppo.types import PackedInputs, PaddedInputs, Params


def check_against(module: Any, policy: Policy, params: Params) -> None:
    """Run a few tokens through both. Refuse the model by name where they disagree or where tokens see what they may not."""
    name = type(module).__name__
    device = next(iter(params.values())).device
    if device.type == "meta":
        return  # nothing to compare: an architecture without weights
    first, other, second, later = (
        _probe(module, tokens, device) for tokens in ((1, 2, 3, 4, 5), (9, 8, 7, 6, 5), (3, 1, 2), (1, 2, 3, 4, 6))
    )
    versions = [value._version for value in params.values()]
    with torch.no_grad():
        _hidden(policy, params, first, second)
        if versions != [value._version for value in params.values()]:
            raise attention_interface.Impossible(f"{name} has changed its parameters in place: load it anew.")
        if _moves(policy, params, (first, second), (later, second), slice(0, first.numel() - 1)):
            raise ValueError(f"{name} lets a token see those after it, so it gives no probability of the next token.")
        if _moves(policy, params, (first, second), (other, second), slice(first.numel(), None)):
            raise ValueError(f"{name} lets sequences of a {policy.layout} batch see each other.")
        wrong = _disagreement(name, policy, params, first, second)
        if wrong is None and _is_half(params):  # its roundings hide a head that is scaled by 1.2
            try:
                wrong = _disagreement(name, *_in_float32(policy, params), first, second)
            except Exception as error:  # a model may insist on its dtype in any way, or memory be short
                reason = str(error).strip().split("\n")[0]
                warnings.warn(
                    f"{name} does not run in float32 ({type(error).__name__}: {reason}), so it was compared with the policy in "
                    "half precision only, where small differences do not show. Make a policy of it in float32 once.",
                    stacklevel=2,
                )
    if wrong is not None:
        raise ValueError(wrong)


def _disagreement(name: str, policy: Policy, params: Params, *sequences: Tensor) -> str | None:
    """What is wrong if the policy's logits are not those of the model itself, which reads the sequences one by one."""
    hidden = _hidden(policy, params, *sequences)
    logits, own = policy.head.bind(params).logits(hidden), policy.with_own_attention()
    alone = [functional_call(own, params, kwargs={"input_ids": ids[None], "use_cache": False}) for ids in sequences]
    expected = torch.cat([output.logits[0] for output in alone])
    if logits.dim() != expected.dim():
        return (
            f"{name} gives one output a row, and one a token is needed. A classifier of sequences, such as a reward model, "
            "becomes a critic when it is loaded with AutoModelForTokenClassification."
        )
    if logits.shape != expected.shape:
        return f"{name} gives {expected.shape[-1]} logits, and its output matrix has {logits.shape[-1]} rows."
    dtypes = {value.dtype for value in params.values() if value.is_floating_point()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | {torch.float32})  # models keep parts in float32
    error = (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    tolerance = 1e-4 if eps < 1e-6 else 32 * eps
    if error <= tolerance:
        return None
    return (
        f"{name}: {policy.layout} logits differ from the model's own by {error:.1e} of the largest (limit "
        f"{tolerance:.0e}). Its head or its attention is not what was read off it: {policy.head}."
    )


def is_random(policy: Policy, params: Params) -> bool:
    """Whether a forward draws random numbers: dropout, layer drop, router jitter."""
    device = next(iter(params.values())).device
    if device.type == "meta":
        return False
    tokens = torch.arange(8, device=device) % policy.num_embeddings
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    with torch.no_grad(), seeded(0, device):
        before = [generator.get_state() for generator in generators]
        _hidden(policy, params, tokens)
        after = [generator.get_state() for generator in generators]
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _moves(policy: Policy, params: Params, before: Sequence[Tensor], after: Sequence[Tensor], places: slice) -> bool:
    """Whether hidden states at `places` change with the sequences, by more than a rounding of float32.

    In half precision an expert that sees another group of tokens may round otherwise, so float32 decides.
    """

    def change(policy: Policy, params: Params) -> bool:
        a, b = (_hidden(policy, params, *sequences)[places] for sequences in (before, after))
        return bool((a - b).abs().max() > 16 * torch.finfo(torch.float32).eps * a.abs().max())

    return change(policy, params) and (not _is_half(params) or change(*_in_float32(policy, params)))


def _in_float32(policy: Policy, params: Params) -> tuple[Policy, Params]:
    """The same with copies in float32, also of buffers. Kernels for half precision alone give way to the default."""
    only_half = policy.attention in (flash_attention, varlen_attention)
    wide = dataclasses.replace(
        policy,
        skeleton=copy.deepcopy(policy.skeleton).float(),
        attention=choose_attention if only_half else policy.attention,
        sampling_attention="eager" if "flash" in policy.sampling_attention else policy.sampling_attention,
    )
    return wide, {key: value.float() if value.is_floating_point() else value for key, value in params.items()}


def _is_half(params: Params) -> bool:
    return any(value.dtype in (torch.float16, torch.bfloat16) for value in params.values())


def _hidden(policy: Policy, params: Params, *sequences: Int[Tensor, " _"]) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of the sequences' tokens, in the layout that the policy is for."""
    if policy.padded_only is None:
        return policy.hidden_states(params, _packed(*sequences))
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=ids.device)
    columns = torch.arange(ids.shape[1], device=ids.device)
    mask = columns < lengths[:, None]
    hidden = policy.hidden_states(params, PaddedInputs(ids, columns.expand_as(ids), mask))
    return hidden[rearrange(mask, "batch seq -> (batch seq)")]


def _probe(module: Any, tokens: tuple[int, ...], device: torch.device) -> Int[Tensor, " tokens"]:
    return torch.tensor(tokens, device=device) % module.get_input_embeddings().weight.shape[0]


def _packed(*sequences: Int[Tensor, " _"]) -> PackedInputs:
    counts = torch.tensor([0] + [ids.numel() for ids in sequences], device=sequences[0].device)
    positions = torch.cat([torch.arange(ids.numel(), device=ids.device) for ids in sequences])
    return PackedInputs(torch.cat(sequences), positions, counts.cumsum(0).to(torch.int32))
