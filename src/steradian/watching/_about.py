"""What is known of a run before its first step: the contents of run.json."""

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.watching._followed import Followed

__all__ = ["about"]


def about(optimizer: Optimizer, followed: Sequence[Followed], names: Mapping[int, str], **given: Any) -> dict[str, Any]:
    """The contents of run.json.

    Args:
        optimizer: the optimizer.
        followed: its rows, in the model's order.
        names: the names of all parameters, by their id.
        **given: what the user gave, and what the watch knows.
    """
    kind = type(optimizer)
    rest = set(names.values()) - {name for entry in followed for name in entry.names}
    return {
        **given,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "optimizer": {"name": f"{kind.__module__}.{kind.__qualname__}", "groups": _settings(optimizer, names)},
        "groups": [entry.about() for entry in followed],
        "rest": sorted(rest),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": ", ".join(dict.fromkeys(_device_name(entry.device) for entry in followed)),
        },
    }


def _settings(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The settings of every param group, as far as JSON can hold them, with the names of its parameters."""
    found = []
    for group in optimizer.param_groups:
        settings: dict[str, Any] = {"params": [names.get(id(param), "?") for param in group["params"]]}
        for key, value in group.items():
            if key in ("params", "param_names"):
                continue
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            try:
                json.dumps(value)
            except TypeError:
                value = str(value)
            settings[key] = value
        found.append(settings)
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
