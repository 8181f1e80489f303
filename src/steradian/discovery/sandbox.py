"""Run a model and leave it as it was.

The model runs on private copies of its parameters, buffers and other attributes, so that running statistics, gradients,
hooks on parameters, counters and caches never see a probe. The originals are put back afterwards, also when it raises.
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
from operator import is_not
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from steradian.discovery.thresholds import ATTRIBUTE_DEPTH, EPSILON, MOST_ITEMS, MOST_NUMBERS, NEST_DEPTH
from steradian.groups import parameters_of

Leaves = dict[str, nn.Parameter]

_CONSTANTS = (bool, int, float, str, NoneType)
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_LIBRARY = ("torch.", "builtins", "weakref")  # modules of functions and objects that are left as they are
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_GROUPED_MM = getattr(torch, "_grouped_mm", None)


def floating(tensor: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A private copy in the dtype of the probe; integers and booleans keep theirs."""
    if dtype is None or not floating(tensor):
        return tensor.detach().clone()
    return tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype, copy=True)


@contextmanager
def swapped(
    model: nn.Module, leaves: Mapping[str, nn.Parameter], *, dtype: torch.dtype | None, generic: bool = False
) -> Iterator[None]:
    """Run the model in training mode on the leaves and on copies of all else; `generic` ones at a random point."""
    with ExitStack() as stack:
        copies: dict[int, Any] = {id(p): leaves[name] for name, p in parameters_of(model).items()}
        attributes = _Attributes(copies | {id(module): module for module in model.modules()}, dtype, stack)
        for module in list(model.modules()):
            attributes.swap(module)
            own = {name: module.__dict__.get(name) for name in ("eps", "epsilon", "variance_epsilon") if generic}
            module.__dict__.update({name: min(e, EPSILON) for name, e in own.items() if isinstance(e, float)})
            mean, var = (module._buffers.get(name) for name in ("running_mean", "running_var"))
            if generic and mean is not None and var is not None:
                mean += var.sqrt() / 2  # in eval mode, fresh statistics would hide that a mean is subtracted
            # What transformers and timm recompute in the backward pass would not be in float64, nor in the graph.
            recomputing = {"gradient_checkpointing", "grad_checkpointing"} & module.__dict__.keys()
            module.__dict__.update(dict.fromkeys(recomputing, False))
            if isinstance(module, nn.SyncBatchNorm):
                # Its statistics over one process are those of plain batch normalization, which also runs on a CPU.
                module.__dict__["forward"] = partial(_BatchNorm.forward, module)
        if model.training:
            # A submodule in eval mode was put there on purpose; one with its own `train` may not have been called yet.
            frozen = [module for module in model.modules() if not module.training]
            for module in [module for module in model.modules() if type(module).train is not nn.Module.train]:
                module.train(module.training)
            for module in frozen:
                module.training = False
        else:
            model.train()
        yield


class _Attributes:
    """The attributes of modules, and of other modules and objects that they hold, swapped for private copies.

    A forward pass may count in a dictionary of dictionaries, keep its last activations in a queue, or draw from a
    generator of its own. `copies` are those that exist already, by the id of the original; the stack restores.
    """

    def __init__(self, copies: Mapping[int, Any], dtype: torch.dtype | None, stack: ExitStack) -> None:
        self._copies, self._dtype, self._stack = dict(copies), dtype, stack

    def swap(self, owner: object, depth: int = ATTRIBUTE_DEPTH, *, objects: bool = True) -> None:
        """Give an object copies of its attributes, and of those of the objects that it holds."""
        attributes, originals = owner.__dict__, owner.__dict__.copy()
        self._stack.callback(attributes.update, originals)
        self._stack.callback(attributes.clear)  # comes first
        attributes.update({name: self._copy(value, depth, objects=objects) for name, value in originals.items()})

    def _copy(self, value: Any, depth: int, *, objects: bool) -> Any:
        if type(value) in _CONSTANTS or isinstance(value, type) or id(value) in self._copies:
            return self._copies.get(id(value), value)
        copied, inside = value, partial(self._copy, depth=depth - 1, objects=objects)
        if isinstance(value, Tensor):
            copied = as_dtype(value, self._dtype)
        elif type(value) in _GENERATORS:
            copied = copy.deepcopy(value)
        elif isinstance(value, np.ndarray):
            copied = value.copy() if value.size <= MOST_NUMBERS else value
        elif isinstance(value, tuple) and depth:
            items = [inside(item) for item in value]
            if any(map(is_not, items, value)):
                copied = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        elif type(value) in _CONTAINERS and depth:
            copied = self._copies[id(value)] = value.copy()
            if not isinstance(value, set) and len(value) <= MOST_ITEMS:
                for place, item in value.items() if isinstance(value, dict) else enumerate(value):
                    copied[place] = inside(item)
        elif issubclass(type(value), nn.Module):  # not registered, such as a teacher in a list, and no weak proxy
            self._copies[id(value)] = value
            self.swap(value)
        elif objects and depth and hasattr(value, "__dict__") and not type(value).__module__.startswith(_LIBRARY):
            self._copies[id(value)] = value
            self.swap(value, depth - 1, objects=False)
        self._copies[id(value)] = copied
        return copied


