"""verl's actor by fnppo: the interface of `DataParallelPPOActor`, over a plain module and a torch optimizer.

    actor = Actor(config, actor_module, actor_optimizer)
    log_probs, entropys = actor.compute_log_prob(data, calculate_entropy=True)
    metrics = actor.update_policy(data)

The module and the optimizer stay the caller's, and are changed in place as verl does it, so learning rate schedules,
checkpoints and the sync of weights to the sampler go on. verl is not imported: `data` may be its DataProto or anything with
`.batch` and `.meta_info`. Columns of responses have the width of the responses, as verl has them.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnppo.arguments import check_count
from fnppo.checks import check_batch, check_vocabulary
from fnppo.functional import functional_policy, without_wrapper
from fnppo.gradients import accumulate_gradients
from fnppo.interop.verl_options import Options, read
from fnppo.layouts import Layout
from fnppo.logprobs import compute_logprobs, forward_logprobs
from fnppo.losses import on_policy, ppo_loss
from fnppo.metrics import Metrics, summarize
from fnppo.partition import combine, partition
from fnppo.policy import Policy
from fnppo.precision import cast
from fnppo.rows import select_rows
from fnppo.types import ModelBatch, PaddedBatch, Params

NAMES = {
    "policy_loss": "actor/pg_loss", "kl": "actor/kl_loss", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm",
    "dual_clip_fraction": "actor/pg_clipfrac_lower", "ppo_kl": "actor/ppo_kl",
}  # fmt: skip
"""Of metrics that both have. Those of tokens are means over the tokens of a mini-batch; verl's follow `loss_agg_mode`."""


