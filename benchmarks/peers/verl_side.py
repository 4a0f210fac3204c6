"""verl's DataParallelPPOActor on the CPU; MODE is padded or rmpad.

It runs in float32, so autocast is put aside. Remove-padding needs index helpers of flash-attn, which has no build for
CPUs: `stand_ins/flash_attn` holds the three of them. Its attention is then transformers' SDPA, which finds the rows of a
packed batch by their positions.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")

import tempfile

import torch
import torch.distributed as dist
import verl
import verl.workers.actor.dp_actor as dp_actor
from serve import Contender, serve, watched
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.workers.config import FSDPActorConfig, OptimizerConfig

COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask", "advantages", "old_log_probs"]


def make(workload: dict[str, Any], mode: str) -> Contender:
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    dp_actor.get_device_id = lambda: "cpu"
    dp_actor.torch.autocast = lambda *_, **__: nullcontext()
    model = LlamaForCausalLM(LlamaConfig(**workload["config"], attn_implementation="sdpa")).float()
    model.load_state_dict(workload["params"])
    size, max_tokens, rmpad = workload["rows_per_micro_batch"], workload["max_tokens"], mode == "rmpad"
    rows = len(workload["columns"]["input_ids"])
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=rows, ppo_mini_batch_size=rows, ppo_micro_batch_size_per_gpu=size,
        use_dynamic_bsz=rmpad, ppo_max_token_len_per_gpu=max_tokens, use_torch_compile=False, use_remove_padding=rmpad,
        entropy_coeff=workload["entropy_coef"], use_kl_loss=False, loss_agg_mode="seq-mean-token-mean",
        optim=OptimizerConfig(lr=workload["lr"]), grad_clip=1.0,
    )  # fmt: skip
    object.__setattr__(config.fsdp_config, "dtype", "float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload["lr"])
    actor = dp_actor.DataParallelPPOActor(config, model, optimizer)
    data = DataProto.from_dict(
        {name: workload["columns"][name] for name in COLUMNS},
        meta_info={
            "temperature": 1.0, "micro_batch_size": size, "max_token_len": max_tokens, "use_dynamic_bsz": rmpad,
        },
    )  # fmt: skip
    return Contender(
        lambda: actor.compute_log_prob(data, calculate_entropy=True),
        lambda: actor.update_policy(data),
        watched(optimizer, model),
        verl.__version__,
    )


serve(make)