@contextmanager
def isolated(dtype: torch.dtype | None, seed: int) -> Iterator[None]:
    """Gradients on, compilation off, global generators seeded, and they and defaults restored afterwards."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.enter_context(_Widen(dtype))
        random.seed(seed)
        np.random.seed(seed)
        other = torch.accelerator.is_available() and not torch.cuda.is_available()
        if other or torch.cuda.is_initialized():
            torch.manual_seed(seed)
        else:  # the seed that `torch.manual_seed` leaves for a GPU which is not in use yet could not be restored
            torch.default_generator.manual_seed(seed)
        yield


class _Widen(TorchFunctionMode):
    """Casts to a narrower floating-point dtype in the model's code go to the dtype of the probe."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        real, wide = (torch.float32, torch.float16, torch.bfloat16), dtype.to_complex()
        self.wider = dict.fromkeys(real, dtype) | dict.fromkeys((torch.complex64, torch.complex32), wide)
        self.casts = dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), dtype)
        self.casts |= dict.fromkeys((Tensor.cfloat, Tensor.chalf), wide)  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        wider, kwargs = self.wider, kwargs or {}
        if func in self.casts:
            return args[0].to(self.casts[func])
        if func is _GROUPED_MM and args[0].dtype == torch.float64 and args[1].ndim == 3 and args[0].ndim == 2:
            return _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        args = tuple([wider.get(a, a) if isinstance(a, torch.dtype) else a for a in args])
        return func(*args, **{k: wider.get(a, a) if isinstance(a, torch.dtype) else a for k, a in kwargs.items()})


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The products of blocks of rows with one matrix each, which torch does not compute in float64."""
    stops = [0, *ends.tolist()]
    parts = [a[start:stop] @ b[i] for i, (start, stop) in enumerate(pairwise(stops))]
    left = len(a) - stops[-1]  # zeros only if there are any: the graph has them as a constant beside the products
    return torch.cat([*parts, a.new_zeros(left, b.shape[-1])] if left else parts)


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in tuples, lists, mappings, dataclasses and plain objects, in order, each once."""
    return list({id(tensor): tensor for tensor in _search(value, NEST_DEPTH)}.values())


def _search(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    # No loss is computed from the keys and values for the next token.
    of_next = type(value).__name__.endswith("Cache")
    if not depth or of_next or isinstance(value, str | bytes | int | float | type | nn.Module):
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = [item for key, item in value.items() if key != "past_key_values"]
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        items = vars(value).values()
    for item in items:
        yield from _search(item, depth - 1)


def map_inputs(value: Any, change: Callable[[Tensor, str], Tensor], name: str = "", depth: int = NEST_DEPTH) -> Any:
    """The same nest with every tensor replaced by change(tensor, name of the argument, key or attribute)."""
    inside = partial(map_inputs, change=change, depth=depth - 1)
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, list | tuple):
        items = [inside(item, name=name) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update({key: inside(item, name=str(key)) for key, item in value.items()})
        return changed
    names = list(getattr(value, "__dict__", getattr(value, "__dataclass_fields__", ())))
    if depth > 0 and names and tensors_in(value):
        changed = copy.copy(value)
        for attribute in names:
            object.__setattr__(changed, attribute, inside(getattr(changed, attribute, None), name=attribute))
        return changed
    return value


def name_inputs(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names that the forward method gives to positional inputs, "" where it names none."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return [names[i] if i < len(names) else "" for i in range(len(args))]
