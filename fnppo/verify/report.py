"""What a verification found, as values, as a table and as JSON."""

from typing import Any, NamedTuple

from rich.table import Table


class Check(NamedTuple):
    """One row of the table."""

    name: str
    passed: bool | None
    """None: there is nothing to check in this model."""
    note: str = ""
    """What was found; for a failure the likely cause and what to use instead."""
    error: float | None = None
    tolerance: float | None = None


class Report(NamedTuple):
    """All checks of one model in one dtype on one device."""

    model: str
    dtype: str
    device: str
    checks: list[Check]

    @property
    def verified(self) -> bool:
        """No check failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        failed = [check.name for check in self.checks if check.passed is False]
        if failed:
            return f"NOT VERIFIED: {self.model} in {self.dtype}: {', '.join(failed)}"
        count = sum(check.passed is True for check in self.checks)
        return f"VERIFIED: {self.model} in {self.dtype}: {count} checks passed"

    def as_json(self) -> dict[str, Any]:
        """Plain data; an error that is not finite is text, as JSON has no such number."""
        checks = [check._asdict() for check in self.checks]
        for check in checks:
            for name in ("error", "tolerance"):
                if check[name] is not None and not abs(check[name]) < float("inf"):
                    check[name] = str(check[name])
        return {**self._asdict(), "checks": checks, "verified": self.verified, "verdict": self.verdict}

    def as_table(self) -> Table:
        """For a terminal."""
        table = Table(
            title=f"{self.model} · {self.dtype} · {self.device}",
            title_justify="left",
            caption="log-probs and entropies in nats, gradients relative to each parameter's largest",
            caption_justify="left",
        )
        table.add_column("check")
        table.add_column("error", justify="right")
        table.add_column("tolerance", justify="right")
        table.add_column("result")
        table.add_column("found", overflow="fold")
        words = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[dim]none[/]"}
        for check in self.checks:
            numbers = ["" if x is None else f"{x:.1e}" for x in (check.error, check.tolerance)]
            table.add_row(check.name, *numbers, words[check.passed], check.note)
        return table
