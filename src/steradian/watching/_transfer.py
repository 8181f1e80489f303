"""Tensors of several devices on their way to the host: one copy per device, and nobody waits for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Transfer"]


class Transfer:
    """Copies tensors to the host, all of one device and dtype in one go.

    Args:
        tensors: any number of tensors, on any devices.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for k, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(k)
        self.copies: list[tuple[list[int], Tensor, Any]] = []
        for (device, _), chosen in kinds.items():
            flat = torch.cat([tensors[k].detach().reshape(-1) for k in chosen])
            if device.type != "cuda":
                self.copies.append((chosen, flat.cpu(), None))
                continue
            with torch.cuda.device(device):
                host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
                host.copy_(flat, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            self.copies.append((chosen, host, done))

    def ready(self) -> bool:
        """Whether everything has arrived."""
        return all(done is None or done.query() for _, _, done in self.copies)

    def arrays(self) -> list[NDArray[Any]]:
        """The tensors as arrays, in their order; waits for what has not arrived."""
        found: dict[int, NDArray[Any]] = {}
        for chosen, host, done in self.copies:
            if done is not None:
                done.synchronize()
            array, start = host.numpy() if host.dtype != torch.bfloat16 else host.float().numpy(), 0
            for k in chosen:
                size = int(np.prod(self.shapes[k], dtype=np.int64))
                found[k] = array[start : start + size].reshape(self.shapes[k])
                start += size
        return [found[k] for k in range(len(self.shapes))]
