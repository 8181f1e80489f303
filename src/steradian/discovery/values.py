"""The tensors inside a model's inputs and outputs, however they are nested."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["floating", "map_inputs", "name_inputs", "perturb", "tensors_in"]

_DEPTH = 8
_SMALL = 0.05


def tensors_in(value: Any, depth: int = _DEPTH) -> list[Tensor]:
    """Tensors in tuples, lists, mappings, dataclasses and plain objects, in order, each once.

    Caches of keys and values, which some models return for the next token, are left out: no loss is computed from
    them.

    >>> len(tensors_in({"a": (torch.ones(1), [torch.ones(2)]), "b": "text"}))
    2
    """
    found: dict[int, Tensor] = {}
    _collect(value, found, depth)
    return list(found.values())


def _collect(value: Any, found: dict[int, Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
    elif depth and not isinstance(value, str | bytes | int | float | type | nn.Module):
        for item in _items(value):
            _collect(item, found, depth - 1)


def _items(value: Any) -> list[Any]:
    if type(value).__name__.endswith("Cache"):
        return []
    if isinstance(value, Mapping):
        return [item for key, item in value.items() if key != "past_key_values"]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []


def map_inputs(value: Any, change: Callable[[Tensor, str], Tensor], name: str = "") -> Any:
    """The same nest with every tensor replaced by change(tensor, name of the argument or key)."""
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return type(value)(*(map_inputs(item, change, key) for key, item in fields))
    if isinstance(value, list | tuple):
        return type(value)(map_inputs(item, change, name) for item in value)
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update({key: map_inputs(item, change, str(key)) for key, item in value.items()})
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            object.__setattr__(twin, field.name, map_inputs(item, change, field.name))
        return twin
    return value


def name_inputs(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names that the forward method gives to positional inputs, "" where it names none."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else "" for i in range(len(args))]


def floating(tensor: Tensor) -> bool:
    """Whether a derivative can flow through it."""
    return tensor.is_floating_point() or tensor.is_complex()


def perturb(tensor: Tensor, name: str, generator: Callable[[torch.device], torch.Generator]) -> Tensor:
    """A random input like the given one: noise of half its size, inside its range.

    Integers are token ids or labels, zeros and ones or infinities are masks: those stay as they are, and so do sparse
    and nested tensors. A
    constant input, such as a dummy batch of zeros, says nothing about the range and becomes random; one much
    smaller than 1, which a normalization's ε would drown, is brought to the size 1.
    """
    if not floating(tensor) or tensor.layout != torch.strided or tensor.numel() == 0 or "mask" in name:
        return tensor.clone()
    if not bool(torch.isfinite(tensor).all()):
        return tensor.clone()
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = values.min(), values.max()
    noise = torch.randn(values.shape, dtype=values.dtype, device=values.device, generator=generator(values.device))
    if bool(low == high):
        noisy = values + noise * (high.abs() if bool(high != 0) else 1)
    elif bool(((values == low) | (values == high)).all()):
        return tensor.clone()
    else:
        size = values.square().mean().sqrt()
        noisy = (values + size / 2 * noise).clamp(low, high)
        noisy = noisy / size if bool(size < _SMALL) else noisy
    return torch.view_as_complex(noisy) if tensor.is_complex() else noisy
