"""docs/pages/cost.md: tables and plots of what cost.py has measured."""

import math
import statistics
from pathlib import Path
from typing import Any

from generated import Curve, figure, in_words, save, table

MIB = 2**20


def exponent(xs: list[float], ys: list[float]) -> float:
    """k of y = c · x^k, by least squares on the logarithms of all points as they are, with nothing subtracted."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def bound(row: dict[str, Any], rate: float) -> float:
    """Seconds that the matrix products take at least."""
    return sum(row["flops"].values()) / rate


def by_series(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["series"] for row in rows)
    return {name: [row for row in rows if row["series"] == name] for name in names}


def parts_of(data: dict[str, Any]) -> dict[str, str]:
    """The generated parts of the page."""
    rate, fits, parts = data["rate"], [], {}
    for name, sweep in data["sweeps"].items():
        lines = []
        for series, rows in by_series(sweep["rows"]).items():
            xs = [row["x"] for row in rows]
            line = statistics.linear_regression(xs, [row["peak"] for row in rows])
            fits.append(
                [
                    sweep["axis"],
                    series,
                    f"{xs[0]:,} to {xs[-1]:,}",
                    f"{exponent(xs, [row['seconds'] for row in rows]):.2f}",
                    f"{exponent(xs, [bound(row, rate) for row in rows]):.2f}",
                    f"{exponent(xs, [row['peak'] for row in rows]):.2f}",
                    f"{line.slope / 1024:+,.1f}",
                ]
            )
            for row in rows:
                share = [f"{row['flops'][kind] / sum(row['flops'].values()):.0%}" for kind in row["flops"]]
                time, least = row["seconds"], bound(row, rate)
                lines.append(
                    [
                        f"{row['x']:,}",
                        series,
                        f"{time:.3f}",
                        f"{least:.3f}",
                        f"{time / least:.1f}",
                        *share,
                        f"{row['peak'] / MIB:,.1f}",
                        f"{row['expected'] / MIB:,.1f}",
                    ]
                )
        head = [sweep["axis"], "curve", "seconds", "bound, s", "ratio", "layers", "attention", "head"]
        head += ["peak, MiB", "by the formula, MiB"]
        parts[name] = f"![{sweep['axis']}](plots/cost-{name}.svg)\n\n" + table(head, lines)
    parts["exponents"] = (
        f"{in_words(data['machine'])} Products of square matrices ran at {rate / 1e9:,.0f} GFLOP/s. Each point is the "
        f"median of {data['rounds']} rounds; the script took {data['minutes']:.1f} minutes.\n\n"
        + table(["grows", "curve", "range", "time", "bound", "memory", "KiB for each one more"], fits)
    )
    lines = [[f"{r['x']:,}", *(f"{r[key] / MIB:,.1f}" for key in ("peak", "weight", "logits"))] for r in data["head"]]
    parts["head"] = "![targets](plots/cost-head.svg)\n\n" + table(
        ["targets", "peak, MiB", "of it the weight's gradient, MiB", "one copy of the logits, MiB"], lines
    )
    process, (first, *_, last) = data["process"], by_series(data["sweeps"]["tokens"]["rows"])["one micro-batch"]
    parts["process"] = (
        f"From {process['from']:,} to {process['to']:,} tokens in one micro-batch the peak resident memory of a process "
        f"(`VmHWM`) grew by {process['resident'] / MIB:,.0f} MiB, the counted one by "
        f"{(last['peak'] - first['peak']) / MIB:,.0f} MiB."
    )
    return parts


def draw(data: dict[str, Any], out: Path) -> None:
    """A figure for each sweep, time and memory, and one for the head."""
    for name, sweep in data["sweeps"].items():
        made, (left, right) = figure(2)
        times = Curve(left, x=sweep["axis"], y="seconds", title="time of an update")
        peaks = Curve(right, x=sweep["axis"], y="MiB above parameters and moments", title="peak memory", ylog=False)
        series = by_series(sweep["rows"])
        for label, rows in series.items():
            xs = [row["x"] for row in rows]
            times.add(label, xs, [row["seconds"] for row in rows])
            peaks.add(label, xs, [row["peak"] / MIB for row in rows])
        for label in series if name == "responses" else list(series)[:1]:
            bounds = [bound(row, data["rate"]) for row in series[label]]
            times.add("bound" if len(series) == 1 else f"bound, {label}", [row["x"] for row in series[label]], bounds)
        peaks.axes.set_ylim(bottom=0)
        save(made, out / f"plots/cost-{name}.svg")
    made, (axes,) = figure(1)
    curve = Curve(axes, x="targets", y="MiB", title="head, forward and backward")
    for label, key in (("peak", "peak"), ("one copy of the logits", "logits"), ("gradient of the weight", "weight")):
        curve.add(label, [row["x"] for row in data["head"]], [row[key] / MIB for row in data["head"]])
    save(made, out / "plots/cost-head.svg")
