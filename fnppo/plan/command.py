"""`fnppo plan MODEL`."""

import enum
import json
from typing import Annotated

import torch
import typer
from rich.console import Console

from fnppo.plan.count import shape_of
from fnppo.plan.models import SHAPES, empty_model
from fnppo.plan.report import GIB, as_json, as_table, as_text
from fnppo.plan.search import plan_update


class Master(enum.StrEnum):
    """What `--master` takes: not float16, in which AdamW's eps is 0."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Precision(enum.StrEnum):
    """What `--dtype` takes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help=f"A hub id, a folder with a config.json, or one of {', '.join(SHAPES)}. The configuration alone is read."
        ),
    ],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the update.")] = 8,
    memory: Annotated[float, typer.Option(min=0, help="GiB of each GPU.")] = 80,
    tokens: Annotated[int, typer.Option(min=1, help="Of a micro-batch: max_tokens of update_policy.")] = 16384,
    update_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a mini-batch on all GPUs. By default one micro-batch for each.")
    ] = None,
    reserve: Annotated[
        float, typer.Option(min=0, help="GiB left free for the CUDA context, NCCL and gaps between blocks.")
    ] = 4,
    dtype: Annotated[Precision, typer.Option(help="In which the layers compute.")] = Precision.bfloat16,
    master: Annotated[Master, typer.Option(help="Of parameters and AdamW's moments.")] = Master.float32,
    offload: Annotated[
        bool, typer.Option("--offload", help="Look at layouts with parameters, gradients and moments on the host too.")
    ] = False,
    as_data: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, in bytes.")] = False,
) -> None:
    """Which layouts of an update fit into the memory of the GPUs, and which of them sends least.

    A layout is: FSDP groups x Ulysses GPUs in each, layers computed again in the backward or not (remat), and with
    --offload parameters, gradients and moments on the host. Nothing is downloaded but the configuration.

    Exit status 0: something fits, and one is recommended. 1: nothing does, and the last line says how many tokens or GPUs
    would.
    """
    if memory <= reserve:
        raise ValueError(f"memory is {memory:g} GiB, of which {reserve:g} are reserved. Give more, or lower --reserve.")
    out = Console(soft_wrap=False)
    with Console(stderr=True).status(f"counting {model}"):
        shape = shape_of(empty_model(model), dtype=getattr(torch, dtype))
        found = plan_update(
            shape,
            gpus=gpus,
            budget=int((memory - reserve) * GIB),
            tokens=tokens,
            update_tokens=update_tokens,
            master=getattr(torch, master),
            offload=offload,
        )
    if as_data:
        typer.echo(json.dumps(as_json(found), indent=2))
    else:
        out.print(as_table(found))
        for line in as_text(found):
            out.print(line, style="" if found.recommended else "bold red", highlight=False)
    raise typer.Exit(0 if found.recommended else 1)
