"""What the demo shows and keeps: a progress bar, metrics as JSON lines, and a plot."""

import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOWN = {"reward": "{:.2f}", "accuracy": "{:.0%}", "kl": "{:.4f}", "entropy": "{:.2f}", "tokens/s": "{:.0f}"}


def progress_bar() -> Progress:
    """A bar with the latest metrics behind it, and room for a line a step above it."""
    columns = (TextColumn("training"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[latest]}"))


def in_words(metrics: dict[str, float]) -> str:
    """The metrics that a person watches."""
    return "  ".join(f"{name} {form.format(metrics[name])}" for name, form in SHOWN.items())


def peak_gb() -> float:
    """The most memory that the process has held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # kilobytes on Linux


def write(path: Path, text: str) -> None:
    """Put `text` into a file that holds either all of it or what it held before."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


class MetricsFile:
    """JSON lines, one a step. Opened for a resumed run, it drops the lines of steps that will be made again."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        self.path = path
        kept = [row for row in self.rows() if row["step"] < first_step]
        write(path, "".join(json.dumps(row) + "\n" for row in kept))

    def append(self, row: dict[str, Any]) -> None:
        """Write one step."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that was cut off while it was written does not count."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


class Evaluation:
    """Held-out accuracies by name, kept in a file, so that a resumed run still knows where it began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.accuracy: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def record(self, name: str, accuracy: float) -> None:
        """Write one accuracy."""
        self.accuracy[name] = accuracy
        write(self.path, json.dumps(self.accuracy, indent=1) + "\n")

    def __str__(self) -> str:
        """Each way of answering, from the first accuracy to the last."""
        ways: dict[str, list[str]] = {}
        for name, accuracy in self.accuracy.items():
            ways.setdefault(name.split(", ")[1], []).append(f"{accuracy:.1%}")
        return ", ".join(f"{way} {' -> '.join(values)} right" for way, values in ways.items())


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Reward and accuracy, KL and entropy, over the steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [row["step"] + 1 for row in rows]
    left.plot(steps, [row["reward"] for row in rows], "o-", label="reward")
    left.plot(steps, [row["accuracy"] for row in rows], "--", label="accuracy")
    left.plot(steps, [row["solved"] for row in rows], ":", label="questions with a right answer")
    left.set(xlabel="step", ylim=(0, 1.02), title="sampled answers in training")
    left.legend(loc="lower right", fontsize=8)
    right.plot(steps, [row["entropy"] for row in rows], "o-", color="tab:green", label="entropy (nats)")
    right.plot(steps, [row["kl"] for row in rows], "s-", color="tab:red", label="KL to the initial model (nats)")
    right.set(xlabel="step", title="the policy")
    right.legend(fontsize=8)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=150, format="png")
    os.replace(temporary, path)


def same_settings(path: Path, settings: dict[str, str]) -> None:
    """Note the settings of a run, or refuse to go on with others."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(settings, indent=1) + "\n")
    before = json.loads(path.read_text())
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"the run in {path.parent} has {name} = {before.get(name)}, not {value}. Choose another --out."
            )


def stopped_by_ctrl_c() -> threading.Event:
    """An event that the first Ctrl-C sets; a second one stops at once."""
    event = threading.Event()

    def stop(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    return event
