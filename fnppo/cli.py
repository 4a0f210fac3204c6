"""The command line: `fnppo demo`."""

import sys


def main() -> None:
    """Entry point of the `fnppo` command."""
    try:
        import typer

        from fnppo.demo.run import demo
    except ModuleNotFoundError as error:
        sys.exit(f"fnppo's command line needs {error.name}. Run: pip install 'fnppo[demo]'")
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="The policy update of RL for language models.")
    app.callback()(lambda: None)  # keeps `demo` a subcommand while it is the only one
    app.command()(demo)
    try:
        app()
    except ValueError as error:
        sys.exit(f"error: {error}")
