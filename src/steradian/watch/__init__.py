"""What any optimizer really does on the spheres, step by step: `steradian.watch(optimizer, …)` and its records."""

import sys
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from steradian.groups import Groups
from steradian.watch._block import Alert, Block
from steradian.watch.monitor import Watch, watch

__all__ = ["Alert", "Block", "Watch", "watch"]


class _CallableModule(ModuleType):
    """`steradian.watch` is the function that users call and the package that holds it."""

    def __call__(
        self, optimizer: Optimizer, groups: Groups | None = None, *, every: int = 1, to: Any = None, **options: Any
    ) -> Watch:
        return watch(optimizer, groups, every=every, to=to, **options)


sys.modules[__name__].__class__ = _CallableModule
