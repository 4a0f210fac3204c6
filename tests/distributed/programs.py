"""What the ranks of the tests run. Everything comes in and goes out as plain tensors and numbers."""

import copy
from collections import Counter
from functools import cache, partial

import optree
import torch
import torch.distributed as dist
from tiny import tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fnppo
from fnppo.distributed import (
    FSDPActor,
    Ulysses,
    checkpoint,
    gather_params,
    gather_rows,
    own_rows,
    ranks_of,
    shard_params,
    split_tokens,
)
from fnppo.distributed.checkpoint import named
from fnppo.distributed.mesh import DIMS
from fnppo.testing import float64_everywhere, tiny_causal_lm
from fnppo.types import PackedInputs

OPTIMIZER = fnppo.skip_nonfinite(fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-2, eps=1e-3)))
LOSSES = {
    "ppo": partial(fnppo.ppo_loss, clip_low=0.2, clip_high=0.28, entropy_coef=0.01, kl_coef=0.1),
    "gspo": partial(fnppo.ppo_loss, surrogate=fnppo.surrogates.gspo),
}


@cache
def mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=DIMS)


@cache
def ranks(shape):
    return ranks_of(mesh(shape))


@cache
def model(family):
    return copy.deepcopy(tiny(family)).requires_grad_(True)


def loss_function(policy, loss, **hint):
    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=0.8, **hint)
        return LOSSES[loss](stats, micro_batch.targets)

    return loss_fn


def whole(tree):
    """Plain tensors in the place of DTensors, on every rank."""
    return optree.tree_map(lambda x: (x.full_tensor() if isinstance(x, DTensor) else x).detach(), tree)


def update(batch, shape, family, loss, options, engine):
    """Log-probs of the rank's rows, one `update_policy`, and what it leaves: (stats, metrics, params, opt_state)."""
    with float64_everywhere():
        actor = FSDPActor(model(family), OPTIMIZER, mesh=mesh(shape), **engine)
        stats = actor.compute_logprobs(
            batch, temperature=0.8, entropy=True, max_tokens=options["max_tokens"], layout=options["layout"]
        )
        metrics = actor.update_policy(batch, loss_fn=loss_function(actor.policy, loss), **options)
        return stats, metrics, whole(actor.params), whole(actor.opt_state)


def pure_gradients(batch, shape, family, loss, layout):
    """(loss, metrics), log-probs and gradients by `gather_params` of a tree of shards: no module, no FSDP2, no actor."""
    with float64_everywhere():
        policy, params = fnppo.functional_policy(model(family))
        if shape[2] > 1:
            policy = split_tokens(policy, ranks(shape).sequence)
        shards = shard_params(params, ranks(shape))
        micro_batch, loss_fn = layout.lay(batch), loss_function(policy, loss)
        (value, metrics), grads = fnppo.value_and_grad(lambda shards: loss_fn(gather_params(shards), micro_batch))(
            shards
        )
        stats = fnppo.forward_logprobs(gather_params(shards), micro_batch, policy=policy, temperature=0.8)
        kl = fnppo.exact_kl(
            gather_params(shards), {n: p * 0.9 for n, p in params.items()}, micro_batch, policy=policy, temperature=0.8
        )
        return value, metrics.per_step, whole(stats), kl.detach(), whole(grads)


def prepared(batch, shape, options):
    """An update whose `prepare` asks the current policy for log-probs of the whole mini-batch."""
    with float64_everywhere():
        actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
        actor.update_policy(
            batch, loss_fn=loss_function(actor.policy, "ppo"), prepare=fresh_logprobs(actor.policy), **options
        )
        return whole(actor.params)


def fresh_logprobs(policy):
    def prepare(params, mini_batch):
        stats = fnppo.compute_logprobs(params, mini_batch, policy=policy, temperature=0.8, max_tokens=12)
        return mini_batch._replace(old_logprobs=stats.logprobs - 0.1)

    return prepare


def refused(batch, shape, options):
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    before = whole(actor.params)
    try:
        actor.update_policy(batch, loss_fn=loss_function(actor.policy, "ppo"), **options)
    except ValueError as error:
        return str(error), before, whole(actor.params)
    raise AssertionError("nothing was refused")


