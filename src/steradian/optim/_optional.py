"""What not every installation has: Triton for the fused step, and a torch that shards parameters."""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

__all__ = ["fused_available", "fused_works", "sharding"]


@functools.cache
def _fused_step() -> ModuleType | None:
    """`steradian.optim._fused`, where Triton is there."""
    return None if importlib.util.find_spec("triton") is None else importlib.import_module("steradian.optim._fused")


def fused_available(params: Sequence[Tensor]) -> bool:
    """Whether Triton is there and runs on the device of these parameters."""
    module = _fused_step()
    return module is not None and all(module.available(param.device) for param in params)


def fused_works(params: Sequence[Tensor]) -> bool:
    """Whether these parameters are on GPUs on which a Triton kernel was seen to run."""
    if not params or not all(param.is_cuda for param in params):
        return False
    module = _fused_step()
    return module is not None and all(module.works(device) for device in {param.device for param in params})


def sharding() -> ModuleType:
    """`steradian.optim._sharded`, imported when a parameter is sharded: not every torch has what it needs."""
    return importlib.import_module("steradian.optim._sharded")
