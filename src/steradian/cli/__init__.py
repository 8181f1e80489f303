"""The command line, thin: it parses, calls, and prints errors in one line."""

import codecs
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from rich.console import Console

from steradian import __version__
from steradian.lab.interruption import exit_on_signal

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
_LAB = ("pandas", "pyarrow", "plotly", "matplotlib", "PIL", "sklearn", "scipy")
_WIDE = 160  # columns, where no terminal says how many there are
_INTERRUPTED = 130
_PLAINER = {"−": "-", "±": "~", "×": "x", "…": ".", "†": "+", "“": '"', "”": '"'}  # one for one: tables stay straight


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """What a terminal without a sign gets: one that is near, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAINER.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("steradian", _plainly)


def screen(*, stderr: bool = False) -> Console:
    """Where commands print: names are shown as they are, and tables keep their lines in a file."""
    made = Console(stderr=stderr, markup=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made


from steradian.cli import bench, data, look, show, study  # noqa: E402, F401  # each adds its commands


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"steradian {__version__}")
        raise typer.Exit


@app.callback()
def steradian(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Commands of Steradian."""


def main() -> None:
    """Run the command line; an error is one line on stderr, exit code 1, or 2 where the arguments are wrong.

    With STERADIAN_TRACEBACK=1 in the environment an error shows where it comes from.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="steradian")
    try:
        with _ended_in_order():
            code = app(prog_name="steradian", standalone_mode=False)
    except Exception as error:
        if os.environ.get("STERADIAN_TRACEBACK"):
            raise
        code = _told(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        _say("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Within it a request to end closes what is open: a live table gives the cursor back, a cluster is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # as nohup has it
    for number in before:
        signal.signal(number, exit_on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(error: Exception) -> int:
    """Say what is wrong; returns the exit code."""
    # typer brings its own copy of click's errors in some versions: they are known by what they can do.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        text, context = str(error.format_message()), getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(text)
        else:
            _say(f"{text.rstrip('.')}; see {context.command_path if context else 'steradian'} --help")
        return int(error.exit_code)
    if type(error).__name__ == "Abort":  # what older ones make of an interruption
        return _INTERRUPTED
    if not isinstance(error, _EXPECTED):
        _say(f"{type(error).__name__}: {error}; STERADIAN_TRACEBACK=1 shows where")
        return 1
    # A KeyError writes its message in quotes, and torch adds the frames of its own code.
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, FileExistsError) and error.filename:
        message = f"a folder is needed, and {error.filename} is a file"
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] in _LAB:
        message += f", which comes with the extra 'lab': {_INSTALL}"
    _say(message.split("\nException raised from")[0] or type(error).__name__)
    return 1


def _say(text: str) -> None:
    screen(stderr=True).print(f"steradian: {' '.join(text.split())}", style="red", soft_wrap=True)
