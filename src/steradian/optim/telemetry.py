"""Seven numbers about every row of a step, and the memory that holds them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["TELEMETRY", "Telemetry"]

TELEMETRY = ("radius", "angle", "effective_lr", "next_radius", "gradient_norm", "defect", "radial")
"""The columns: r, the angle between x and x', η^e, r', ‖∇L(x)‖, |cos(x, ∇L(x))| and A⟨c,u⟩."""


class Telemetry(dict[Tensor, Tensor]):
    """The numbers of `TELEMETRY` for every row in its last step: (n, 7) under each parameter.

    The first parameter of a joint set stands for the set, and a sharded parameter has the rows that this rank steps.
    The value of a parameter is a view of one tensor for its device and dtype. Every step overwrites the memory, which
    stays at its address until a param group is added. A parameter that takes no step keeps its last numbers.
    """

    buffers: tuple[Tensor, ...] = ()  #: the tensors, (N, 7), one for each device and dtype
    #: a second tensor like the only buffer, aligned to 16 bytes, to which a fused step that covers all rows and is not
    #: captured writes its numbers as well
    also: Tensor | None = None
    left: Tensor | None = None  #: that tensor, after a step that wrote to it; else None

    def __init__(self) -> None:
        self._covered: list[tuple[int, int, torch.device, torch.dtype]] = []
        self._places: dict[Tensor, tuple[int, slice]] = {}

    def place(self, param: Tensor) -> tuple[int, slice]:
        """The index of the buffer with the rows of a parameter, and the range of rows in it."""
        return self._places[param]

    @torch.inference_mode(False)
    def cover(self, counts: Sequence[tuple[Tensor, int, torch.dtype]]) -> None:
        """Make room for parameters with their numbers of rows and dtypes; nothing moves if there is room already."""
        wanted = [(id(param), n, param.device, dtype) for param, n, dtype in counts]
        if wanted == self._covered:
            return
        before, self._covered, self._places = dict(self), wanted, {}
        sizes: dict[tuple[torch.device, torch.dtype], int] = {(param.device, dtype): 0 for param, _, dtype in counts}
        for param, n, dtype in counts:
            kind = (param.device, dtype)
            self._places[param] = (list(sizes).index(kind), slice(sizes[kind], sizes[kind] + n))
            sizes[kind] += n
        self.buffers = tuple(
            torch.zeros(size, len(TELEMETRY), device=device, dtype=dtype) for (device, dtype), size in sizes.items()
        )
        self.clear()
        self.update({param: self.buffers[at][rows] for param, (at, rows) in self._places.items()})
        for param, old in before.items():
            if param in self and self[param].shape == old.shape:
                self[param].copy_(old)
