"""All checks of one model, in order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fnppo.functional import functional_policy
from fnppo.policy import Policy
from fnppo.types import Params
from fnppo.verify import checks
from fnppo.verify.checks import LAYOUTS
from fnppo.verify.report import Check, Report
from fnppo.verify.subject import subject_of


def verify(
    module: Any, *, length: int = 32, seed: int = 0, on_check: Callable[[Check], None] = lambda check: None
) -> Report:
    """Compare everything that a training step computes from a model with the model's own forward.

    The reference is a copy of the module with the attention it came with, in the next wider dtype, one unpadded row at a
    time, all logits at once. Against it: each layout (packed, prefixes shared, padded), log-probs, entropies and the gradients of all parameters; rows that
    must not see each other; positions; the head; tied weights; remat; dropout; micro-batches.

    The model in its own dtype is not that exact either. Four times its own distance from the reference is the tolerance, or
    16 eps of the dtype if that is more. float64 has nothing wider: there it is √eps, 1.5e-8, of the model in float64.

    Args:
        module: any causal LM from transformers, on any device, in any dtype.
        length: tokens of the longest of the four rows. Make it longer than a window or chunk of the model's attention,
            if these are to be part of the check.
        seed: of the tokens.
        on_check: called with each row of the report as it is found.

    Returns:
        A report, whose `verified` is True when no check failed. A model that `functional_policy` refuses is not verified,
        with its reason.

    >>> from fnppo.testing import tiny_llama
    >>> verify(tiny_llama()).verified
    True
    """
    found: list[Check] = []

    def note(check: Check) -> None:
        found.append(check)
        on_check(check)

    parameter = next(module.parameters())
    options = {"length": length, "seed": seed}
    try:
        policy, params = functional_policy(module)
        examine(module, policy, params, **options, note=note)
    except Exception as error:  # whatever a model does wrong, the report says it
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        note(Check("runs at all", False, kind + str(error).strip().split("\n")[0]))
    else:
        if any(check.passed is False for check in found) and parameter.dtype in (torch.float16, torch.bfloat16):
            note(_rounding(module, policy, params, **options))
    return Report(type(module).__name__, str(parameter.dtype).removeprefix("torch."), str(parameter.device), found)


def examine(
    module: Any, policy: Policy, params: Params, *, length: int, seed: int, note: Callable[[Check], None]
) -> None:
    """The checks of a policy that was read off a module. Those after the layouts use the first layout that is right."""
    subject = subject_of(module, policy, params, length=length, seed=seed)
    for row in checks.one_by_one(subject):
        note(row)
    right = []
    for name in LAYOUTS:
        rows = list(checks.layout(subject, name))
        for row in rows:
            note(row)
        if all(row.passed for row in rows):
            right.append(name)
    if not right:
        return
    subject = dataclasses.replace(subject, layout=LAYOUTS[right[0]])
    for check in checks.FURTHER:
        for row in check(subject):
            note(row)


def _rounding(module: Any, policy: Policy, params: Params, **options: Any) -> Check:
    """Whether what failed in half precision holds in float32."""
    found: list[Check] = []
    single = {name: value.float() if value.is_floating_point() else value for name, value in params.items()}
    examine(module, policy, single, note=found.append, **options)
    failed = [check.name for check in found if check.passed is False]
    if failed:
        return Check("in float32", False, f"fails too: {', '.join(failed)}. It is not rounding.")
    return Check(
        "in float32",
        None,
        "all pass, so the failures are rounding, or overflow, which this model amplifies. Train it in float32.",
    )
