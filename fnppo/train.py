"""The update itself: one optimizer step, and the epochs × mini-batches × micro-batches around it."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fnppo.arguments import check_type
from fnppo.batching import plan_minibatches
from fnppo.checks import check_batch
from fnppo.gradients import LossFn, accumulate_gradients, checked_loss
from fnppo.layouts import Layout, packed
from fnppo.metrics import Metrics, merge_metrics, summarize
from fnppo.optim import Optimizer, State, apply_updates, global_norm
from fnppo.precision import loss_scale_of
from fnppo.rows import lengths, select_rows
from fnppo.types import PaddedBatch, PyTree
from fnppo.weights import token_mean

Weights: TypeAlias = Callable[[PaddedBatch], PaddedBatch]
Prepare: TypeAlias = Callable[[PyTree, PaddedBatch], PaddedBatch]
Accumulate: TypeAlias = Callable[[LossFn, PyTree, Iterable[Any]], tuple[tuple[Tensor, Metrics], PyTree]]


def train_step(
    params: PyTree,
    opt_state: State,
    batches: Iterable[Any],
    *,
    loss_fn: LossFn,
    optimizer: Optimizer,
    donate: bool = False,
    accumulate: Accumulate = accumulate_gradients,
) -> tuple[PyTree, State, Metrics]:
    """One optimizer step over the micro-batches of one mini-batch.

    Args:
        params, opt_state: the trees to start from; not changed unless donated.
        batches: micro-batches whose `loss_weights` were made from the whole mini-batch.
        loss_fn: (params, micro-batch) -> (loss, metrics).
        optimizer: an (init, update) pair.
        donate: reuse the memory of `params` and `opt_state`, which are then gone. The same numbers to the bit.
        accumulate: (loss_fn, params, batches) -> ((loss, metrics), grads). That of `fnppo.distributed` adds over ranks, too.

    Returns:
        New params, new opt_state, and metrics with `grad_norm` (before any clipping) and `steps` added, and `loss_scale`
        under `dynamic_loss_scale`.

    Raises:
        ValueError: as in `accumulate_gradients`, and where optimizer, state and parameters do not belong together.

    >>> from fnppo import sgd, summarize
    >>> loss_fn = lambda params, x: ((params["w"] * x).sum(), Metrics())
    >>> params, optimizer = {"w": torch.tensor(1.0)}, sgd(0.1)
    >>> step = train_step(params, optimizer.init(params), [2.0, 3.0], loss_fn=loss_fn, optimizer=optimizer)
    >>> step[0], summarize(step[2])
    ({'w': tensor(0.5000)}, {'grad_norm': 5.0, 'steps': 1.0})
    """
    check_type("optimizer", optimizer, Optimizer, "Such as adamw(1e-6).")
    if (scale := loss_scale_of(opt_state)) is not None and callable(loss_fn):
        loss_fn = _scaled(loss_fn, scale)
    (_, metrics), grads = accumulate(loss_fn, params, batches)
    norm = global_norm(grads)
    if scale is not None:
        norm = norm / scale
        metrics = metrics._replace(per_step=metrics.per_step | {"loss_scale": scale})
    updates, opt_state = optimizer.update(grads, opt_state, params, donate=donate)
    del grads
    params = apply_updates(params, updates, donate=donate)
    return (
        params,
        opt_state,
        metrics._replace(
            per_step=metrics.per_step | {"grad_norm": norm},
            totals=metrics.totals | {"steps": torch.ones_like(norm, dtype=torch.long)},
        ),
    )


def _scaled(loss_fn: LossFn, scale: Tensor) -> LossFn:
    """The loss times `scale`; its metrics as they are."""

    def scaled(params: PyTree, batch: Any) -> tuple[Tensor, Any]:
        loss, metrics = checked_loss(loss_fn(params, batch))
        return loss * scale, metrics

    return scaled


def update_policy(
    params: PyTree,
    opt_state: State,
    batch: PaddedBatch,
    *,
    loss_fn: LossFn,
    optimizer: Optimizer,
    mini_batch_size: int,
    max_tokens: int,
    num_epochs: int = 1,
    prepare: Prepare | None = None,
    weights: Weights = token_mean,
    seed: int = 0,
    layout: Layout = packed,
    donate: bool = False,
    accumulate: Accumulate = accumulate_gradients,
) -> tuple[PyTree, State, dict[str, float]]:
    """Several epochs over a batch of rollouts: what a PPO or GRPO iteration does after sampling.

    Each epoch shuffles the rows and cuts them into mini-batches. Each mini-batch gets its loss weights once, is split
    into micro-batches of at most `max_tokens` real tokens, and makes one optimizer step. The split changes memory and
    time, not numbers. The same arguments give the same bits.

    Args:
        batch: the rollouts.
        loss_fn: (params, micro-batch) -> (loss, metrics).
        mini_batch_size: rows of one optimizer step, drawn without regard to prompt groups. The last mini-batch of an
            epoch may be shorter; its weights are made from the rows it has.
        max_tokens: limit of real tokens of one forward.
        num_epochs: passes over the batch.
        prepare: (params, mini-batch) -> mini-batch, called once per mini-batch, before `weights` and without gradients.
            Here stands what depends on the current policy and on the whole mini-batch, such as the rules of
            `fnppo.surrogates.selection`. It must not keep the params it is given.
        weights: mask -> loss weights, such as `token_mean`.
        seed: of the shuffling.
        layout: `packed`, `shared` (what rows begin with in common is computed once) or `padded`, from `fnppo.layouts`.
        donate, accumulate: see `train_step`. After a donation the caller's `params` and `opt_state` are gone.

    Returns:
        New params, new opt_state, and metrics as plain floats, over all steps (see `summarize`).

    Raises:
        ValueError: the batch is malformed, a row is over `max_tokens`, a size is below 1, or `prepare` returned no batch.

    >>> from fnppo import adamw, forward_logprobs, functional_policy, padded_batch, ppo_loss
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> def loss_fn(params, micro_batch):
    ...     return ppo_loss(forward_logprobs(params, micro_batch, policy=policy, temperature=1.0), micro_batch.targets)
    >>> batch = padded_batch([[1], [1]], [[4, 5], [6]], old_logprobs=[[-2.5, -2.5], [-2.5]], advantages=[1.0, -1.0])
    >>> params, opt_state, metrics = update_policy(
    ...     params, adamw(1e-3).init(params), batch, loss_fn=loss_fn, optimizer=adamw(1e-3),
    ...     mini_batch_size=1, max_tokens=100, num_epochs=3,
    ... )
    >>> metrics["steps"], metrics["tokens"]
    (6.0, 9.0)
    """
    check_type("layout", layout, Layout, "Use fnppo.packed, fnppo.shared or fnppo.padded.")
    batch = check_batch(batch)
    rows = batch.input_ids.shape[0]
    if rows == 0:
        raise ValueError("the batch has no rows, and an update needs at least 1. Skip it.")
    layout.plan(batch, max_tokens)  # a row over the limit is refused before anything is changed
    total = Metrics()
    steps = plan_minibatches(rows, mini_batch_size=mini_batch_size, num_epochs=num_epochs, seed=seed)
    for step in steps:
        mini_batch = select_rows(batch, step)
        if prepare is not None:
            with torch.no_grad():
                mini_batch = prepare(params, mini_batch)
            check_type(
                "what prepare returned", mini_batch, PaddedBatch, "Return the mini-batch, such as with a new column."
            )
        mini_batch = weights(mini_batch)
        groups = layout.plan(mini_batch, max_tokens)
        micro_batches = (layout.lay(select_rows(mini_batch, group)) for group in groups)
        params, opt_state, metrics = train_step(
            params, opt_state, micro_batches, loss_fn=loss_fn, optimizer=optimizer, donate=donate, accumulate=accumulate
        )
        total = merge_metrics(total, metrics)
    return params, opt_state, summarize(total)


def describe_update(
    batch: PaddedBatch,
    *,
    mini_batch_size: int,
    max_tokens: int,
    num_epochs: int = 1,
    seed: int = 0,
    layout: Layout = packed,
) -> str:
    """What `update_policy` does with the same arguments, in counts: its steps, and the rows of each micro-batch.

    Raises:
        ValueError: as in `update_policy`.

    >>> from fnppo import padded_batch
    >>> print(describe_update(padded_batch([[1]] * 5, [[2]] * 5), mini_batch_size=4, max_tokens=6))
    5 rows, 1 epochs, mini_batch_size 4, max_tokens 6: 2 optimizer steps, 3 forwards
    step 1: 4 rows, 8 tokens, micro-batches of 2 + 2 rows
    step 2: 1 rows, 2 tokens, micro-batches of 1 rows
    """
    rows = check_batch(batch).input_ids.shape[0]
    lines, forwards = [], 0
    steps = plan_minibatches(rows, mini_batch_size=mini_batch_size, num_epochs=num_epochs, seed=seed)
    for number, step in enumerate(steps, 1):
        mini_batch = select_rows(batch, step)
        groups = layout.plan(mini_batch, max_tokens)
        forwards += len(groups)
        sizes = " + ".join(str(len(group)) for group in groups)
        lines.append(
            f"step {number}: {len(step)} rows, {sum(lengths(mini_batch))} tokens, micro-batches of {sizes} rows"
        )
    head = f"{rows} rows, {num_epochs} epochs, mini_batch_size {mini_batch_size}, max_tokens {max_tokens}"
    return "\n".join([f"{head}: {len(steps)} optimizer steps, {forwards} forwards", *lines])
