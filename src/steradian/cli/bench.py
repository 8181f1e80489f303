"""The command that runs a benchmark of the source tree."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from steradian.cli import app


@app.command(  # -h belongs to the benchmark
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A file of benchmarks/: step, image, discovery, fleet, watch, …")],
) -> None:
    """Run a benchmark of the source tree; arguments after its name are passed to it.

    Example: steradian bench fleet --models ResNet20 --sizes 1 8
    """
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    # The folder also has modules that benchmarks share.
    there = {path.stem: path for path in sorted(folder.glob("*.py")) if '__name__ == "__main__"' in path.read_text()}
    if name not in there:
        raise ValueError(f"no benchmark {name!r} in {folder}; there are {', '.join(there) or 'none'}")
    script = there[name]
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(script), run_name="__main__")
