"""How trainings are carried out."""

from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["Execution"]


@dataclass(frozen=True)
class Execution:
    """How trainings are carried out; their results depend on it by rounding alone.

    Attributes:
        captured: replay the step as a CUDA graph; None: on a GPU.
        compiled: compile the network, and steps that have no fused form, with torch.compile.
        fused: take the fused optimizer steps; None: on a GPU.
        members: how many trainings that differ by their seed alone are carried out as one network.
        together: steps in one launch of a graph.
        chunk: images that are evaluated at once.
        channels_last: keep weights and images with channels last in memory; None: on a GPU.
        joined: carry out networks with BN by the lab's own kernels, of those with many channels the first convolution
            where they are compiled; None: in bf16 on a GPU.
        lanes: fill up the input channels of convolutions, with zeros, to a multiple of it; None: 8 on a GPU, whose
            matrix units take so many at once, and 1 elsewhere.
    """

    captured: bool | None = None
    compiled: bool = False
    fused: bool | None = None
    members: int = 1
    together: int = 1
    chunk: int = 500
    channels_last: bool | None = None
    joined: bool | None = None
    lanes: int | None = None

    def on(self, device: torch.device) -> "Execution":
        """With everything that depends on the device decided."""
        gpu = device.type == "cuda"
        for name in ("members", "together", "chunk", "lanes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.captured and not gpu:
            raise ValueError("captured must be None or False on a CPU, got True")
        usual = {"captured": gpu, "fused": gpu, "channels_last": gpu, "joined": gpu, "lanes": 8 if gpu else 1}
        chosen: dict[str, Any] = {name: value for name, value in usual.items() if getattr(self, name) is None}
        return replace(self, **chosen)
