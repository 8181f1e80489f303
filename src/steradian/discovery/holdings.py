"""What the modules of a model hold beside submodules, parameters and buffers: found, swapped for copies, put back.

A forward pass may count in a dictionary of dictionaries, keep its last activations in a queue, or draw from a
generator of its own. All that is reached from the attributes of a module through plain containers, or through an
object of the user's, is remembered before the pass and restored after it.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Holdings", "swap_value"]

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_MAPPINGS, list, set, deque)
_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 4
_MOST = 4096
"""Items of a container that is looked into; one with more holds data, not the state of a layer."""

_MOST_NUMBERS = 2**20
"""Numbers of an array that is remembered."""


class Holdings:
    """Containers, objects and generators that are reached from some dictionaries of attributes.

    Args:
        attributes: the attributes of modules, without their submodules, parameters and buffers.
    """

    def __init__(self, attributes: Iterable[dict[str, Any]]) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._put_back: dict[int, Callable[[], object]] = {}
        for of_module in attributes:
            for value in of_module.values():
                self._find(value, _DEPTH, objects=True)

    def _find(self, value: Any, depth: int, *, objects: bool) -> None:
        if not depth or type(value) in _PLAIN or id(value) in self._containers or id(value) in self._put_back:
            return
        if type(value) in _CONTAINERS:
            self._containers[id(value)] = value, value.copy()
            items = value.values() if isinstance(value, dict) else value
            for item in items if len(value) <= _MOST else ():
                self._find(item, depth - 1, objects=objects)
        elif isinstance(value, tuple):
            for item in value if len(value) <= _MOST else ():
                self._find(item, depth - 1, objects=objects)
        elif (restore := _restorer(value)) is not None:
            self._put_back[id(value)] = restore
        elif objects and _is_users(value):
            self._containers[id(value.__dict__)] = value.__dict__, value.__dict__.copy()
            for item in value.__dict__.values():
                self._find(item, depth - 1, objects=False)

    def swap(self, twin: Callable[[Tensor], Tensor]) -> None:
        """Put twins in the place of the tensors in all containers."""
        for container, content in self._containers.values():
            if len(content) > _MOST or not any(_holds_tensors(item) for item in _items(content)):
                continue
            if isinstance(container, dict):
                _fill(container, {key: swap_value(item, twin) for key, item in content.items()})
            else:
                container.clear()
                _fill(container, [swap_value(item, twin) for item in content])

    def restore(self) -> None:
        """Put everything back."""
        for container, content in self._containers.values():
            if not _unchanged(container, content):
                container.clear()
                _fill(container, content)
        for put_back in self._put_back.values():
            put_back()


def swap_value(value: Any, twin: Callable[[Tensor], Tensor]) -> Any:
    """A tensor's twin, and a tuple with the twins of its tensors; anything else as it is."""
    if isinstance(value, Tensor):
        return twin(value)
    if isinstance(value, tuple) and _holds_tensors(value):
        items = [swap_value(item, twin) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)


def _items(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _unchanged(container: Any, content: Any) -> bool:
    """Whether a container holds the very items that it held: then it is not touched, as others may be reading it."""
    if isinstance(container, set):
        return bool(container == content)
    if len(container) != len(content) or not all(map(is_, _items(container), _items(content))):
        return False
    return not isinstance(container, dict) or all(map(is_, container, content))


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        for key, item in content.items():  # the update of a Counter would add
            container[key] = item
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _restorer(value: Any) -> Callable[[], object] | None:
    """How to bring a generator, or an array of numpy's that is no data set, back to what it is now; None for others."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy_random = numpy.random
        if isinstance(value, numpy.ndarray) and value.size <= _MOST_NUMBERS and value.flags.writeable:
            return partial(numpy.copyto, value, value.copy())
        if isinstance(value, numpy_random.RandomState):
            return partial(value.set_state, value.get_state())
        if isinstance(value, numpy_random.Generator):
            return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _is_users(value: Any) -> bool:
    """Whether a value is an object that holds some state: none of torch, no function, and none that knows a model."""
    if isinstance(value, Tensor | nn.Module | ModuleType | type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    if type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    return not any(isinstance(item, nn.Module) for item in value.__dict__.values())
