"""What the scripts here write into pages of the documentation: parts between marks, tables, plots, and the data behind them."""

import argparse
import json
import platform
import re
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

PAGES = Path(__file__).parent.parent / "docs/pages"


def write_parts(page: str, parts: dict[str, str], *, out: Path) -> None:
    """Put each part between its marks, `<!-- name -->` and `<!-- end of name -->`; what stands around it stays."""
    text = (PAGES / page).read_text()
    for name, part in parts.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.S)
        text, count = marks.subn(lambda found, part=part: f"{found[1]}\n{part.strip()}\n\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"{page} has {count} places for {name}. Put its two marks there once.")
    out.mkdir(parents=True, exist_ok=True)
    (out / page).write_text(text)


def add_write(parser: argparse.ArgumentParser) -> None:
    """The option that `publish` takes."""
    where = PAGES.relative_to(PAGES.parent.parent)
    told = f"write page and data, to {where} or another folder"
    parser.add_argument("--write", nargs="?", type=Path, const=PAGES, metavar="FOLDER", help=told)


def publish(
    page: str, data: dict[str, Any], parts_of: Callable[[dict[str, Any]], dict[str, str]], out: Path | None
) -> None:
    """Print the parts of a page; where there is an `out`, write them there, and the data to `plots/`."""
    data = json.loads(json.dumps({"machine": machine()} | data))
    parts = parts_of(data)
    print("", *parts.values(), sep="\n\n")
    if out is not None:
        write_data(data, out / f"plots/{Path(page).stem}.json")
        write_parts(page, parts, out=out)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["--"] * len(head), *rows])


def write_data(data: dict[str, Any], file: Path) -> None:
    """As JSON, with the machine that measured it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine()} | data, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": str(date.today()),
    }


def in_words(machine: dict[str, Any]) -> str:
    return (
        f"Measured on {machine['date']} on a CPU ({machine['processor']}, threads: {machine['threads']}), torch "
        f"{machine['torch']}, transformers {machine['transformers']}."
    )


class Curve:
    """Axes of one plot. Curves differ in mark and stroke, so they can be told apart without colours."""

    STYLES = ("ko-", "ks--", "k^:", "kD-.")

    def __init__(self, axes: Any, *, x: str, y: str, title: str, xlog: bool = True, ylog: bool = True) -> None:
        self.axes, self.drawn = axes, 0
        axes.set(xlabel=x, ylabel=y, title=title)
        if xlog:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if ylog:
            axes.set_yscale("log")
            for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                ticks(lambda value, _: f"{value:g}")
            axes.tick_params(axis="y", which="minor", labelsize=6)
        axes.grid(True, which="major", color="0.85", linewidth=0.6)

    def add(self, name: str, xs: Sequence[float], ys: Sequence[float]) -> None:
        style = self.STYLES[self.drawn % len(self.STYLES)]
        self.axes.plot(xs, ys, style, label=name, markersize=4, linewidth=1, markerfacecolor="0.6")
        self.axes.set_xticks(sorted({*self.axes.get_xticks(), *xs} & {*xs}) if self.drawn else list(xs))
        self.drawn += 1
        self.axes.legend(fontsize=7)


def figure(columns: int) -> tuple[Any, list[Any]]:
    """A figure, and its axes beside each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(4.2 * columns, 3.1), layout="constrained")
    FigureCanvasAgg(made)
    return made, list(made.subplots(1, columns, squeeze=False)[0])


def save(made: Any, file: Path) -> None:
    """As SVG with text as text: small, and the same bytes for the same numbers."""
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fnppo"}):
        made.savefig(file, format="svg", metadata={"Date": None})
