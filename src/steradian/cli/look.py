"""Commands that look at a model: demo and inspect."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from steradian.cli import app, screen

if TYPE_CHECKING:
    from torch import Tensor, nn


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per method.")] = 30,
) -> None:
    """Find the spheres of a small BN network, train it on digits with three optimizers, watch them, write a page.

    Example: steradian demo --out demo
    """
    from steradian.lab import demo as lab_demo

    results = lab_demo.run(out, epochs=epochs)
    typer.echo(f"The spheres that find_groups proved:\n\n{results[0].groups}\n")
    for result in results:
        typer.echo(result.watch.summary() + "\n")
    table = Table("method", "test accuracy", "seconds, every step watched")
    for result in results:
        table.add_row(result.name, f"{100 * result.accuracy:.1f} %", f"{result.seconds:.1f}")
    console = screen()
    console.print(table)
    console.print(f"The page: {out / 'index.html'}", soft_wrap=True)


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(help="package.module:factory, file.py:factory, or timm:NAME if timm is installed.")
    ],
    input: Annotated[
        list[str], typer.Option(help="Shape of an input, e.g. 8x3x32x32, or 8x16:1000 for tokens; once per input.")
    ],
    explain: Annotated[str | None, typer.Option(help="Explain one parameter in detail.")] = None,
) -> None:
    """Find which weights of a model live on spheres, proved on the model itself, and why.

    Example: steradian inspect steradian.lab.models:small_cnn --input 8x1x8x8
    """
    from steradian.discovery import find_groups

    model = load_model(target)
    groups = find_groups(model, *map(example_input, input))
    typer.echo(groups.explain(explain) if explain else str(groups))


def load_model(target: str) -> "nn.Module":
    """The model of "package.module:factory" or "folder/file.py:factory", or of "timm:NAME" without weights.

    Modules are found from the current directory, as with `python -m`, and a file's imports from its folder. The factory
    may be a model itself, or an attribute of a class: "package.module:Networks.small".

    >>> type(load_model("steradian.lab.models:small_cnn")).__name__
    'Sequential'
    """
    from torch import nn

    module_name, separator, name = target.partition(":")
    in_file = module_name.endswith(".py")
    if not separator or not module_name or not name or (module_name.startswith(".") and not in_file):
        raise ValueError(f"target must be package.module:factory, file.py:factory or timm:NAME, got {target!r}")
    if module_name == "timm":
        timm = _import(module_name, hint="timm:NAME needs the package timm")
        model = timm.create_model(name, pretrained=False)
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        made = _import_file(Path(module_name)) if in_file else _import(module_name)
        for part in name.split("."):
            if not hasattr(made, part):
                raise ValueError(f"target {target!r}: {module_name} has no {name!r}")
            made = getattr(made, part)
        model = made if isinstance(made, nn.Module) else _call(made, target)
    if not isinstance(model, nn.Module):
        raise TypeError(f"target {target!r} must make a torch.nn.Module, got {type(model).__name__}")
    return model


def example_input(shape: str) -> "Tensor":
    """A random tensor of a shape like 8x3x32x32; of a shape like 8x16:1000, token numbers below 1000.

    >>> example_input("2x3").shape, example_input("2x3:50").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    import torch

    sizes, colon, below = shape.lower().partition(":")
    parts = [*sizes.split("x"), *([below] if colon else [])]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"input must be a shape like 8x3x32x32, or 8x16:1000 for tokens below 1000, got {shape!r}")
    numbers = [int(part) for part in parts]
    try:
        return torch.randint(numbers[-1], numbers[:-1]) if colon else torch.randn(numbers)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"input must fit in memory, got {shape!r}") from error


def _call(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise TypeError(f"target {target!r} must be a torch.nn.Module or make one, got {type(factory).__name__}")
    try:
        return factory()
    except Exception as error:
        raise RuntimeError(
            f"target {target!r} must make a model when it is called without arguments; "
            f"it raised {type(error).__name__}: {error}"
        ) from error


def _import(name: str, *, hint: str = "it must be importable from here") -> Any:
    try:
        return _run(partial(importlib.import_module, name), name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):  # the module exists, one of its imports does not
            raise ImportError(f"{name} imports {missing!r}, which cannot be found") from error
        raise ImportError(f"no module {name!r} ({hint})") from error


def _import_file(path: Path) -> Any:
    """The module in a file, under a name that no other module has."""
    if not path.is_file():
        raise ValueError(f"target must name an existing file, got {str(path)!r}")
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"inspected {path}", path)
    assert spec is not None, "every .py file has one"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where classes look for their module
    try:
        _run(partial(spec.loader.exec_module, module), str(path))
    except ModuleNotFoundError as error:
        raise ImportError(f"{path} imports {error.name!r}, which cannot be found") from error
    return module


def _run(load: Callable[[], Any], name: str) -> Any:
    """Run a module's code; a script may end the process."""
    try:
        return load()
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ImportError(f"{name} cannot be imported: it raised {reason}") from error
