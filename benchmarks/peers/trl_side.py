"""TRL's path to log-probs and entropies (`GRPOTrainer._get_per_token_logps_and_entropies`), under the plain loss.

The method is called as it is (without the timer around it), on a stand-in that has what it reads, with the fused head that the trainer gives its model.
"""

from contextlib import nullcontext
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
import trl
from plain_side import loss_of
from serve import Contender, serve, watched
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head


def make(workload: dict[str, Any], mode: str) -> Contender:
    model = LlamaForCausalLM(LlamaConfig(**workload["config"], attn_implementation="sdpa"))
    model.load_state_dict(workload["params"])
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
    columns, size = workload["columns"], workload["rows_per_micro_batch"]
    rows, responses = columns["responses"].shape
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload["lr"])

    def forward(start: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        part = {name: column[start : start + size] for name, column in columns.items()}
        new, entropy, _ = unwrap(GRPOTrainer._get_per_token_logps_and_entropies)(
            trainer, model, part["input_ids"], part["attention_mask"], responses, compute_entropy=True
        )
        return new, entropy, part

    def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            parts = [forward(start)[:2] for start in range(0, rows, size)]
        first, second = (torch.cat(part) for part in zip(*parts, strict=True))
        return first, second

    def update() -> None:
        optimizer.zero_grad()
        for start in range(0, rows, size):
            new, entropy, part = forward(start)
            (loss_of(new, entropy, part, workload["entropy_coef"]) / rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Contender(logprobs, update, watched(optimizer, model), trl.__version__)


serve(make)
