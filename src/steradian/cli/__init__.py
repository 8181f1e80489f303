"""The command line, thin: it parses, calls, and prints errors in one line."""

import sys

try:
    import typer
except ImportError:  # the library works without its command line
    sys.exit("steradian: the command line needs the extra 'lab': pip install 'steradian[lab]'")

from rich.console import Console

__all__ = ["app", "main"]

app = typer.Typer(
    help="Find the spheres a normalized network trains on, and see what optimizers do on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

from steradian.cli import bench, data, look, show, study  # noqa: E402, F401  # each adds its commands


@app.callback()
def steradian() -> None:
    """Commands of Steradian."""


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit code 1."""
    try:
        app()
    except (ValueError, TypeError, KeyError, ImportError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split("\n"))
        Console(stderr=True).print(f"steradian: {text}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