class Actor:
    """`DataParallelPPOActor` with the numbers of fnppo: the same for any split into micro-batches.

    Args:
        config: `FSDPActorConfig` of verl (0.7.0 to 0.9.1), or a mapping with its names.
        actor_module: a causal LM from transformers, or PEFT's around one, not wrapped in FSDP. Its dropout is off.
        actor_optimizer: steps the module's parameters; None for a reference policy.
    """

    def __init__(self, config: Any, actor_module: Any, actor_optimizer: torch.optim.Optimizer | None = None) -> None:
        self.config, self.actor_module, self.actor_optimizer = config, actor_module, actor_optimizer
        read(config, response_length=1, importance_weights=False)  # what is wrong with it is said now
        self._module = without_wrapper(actor_module)
        self._architecture, _ = functional_policy(actor_module)

    @property
    def policy(self) -> Policy:
        """Of PEFT's models made anew, since adapters may have been disabled or changed since the last call."""
        wrapped = self._module is not self.actor_module
        return functional_policy(self.actor_module)[0] if wrapped else self._architecture

    def compute_log_prob(self, data: Any, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of all tokens of the responses [batch, response]; 0 where a response has ended.

        Raises:
            ValueError: `data` lacks a column or a number of `meta_info`, has images, or positions that are not those of its mask.
        """
        batch, width = self._batch(data, learned=None)
        options = read(self.config, response_length=width, importance_weights=False)
        known = _info(data, "temperature", "use_dynamic_bsz")
        if known["use_dynamic_bsz"]:
            layout, max_tokens = options.layout, _info(data, "max_token_len")["max_token_len"]
        else:
            size = _info(data, "micro_batch_size")["micro_batch_size"]
            check_count("micro_batch_size", size, least=1, remedy="It counts rows.")
            layout, max_tokens = (
                Layout(lambda batch, *_, **__: _runs(len(batch.input_ids), size), options.layout.lay),
                2**62,
            )
        stats = compute_logprobs(
            _cast(self._params(), options), batch, policy=self.policy, temperature=known["temperature"],
            max_tokens=max_tokens, entropy=calculate_entropy, layout=layout,
        )  # fmt: skip
        entropy = None if stats.entropy is None else stats.entropy[:, -width:]
        return stats.logprobs[:, -width:], entropy

    def update_policy(self, data: Any) -> dict[str, list[float]]:
        """`ppo_epochs` over the mini-batches, in their order. Returns each metric's values, one a step of the optimizer.

        Raises:
            ValueError: as in `compute_log_prob`; nothing has been changed then.
        """
        if self.actor_optimizer is None:
            raise ValueError(
                "there is no actor_optimizer: this actor is a reference. Make one with an optimizer to update."
            )
        batch, width = self._batch(data, learned="response_mask")
        temperature = _info(data, "temperature")["temperature"]
        options = read(self.config, response_length=width, importance_weights="importance_weights" in batch.extra)
        names = {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        trained, frozen = partition(self._params(), names.__contains__)
        steps = _runs(len(batch.input_ids), options.mini_batch_size)
        fresh = options.own_old_logprobs and len(steps) * options.epochs == 1

        policy = self.policy
        check_vocabulary(batch, policy.vocab_size, policy.max_positions)
        for rows in steps:  # what cannot be planned is refused before anything is changed
            _micro_batches(select_rows(batch, rows), options)

        def loss_fn(trained: Params, micro_batch: ModelBatch) -> tuple[Tensor, Metrics]:
            params = _cast(combine(trained, frozen), options)
            entropy = options.entropy or options.loss["entropy_coef"] != 0
            stats = forward_logprobs(params, micro_batch, policy=policy, temperature=temperature, entropy=entropy)
            targets = on_policy(micro_batch.targets, stats) if fresh else micro_batch.targets
            loss, metrics = ppo_loss(stats, targets, **options.loss)
            assert targets.old_logprobs is not None
            moved = (targets.old_logprobs - stats.logprobs.detach()).sum()
            return loss, metrics._replace(per_token=metrics.per_token | {"ppo_kl": moved})

        found = defaultdict[str, list[float]](list)
        for _ in range(options.epochs):
            for rows in steps:
                mini_batch = options.weights(select_rows(batch, rows))
                micro_batches = _micro_batches(mini_batch, options)
                (_, metrics), grads = accumulate_gradients(loss_fn, trained, micro_batches)
                norm = self._step(grads, options.grad_clip)
                for name, value in (summarize(metrics) | {"grad_norm": norm}).items():
                    found[NAMES.get(name, f"actor/{name}")].append(value)
        return dict(found)

    def _batch(self, data: Any, *, learned: str | None) -> tuple[PaddedBatch, int]:
        return _batch(data, learned=learned, device=next(self._module.parameters()).device)

    def _params(self) -> Params:
        """As they are now: they may have been moved to another device, or replaced, since the last call."""
        return {name: parameter.detach() for name, parameter in self._module.named_parameters()}

    def _step(self, grads: Params, grad_clip: float) -> float:
        """Clip and step, unless the norm is not finite; returns the norm before clipping."""
        assert self.actor_optimizer is not None
        parameters = dict(self._module.named_parameters())
        for name, grad in grads.items():
            parameters[name].grad = grad
        norm = torch.nn.utils.clip_grad_norm_([parameters[name] for name in grads], grad_clip)
        if bool(torch.isfinite(norm)):
            self.actor_optimizer.step()
        self.actor_optimizer.zero_grad()
        return float(norm)


def _batch(data: Any, *, learned: str | None, device: torch.device) -> tuple[PaddedBatch, int]:
    """Columns of verl as a `PaddedBatch` on the device of the model, and the width of responses. Without `learned`, all of a response is."""
    if "multi_modal_inputs" in (getattr(data, "non_tensor_batch", None) or {}):
        raise ValueError("data has multi_modal_inputs; this actor reads text. Leave them out where they are empty.")
    columns = getattr(data, "batch", data)
    needed = ["input_ids", "attention_mask", "position_ids", "responses"]
    needed += [] if learned is None else [learned, "old_log_probs", "advantages"]
    for name in needed:
        if name not in columns.keys():  # noqa: SIM118 - a TensorDict
            raise ValueError(f"data has no column {name}. It needs {', '.join(needed)}.")
        if columns[name].is_nested:
            raise ValueError(f"{name} is a nested tensor; padded ones are read. Use its to_padded_tensor.")
    columns = {name: column.to(device) for name, column in columns.items()}
    ids, attention, width = columns["input_ids"], columns["attention_mask"] != 0, columns["responses"].shape[1]
    _check_positions(columns["position_ids"], attention)

    def whole(name: str) -> Tensor | None:
        return pad(columns[name], (ids.shape[1] - width, 0)) if name in columns else None

    mask = pad(attention[:, -width:], (ids.shape[1] - width, 0)) if learned is None else whole(learned)
    assert mask is not None
    batch = PaddedBatch(ids, attention, mask != 0)
    if learned is not None:
        weights = whole("rollout_is_weights")
        batch = batch._replace(
            old_logprobs=whole("old_log_probs"), advantages=whole("advantages"), ref_logprobs=whole("ref_log_prob"),
            extra={} if weights is None else {"importance_weights": weights},
        )  # fmt: skip
    return check_batch(batch), width


def _check_positions(position_ids: Tensor, attention: Tensor) -> None:
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids has {position_ids.dim()} dimensions; this actor reads text, which has 2.")
    wrong = (position_ids != attention.cumsum(1) - 1) & attention
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, column {column}: position_ids is {int(position_ids[row, column])}, expected "
            f"{int(attention[row].cumsum(0)[column]) - 1}: positions are counted from the mask. Leave other ones to verl."
        )


def _info(data: Any, *names: str) -> dict[str, Any]:
    for name in names:
        if name not in data.meta_info:
            raise ValueError(f"meta_info has no {name}. Set it where the batch is made, as verl's workers do.")
    return {name: data.meta_info[name] for name in names}


def _runs(rows: int, size: int) -> list[list[int]]:
    """Rows in order, `size` at a time."""
    return [list(range(first, min(first + size, rows))) for first in range(0, rows, size)]


def _micro_batches(mini_batch: PaddedBatch, options: Options) -> Iterator[ModelBatch]:
    if options.max_tokens is not None:
        groups = options.layout.plan(mini_batch, options.max_tokens)
    else:
        assert options.micro_batch_size is not None
        groups = _runs(len(mini_batch.input_ids), options.micro_batch_size)
    return (options.layout.lay(select_rows(mini_batch, group)) for group in groups)


def _cast(params: Params, options: Options) -> Params:
    return params if options.dtype is None else cast(params, options.dtype)
