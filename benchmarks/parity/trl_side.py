"""TRL's own GRPO losses on the cases of a file; runs in TRL's environment: `python trl_side.py CASES RESULTS`.

The losses are branches of one method, `GRPOTrainer._compute_loss`. It is called as it is, on a stand-in that has what the
method reads: a real `GRPOConfig`, a real `Accelerator`, and the log-probs of the case in place of a model's.
"""

import tempfile
from collections import defaultdict
from types import MethodType, SimpleNamespace

import torch
import trl
from accelerate import Accelerator
from serve import serve
from trl import GRPOConfig, GRPOTrainer

Columns = dict[str, torch.Tensor]


def policy_loss(columns: Columns, *, rejects: bool = False, corrected: bool = False, **options) -> Columns:
    """The loss and its gradient in the log-probs. `rejects`: the batch has sampler log-probs; `corrected`: weights."""
    mask = columns["response_mask"]
    rows, width = mask.shape
    log_prob = columns["log_prob"].clone().requires_grad_()
    quiet = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "report_to": "none"}
    args = GRPOConfig(**quiet | {"max_completion_length": width} | options)
    args.steps_per_generation = 1  # the whole batch is one micro-batch
    trainer = SimpleNamespace(
        args=args,
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        beta=args.beta,
        max_completion_length=args.max_completion_length,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_prob, columns["entropy"], None),
    )
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    ids, prompt = torch.ones(rows, width, dtype=torch.long), torch.ones(rows, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": columns["advantages"],
        "old_per_token_logps": columns["old_log_prob"],
        "ref_per_token_logps": columns["ref_log_prob"],
        "num_items_in_batch": mask.sum(),
    }
    if rejects:
        inputs["sampling_per_token_logps"] = columns["rollout_log_prob"]
    if corrected:
        inputs["importance_sampling_ratio"] = columns["rollout_is_weights"]
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    gradient = torch.autograd.grad(loss, log_prob)[0]
    return {"value": loss.detach(), "gradient": gradient, "tokens": (gradient != 0).sum()}


def names(columns: Columns) -> dict[str, list[str]]:
    """docs/pages/from-trl.md maps them."""
    return {"names": []}


if __name__ == "__main__":
    serve(globals(), trl.__version__)