def failing_loss(batch, shape, where, options):
    """An update whose loss fails on one rank, in its last step; then one that does not, on the same actor.

    And an actor that has made the steps before that alone, and then the one that does not fail.
    """
    actor, other = (FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape)) for _ in range(2))
    right = loss_function(actor.policy, "ppo")
    steps = 0

    def wrong(params, micro_batch):
        nonlocal steps
        steps += 1
        bad = steps == 2 and dist.get_rank() == 1
        if bad and where == "before the layers":
            raise ValueError("no use")
        loss, metrics = right(params, micro_batch)
        if bad and where == "after the layers":
            raise RuntimeError("bad row 7")
        if bad and where == "metrics of another type":
            return loss, {}
        if bad and where == "not a number":
            loss = loss * float("nan")
        return loss, metrics

    try:
        actor.update_policy(batch, loss_fn=wrong, **options, num_epochs=2)
        said = None
    except ValueError as error:
        said = str(error)
    skipped = int(actor.opt_state.skipped)
    other.update_policy(batch, loss_fn=loss_function(other.policy, "ppo"), **options)
    for each in (actor, other):
        each.update_policy(batch, loss_fn=loss_function(each.policy, "ppo"), **options)
    after, expected = (whole({"params": each.params, "moments": each.opt_state.inner}) for each in (actor, other))
    return said, skipped, after, expected


def uneven_losses(parts, shape):
    """Losses without a graph, and metrics without names, where a rank has no targets; NaN among extremes on one rank."""
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    right = loss_function(actor.policy, "ppo")

    def loss_fn(params, micro_batch):
        if micro_batch.targets.token_ids.numel() == 0:
            return torch.zeros(()), fnppo.Metrics()
        loss, metrics = right(params, micro_batch)
        strange = torch.tensor(float("nan") if dist.get_rank() == 1 else 1.0)
        return loss, metrics._replace(maxima=metrics.maxima | {"strange": strange})

    found = [actor.update_policy(part, loss_fn=loss_fn, mini_batch_size=9, max_tokens=12) for part in parts]
    weights = dict(actor.gathered())
    before = {name: value.clone() for name, value in weights.items()}
    actor.update_policy(parts[0], loss_fn=right, mini_batch_size=9, max_tokens=12)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    return found


def unlike(batch, shape):
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    actor.update_policy(batch, loss_fn=None, mini_batch_size=4 + dist.get_rank(), max_tokens=12)


def stray_factors():
    """Gradient of w in the mean of w·x, whose x are dealt to the ranks, by the readable path and by FSDP2's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).chunk(size)[rank]
    shards = shard_params({"w": torch.ones(1)}, ranks((1, size, 1)))
    _, grads = fnppo.value_and_grad(lambda shards: ((gather_params(shards)["w"] * x).sum() / 4, None))(shards)
    return grads["w"].full_tensor().item()


def slices(tokens):
    split = Ulysses(ranks((1, 1, dist.get_world_size())).sequence)
    ids = torch.arange(tokens)
    even = split.even(PackedInputs(ids, ids, torch.tensor([0, tokens])))
    own = split.part(tokens)
    return even.input_ids.numel(), own.start, own.stop


def refused_construction(shape, architecture):
    try:
        module = tiny_causal_lm(architecture) if architecture == "mamba" else model(architecture)
        FSDPActor(module, OPTIMIZER, mesh=mesh(shape))
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def shared_rows(batch, shape):
    """What every rank has after `gather_rows`, and its own rows of it."""
    rows = gather_rows(batch, ranks(shape), check=fnppo.checks.check_batch)
    return rows.batch, own_rows(rows.batch.input_ids, rows)


def trained(actor, batch, updates, first=0):
    for number in range(first, updates):
        actor.update_policy(
            batch, loss_fn=loss_function(actor.policy, "ppo"), mini_batch_size=4, max_tokens=12, seed=number
        )


def state_of(actor):
    return dict(named(whole({"params": actor.params, "opt_state": actor.opt_state})))


def saved(batch, shape, folder, updates, save):
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    trained(actor, batch, updates)
    if save:
        saving = actor.save(folder, step=updates, position={"row": 16}, wait=False)
        state = state_of(actor)
        trained(actor, batch, updates + 1, updates)  # what is on its way to the disk does not change any more
        saving.wait()
        return state
    return state_of(actor)


def saved_and_loaded(batch, shape, folder, updates):
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    restored = actor.load(folder)
    trained(actor, batch, updates, restored.step)
    return tuple(restored), state_of(actor)


def keep_saving(shape, folder, times, keep):
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    for step in range(times):
        actor.save(folder, step=step, keep=keep, wait=step == times - 1)


def failing_save(shape, folder):
    """A save that is complete, then one whose files rank 1 cannot digest."""
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    actor.save(folder, step=0)

    def no_space(file):
        raise OSError("no space left")

    right = checkpoint._digest
    if dist.get_rank() == 1:
        checkpoint._digest = no_space
    try:
        actor.save(folder, step=1)
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        checkpoint._digest = right
    raise AssertionError("nothing has failed")


def foreign(shape, family, folder):
    actor = FSDPActor(model(family), OPTIMIZER, mesh=mesh(shape))
    try:
        actor.load(folder)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def beside_frozen(shape, folder, change):
    """A checkpoint of norms alone, loaded beside the frozen weights it was saved with, or others."""
    module = copy.deepcopy(model("llama"))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name)
    actor = FSDPActor(module, OPTIMIZER, mesh=mesh(shape))
    if not list(folder.glob("step-*")):
        actor.save(folder, step=1)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 2] += change
    return tuple(FSDPActor(module, OPTIMIZER, mesh=mesh(shape)).load(folder))[:1]


def loaded_in_between(batch, shape, folder, reshard):
    """Log-probs when saved and when loaded again after an update, and what is said of a step that is too early."""
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape), reshard_after_forward=reshard)
    actor.save(folder, step=1, wait=False)
    first = actor.compute_logprobs(batch, temperature=1.0, max_tokens=12).logprobs
    trained(actor, batch, 1)
    actor.compute_logprobs(batch, temperature=1.0, max_tokens=12)
    assert actor.load(folder).step == 1
    again = actor.compute_logprobs(batch, temperature=1.0, max_tokens=12).logprobs
    actor.save(folder, step=2, wait=False)
    try:
        actor.save(folder, step=0)
    except ValueError as error:
        return first, again, str(error)
    raise AssertionError("nothing was refused")


def exported(shape, family, folder):
    actor = FSDPActor(model(family), OPTIMIZER, mesh=mesh(shape))
    actor.export(folder)
    return whole(actor.params)


def options(batch, update):
    """(log-probs, parameters) after an update, with each of some options of `fully_shard`."""
    found = []
    for fsdp in (
        {},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ):
        module = copy.deepcopy(model("llama"))
        actor = FSDPActor(module.float() if "mp_policy" in fsdp else module, OPTIMIZER, mesh=mesh((1, 2, 1)), **fsdp)
        actor.update_policy(batch, loss_fn=loss_function(actor.policy, "ppo"), **update)
        stats = actor.compute_logprobs(batch, temperature=1.0, max_tokens=12)
        found.append((stats.logprobs.double(), whole(actor.params)))
    return found


def frozen(batch, shape, update):
    """All parameters before and after an update of the norms and of one layer's attention, and who has moments."""
    module = copy.deepcopy(model("llama"))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name or "layers.1.self_attn" in name)
    actor = FSDPActor(module, OPTIMIZER, mesh=mesh(shape))
    before = {name: value.clone() for name, value in actor.gathered()}
    actor.update_policy(batch, loss_fn=loss_function(actor.policy, "ppo"), **update)
    return (
        before,
        dict(actor.gathered()),
        actor.params.keys() | set(),
        actor.opt_state.inner[1].first_moment.keys() | set(),
    )


