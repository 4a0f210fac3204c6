"""The checks: every layout, and every other way to compute it, gives the model's own numbers."""

import copy
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fnppo.layouts import Layout, packed, padded, sharing
from fnppo.policy import Policy
from fnppo.remat import rematerialize
from fnppo.rows import select_rows
from fnppo.types import ModelBatch, PaddedBatch, Params
from fnppo.verify.measure import (
    Measured,
    apart,
    by_the_library,
    grads_apart,
    in_float64,
    logprobs_by_the_library,
    nats_apart,
)
from fnppo.verify.report import Check
from fnppo.verify.subject import Subject

LAYOUTS: dict[str, Layout] = {"packed": packed, "shared": sharing(least_shared=1), "padded": padded}
CAUSES = {
    "one by one": "A single row already differs from the model's own output: its head or its attention does something that "
    "was not read off it. Do not train this model with fnppo.",
    "packed": "The model does not keep packed rows apart. Use layout=padded.",
    "shared": "A row does not see what it shares with another as its own. Use layout=packed.",
    "padded": "The model reads padding, or counts it in positions. Use layout=packed.",
}


def one_by_one(subject: Subject) -> Iterator[Check]:
    """Each row by itself."""
    pieces = [subject.lay(row) for row in range(subject.batch.input_ids.shape[0])]
    found = by_the_library(subject.policy, subject.params, pieces)
    yield from _both(subject, "one by one", found, cause=CAUSES["one by one"])
    yield tied_weights(subject, found.grads)


def layout(subject: Subject, name: str) -> Iterator[Check]:
    """All rows in one layout: their numbers, whether they see each other, and whether it matters which is the first."""
    if subject.policy.padded_only and name != "padded":
        yield Check(name, None, f"refused: {subject.policy.padded_only} Use layout=padded.")
        return
    subject = dataclasses.replace(subject, layout=LAYOUTS[name])
    found = by_the_library(subject.policy, subject.params, [subject.lay()])
    yield from _both(subject, name, found, cause=CAUSES[name])
    ids = subject.batch.input_ids.clone()
    ids[0] = (ids[0] + 1) % subject.policy.vocab_size
    here = subject.batch._replace(input_ids=ids)
    others = subject.lay().targets.rows > 1  # row 1 shares the prompt of row 0, and its layout with it
    error = apart(_logprobs(subject, here)[others], found.logprobs[others])
    yield subject.nats_check(f"{name}: no leak", error, cause=CAUSES[name], found="other tokens in row 0")
    last = subject.batch.input_ids.shape[0] - 1
    behind = found.logprobs[subject.lay().targets.rows == last]
    before = _logprobs(subject, select_rows(subject.batch, [last, *range(last)]))[: behind.numel()]
    note = _if_positions_ran_on(subject, found.logprobs) if name == "packed" else ""
    yield subject.nats_check(f"{name}: restart", apart(before, behind), cause=CAUSES[name], found=note)


def _if_positions_ran_on(subject: Subject, logprobs: Tensor) -> str:
    """Whether this model would show it at all if the positions of packed rows did not restart."""
    inputs, targets = subject.lay()
    run_on = torch.arange(inputs.input_ids.numel(), device=inputs.input_ids.device)
    batch = ModelBatch(inputs._replace(position_ids=run_on), targets)
    try:
        change = apart(logprobs_by_the_library(subject.policy, subject.params, batch), logprobs)
    except (IndexError, RuntimeError, ValueError):
        return "running on would leave the table"
    if change <= subject.nats:
        return "positions are relative"
    return f"running on would change {change:.1g}"


def head(subject: Subject) -> Iterator[Check]:
    """The logits of a row, and the head a few targets at a time."""
    with in_float64(subject.params), torch.no_grad():
        hidden = subject.policy.hidden_states(
            subject.params, subject.layout.lay(select_rows(subject.batch, [0])).inputs
        )
        logits = subject.policy.head.bind(subject.params).logits(hidden)
    _, bias, scale, softcap = subject.policy.head
    parts = [
        "linear",
        *["bias"] * bool(bias),
        *[f"scale {scale:g}"] * (scale != 1),
        *[f"softcap {softcap}"] * bool(softcap),
    ]
    cause = f"The head was read as {', '.join(parts)}, and is something else. Do not train this model with fnppo."
    yield subject.nats_check("head: logits", apart(logits, subject.logits), cause=cause, found=", ".join(parts))
    half = max(
        int(subject.batch.loss_mask.sum()) // 2, 1
    )  # far smaller chunks would sum in another order, less exactly
    found = by_the_library(subject.policy, subject.params, [subject.lay()], chunk_size=half)
    yield from _both(
        subject, "head in chunks", found, cause="Chunks must not matter. Pass chunk_size=10**9, and report it."
    )


