"""What a compiler is not to look into, without loading torch's, which takes as long as torch itself."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["load", "untraced"]

P = ParamSpec("P")
R = TypeVar("R")

_WAITING: list[Callable[[], None]] = []


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which loads the compiler, from `load` on."""
    called = function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return called(*args, **kwargs)

    def disable() -> None:
        nonlocal called
        called = torch.compiler.disable(function)

    _WAITING.append(disable)
    return call


def load() -> None:
    """Called before the first optimizer is there, and with it a step that may be compiled."""
    while _WAITING:
        _WAITING.pop()()
