"""A plan in words, as a table and as plain data."""

import math
from typing import Any

from rich.table import Table

from fnppo.plan.search import Plan, Row

GIB = 1 << 30


def as_table(plan: Plan) -> Table:
    """For a terminal: GiB on one GPU."""
    shape = plan.shape
    table = Table(
        title=f"{shape.name}, {size(shape.parameters)} · {name(plan.master)}, layers in {name(shape.dtype)} · "
        f"{plan.gpus} GPU{'s' * (plan.gpus > 1)} · {plan.tokens:,} tokens",
        title_justify="left",
        caption=f"GiB on one GPU, of which {plan.budget / GIB:g} are for the update; sent: what one GPU sends in an update",
        caption_justify="left",
    )
    offload = any(row.layout.offload for row in plan.rows)
    for heading in ("fsdp x ulysses", "remat", *["offload"] * offload):
        table.add_column(heading)
    for heading in ("state", "gathered", "activations", "peak", "left", "sent"):
        table.add_column(heading, justify="right")
    table.add_column("most at")
    for row in plan.rows:
        layout, memory = row.layout, row.memory
        best = row is plan.recommended
        table.add_row(
            f"{layout.fsdp} x {layout.ulysses}" + (" *" if best else ""),
            "yes" if layout.remat else "no",
            *["yes" if layout.offload else "no"] * offload,
            *(gib(n) for n in (memory.params + memory.grads + memory.moments, memory.gathered, memory.activations)),
            gib(memory.peak),
            gib(row.left) if row.fits else f"[red]{gib(row.left)}[/]",
            gib(row.traffic.update),
            max(memory.stages, key=memory.stages.__getitem__),
            style="bold green" if best else "" if row.fits else "dim",
        )
    return table


def as_text(plan: Plan) -> list[str]:
    """What to do, a line each."""
    lines = [f"not counted: {note}" for note in plan.shape.notes]
    row = plan.recommended
    if row is None:
        lines.append(
            f"NOTHING FITS: {plan.tokens:,} tokens a micro-batch, GPUs: {plan.gpus}. " + " ".join(_advice(plan))
        )
        return lines
    layout, sent = row.layout, row.traffic
    words = [
        f"fsdp {layout.fsdp}",
        f"ulysses {layout.ulysses}",
        *["remat"] * layout.remat,
        *["offload"] * layout.offload,
    ]
    lines += [
        f"RECOMMENDED *: {', '.join(words)}: peak {gib(row.memory.peak)} GiB, {gib(row.left)} left. It sends the least of "
        f"those that fit. The largest micro-batch that fits in any layout has {plan.most_tokens:,} tokens.",
        f"sent in a micro-batch by one GPU: {_gib(sent.gather_forward)} to gather in the forward, {_gib(sent.gather_backward)} "
        f"in the backward, {_gib(sent.reduce_scatter)} to reduce, {_gib(sent.all_to_all)} all-to-all"
        + (f", {_gib(sent.host)} to and from the host" if sent.host else "")
        + f"; micro-batches in an update of {plan.update_tokens:,} tokens: {sent.micro_batches}.",
        f"arithmetic of a token: {row.flops.matrices / 1e9:.3g} GFLOP + {row.flops.attention / 1e6:.3g} MFLOP for each token "
        "of its row.",
    ]
    return lines


def _advice(plan: Plan) -> list[str]:
    tokens = (
        f"At most {plan.most_tokens:,} tokens would fit on them."
        if plan.most_tokens
        else "Not even 1 token would fit on them."
    )
    gpus = (
        f"{plan.fewest_gpus} GPUs would be enough for {plan.tokens:,}."
        if plan.fewest_gpus
        else "More GPUs alone would not help."
    )
    return [tokens, gpus]


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain data, in bytes."""
    shape = plan.shape
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "master": name(plan.master),
        "dtype": name(shape.dtype),
        "gpus": plan.gpus,
        "budget": plan.budget,
        "tokens": plan.tokens,
        "update_tokens": plan.update_tokens,
        "layouts": [_row(row) for row in plan.rows],
        "recommended": None if plan.recommended is None else plan.rows.index(plan.recommended),
        "most_tokens": plan.most_tokens,
        "fewest_gpus": plan.fewest_gpus,
        "notes": list(shape.notes),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        **row.layout._asdict(),
        "memory": row.memory._asdict() | {"peak": row.memory.peak, "stages": row.memory.stages},
        "traffic": row.traffic._asdict() | {"micro_batch": row.traffic.micro_batch, "update": row.traffic.update},
        "flops": row.flops._asdict(),
        "left": row.left,
        "fits": row.fits,
    }


def gib(size: float) -> str:
    """Of bytes.

    >>> gib(3 << 29), gib(0)
    ('1.5', '0')
    """
    return f"{size / GIB:.1f}" if size else "0"


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size else "none"


def size(count: int) -> str:
    """A number of parameters.

    >>> size(7_615_616_512), size(494_032_768)
    ('7.62B', '494M')
    """
    for unit, power in (("B", 9), ("M", 6), ("k", 3)):
        if count >= 10**power:
            digits = max(0, 2 - int(math.log10(count / 10**power)))
            return f"{count / 10**power:.{digits}f}{unit}"
    return str(count)


def name(dtype: Any) -> str:
    """Of a dtype."""
    return str(dtype).removeprefix("torch.")