def tied_weights(subject: Subject, found: Params) -> Check:
    """One tensor for both ends is one parameter, whose gradient is the sum over both uses."""
    name = subject.policy.head.weight
    if subject.module.get_input_embeddings().weight is not subject.module.get_output_embeddings().weight:
        return Check("tied weights", None, "embedding and head are two tensors")
    error = grads_apart({name: found[name]}, {name: subject.reference.grads[name]})
    cause = "The gradient misses one of the two uses. Untie the weights."
    return subject.grads_check("tied weights", error, cause=cause, found=f"one parameter, {name}")


def remat(subject: Subject) -> Iterator[Check]:
    """Layers that are computed again in the backward give the same gradients."""
    again = _with_copied_skeleton(subject.policy)
    rematerialize(again.skeleton)
    plain, remade = (
        by_the_library(policy, subject.params, [subject.lay()], wide=False) for policy in (subject.policy, again)
    )
    cause = "A layer computes something else the second time. Leave remat=False."
    error = grads_apart(remade.grads, plain.grads)
    yield subject.grads_check("remat: gradients", error, cause=cause, found="layers computed again in the backward")


def dropout(subject: Subject) -> Iterator[Check]:
    """In training mode the seed decides every mask."""
    train = _with_copied_skeleton(subject.policy)
    train.skeleton.train()
    policies = [train.with_dropout_seed(seed) for seed in (0, 0, 1)]
    first, again, other = (logprobs_by_the_library(policy, subject.params, subject.lay()) for policy in policies)
    if torch.equal(first, other):
        yield Check("dropout", None, "nothing is random in training mode")
        return
    cause = "The seed does not decide all masks, so old and new log-probs differ by chance. Leave train=False."
    found = f"seeded; other masks move log-probs by {apart(first, other):.1g}"
    yield subject.nats_check("dropout", apart(first, again), cause=cause, found=found)


def micro_batches(subject: Subject) -> Iterator[Check]:
    """The gradient is the sum over micro-batches, however the rows are cut."""
    pieces = [subject.lay(0, 1), subject.lay(2), subject.lay(3)]
    found = by_the_library(subject.policy, subject.params, pieces)
    cause = "Something is computed over a whole micro-batch. Use micro-batches of one row."
    yield from _both(subject, "micro-batches", found, cause=cause)


def window(subject: Subject) -> Iterator[Check]:
    """Whether the rows were long enough to see the end of an attention window."""
    config = subject.module.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    sizes = {
        "sliding window": ("sliding_attention", getattr(config, "sliding_window", None)),
        "chunk": ("chunked_attention", getattr(config, "attention_chunk_size", None)),
    }
    length = subject.row().numel()
    for name, (kind, size) in sizes.items():
        if size and (kind in kinds or (not kinds and getattr(config, "use_sliding_window", True))):
            longer = (
                "was in use"
                if size < length
                else f"was not reached: rows have {length} tokens. Try --length {size + 8}"
            )
            yield Check(name, True if size < length else None, f"{size} tokens, {longer}")


FURTHER: tuple[Callable[[Subject], Iterator[Check]], ...] = (
    window, head, remat, dropout, micro_batches,
)  # fmt: skip


def _both(subject: Subject, name: str, found: Measured, *, cause: str) -> Iterator[Check]:
    nats, relative = nats_apart(found, subject.reference), grads_apart(found.grads, subject.reference.grads)
    yield subject.nats_check(f"{name}: log-probs", nats, cause=cause, found="")
    yield subject.grads_check(f"{name}: gradients", relative, cause=cause, found="")


def _with_copied_skeleton(policy: Policy) -> Policy:
    return dataclasses.replace(policy, skeleton=copy.deepcopy(policy.skeleton))


def _logprobs(subject: Subject, batch: PaddedBatch) -> Tensor:
    return logprobs_by_the_library(subject.policy, subject.params, subject.layout.lay(batch))
