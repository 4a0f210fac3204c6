"""verl's own actor and `fnppo.interop.verl.Actor` on the same batch and weights: log-probs, entropies, parameters after.

    PYTHONPATH=. build/parity/verl-0.7.0/bin/python benchmarks/parity/actor.py        (`make parity` makes that environment)

In float64, a micro-batch being a whole mini-batch, since verl's result depends on the split otherwise. The status is 1 where
log-probs are apart by more than 1e-5, or parameters by more than 1e-6.
"""

import copy
import os
import sys
import tempfile
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "peers" / "stand_ins"))  # index helpers of flash-attn, for CPUs
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")

import torch
import torch.distributed as dist
import verl
import verl.workers.actor.dp_actor as dp_actor
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.workers.config import FSDPActorConfig, OptimizerConfig, PolicyLossConfig

from fnppo.interop.verl import Actor

ROWS, PROMPT, RESPONSE, VOCAB = 6, 4, 5, 32
LOSSES = ("vanilla", "gpg", "cispo", "gspo", "sapo", "geo_mean")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
)  # the fourth is no mean over sequences in 0.7.0
FORCED = {"gspo", "sapo", "geo_mean"}  # verl averages their policy loss by seq-mean-token-mean, whatever is asked for
INFO = {"temperature": 0.8, "micro_batch_size": 4, "max_token_len": 40, "use_dynamic_bsz": False}


def columns() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + RESPONSE), generator=draw)
    attention = torch.ones_like(ids)
    for row in range(ROWS):
        attention[row, : row % 3] = 0
        attention[row, PROMPT + 1 + row % RESPONSE :] = 0
    mask = attention[:, PROMPT:]
    noise = torch.randn(3, ROWS, RESPONSE, dtype=torch.float64, generator=draw)
    return {
        "input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:], "response_mask": mask, "advantages": noise[0] * mask,
        "old_log_probs": -3.5 + 0.3 * noise[1], "ref_log_prob": -3.5 + 0.3 * noise[2],
    }  # fmt: skip


def run(make: Any, config: Any, model: LlamaForCausalLM, data: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """[log-probs, entropies, parameters after the update], at learned tokens."""
    module = copy.deepcopy(model)
    actor = make(config, module, torch.optim.SGD(module.parameters(), lr=0.1))
    proto = DataProto.from_dict({name: column.clone() for name, column in data.items()}, meta_info=dict(INFO))
    stats = actor.compute_log_prob(proto, calculate_entropy=True)
    actor.update_policy(proto)
    parameters = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return [*(column[data["response_mask"] == 1] for column in stats), parameters]


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    dp_actor.get_device_id = lambda: "cpu"
    dp_actor.torch.autocast = lambda *_, **__: nullcontext()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.2)).double()
    data, worst = columns(), 0.0
    print(f"verl {verl.__version__}: the largest differences of log-probs, entropies and parameters")
    for loss, aggregation, packed in product(LOSSES, AGGREGATIONS, (False, True)):
        if loss in FORCED and aggregation != "seq-mean-token-mean":
            continue
        config = FSDPActorConfig(
            strategy="fsdp", rollout_n=2, ppo_mini_batch_size=3, ppo_micro_batch_size_per_gpu=3, ppo_epochs=2,
            use_torch_compile=False, use_remove_padding=packed, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1,
            loss_agg_mode=aggregation, clip_ratio_high=0.28, policy_loss=PolicyLossConfig(loss_mode=loss),
            optim=OptimizerConfig(lr=0.1),
        )  # fmt: skip
        object.__setattr__(config.fsdp_config, "dtype", "float32")  # of autocast, which is put aside
        pairs = zip(*(run(make, config, model, data) for make in (dp_actor.DataParallelPPOActor, Actor)), strict=True)
        apart = [float((theirs - ours).abs().max()) for theirs, ours in pairs]
        print(f"{loss:9} {aggregation:24} {'packed' if packed else 'padded'}  " + "  ".join(f"{x:.0e}" for x in apart))
        worst = max(worst, apart[0] / 1e-5, apart[1] / 1e-5, apart[2] / 1e-6)
    sys.exit(int(worst > 1))


main()
