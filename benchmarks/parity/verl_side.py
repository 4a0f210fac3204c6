"""verl's own functions on the cases of a file; runs in verl's environment: `python verl_side.py CASES RESULTS`.

Nothing of verl is replaced or patched. Columns are named as verl names them; see `serve` for cases and results.
"""

import dataclasses
import inspect
import os
import tempfile
from types import SimpleNamespace

import numpy as np
import torch
import verl
import verl.trainer.ppo.core_algos as core_algos
import verl.trainer.ppo.rollout_corr_helper as rollout_corr_helper
import verl.utils.torch_functional as verl_F
from serve import serve
from verl.trainer.config import AlgoConfig, KLControlConfig, RolloutCorrectionConfig
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

Columns = dict[str, torch.Tensor]


def actor_config(*, policy_loss: dict | None = None, **options) -> FSDPActorConfig:
    """An actor's configuration with these options; the required ones that no loss reads are filled in."""
    required = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    policy_loss = dict(policy_loss or {})
    if "rollout_correction" in policy_loss:
        policy_loss["rollout_correction"] = RolloutCorrectionConfig(**policy_loss["rollout_correction"])
    return FSDPActorConfig(**required | options, policy_loss=PolicyLossConfig(**policy_loss))


def names(columns: Columns) -> dict[str, list[str]]:
    """What a page that maps this version must mention: functions, names that they go by, and options."""
    found = {*core_algos.POLICY_LOSS_REGISTRY, *core_algos.ADV_ESTIMATOR_REGISTRY}
    for module in (core_algos, rollout_corr_helper):
        found |= {name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
        found |= getattr(module, "SUPPORTED_ROLLOUT_RS_OPTIONS", set())
    for config in (FSDPActorConfig, PolicyLossConfig, AlgoConfig, KLControlConfig, RolloutCorrectionConfig):
        found |= {field.name for field in dataclasses.fields(config)}
    return {"names": sorted(name for name in found if not name.startswith("_"))}


def with_gradient(function, columns: Columns, name: str) -> Columns:
    """{value, gradient of the sum of its learned places with respect to the column `name`}."""
    leaf = columns[name].clone().requires_grad_()
    value = function(**columns | {name: leaf})
    scored = value if value.dim() == 0 else torch.where(columns["response_mask"] > 0, value, 0)
    return {"value": value.detach(), "gradient": torch.autograd.grad(scored.sum(), leaf)[0]}


def kl_penalty(columns: Columns, *, kind: str) -> Columns:
    def value(log_prob, ref_log_prob, **_):
        return core_algos.kl_penalty(log_prob, ref_log_prob, kind)

    return with_gradient(value, columns, "log_prob")


def agg_loss(columns: Columns, *, mode: str, **options) -> Columns:
    def value(loss_mat, response_mask, **_):
        return core_algos.agg_loss(loss_mat, response_mask, mode, **options)

    return with_gradient(value, columns, "loss_mat")


def split(columns: Columns, parts: int) -> list[Columns]:
    """The columns of every `parts`-th row, beginning with each of the first ones."""
    rows = len(columns["response_mask"])
    return [
        {name: value[part::parts] if len(value) == rows else value for name, value in columns.items()}
        for part in range(parts)
    ]


def split_policy_loss(columns: Columns, *, parts: int, **options) -> Columns:
    """The losses of micro-batches, each divided by the counts of the whole, added up."""
    mask = columns["response_mask"]
    counts = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    found = [policy_loss(part, counts=counts, **options) for part in split(columns, parts)]
    gradient = torch.zeros_like(columns["log_prob"])
    for part, result in enumerate(found):
        gradient[part::parts] = result["gradient"]
    return {"value": sum(result["value"] for result in found), "gradient": gradient}


def policy_loss(
    columns: Columns, *, mode: str, agg: str = "token-mean", counts: dict | None = None, **options
) -> Columns:
    config = actor_config(**options)
    config.global_batch_info.update(counts or {})
    metrics = {}

    def value(log_prob, old_log_prob, advantages, response_mask, rollout_is_weights=None, **_):
        loss, found = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=agg,
            config=config,
            rollout_is_weights=rollout_is_weights,
        )
        metrics.update(found)
        return loss

    result = with_gradient(value, columns, "log_prob")
    shares = {"pg_clipfrac", "pg_clipfrac_lower"}
    return result | {name: torch.tensor(metrics[f"actor/{name}"]) for name in shares if f"actor/{name}" in metrics}


def ppo_loss(columns: Columns, *, parts: int, agg: str = "token-mean", **options) -> Columns:
    """The whole loss of an actor that is not `DataParallelPPOActor`: with entropy and KL, micro-batches added up."""
    from tensordict import NonTensorData, TensorDict
    from verl.workers.utils.losses import ppo_loss

    config = actor_config(loss_agg_mode=agg, **options)
    mask = columns["response_mask"]
    names = {"old_log_prob": "old_log_probs", "ref_log_prob": "ref_log_prob", "advantages": "advantages"}
    whole = {"dp_size": 1, "batch_num_tokens": mask.sum().item(), "global_batch_size": len(mask)}

    def value(log_prob, **_):
        total = torch.zeros((), dtype=torch.float64)
        for part in split(columns | {"log_prob": log_prob}, parts):
            rows, width = part["response_mask"].shape
            read = {name: part[column] for column, name in names.items()} | {"response_mask": part["response_mask"]}
            read |= {"prompts": torch.ones(rows, 1), "responses": torch.ones(rows, width)}
            read["attention_mask"] = torch.ones(rows, width + 1, dtype=torch.long)
            data = TensorDict(read | {name: NonTensorData(number) for name, number in whole.items()}, [rows])
            # What an engine gives: for each position of the packed rows, the score of the token after it.
            model_output = {
                name: torch.nn.functional.pad(part[column], (0, 1)).flatten()
                for name, column in (("log_probs", "log_prob"), ("entropy", "entropy"))
            }
            total = total + ppo_loss(config, model_output, data)[0]
        return total

    return with_gradient(value, columns, "log_prob")


