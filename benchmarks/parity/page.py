"""docs/pages/parity.md, from what has been compared."""

import math

import torch
from batches import SEEDS, SHAPES
from compare import TOLERANCE, DifferenceResult, RowResult, agrees, version_of


def number(value: float) -> str:
    """At most five digits."""
    if math.isnan(value):
        return "NaN"
    text = f"{value:.5g}"
    return "0" if text in ("0", "-0") else text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def cell(values: list[float] | str) -> str:
    """Numbers, or the name of an error."""
    if isinstance(values, str):
        return f"`{values}`"
    return ", ".join(number(value) for value in values)


def order(value: float | None) -> str:
    """A difference of a row as a power of ten."""
    if value is None:
        return ""
    return "0" if value == 0 else number(float(f"{value:.0e}"))


def table_line(result: RowResult) -> str:
    """A line of the table: the largest difference over the versions that agree, and which those are."""
    row, lines = result
    good = {peer: line for peer, line in lines.items() if agrees(line)}
    value = max((line.value for line in good.values()), default=math.nan)
    gradients = [line.gradient for line in good.values() if line.gradient is not None]
    versions = ", ".join(version_of(peer) for peer in good)
    named = dict.fromkeys(row.differs.values())
    elsewhere = "; ".join(
        f"{', '.join(v for v, n in row.differs.items() if n == name)}: [differs](#{name})" for name in named
    )
    cells = [
        row.theirs,
        row.ours,
        order(None if math.isnan(value) else value),
        order(max(gradients, default=None)),
        "; ".join(filter(None, [versions, elsewhere])),
    ]
    return "| " + " | ".join(cells) + " |"


def difference_section(result: DifferenceResult) -> str:
    """The part of the page about one difference."""
    difference, shown = result
    peers = [peer for peer in shown[0].theirs if version_of(peer) not in difference.absent]
    head = ["", *(peer.replace("-", " ") for peer in peers), "fnppo"]
    lines = [[each.call.label, *(cell(each.theirs[peer]) for peer in peers), cell(each.ours)] for each in shown]
    table = "\n".join("| " + " | ".join(line) + " |" for line in [head, ["--"] * len(head), *lines])
    return f"""<a id="{difference.name}"></a>
#### {difference.title}

*{difference.kind}* of {difference.peer} {", ".join(difference.versions)}. {difference.reason}

Batch: {difference.batch}.

{table}
"""


INTRODUCTION = """# Parity with verl and TRL

The functions of verl's `core_algos.py`, `rollout_corr_helper.py` and `torch_functional.py`, and the losses of TRL's
`GRPOTrainer`, beside those of fnppo on the same batches. Made by `make parity`, which runs each wheel unchanged in an
environment of its own, under the same torch ({torch}).

**{agree} of {all} comparisons agree to {tolerance} in float64, in value and in gradient; each of the {differ} others is one
of the [{count} differences](#differences) below.** A comparison is a line of a table with one version.

Batches are random: {shapes} shapes times {seeds} seeds, from 4 to 16 rows and from 1 to 64 columns, with one turn or several
(the output of a tool between them is masked), and log-ratios small or so large that many tokens are clipped. A difference
is divided by the largest number of the column where that is above 1. *value* is the largest difference of a loss, a column
or a share of clipped tokens; *gradient*, of the gradient in the log-probs (values, logits), at masked places too. What
stands at 1e-8 is an epsilon of verl's in a denominator.

Names of fnppo are explained in the [reference](reference.md); [From verl](from-verl.md) maps options.
"""

DIFFERENCES = """## Differences

Each with a batch that fits on a line. What fnppo gives is derived by hand from the formula in `benchmarks/parity/differences`,
and checked against it; `make parity` fails where a peer no longer differs, or differs elsewhere.
"""


def body(table: dict[str, list[RowResult]], differences: dict[str, list[DifferenceResult]]) -> str:
    """All tables and all differences."""
    head = "| the peer's | fnppo's | value | gradient | versions |\n|--|--|--|--|--|\n"
    parts = [f"## {title}\n\n{head}" + "\n".join(map(table_line, rows)) + "\n" for title, rows in table.items() if rows]
    parts += [DIFFERENCES]
    parts += [
        f"### {title}\n\n" + "\n".join(map(difference_section, some)) for title, some in differences.items() if some
    ]
    return "\n".join(parts)


def page(table: dict[str, list[RowResult]], differences: dict[str, list[DifferenceResult]]) -> str:
    """The document."""
    lines = [
        line
        for rows in table.values()
        for result in rows
        for peer, line in result.lines.items()
        if version_of(peer) not in result.row.absent
    ]
    agree = sum(map(agrees, lines))
    introduction = INTRODUCTION.format(
        torch=torch.__version__.partition("+")[0],
        agree=agree,
        all=len(lines),
        differ=len(lines) - agree,
        count=sum(map(len, differences.values())),
        tolerance=number(TOLERANCE),
        shapes=len(SHAPES),
        seeds=SEEDS,
    )
    return introduction + "\n" + body(table, differences)
