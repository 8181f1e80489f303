"""Clear errors for models and inputs that cannot be probed, and the first pass, which finds them out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ..groups import is_flattened, is_sharded
from .probe import Prober, Reading
from .values import tensors_in

__all__ = ["check_model", "first_pass", "in_words"]

_HALF = (torch.float16, torch.bfloat16)


def check_model(model: nn.Module) -> None:
    """Raise on what is no model to probe.

    Raises:
        TypeError: not an eager `nn.Module`.
        ValueError: no parameters, or parameters without values.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"the submodule {name!r}" if name else "model"
            raise TypeError(f"{which} is a TorchScript module, whose tensors cannot be swapped; pass the eager module")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError(f"the model ({type(model).__name__}) has no parameters, so there is nothing to group")
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} is not initialized yet; run the lazy model once on a batch first")
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values; call model.to_empty first")
        if parameter.requires_grad and parameter.layout != torch.strided:
            raise ValueError(
                f"parameter {name!r} is sparse, and rows are cut from dense tensors; pass the dense parameter"
            )
        if is_flattened(parameter):
            raise ValueError(
                f"parameter {name!r} is a piece of what FullyShardedDataParallel made flat, where there are no rows; "
                "shard with fully_shard, after the rows are found"
            )
        if is_sharded(parameter):
            raise ValueError(
                f"parameter {name!r} is sharded over several processes; find the rows before fully_shard, then "
                "groups.of(model) has them for the sharded parameters"
            )


def first_pass(prober: Prober, inputs: Any) -> Reading:
    """One pass at the model's own point, in float64 if the model bears it, else in float32 or in its own types.

    Raises:
        ValueError: inputs on another device, NaN outputs, or no output that depends on a parameter.
        RuntimeError: the model raised, chained from what it raised.
        torch.OutOfMemoryError: as the model raised it.
    """
    if any(t.is_meta for t in tensors_in(inputs)):
        raise ValueError("an input is on the meta device and has no values; pass tensors with values")
    reading = _attempt(prober, inputs)
    if reading.outputs and not any(t.numel() for t in reading.outputs):
        raise ValueError("the model's output holds no numbers on these inputs; pass a batch with at least two samples")
    if not reading.outputs or not reading.tables or all(reading.effect(name) == 0 for name in prober.trainable):
        _check_differentiable(prober, reading)
    if any(bool(t.isnan().any()) for t in reading.outputs):
        raise ValueError(
            "the model's output contains NaN on these inputs, so nothing can be measured; check the inputs for NaN "
            "and infinities and the parameters for divergence"
        )
    if not reading.finite:
        raise ValueError("the gradients of the model are not finite on these inputs; check them for NaN and infinities")
    return reading


class _Pairs:
    """Looks for batch normalizations of two values per channel, of which nothing is left but their order."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hooks for one forward pass."""
        handles = [
            module.register_forward_pre_hook(partial(self._look, name))
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and module.training and args[0].ndim > 1 and args[0].numel() == 2 * args[0].shape[1]:
            self.found[name] = None

    def finish(self, outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> None:
        """All is seen."""


def _attempt(prober: Prober, inputs: Any) -> Reading:
    try:
        pairs = _Pairs()
        reading = prober.read(prober.own, seed=0, recorder=pairs)
        if pairs.found:
            prober.remarks.append(
                "batch normalization of two values per channel keeps nothing but their order, so that weights in front "
                f"of it have no effect to measure; pass a larger batch: {', '.join(pairs.found)}"
            )
        return reading
    except torch.OutOfMemoryError as error:
        error.add_note("find_groups runs the model in float64, which takes twice its memory: pass a smaller batch")
        raise
    except Exception:  # whatever the model cannot do in float64, its own types decide
        single = _attempt_single(prober)
        if single is not None:
            return single
        try:
            prober.use(None)
            return prober.read(prober.own, seed=0)
        except Exception as error:
            raise _translate(prober, inputs, error) from error


def _attempt_single(prober: Prober) -> Reading | None:
    """In float32, if that is better than the model's own half precision, which tells invariance up to some percent."""
    if not any(p.dtype in _HALF for p in prober.parameters.values()):
        return None
    try:
        prober.use(torch.float32)
        return prober.read(prober.own, seed=0)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # as in float64
        return None


def _translate(prober: Prober, inputs: Any, error: Exception) -> Exception:
    model_on = {str(p.device) for p in prober.model.parameters()}
    given_on = {str(t.device) for t in tensors_in(inputs)}
    if given_on and not given_on <= model_on:
        return ValueError(
            f"the inputs are on {', '.join(sorted(given_on))} but the model is on {', '.join(sorted(model_on))}; "
            f"move the inputs with .to({sorted(model_on)[0]!r})"
        )
    hint = "call the model on these inputs yourself to see where"
    if "more than 1 value per channel" in str(error):
        hint = "batch normalization needs more than one sample: pass a larger batch"
    return RuntimeError(f"on these inputs the model raised {in_words(error)}; {hint}")


def in_words(error: Exception) -> str:
    """An exception in one line.

    >>> in_words(KeyError("x"))
    "KeyError ('x')"
    """
    return f"{type(error).__name__} ({(str(error).strip().splitlines() or ['no message'])[0]})"


def _check_differentiable(prober: Prober, reading: Reading) -> None:
    if prober.backwards:
        return
    what = "no floating-point tensor" if not reading.outputs else "no tensor that requires a gradient"
    raise ValueError(
        f"the model's output holds {what}, so no derivative can be taken; return the floating-point outputs that "
        "the loss is computed from, without detach() or torch.no_grad()"
    )
