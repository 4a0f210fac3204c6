"""A class with state: a sharded policy, its optimizer's state, and three plain calls around the pure functions."""

import os
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import optree
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fnppo.arguments import check_type
from fnppo.attention import Attention, choose_attention
from fnppo.checkpoint import save_pretrained
from fnppo.checks import check_batch, check_vocabulary
from fnppo.distributed.checkpoint import Restored, Saving, begin_save, load
from fnppo.distributed.dealing import Deal, balanced, share_of
from fnppo.distributed.engine import gradients_of, reshard, shard_policy, without_gradients
from fnppo.distributed.fingerprint import fingerprint
from fnppo.distributed.mesh import make_mesh, ranks_of
from fnppo.distributed.reduce import raise_together
from fnppo.distributed.rows import AllRows, gather_rows, own_rows
from fnppo.distributed.ulysses import split_tokens
from fnppo.dtensor import local, whole
from fnppo.functional import functional_policy
from fnppo.gradients import LossFn
from fnppo.layouts import Layout, packed
from fnppo.logprobs import compute_logprobs
from fnppo.optim import Optimizer
from fnppo.train import Prepare, Weights, update_policy
from fnppo.types import PaddedBatch, TokenStats
from fnppo.weights import token_mean


class FSDPActor:
    """A policy in shards over many ranks: `compute_logprobs` and `update_policy` with the numbers of a single process.

    Every rank makes one from the same module, and calls the same methods in the same order with rows of its own. An
    update is that of `fnppo.update_policy` on the rows of all ranks, in the order of ranks, to the rounding of sums.

    Attributes:
        policy: for the `loss_fn` of `update_policy`: `forward_logprobs(params, micro_batch, policy=actor.policy, ...)`.
        params: the trained parameters, as DTensors; `update_policy` changes them in place.
        opt_state: the optimizer's state; its moments are sharded as the parameters are.

    >>> from fnppo import adamw, forward_logprobs, padded_batch, ppo_loss
    >>> from fnppo.testing import tiny_llama
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: fnppo.distributed.start()
    >>> actor = FSDPActor(tiny_llama(), adamw(1e-3), mesh=make_mesh(device_type="cpu"))
    >>> def loss_fn(params, micro_batch):
    ...     stats = forward_logprobs(params, micro_batch, policy=actor.policy, temperature=1.0)
    ...     return ppo_loss(stats, micro_batch.targets)
    >>> batch = padded_batch([[1], [1]], [[4, 5], [6]], old_logprobs=[[-2.5, -2.5], [-2.5]], advantages=[1.0, -1.0])
    >>> metrics = actor.update_policy(batch, loss_fn=loss_fn, mini_batch_size=1, max_tokens=100)
    >>> metrics["steps"], metrics["tokens"], actor.compute_logprobs(batch, temperature=1.0, max_tokens=100).logprobs.shape
    (2.0, 3.0, torch.Size([2, 3]))
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        attention: Attention = choose_attention,
        remat: bool = False,
        deal: Deal = balanced,
        **fsdp: Any,
    ) -> None:
        """Shard `module`, which stays as it is: what is sharded is a copy.

        Args:
            module: a causal LM from transformers, the same on every rank. Parameters with `requires_grad=False` stay frozen.
            optimizer: an (init, update) pair of `fnppo.optim`.
            mesh: from `make_mesh`; by default all ranks are shards.
            attention, remat: as in `functional_policy`.
            deal: how micro-batches are dealt to ranks: `balanced` by work, or `in_turn`, of `fnppo.distributed.dealing`.
            fsdp: options of torch's `fully_shard`: `mp_policy`, `offload_policy`, `reshard_after_forward`.

        Raises:
            ValueError: as in `functional_policy` and `make_mesh`; or tokens are to be split over ranks, and the model reads
                padded batches only, or has a number of heads that the ranks cannot share.
        """
        check_type("optimizer", optimizer, Optimizer, "Such as adamw(1e-6).")
        self._ranks = ranks_of(make_mesh() if mesh is None else mesh)
        policy, params = functional_policy(module, attention=attention, remat=remat)
        self._architecture = policy
        if self._ranks.sequence.size() > 1:
            policy = split_tokens(policy, self._ranks.sequence)
        self.policy, self._root = shard_policy(policy, params, self._ranks, **fsdp)
        self._all = dict(self._root.model.named_parameters())
        self.params = {name: leaf for name, leaf in self._all.items() if leaf.requires_grad}
        if not self.params:
            raise ValueError(
                f"every parameter of {type(module).__name__} is frozen. Set requires_grad on those to be trained."
            )
        self.optimizer, self.opt_state = optimizer, optimizer.init(self.params)
        self._gradients = gradients_of(self._root, self.policy, self._ranks)
        self._saving: Saving | None = None
        self._share = partial(share_of, rank=self._ranks.data.rank(), ranks=self._ranks.data.size(), deal=deal)

    def compute_logprobs(
        self,
        batch: PaddedBatch,
        *,
        temperature: float,
        max_tokens: int,
        entropy: bool = False,
        chunk_size: int | None = None,
        layout: Layout = packed,
    ) -> TokenStats:
        """`fnppo.compute_logprobs` of this rank's rows, in their order; which rank computes which row is balanced.

        Args, returns: as there. A rank may have no rows, but calls it with the others.

        Raises:
            ValueError: as there, on every rank, with the rank and its row.
        """
        rows = self._gather(batch, layout, max_tokens, temperature=temperature, entropy=entropy)
        forward = partial(
            compute_logprobs, batch=rows.batch, policy=self.policy, temperature=temperature, max_tokens=max_tokens,
            entropy=entropy, chunk_size=chunk_size, layout=self._share(layout),
        )  # fmt: skip
        stats = without_gradients(self._root, forward)
        optree.tree_map_(partial(dist.all_reduce, group=self._ranks.data), stats)  # 0 where another rank computed
        return own_rows(stats, rows)

    def update_policy(
        self,
        batch: PaddedBatch,
        *,
        loss_fn: LossFn,
        mini_batch_size: int,
        max_tokens: int,
        num_epochs: int = 1,
        prepare: Prepare | None = None,
        weights: Weights = token_mean,
        seed: int = 0,
        layout: Layout = packed,
    ) -> dict[str, float]:
        """`fnppo.update_policy` on the rows of all ranks. `params` and `opt_state` are changed in place.

        Args:
            batch: this rank's rows; maybe none. `groups` are numbers of prompts among all ranks: the same number on two ranks
                is the same prompt.
            loss_fn: (params, micro-batch) -> (loss, metrics), over `policy` of this actor, of which it makes one forward. It
                is called with gathered parameters of the embeddings and the head, and must be a sum over targets, as the
                losses of `fnppo` are: every rank adds its part.
            mini_batch_size: rows of one optimizer step, over all ranks.
            max_tokens: limit of real tokens of one forward of one group of sequence ranks.
            prepare: as in `fnppo.update_policy`; it is given the rows of all ranks, on every rank, and so what it computes is
                computed by each of them.
            num_epochs, weights, seed, layout: as there, the same on every rank.

        Returns:
            Metrics over all steps and ranks, the same on every rank.

        Raises:
            ValueError: as in `fnppo.update_policy`, on every rank, with the rank and its row.
        """
        rows = self._gather(
            batch, layout, max_tokens, mini_batch_size=mini_batch_size, num_epochs=num_epochs, seed=seed
        )
        optimizer = Optimizer(self.optimizer.init, self._update)
        self.params, self.opt_state, metrics = update_policy(
            self.params, self.opt_state, rows.batch,
            loss_fn=loss_fn, optimizer=optimizer, mini_batch_size=mini_batch_size, max_tokens=max_tokens,
            num_epochs=num_epochs, prepare=None if prepare is None else self._prepared(prepare), weights=weights,
            seed=seed, layout=self._share(layout), donate=True, accumulate=self._gradients,
        )  # fmt: skip
        return metrics

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int,
        position: dict[str, Any] | None = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Saving:
        """A checkpoint `folder/step-...` of the trained parameters, the optimizer's state and random states.

        Args:
            folder: on a file system that all ranks share.
            step, position, keep: see `fnppo.distributed.checkpoint.begin_save`.
            wait: False returns once everything is copied to host memory; training goes on while it is written. The next
                `save`, and `wait()` of what is returned, wait until it is complete, and raise what went wrong.
        """
        self._finish_saving()
        self._saving = begin_save(
            folder, self._state(), step=step, position=position or {}, keep=keep, group=self._files,
            frozen=self._frozen,
        )  # fmt: skip
        saving = self._saving
        if wait:
            self._finish_saving()
        return saving

    def load(self, folder: str | os.PathLike[str]) -> Restored | None:
        """Go on from the last complete checkpoint of a folder, of whatever mesh; None where there is none.

        Raises:
            ValueError: on every rank: the checkpoint is damaged, of another model or optimizer, or beside other frozen weights.
        """
        self._finish_saving()
        reshard(self._root)
        return load(folder, self._state(), group=self._files, frozen=self._frozen)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole parameters, one after the other, on every rank: to hand weights to a sampler.

        Every rank walks it to its end, since each parameter is gathered by all of them. In the order of names.
        """
        for name in sorted(self._all):
            parameter = self._all[name].detach()
            value, here = whole(parameter), local(parameter)
            alias = value.untyped_storage().data_ptr() == here.untyped_storage().data_ptr()
            yield name, value.clone() if alias else value  # the next update changes what is here

    def export(self, path: str | os.PathLike[str], *, tokenizer: Any = None) -> None:
        """A folder that plain transformers, vLLM and SGLang load: config, safetensors and the tokenizer (`save_pretrained`).

        Every rank calls it. The first keeps all parameters in host memory, and writes.
        """
        self._finish_saving()
        first = self._ranks.world.rank() == 0
        params = {}
        for name, parameter in self.gathered():
            if first:
                params[name] = parameter.cpu()
        error = None
        if first:
            try:
                save_pretrained(path, params, policy=self._architecture, tokenizer=tokenizer)
            except Exception as failed:
                error = str(failed)
        raise_together(error, self._ranks.world)

    def _finish_saving(self) -> None:
        """Wait for a checkpoint that is on its way. What went wrong on one rank is raised on all."""
        error, saving, self._saving = None, self._saving, None
        if saving is None:
            return
        try:
            saving.wait()
        except Exception as failed:
            error = str(failed)
        raise_together(error, self._files)

    @cached_property
    def _files(self) -> dist.ProcessGroup:
        """A group of its own for checkpoints, which are written while the others are in use, from host memory."""
        group: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(self._ranks.world), backend="gloo")
        return group

    @cached_property
    def _frozen(self) -> dict[str, int]:
        """What a run that loads a checkpoint must have as well, since it is in none of them."""
        return {name: fingerprint(leaf) for name, leaf in sorted(self._all.items()) if not leaf.requires_grad}

    def _state(self) -> dict[str, Any]:
        return {"params": self.params, "opt_state": self.opt_state}

    def _update(self, grads: Any, state: Any, params: Any, *, donate: bool = False) -> tuple[Any, Any]:
        """The optimizer's update. The state is kept at once: a later step may fail, and the moments have changed in place."""
        updates, self.opt_state = self.optimizer.update(grads, state, params, donate=donate)
        return updates, self.opt_state

    def _gather(self, batch: PaddedBatch, layout: Layout, max_tokens: int, **alike: Any) -> AllRows:
        device = self._ranks.shards.device_type

        def check(batch: PaddedBatch) -> None:
            check_vocabulary(check_batch(batch), self.policy.vocab_size, self.policy.max_positions)
            if batch.input_ids.device.type != device:
                raise ValueError(f"the batch is on {batch.input_ids.device}, the model on {device}. Move the batch.")
            layout.plan(batch, max_tokens)

        return gather_rows(batch, self._ranks, check=check, alike=alike | {"max_tokens": max_tokens})

    def _prepared(self, prepare: Prepare) -> Prepare:
        return lambda params, mini_batch: without_gradients(self._root, prepare, mini_batch)
