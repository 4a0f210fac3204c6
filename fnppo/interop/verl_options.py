"""verl's actor configuration read once, into the functions and numbers that it names. What cannot be honoured is refused."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from fnppo.arguments import check_count, check_number
from fnppo.kl import KLEstimator, kl_abs, kl_k1, kl_k2, kl_k3, straight_through
from fnppo.layouts import Layout, packed, padded
from fnppo.surrogates import Surrogate, cispo, clipped_surrogate, gmpo, gpg, gspo_token, sapo, weighted
from fnppo.types import PaddedBatch
from fnppo.weights import constant_norm, sequence_mean, sequence_sum, token_mean

KL: dict[str, KLEstimator] = {"kl": kl_k1, "abs": kl_abs, "mse": kl_k2, "low_var_kl": kl_k3}
KL |= {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
KL_CAP = 10.0
"""verl's, of k3 alone."""

NEUTRAL = {
    "freeze_vision_tower": False, "shuffle": False, "ppo_micro_batch_size": None, "ulysses_sequence_parallel_size": 1,
    "use_prefix_grouper": False, "calculate_sum_pi_squared": False, "pad_to_length": False,
}  # fmt: skip
"""Options that have to be as they are here."""

SPEED = {
    "use_torch_compile", "use_fused_kernels", "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size",
    "entropy_checkpointing",
}  # fmt: skip
"""Change no number in verl; the head of fnppo does what they are for, always."""

OUTSIDE = {
    "strategy", "rollout_n", "optim", "checkpoint", "profiler", "engine", "model_config", "data_loader_seed",
    "global_batch_info", "ppo_infer_micro_batch_size_per_gpu", "ppo_infer_max_token_len_per_gpu",
}  # fmt: skip
"""Read by verl's workers around the actor, not by the actor."""

OTHER_LOSSES = {
    "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta", "rollout_correction",
}  # fmt: skip
"""Of `policy_loss`: numbers of loss modes that are refused."""

ENGINE = {
    "wrap_policy", "offload_policy", "reshard_after_forward", "fsdp_size", "forward_prefetch", "model_dtype",
    "use_orig_params", "mixed_precision", "param_offload", "optimizer_offload", "grad_offload", "forward_only", "seed",
    "full_determinism", "use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu",
    "infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu", "use_remove_padding",
    "use_no_sync_for_gradient_accumulation", "pad_to_length_bucket", "turbo_config",
}  # fmt: skip
"""Of `fsdp_config`: read by verl's workers and engines, not by the actor."""


class Options(NamedTuple):
    """What `fnppo.interop.verl.Actor` does.

    Attributes:
        loss: keywords of `ppo_loss`: the surrogate with its numbers, entropy and KL.
        weights: batch -> batch with `loss_weights`.
        layout: packed where padding is removed.
        dtype: that the model computes in; None is that of its parameters.
        entropy: whether it is computed although the loss does not need it.
        own_old_logprobs: whether a step on fresh samples has ratio 1, whatever the column says, as in verl.
    """

    mini_batch_size: int
    epochs: int
    max_tokens: int | None
    micro_batch_size: int | None
    loss: dict[str, Any]
    weights: Callable[[PaddedBatch], PaddedBatch]
    layout: Layout
    dtype: torch.dtype | None
    entropy: bool
    own_old_logprobs: bool
    grad_clip: float


def read(config: Any, *, response_length: int, importance_weights: bool) -> Options:
    """The options of a configuration of verl's: its dataclass, an OmegaConf, a mapping, or anything with attributes.

    Raises:
        ValueError: an option is not known, or has a value that this actor cannot honour.
    """
    found = _Reader("", config)
    dynamic = found("use_dynamic_bsz", False)
    counts = {"ppo_mini_batch_size": 256, "ppo_epochs": 1, "ppo_max_token_len_per_gpu": 16384}
    sizes = {name: found.count(name, default) for name, default in counts.items()}
    rows = found.count("ppo_micro_batch_size_per_gpu", None)
    grad_clip = found("grad_clip", 1.0)
    check_number("grad_clip", grad_clip, above=0, infinite=True, remedy="It bounds the norm of the gradient.")
    low, high = (_clip(found, side) for side in ("clip_ratio_low", "clip_ratio_high"))
    surrogate, numbers = _surrogate(found, low, high)
    if importance_weights:
        surrogate = weighted(surrogate)
    loss = {"surrogate": surrogate, "entropy_coef": found("entropy_coeff", 0.0), **numbers}
    kl_type, kl_coef = found("kl_loss_type", "low_var_kl"), found("kl_loss_coef", 0.001)
    kl = _kl(kl_type)
    if found("use_kl_loss", False):
        loss |= {"kl_coef": kl_coef, "kl": kl}
        if kl_type.rstrip("+") in ("low_var_kl", "k3"):
            loss["kl_cap"] = KL_CAP
    horizon = found("loss_scale_factor", None) or response_length
    options = Options(
        mini_batch_size=sizes["ppo_mini_batch_size"],
        epochs=sizes["ppo_epochs"],
        max_tokens=sizes["ppo_max_token_len_per_gpu"] if dynamic else None,
        micro_batch_size=None if dynamic else rows,
        loss=loss,
        weights=_weights(found("loss_agg_mode", "token-mean"), horizon),
        layout=packed if found("use_remove_padding", False) else padded,
        dtype=_dtype(found.nested("fsdp_config")),
        entropy=found("calculate_entropy", False),
        own_old_logprobs=not found("use_rollout_log_probs", False),
        grad_clip=float(grad_clip),
    )
    if not dynamic and options.micro_batch_size is None:
        raise ValueError("ppo_micro_batch_size_per_gpu is None without use_dynamic_bsz. Set one of them.")
    found.refuse_the_rest(SPEED | OUTSIDE)
    return options


