"""A plain padded loop over a transformers model with logits of responses only: what a careful user writes."""

from typing import Any

import torch
import transformers
from serve import Contender, serve, watched
from transformers import LlamaConfig, LlamaForCausalLM


def make(workload: dict[str, Any], mode: str) -> Contender:
    model = LlamaForCausalLM(LlamaConfig(**workload["config"], attn_implementation="sdpa"))
    model.load_state_dict(workload["params"])
    columns = workload["columns"]
    rows = len(columns["input_ids"])
    responses, size = columns["responses"].shape[1], workload["rows_per_micro_batch"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload["lr"])

    def forward(start: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        part = {name: column[start : start + size] for name, column in columns.items()}
        logits = model(
            input_ids=part["input_ids"], attention_mask=part["attention_mask"], position_ids=part["position_ids"],
            use_cache=False, logits_to_keep=responses + 1,
        ).logits[:, :-1]  # fmt: skip
        logp = logits.log_softmax(-1)
        return logp.gather(-1, part["responses"][..., None])[..., 0], -(logp.exp() * logp).sum(-1), part

    def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            parts = [forward(start)[:2] for start in range(0, rows, size)]
        first, second = (torch.cat(part) for part in zip(*parts, strict=True))
        return first, second

    def update() -> None:
        optimizer.zero_grad()
        for start in range(0, rows, size):
            new, entropy, part = forward(start)
            loss = loss_of(new, entropy, part, workload["entropy_coef"]) / rows
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Contender(logprobs, update, watched(optimizer, model), transformers.__version__)


def loss_of(new: torch.Tensor, entropy: torch.Tensor, part: dict[str, torch.Tensor], coef: float) -> torch.Tensor:
    """PPO's loss with an entropy bonus: the mean over the tokens of each row, summed over rows."""
    ratio, mask, advantages = (new - part["old_log_probs"]).exp(), part["response_mask"], part["advantages"]
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gain = torch.where(advantages < 0, torch.max(gain, 3.0 * advantages), gain)
    return (-(gain + coef * entropy) * mask / mask.sum(-1, keepdim=True)).sum()


if __name__ == "__main__":
    serve(make)
