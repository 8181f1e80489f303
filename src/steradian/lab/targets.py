"""Models and inputs named on the command line."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["example_input", "load_model"]


def load_model(target: str) -> nn.Module:
    """The model of "package.module:factory", or of "timm:NAME" without weights.

    The current directory can be imported from, as with `python -m`.

    >>> type(load_model("steradian.lab.models:small_cnn")).__name__
    'Sequential'
    """
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name or module_name.startswith("."):
        raise ValueError(f"target must be package.module:factory or timm:NAME, got {target!r}")
    if module_name == "timm":
        timm = _imported("timm", "it names timm's models")
        model = timm.create_model(name, pretrained=False)
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        module = _imported(module_name, "it must be importable from here")
        if not hasattr(module, name):
            raise ValueError(f"target {target!r}: {module_name} has no {name!r}")
        made = getattr(module, name)
        model = made if isinstance(made, nn.Module) else _called(made, target)
    if not isinstance(model, nn.Module):
        raise TypeError(f"target {target!r} must make a torch.nn.Module, got {type(model).__name__}")
    return model


def example_input(shape: str) -> Tensor:
    """A random tensor of a shape like 8x3x32x32; with a number behind a colon, whole numbers below that, as tokens are.

    >>> example_input("2x3").shape, example_input("2x3:50").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    sizes, colon, below = shape.lower().partition(":")
    parts = [*sizes.split("x"), *([below] if colon else [])]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"input must be a shape like 8x3x32x32, or 8x16:1000 for tokens below 1000, got {shape!r}")
    numbers = [int(part) for part in parts]
    try:
        return torch.randint(numbers[-1], numbers[:-1]) if colon else torch.randn(numbers)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"input must fit in memory, got {shape!r}") from error


def _called(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise TypeError(f"target {target!r} must be a torch.nn.Module or make one, got {type(factory).__name__}")
    try:
        return factory()
    except Exception as error:
        raise RuntimeError(
            f"target {target!r} must make a model when it is called without arguments; "
            f"it raised {type(error).__name__}: {error}"
        ) from error


def _imported(name: str, why: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):  # it is there, and imports what is not
            raise ImportError(f"{name} imports {missing!r}, and there is no such module") from error
        raise ImportError(f"no module {name!r} ({why})") from error