class _Reader:
    """Looks options up by name, and knows which were never asked for. None is as good as left out."""

    def __init__(self, place: str, config: Any) -> None:
        self.place, self.asked = place, set[str]()
        if isinstance(config, str | bytes | int | float):
            raise ValueError(
                f"{place or 'config'} is {config!r}; a configuration is needed. Give a mapping or verl's dataclass."
            )
        if isinstance(config, Mapping):
            self.values = dict(config)
        elif dataclasses.is_dataclass(config):
            self.values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        else:
            self.values = dict(config.items() if hasattr(config, "items") else vars(config))

    def __call__(self, name: str, default: Any) -> Any:
        self.asked.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None) -> Any:
        value = self(name, default)
        return value if value is None else check_count(name, value, least=1, remedy="It counts rows, epochs or tokens.")

    def nested(self, name: str) -> "_Reader":
        return _Reader(f"{self.place}{name}.", self(name, {}))

    def refuse_the_rest(self, known: set[str]) -> None:
        """What is neither read nor known to be another's, and what has to be neutral and is not."""
        for name, off in (("router_replay", "mode"), ("qat", "enable")):
            if (value := self.nested(name)(off, None)) not in (None, False, "disabled"):
                raise ValueError(f"{self.place}{name}.{off} is {value}; it must be off. Leave it out.")
        for name, neutral in NEUTRAL.items():
            if (value := self(name, neutral)) != neutral:
                raise ValueError(
                    f"{self.place}{name} is {value}; this actor needs {neutral}. See docs/pages/how-to/verl.md."
                )
        # What verl gives its dataclasses beside options begins with an underscore, and so does what Hydra adds.
        if unknown := {name for name in self.values if not name.startswith("_")} - self.asked - known:
            raise ValueError(
                f"{self.place}{min(unknown)} is an option that is not known. Leave it out, or set it on fnppo's functions."
            )


def _clip(found: _Reader, side: str) -> float:
    both, value = found("clip_ratio", 0.2), found(side, None)
    return float(both if value is None else value)


def _surrogate(found: _Reader, low: float, high: float) -> tuple[Surrogate, dict[str, float]]:
    clips = {"clip_low": low, "clip_high": high}
    known: dict[str, tuple[Surrogate, dict[str, float]]] = {
        "vanilla": (clipped_surrogate, clips | {"dual_clip": found("clip_ratio_c", 3.0)}),
        "gspo": (gspo_token, clips),
        "sapo": (sapo, {"tau_pos": found("tau_pos", 1.0), "tau_neg": found("tau_neg", 1.05)}),
        "gpg": (gpg, {}),
        "geo_mean": (gmpo, clips),
        "cispo": (cispo, clips),
    }
    policy_loss = found.nested("policy_loss")
    mode = policy_loss("loss_mode", "vanilla")
    if mode not in known:
        raise ValueError(
            f"policy_loss.loss_mode is {mode}; {', '.join(known)} are known. For others write the loss with ppo_loss and the "
            "surrogates of fnppo (docs/pages/from-verl.md)."
        )
    policy_loss.refuse_the_rest(OTHER_LOSSES)
    return known[mode]


def _kl(name: str) -> KLEstimator:
    if name.rstrip("+") not in KL or name.count("+") > 1:
        raise ValueError(
            f"kl_loss_type is {name}; {', '.join(KL)} are known, and each with a + behind it. Take one of them."
        )
    estimator = KL[name.rstrip("+")]
    return straight_through(estimator) if name.endswith("+") else estimator


def _weights(mode: str, horizon: float) -> Callable[[PaddedBatch], PaddedBatch]:
    known: dict[str, Callable[[PaddedBatch], PaddedBatch]] = {
        "token-mean": token_mean,
        "seq-mean-token-sum": sequence_sum,
        "seq-mean-token-mean": sequence_mean,
        "seq-mean-token-sum-norm": partial(constant_norm, horizon=float(horizon)),
    }
    if mode not in known:
        raise ValueError(f"loss_agg_mode is {mode}; {', '.join(known)} are known. Take one of them.")
    return known[mode]


def _dtype(fsdp_config: _Reader) -> torch.dtype | None:
    name = fsdp_config("dtype", None)
    fsdp_config.refuse_the_rest(SPEED | OUTSIDE | ENGINE)
    known = {None: None, "float32": None, "fp32": None, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    if name not in known:
        raise ValueError(
            f"fsdp_config.dtype is {name}; float32 and bfloat16 are known. For float16 use dynamic_loss_scale with update_policy."
        )
    return known[name]