def value_loss(columns: Columns, *, cliprange_value: float, agg: str = "token-mean") -> Columns:
    def value(vpreds, returns, values, response_mask, **_):
        return core_algos.compute_value_loss(vpreds, returns, values, response_mask, cliprange_value, agg)[0]

    return with_gradient(value, columns, "vpreds")


def advantage(
    columns: Columns, *, estimator: str, config: dict | None = None, force_device: bool = True, **options
) -> Columns:
    """The estimator gets those of the columns and options that it has a name for."""
    os.environ.pop("VERL_FORCE_DEVICE", None)
    if force_device:
        os.environ["VERL_FORCE_DEVICE"] = "cpu"
    function = core_algos.get_adv_estimator_fn(estimator)
    index = np.array([str(group) for group in columns["index"].tolist()], dtype=object)
    mask = columns["response_mask"]
    available = columns | options | {"index": index, "config": AlgoConfig(**config or {})}
    available["old_log_probs"] = columns["old_log_prob"]
    if estimator == "gdpo":
        length = mask.sum(1).long()
        available["non_tensor_batch"] = {name: columns[name].numpy() for name in config["gdpo_reward_keys"]}
        attention = torch.arange(mask.shape[1] + 1)[None, :] < 1 + length[:, None]
        available["batch"] = {"prompts": torch.zeros(len(mask), 1), "attention_mask": attention.long()}
    wanted = inspect.signature(function).parameters
    advantages, returns = function(**{name: value for name, value in available.items() if name in wanted})
    return {"value": advantages, "returns": returns}


def whiten(columns: Columns, *, shift_mean: bool = True) -> Columns:
    return {"value": verl_F.masked_whiten(columns["advantages"], columns["response_mask"], shift_mean)}


def kl_in_reward(columns: Columns, *, kl_ratio: float) -> Columns:
    scores, mask = columns["token_level_rewards"], columns["response_mask"]
    return {
        "value": core_algos.compute_rewards(scores, columns["old_log_prob"], columns["ref_log_prob"], kl_ratio) * mask
    }


def kl_controller(columns: Columns, *, kl_coef: float, target_kl: float, horizon: int, n_steps: int) -> Columns:
    """The coefficient after each of the KLs of `columns["kl"]`."""
    controller = core_algos.AdaptiveKLController(kl_coef, target_kl, horizon)
    coefficients = []
    for kl in columns["kl"].tolist():
        controller.update(kl, n_steps)
        coefficients.append(controller.value)
    return {"value": torch.tensor(coefficients, dtype=torch.float64)}


def correction_weights(columns: Columns, *, metrics: bool = False, **options) -> Columns:
    log_ratio = columns["old_log_prob"] - columns["rollout_log_prob"]
    weights, found = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, columns["response_mask"], **options
    )
    ess = torch.tensor(found["rollout_is_eff_sample_size"])
    return {"value": weights} | ({"effective_sample_size": ess} if metrics else {})


def rejection_mask(columns: Columns, **options) -> Columns:
    log_ratio = columns["old_log_prob"] - columns["rollout_log_prob"]
    return {
        "value": rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, columns["response_mask"], **options)[0]
    }


def veto_mask(columns: Columns, *, threshold: float) -> Columns:
    found = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        columns["old_log_prob"],
        columns["rollout_log_prob"],
        columns["response_mask"],
        rollout_token_veto_threshold=threshold,
    )
    return {"value": found[1]}


def diagnostics(columns: Columns) -> Columns:
    metrics = rollout_corr_helper.compute_offpolicy_metrics(
        columns["old_log_prob"], columns["rollout_log_prob"], columns["response_mask"]
    )
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def vocabulary(columns: Columns, *, function: str) -> Columns:
    """Entropy, log-prob or Σπ² of each token, and the gradient in the logits."""
    logits = columns["logits"].clone().requires_grad_()
    labels = (columns["labels"].flatten(),) if function.startswith("logprobs") else ()
    value = getattr(verl_F, function)(logits.flatten(0, 1), *labels).reshape(columns["labels"].shape)
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), logits)[0]}


class Table(torch.nn.Module):
    """A model whose logits are one row of a table for each token: what `DataParallelPPOActor` needs of a policy."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids: torch.Tensor, **_) -> SimpleNamespace:
        return SimpleNamespace(logits=1.0 * self.table[input_ids])  # logits that may be divided in place


def actor_update(columns: Columns, *, learning_rate: float = 1.0, **options) -> Columns:
    """`DataParallelPPOActor.update_policy` with plain gradient descent."""
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    if not torch.distributed.is_initialized():
        file = os.path.join(tempfile.mkdtemp(), "store")
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    module = Table(columns["table"].float())
    plain = {"use_torch_compile": False, "grad_clip": 1e9, "fsdp_config": FSDPEngineConfig(dtype="float32")}
    config = actor_config(**plain | options)
    actor = DataParallelPPOActor(config, module, torch.optim.SGD(module.parameters(), lr=learning_rate))
    batch = {name: value for name, value in columns.items() if name != "table"}
    data = DataProto.from_dict(batch, meta_info={"temperature": 1.0})
    metrics = actor.update_policy(data)
    scalars = {name.removeprefix("actor/"): torch.tensor(np.mean(value)) for name, value in metrics.items()}
    return {"value": scalars["pg_loss"], "table": module.table.detach()} | scalars


if __name__ == "__main__":
    serve(globals(), verl.__version__)
