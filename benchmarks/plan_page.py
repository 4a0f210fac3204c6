"""The tables of docs/pages/plan.md: what each of its `fnppo plan` commands prints.

python benchmarks/plan_page.py      runs them and writes the page again
"""

import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from fnppo.plan.command import plan

PAGE = Path(__file__).parent.parent / "docs/pages/plan.md"
SHOWN = re.compile(r"(```sh\nfnppo plan ([^\n]*)\n```\n\n```text\n).*?(```\n)", re.S)


def filled(page: str) -> str:
    """The page with the output of each command under it."""
    return SHOWN.sub(lambda found: found[1] + printed(found[2]) + found[3], page)


def printed(arguments: str) -> str:
    """What a command prints on 120 columns."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)
    output = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "120"}).stdout
    return "".join(line.rstrip() + "\n" for line in output.splitlines())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
