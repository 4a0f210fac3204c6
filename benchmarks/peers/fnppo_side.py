"""fnppo on a workload; MODE is one of its layouts."""

from functools import partial
from typing import Any

import torch
from serve import Contender, serve
from transformers import LlamaConfig, LlamaForCausalLM

import fnppo


def make(workload: dict[str, Any], mode: str) -> Contender:
    """`compute_logprobs` and `update_policy`, as a user calls them."""
    module = LlamaForCausalLM(LlamaConfig(**workload["config"]))
    module.load_state_dict(workload["params"])
    policy, params = fnppo.functional_policy(module)
    columns, width = workload["columns"], workload["columns"]["input_ids"].shape[1]
    responses = columns["responses"].shape[1]
    beside_prompts = partial(torch.nn.functional.pad, pad=(width - responses, 0))
    batch = fnppo.PaddedBatch(
        input_ids=columns["input_ids"],
        attention_mask=columns["attention_mask"].bool(),
        loss_mask=beside_prompts(columns["response_mask"].bool()),
        advantages=beside_prompts(columns["advantages"]),
        old_logprobs=beside_prompts(columns["old_log_probs"]),
    )
    common: dict[str, Any] = {"max_tokens": workload["max_tokens"], "layout": getattr(fnppo, mode)}
    loss = partial(fnppo.ppo_loss, entropy_coef=workload["entropy_coef"])
    seen: dict[str, torch.Tensor] = {}

    def watch(grads: Any, state: Any, params: Any, *, donate: bool = False) -> Any:
        """The first gradients are copied; all pass through."""
        if not seen:
            seen.update((name, grad.clone()) for name, grad in grads.items())
        return grads, state

    optimizer = fnppo.chain(
        fnppo.clip_by_global_norm(1.0), fnppo.Optimizer(lambda params: (), watch), fnppo.adamw(workload["lr"])
    )
    state = {"params": params, "opt_state": optimizer.init(params)}

    def loss_fn(params: Any, micro_batch: Any) -> Any:
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0, loss=loss)
        return loss(stats, micro_batch.targets)

    def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
        stats = fnppo.compute_logprobs(state["params"], batch, policy=policy, temperature=1.0, entropy=True, **common)
        return stats.logprobs[:, -responses:], stats.entropy[:, -responses:]

    def update() -> None:
        state["params"], state["opt_state"], _ = fnppo.update_policy(
            state["params"], state["opt_state"], batch, loss_fn=loss_fn, optimizer=optimizer,
            mini_batch_size=len(batch.input_ids), weights=fnppo.sequence_mean, donate=True, **common,
        )  # fmt: skip

    return Contender(logprobs, update, lambda: seen, fnppo.__version__)


serve(make)
