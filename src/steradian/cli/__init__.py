"""The command line: it parses arguments, calls the library, and prints errors in one line."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

from rich.console import Console

from steradian import __version__

_INSTALL = "pip install 'steradian[lab]'"

try:
    import typer
except ImportError:  # the library works without its command line
    sys.exit(f"steradian: the command line needs the extra 'lab': {_INSTALL}")

__all__ = ["app", "main", "screen"]

app = typer.Typer(
    help="Find the spheres a normalized network trains on, and see what optimizers do on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXPECTED = (ValueError, TypeError, KeyError, ImportError, OSError, RuntimeError)
_LAB = ("pandas", "pyarrow", "plotly", "jinja2", "matplotlib", "PIL", "sklearn", "scipy")
_WIDE = 160  # columns, if there is no terminal
_INTERRUPTED = 130


def screen(*, stderr: bool = False) -> Console:
    """The console for commands: without markup, and wide in a file, so that tables are not wrapped."""
    made = Console(stderr=stderr, markup=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made


from steradian.cli import data, look, show, study  # noqa: E402, F401  # each adds its commands


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"steradian {__version__}")
        raise typer.Exit


@app.callback()
def steradian(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Commands of Steradian."""


def main() -> None:
    """Run the command line; an error is one line on stderr with exit code 1, or 2 if the arguments are wrong.

    With STERADIAN_TRACEBACK=1 in the environment errors have a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # on terminals without Unicode
    try:
        code = app(prog_name="steradian", standalone_mode=False)
    except Exception as error:
        if os.environ.get("STERADIAN_TRACEBACK"):
            raise
        code = _print_error(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        _print("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _print_error(error: Exception) -> int:
    """Print an error; returns the exit code."""
    # Some versions of typer have their own copy of click's errors: they are recognized by their attributes.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        text, context = str(error.format_message()), getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(text)
        else:
            _print(f"{text.rstrip('.')}; see {context.command_path if context else 'steradian'} --help")
        return int(error.exit_code)
    if type(error).__name__ == "Abort":  # an interruption in older versions
        return _INTERRUPTED
    frames = traceback.extract_tb(error.__traceback__)
    ours = not frames or Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
    if not isinstance(error, _EXPECTED) or not (ours or isinstance(error, OSError | ImportError)):
        from steradian.lab.registry import is_foreign

        users = [f for f in frames if Path(f.filename).is_file() and not is_foreign(Path(f.filename))]
        at = f" ({users[-1].filename}:{users[-1].lineno})" if users else ""
        _print(f"{type(error).__name__}: {error}{at}; STERADIAN_TRACEBACK=1 shows where")
        return 1
    # A KeyError quotes its message, and torch adds its C++ frames.
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, FileExistsError) and error.filename:
        message = f"expected a folder, but {error.filename} is a file"
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] in _LAB:
        message += f", which comes with the extra 'lab': {_INSTALL}"
    _print(message.split("\nException raised from")[0] or type(error).__name__)
    return 1


def _print(text: str) -> None:
    screen(stderr=True).print(f"steradian: {' '.join(text.split())}", style="red", soft_wrap=True)
