"""Models and inputs named on the command line."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["example_input", "load_model"]


def load_model(target: str) -> nn.Module:
    """The model of "package.module:factory" or "folder/file.py:factory", or of "timm:NAME" without weights.

    The current directory can be imported from, as with `python -m`, and so can the folder of a file. What makes the
    model may be a model itself, and lie in a class: "package.module:Networks.small".

    >>> type(load_model("steradian.lab.models:small_cnn")).__name__
    'Sequential'
    """
    module_name, separator, name = target.partition(":")
    in_file = module_name.endswith(".py")
    if not separator or not module_name or not name or (module_name.startswith(".") and not in_file):
        raise ValueError(f"target must be package.module:factory, file.py:factory or timm:NAME, got {target!r}")
    if module_name == "timm":
        timm = _imported("timm", why="it names timm's models")
        model = timm.create_model(name, pretrained=False)
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        made = _from_file(Path(module_name)) if in_file else _imported(module_name)
        for part in name.split("."):
            if not hasattr(made, part):
                raise ValueError(f"target {target!r}: {module_name} has no {name!r}")
            made = getattr(made, part)
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


def _imported(name: str, *, why: str = "it must be importable from here") -> Any:
    try:
        return _run(partial(importlib.import_module, name), name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):  # it is there, and imports what is not
            raise ImportError(f"{name} imports {missing!r}, and there is no such module") from error
        raise ImportError(f"no module {name!r} ({why})") from error


def _from_file(path: Path) -> Any:
    """The module in a file, under a name that no other module has."""
    if not path.is_file():
        raise ValueError(f"target must name a file that is there, got {str(path)!r}")
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
        raise ImportError(f"{path} imports {error.name!r}, and there is no such module") from error
    return module


def _run(load: Callable[[], Any], name: str) -> Any:
    """Run a module's code, which may do anything: scripts end the process, or take its arguments for theirs."""
    try:
        return load()
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ImportError(f"{name} cannot be imported: it raised {said}") from error
