"""A kernel with what it is called with, launched without Triton's dispatch after the first time.

Triton binds, specializes and looks up on every call, which takes longer than the rest of a step on the host. What it
specializes on does not change between calls here: constants, the number of parameters, and pointers that torch's
allocator aligned.
"""

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

__all__ = ["Launch"]

# A compiled kernel takes constants among its arguments, as here, since 3.2; older versions go through Triton.
_STRAIGHT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)


class Launch:
    """One kernel on a line of programs, with three addresses that are given in each step.

    These are a gradient scaler's scale and verdict, and a second place for telemetry.

    Args:
        kernel: the kernel.
        programs: how many.
        tables: its first arguments, tensors that lie at multiples of 16 bytes.
        more: its arguments behind those three.
        constants: its compile-time arguments.
        options: Triton's.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        tables: tuple[Tensor, ...],
        more: tuple[Tensor | int, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self.kernel, self.programs, self.options = kernel, programs, options
        self.tables, self.more, self.constants = tables, more, constants
        self.run: Callable[..., object] | None = None
        self.before: list[int] = []
        self.behind: list[Any] = []

    def __call__(self, scale: Tensor, found: Tensor, also: Tensor) -> None:
        """Launch on the current stream of the current device."""
        if self.run is not None:
            self.run(*self.before, scale.data_ptr(), found.data_ptr(), also.data_ptr(), *self.behind)
            return
        compiled = self.kernel[(self.programs,)](
            *self.tables, scale, found, also, *self.more, *self.constants, **self.options
        )
        if _STRAIGHT and isinstance(compiled, triton.compiler.CompiledKernel):
            self.run = compiled[(self.programs, 1, 1)]
            self.before = [table.data_ptr() for table in self.tables]
            self.behind = [each.data_ptr() if isinstance(each, Tensor) else each for each in self.more]
            self.behind += self.constants
