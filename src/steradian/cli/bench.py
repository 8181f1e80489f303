"""The command that runs a benchmark of the source tree."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from steradian.cli import app


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="step, image, discovery or fleet: a file of benchmarks/.")],
) -> None:
    """Run a benchmark of the source tree; what follows its name is handed to it.

    Example: steradian bench fleet --models ResNet20 --sizes 1 8
    """
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    script = folder / f"{name}.py"
    if not script.is_file() or Path(name).name != name:
        there = sorted(path.stem for path in folder.glob("*.py"))
        raise ValueError(f"no benchmark {name!r} in {folder}; there are {', '.join(there) or 'none'}")
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(script), run_name="__main__")
