"""Run a model and leave it as it was.

The model runs on private copies of its parameters, buffers and tensor attributes, so that running statistics,
gradients, hooks on parameters and optimizer references never see a probe. What the forward pass does to the
attributes of a module (counters, caches, a computed `weight`) is undone, also when it raises.
"""

import copy
import dataclasses
import inspect
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from operator import is_, is_not
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from steradian.discovery.thresholds import ATTRIBUTE_DEPTH, MOST_ITEMS, MOST_NUMBERS, NEST_DEPTH

Leaves = dict[str, nn.Parameter]

_STORES = {"_parameters", "_buffers", "_modules"}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_COMPLEX_CASTS = {Tensor.cfloat, Tensor.chalf}  # type: ignore[attr-defined]
_GROUPED_MM = getattr(torch, "_grouped_mm", None)
_NARROW = {torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32}


def unwrap(model: nn.Module) -> nn.Module:
    """The module to call: data-parallel wrappers synchronize gradients, which a probe must not do."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def floating(tensor: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A private copy in the dtype of the probe; integers and booleans keep theirs."""
    if dtype is None or not floating(tensor):
        return tensor.detach().clone()
    return tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype, copy=True)


def make_leaves(model: nn.Module, dtype: torch.dtype | None) -> Leaves:
    """A private leaf for each parameter, by its first name; tied parameters share one."""
    return {
        name: nn.Parameter(as_dtype(parameter, dtype), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }


@contextmanager
def swapped(model: nn.Module, leaves: Mapping[str, nn.Parameter], *, dtype: torch.dtype | None) -> Iterator[None]:
    """Run the model in training mode on the leaves and on copies of everything else; restore it afterwards."""
    copies: dict[int, Tensor] = {id(p): leaves[name] for name, p in model.named_parameters()}
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    stores = [(store, store.copy()) for module in modules for store in (module.__dict__[key] for key in _STORES)]
    state = _AttributeState({k: v for k, v in of_module.items() if k not in _STORES} for of_module in attributes)

    def copy_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = as_dtype(tensor, dtype)
        return copies[id(tensor)]

    try:
        state.swap(copy_of)
        for module in modules:
            _swap(module, copy_of)
        _train(model)
        yield
    finally:
        for module, of_module in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(of_module)
        for store, content in stores:
            store.clear()
            store.update(content)
        state.restore()


def _train(model: nn.Module) -> None:
    """Training mode as the model defines it: what it keeps in eval mode stays there.

    In a model that is in training mode already, a submodule in eval mode was put there on purpose; a class
    with its own `train` (frozen statistics) may not have been called yet.
    """
    if not model.training:
        model.train()
        return
    frozen = [module for module in model.modules() if not module.training]
    for module in list(model.modules()):
        if type(module).train is not nn.Module.train:
            module.train(module.training)
    for module in frozen:
        module.training = False


def _swap(module: nn.Module, copy_of: Callable[[Tensor], Tensor]) -> None:
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                store[name] = copy_of(tensor)  # type: ignore[assignment]
    for name, value in list(module.__dict__.items()):
        if name not in _STORES:
            module.__dict__[name] = _swap_value(value, copy_of)
    if isinstance(module, nn.SyncBatchNorm):
        # Its statistics over one process are those of plain batch normalization, which also runs on a CPU.
        module.__dict__["forward"] = partial(_BatchNorm.forward, module)


# Containers, objects and generators in the attributes of modules


class _AttributeState:
    """The state of what modules hold in their attributes: remembered, swapped for copies, restored.

    A forward pass may count in a dictionary of dictionaries, keep its last activations in a queue, or draw from a
    generator of its own. Covered is what is reached through plain containers or through an object of the user's.

    Args:
        attributes: of each module, without submodules, parameters and buffers.
    """

    _CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)

    def __init__(self, attributes: Iterable[dict[str, Any]]) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._restorers: dict[int, Callable[[], object]] = {}
        for of_module in attributes:
            for value in of_module.values():
                self._find(value, ATTRIBUTE_DEPTH, objects=True)

    def _find(self, value: Any, depth: int, *, objects: bool) -> None:
        known = id(value) in self._containers or id(value) in self._restorers
        if known or not depth or type(value) in (bool, int, float, str, type(None)):
            return
        if type(value) in self._CONTAINERS or isinstance(value, tuple):
            if not isinstance(value, tuple):
                self._containers[id(value)] = value, value.copy()
            for item in _items(value) if len(value) <= MOST_ITEMS else ():
                self._find(item, depth - 1, objects=objects)
        elif (restore := _restorer(value)) is not None:
            self._restorers[id(value)] = restore
        elif objects and _has_own_state(value):
            self._containers[id(value.__dict__)] = value.__dict__, value.__dict__.copy()
            for item in value.__dict__.values():
                self._find(item, depth - 1, objects=False)

    def swap(self, copy_of: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensors in all containers by their copies."""
        for container, content in self._containers.values():
            if len(content) <= MOST_ITEMS:
                items = [_swap_value(item, copy_of) for item in _items(content)]
                if any(map(is_not, items, _items(content))):
                    _refill(container, dict(zip(content, items, strict=True)) if isinstance(content, dict) else items)

    def restore(self) -> None:
        """Restore everything."""
        for container, content in self._containers.values():
            if not _unchanged(container, content):
                _refill(container, content)
        for restore in self._restorers.values():
            restore()


def _swap_value(value: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """A tensor's copy, and a tuple with the copies of its tensors; anything else as it is."""
    if isinstance(value, Tensor):
        return copy_of(value)
    if isinstance(value, tuple):
        items = [_swap_value(item, copy_of) for item in value]
        if any(map(is_not, items, value)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _unchanged(container: Any, content: Any) -> bool:
    """Whether a container holds the same items; then it is not touched, because other threads may be reading it."""
    if isinstance(container, set):
        return bool(container == content)
    same = len(container) == len(content) and all(map(is_, _items(container), _items(content)))
    return same and (not isinstance(container, dict) or all(map(is_, container, content)))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        dict.update(container, content)  # `Counter.update` would add
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _restorer(value: Any) -> Callable[[], object] | None:
    """How to restore a generator or a small numpy array; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.size <= MOST_NUMBERS and value.flags.writeable:
            return partial(numpy.copyto, value, value.copy())
        if isinstance(value, numpy.random.RandomState):
            return partial(value.set_state, value.get_state())
        if isinstance(value, numpy.random.Generator):
            return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _has_own_state(value: Any) -> bool:
    """Whether a value is an object of the user's that holds state: no tensor, function or owner of a module."""
    if isinstance(value, Tensor | nn.Module | ModuleType | type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    if type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    return not any(isinstance(item, nn.Module) for item in value.__dict__.values())


# Global state, and the dtype of the probe


@contextmanager
def isolated(dtype: torch.dtype | None) -> Iterator[None]:
    """Gradients on, compilation off, global generators and defaults restored afterwards."""
    states: list[Callable[[], None]] = [partial(random.setstate, random.getstate())]
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        states.append(partial(numpy_random.set_state, numpy_random.get_state()))
    default = torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            stack.enter_context(torch.random.fork_rng(devices=list(devices)))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if dtype is not None:
                torch.set_default_dtype(dtype)
                stack.enter_context(_Widen(dtype))
            yield
    finally:
        torch.set_default_dtype(default)
        for restore in states:
            restore()


class _Widen(TorchFunctionMode):
    """Casts to a narrower floating-point dtype in the model's code go to the dtype of the probe."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].to(self.dtype)
        if func in _COMPLEX_CASTS:
            return args[0].to(self.dtype.to_complex())
        if func is _GROUPED_MM and args[0].dtype == torch.float64 and args[1].ndim == 3 and args[0].ndim == 2:
            return _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        if _any_narrow(args) or _any_narrow(kwargs.values()):
            args = tuple(self._widened(a) for a in args)
            kwargs = {k: self._widened(a) for k, a in kwargs.items()}
        return func(*args, **kwargs)

    def _widened(self, value: object) -> object:
        if not isinstance(value, torch.dtype) or value not in _NARROW:
            return value
        return self.dtype.to_complex() if value.is_complex else self.dtype


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The products of blocks of rows with one matrix each, which torch does not compute in float64."""
    stops = [0, *ends.tolist()]
    parts = [a[start:stop] @ b[i] for i, (start, stop) in enumerate(pairwise(stops))]
    left = len(a) - stops[-1]
    return torch.cat([*parts, a.new_zeros(left, b.shape[-1])] if left else parts)


def _any_narrow(values: Iterable[object]) -> bool:
    for value in values:  # noqa: SIM110 - called for every operation of the model, and any() takes twice as long
        if isinstance(value, torch.dtype) and value in _NARROW:
            return True
    return False


# Nested inputs and outputs


def tensors_in(value: Any, depth: int = NEST_DEPTH) -> list[Tensor]:
    """Tensors in tuples, lists, mappings, dataclasses and plain objects, in order, each once.

    Caches of keys and values, which some models return for the next token, are skipped: no loss is computed from
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
        return
    if not depth or isinstance(value, str | bytes | int | float | type | nn.Module):
        return
    items: Iterable[Any] = ()
    if type(value).__name__.endswith("Cache"):
        pass
    elif isinstance(value, Mapping):
        items = [item for key, item in value.items() if key != "past_key_values"]
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        items = vars(value).values()
    for item in items:
        _collect(item, found, depth - 1)


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
        instance = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            object.__setattr__(instance, field.name, map_inputs(item, change, field.name))
        return instance
    return value


def name_inputs(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names that the forward method gives to positional inputs, "" where it names none."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else "" for i in range(len(args))]
