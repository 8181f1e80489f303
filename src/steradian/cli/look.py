"""Commands that look at a model: demo and inspect."""

import importlib
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from steradian.cli import app, screen

if TYPE_CHECKING:
    from torch import Tensor, nn

_DEPTHS = ("layer_types", "num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
"""Settings of transformers that grow with the number of layers."""
_TARGET = "package.module:factory, file.py:factory, timm:NAME, or hf:PATH of a transformers config or folder."
_INPUT = "Shape of an input, e.g. 8x3x32x32, or 8x16:1000 for tokens; once per input."


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
    target: Annotated[str, typer.Argument(help=_TARGET)],
    input: Annotated[list[str], typer.Option(help=_INPUT)],
    explain: Annotated[str | None, typer.Option(help="Explain one parameter in detail.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of an hf: model, if fewer than it has.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the groups to this file, for Groups.load.")] = None,
) -> None:
    """Find which weights of a model live on spheres, proved on the model itself, and why.

    Example: steradian inspect steradian.lab.models:small_cnn --input 8x1x8x8
    """
    from steradian.discovery import find_groups

    groups = find_groups(load_model(target, layers=layers), *map(example_input, input))
    if save is not None:
        groups.save(save)
    typer.echo(groups.explain(explain) if explain else str(groups))


def load_model(target: str, *, layers: int | None = None) -> "nn.Module":
    """The model of "package.module:factory" or "folder/file.py:factory", of "timm:NAME" or "hf:PATH" without weights.

    Modules are found from the current directory, as with `python -m`, and a file's imports from its folder. The factory
    may be a model itself, or an attribute of a class: "package.module:Networks.small".
    """
    from torch import nn

    place, _, name = target.partition(":")
    if layers is not None and place != "hf":
        raise ValueError(f"--layers is for hf: models, got {target!r}")
    if not place or not name or (place.startswith(".") and not place.endswith(".py")):
        forms = "package.module:factory, file.py:factory, timm:NAME or hf:PATH"
        raise ValueError(f"target must be {forms}, got {target!r}")
    if place == "hf":
        return _from_config(_import_module("transformers"), name, layers)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _import_module(place)
    if place == "timm":
        made = partial(module.create_model, name, pretrained=False)
    else:
        try:
            made = attrgetter(name)(module)
        except AttributeError as error:
            raise ValueError(f"target {target!r}: {place} has no {name!r}") from error
    if not isinstance(made, nn.Module):
        try:
            made = made()
        except Exception as error:
            must = "must be a model, or make one when it is called without arguments"
            raise RuntimeError(f"target {target!r} {must}; it raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise TypeError(f"target {target!r} must make a torch.nn.Module, got {type(made).__name__}")
    return made


def _from_config(transformers: Any, path: str, layers: int | None) -> "nn.Module":
    """The transformers model of a config.json, or of a folder that holds one, with random weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except OSError as error:
        missing = "no such folder or file, and no model of this name can be downloaded"
        raise ValueError(f"hf:{path}: {error if Path(path).exists() else missing}") from error
    if layers is not None:
        parts = [config, *(getattr(config, key) for key in getattr(config, "sub_configs", {}))]
        deep = [(part, key) for part in parts for key in _DEPTHS if hasattr(part, key)]
        if not deep:
            raise ValueError(f"--layers: the config has none of {', '.join(_DEPTHS)}")
        whole = max(len(depth) if isinstance(depth := getattr(*each), list) else depth for each in deep)
        if layers < whole:
            typer.echo(f"{layers} of {whole} layers: the shares are those of this smaller model.\n")
        for part, key in deep:
            depth = getattr(part, key)
            setattr(part, key, depth[:layers] if isinstance(depth, list) else min(depth, layers))
    # The class that the config names has the head that is trained.
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    return named[0](config) if named and named[0] else transformers.AutoModel.from_config(config)


def _import_module(place: str) -> Any:
    """The module of this name or in this file."""
    from steradian.lab.registry import run_file

    try:
        return run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a script may end the process
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ImportError(f"{place} cannot be imported: it raised {reason}") from error


def example_input(shape: str) -> "Tensor":
    """A random tensor of a shape like 8x3x32x32; of a shape like 8x16:1000, token numbers below 1000."""
    import torch

    sizes, colon, below = shape.lower().partition(":")
    parts = [*sizes.split("x"), *([below] if colon else [])]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"input must be a shape like 8x3x32x32, or 8x16:1000 for tokens below 1000, got {shape!r}")
    numbers = [int(part) for part in parts]
    return torch.randint(numbers[-1], numbers[:-1]) if colon else torch.randn(numbers)
