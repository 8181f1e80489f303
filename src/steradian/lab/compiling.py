"""torch.compile for the lab: one compiled function for all trainings, so that those of one kind share it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

__all__ = ["compiled"]


@lru_cache(maxsize=16)
def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled for the shapes that it meets."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(work, dynamic=False)
