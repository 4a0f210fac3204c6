"""The command line: `fnppo verify`, `fnppo plan` and `fnppo demo`."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

COMMANDS = {
    "verify": ("fnppo.verify.command", "cli"),
    "plan": ("fnppo.plan.command", "cli"),
    "demo": ("fnppo.demo.run", "demo"),
}
"""Name of the command and of its function: (module, extra that it needs)."""


def main() -> None:
    """Entry point of the `fnppo` command."""
    try:
        import typer
    except ModuleNotFoundError as error:
        sys.exit(f"fnppo's command line needs {error.name}. Run: pip install 'fnppo[cli]'")
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        help="The policy update of RL for language models, as pure functions.",
    )
    for name, (module, extra) in COMMANDS.items():
        app.command(name)(_command(name, module, extra))
    try:
        app()
    except ValueError as error:
        sys.exit(f"error: {error}")


def _command(name: str, module: str, extra: str) -> Callable[..., Any]:
    """The command's function, or where its packages are missing, one that says so."""
    try:
        command: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return command
    except ModuleNotFoundError as error:
        missing = f"fnppo {name} needs {error.name}. Run: pip install 'fnppo[{extra}]'"

    def refuse() -> None:
        sys.exit(missing)

    refuse.__doc__ = missing
    return refuse