MODEL_LAYERS = 2


class Traffic(TorchDispatchMode):
    """Bytes that this rank gets from others, by kind of collective."""

    def __init__(self, size):
        super().__init__()
        self.size, self.bytes = size, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[-1].split(".")[0]
        kinds = (
            "allgather",
            "all_gather",
            "reduce_scatter",
            "alltoall",
            "all_to_all",
            "allreduce",
            "all_reduce",
            "broadcast",
        )
        kind = next((kind for kind in kinds if kind in name.lower()), None)
        if kind is not None and func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            tensors = [x for x in optree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            largest = max(x.numel() * x.element_size() for x in tensors)
            kind = kind.replace("_", "")
            self.bytes[kind] += largest * (self.size - 1) // self.size
        return func(*args, **(kwargs or {}))


def traffic(batch, shape, layout):
    """Bytes of one micro-batch, forward and backward, and the least that FSDP and Ulysses need."""
    size = 2
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh(shape))
    micro_batch = layout.lay(fnppo.token_mean(batch))
    loss_fn = loss_function(actor.policy, "ppo")
    for _ in range(2):  # what torch sets up on first use is not counted
        with Traffic(size) as counted:
            loss, _ = actor._root(loss_fn, micro_batch)
            loss.backward()
    numbers = {name: -(-p.shape[0] // size) * size * p[0].numel() * 8 for name, p in model("llama").named_parameters()}
    layers = sum(n for name, n in numbers.items() if ".layers." in name)
    around = sum(numbers.values()) - layers
    least = {"allgather": (2 * layers + around) // 2, "reducescatter": (layers + around) // 2}
    if shape[2] == 2:
        tokens = -(-micro_batch.inputs.input_ids.numel() // 2)
        heads, kv_heads, dim = 4, 2, 2
        least["allreduce"] = 2 * micro_batch.targets.token_ids.numel() * 8 // 2  # log-probs and entropies
        least["alltoall"] = 2 * MODEL_LAYERS * tokens * (2 * heads + 2 * kv_heads) * dim * 8 // 2
    return dict(counted.bytes), least


def misused(batch):
    actor = FSDPActor(model("llama"), OPTIMIZER, mesh=mesh((1, 2, 1)))
    fnppo.forward_logprobs(actor.params, fnppo.pack_sequences(batch), policy=actor.policy, temperature=1.0)
