"""A model under probe leaves no trace: its tensors are swapped for copies, and everything is put back.

The model runs on private copies of its parameters, buffers and tensor attributes, so that running statistics,
gradients, hooks on parameters and optimizer references never see a probe. What the forward pass does to the
attributes of a module (counters, caches, a computed `weight`) is undone, also when it raises.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from .holdings import Holdings, swap_value

__all__ = ["Leaves", "as_dtype", "make_leaves", "quiet", "swapped", "unwrap"]

Leaves = dict[str, nn.Parameter]

_OWN = {"_parameters", "_buffers", "_modules"}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_COMPLEX_CASTS = {Tensor.cfloat, Tensor.chalf}  # type: ignore[attr-defined]
_GROUPED_MM = getattr(torch, "_grouped_mm", None)
_NARROW = {torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32}


def unwrap(model: nn.Module) -> nn.Module:
    """The module to call: data-parallel wrappers synchronize gradients, which a probe must not do."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A private copy in the dtype of the probe; integers and booleans keep theirs."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone()
    return tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype, copy=True)


def make_leaves(model: nn.Module, dtype: torch.dtype | None) -> Leaves:
    """A private leaf for each parameter, by its first name; tied parameters share one."""
    return {
        name: nn.Parameter(as_dtype(parameter, dtype), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }


@contextmanager
def swapped(
    model: nn.Module, leaves: Mapping[str, nn.Parameter], *, dtype: torch.dtype | None, training: bool
) -> Iterator[None]:
    """Run the model on the leaves and on copies of everything else; restore each module afterwards."""
    twins: dict[int, Tensor] = {id(p): leaves[name] for name, p in model.named_parameters()}
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    owned = [module.__dict__[store] for module in modules for store in _OWN]
    stores = [(store, store.copy()) for store in owned]
    holdings = Holdings({k: v for k, v in of.items() if k not in _OWN} for of in attributes)

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = as_dtype(tensor, dtype)
        return twins[id(tensor)]

    try:
        holdings.swap(twin)
        for module in modules:
            _swap(module, twin)
        if training:
            _train(model)
        yield
    finally:
        for module, of_module in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(of_module)
        for store, content in stores:
            store.clear()
            store.update(content)
        holdings.restore()


def _train(model: nn.Module) -> None:
    """Training mode as the model understands it: what it keeps in eval mode stays there.

    In a model that is in training mode already, a submodule in eval mode was put there on purpose; a class
    with a `train` of its own (frozen statistics) may not have been asked yet.
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


def _swap(module: nn.Module, twin: Callable[[Tensor], Tensor]) -> None:
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                store[name] = twin(tensor)  # type: ignore[assignment]
    for name, value in list(module.__dict__.items()):
        if name not in _OWN:
            module.__dict__[name] = swap_value(value, twin)
    if isinstance(module, nn.SyncBatchNorm):
        # Its statistics over one process are those of a plain batch norm, which also runs on a CPU.
        module.__dict__["forward"] = partial(_BatchNorm.forward, module)


@contextmanager
def quiet(dtype: torch.dtype | None) -> Iterator[None]:
    """Gradients on, compilation off, generators and defaults restored afterwards."""
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
    """Casts to a narrower floating-point type that stand in the model's code go to the probe's type."""

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
    """The products of blocks of rows with a matrix each, which torch does not compute in float64."""
    stops = [0, *ends.tolist()]
    parts = [a[start:stop] @ b[i] for i, (start, stop) in enumerate(pairwise(stops))]
    left = len(a) - stops[-1]
    return torch.cat([*parts, a.new_zeros(left, b.shape[-1])] if left else parts)


def _any_narrow(values: Iterable[object]) -> bool:
    for value in values:  # noqa: SIM110 - every operation of the model comes by, and any() takes twice as long
        if isinstance(value, torch.dtype) and value in _NARROW:
            return True
    return False
