"""timm imports torchvision for its transforms; where there is none empty names do: no architecture computes with it."""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

__all__ = ["stand_in"]

MODES = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")


class _Names(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return MODES if name == MODES.__name__ else type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Names(spec.name)
        module.__version__ = "0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in() -> None:
    """Provide the names of torchvision, unless it is installed."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
