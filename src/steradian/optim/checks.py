"""Checks of the settings and gradients of a param group: an error names the value and what would be right."""

import functools
import logging
import math
from collections.abc import Callable, Container
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from steradian.groups import Layout, is_flattened

logger = logging.getLogger("steradian")

Options = dict[str, Any]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NAMES = "float32, float64, bfloat16 or float16"


def check(fine: bool, name: str, value: object, expected: str) -> None:
    """Raise a ValueError that names the argument, the value and what would be right."""
    if not fine:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def is_number(value: Any, below: float = math.inf) -> bool:
    """Whether it is a real number, of Python or numpy, with 0 ≤ value < below."""
    return isinstance(value, Real) and 0 <= float(value) < below


_NUMBER = (is_number, "a number ≥ 0")
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("eps", "weight_decay", "wd_ratio", "momentum", "dampening", "rest_lr"), _NUMBER),
    "beta": (lambda value: is_number(value) and value <= 1, "in [0, 1]"),
    "beta2": (lambda value: is_number(value, below=1), "a number in [0, 1)"),
    "betas": (
        lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(is_number(x, below=1) for x in value),
        "two numbers in [0, 1)",
    ),
    "clip": (lambda value: isinstance(value, Real) and float(value) > 0, "a number > 0"),
    "without": (
        lambda value: isinstance(value, str) and set(value) <= set("abc") and len(set(value)) == len(value),
        'letters out of "abc", each at most once',
    ),
    "corrected_decay": (lambda value: isinstance(value, bool), "True or False"),
    "fused": (lambda value: value is None or isinstance(value, bool), "None, True or False"),
    "direction": (("gradient", "adam", "muon").__contains__, '"gradient" or "adam" or "muon"'),
    "spread": (("equal", "rms").__contains__, '"equal" or "rms"'),
    "rest": (("sgd", "adamw").__contains__, '"sgd" or "adamw"'),
}


def check_settings(group: Options, names: Container[str]) -> None:
    """The settings of an optimizer in a param group; letters are put in order, and the first rate is kept."""
    for name, (fine, expected) in _SETTINGS.items():
        check(name not in names or fine(group[name]), name, group.get(name), expected)
    check_rate(group)
    for name in ("amsgrad", "differentiable"):  # in a param group for torch's optimizers, or in a state of theirs
        check(not group.get(name), name, group.get(name), "False: there is no such step here")
    if "without" in names:
        group["without"] = "".join(sorted(group["without"]))
    if group.get("corrected_decay") and group.get("rows") is not None:
        first = group.setdefault("first_lr", float(group["lr"]))
        known = first > 0 or "max_lr" in group or "initial_lr" in group
        check(known, "lr", group["lr"], "> 0 with corrected_decay, or give the group max_lr, its largest rate")


def check_rate(group: Options) -> None:
    """lr: a finite number ≥ 0, or a tensor with one; that of an accelerator is not read."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        check(lr.numel() == 1 and not lr.is_complex(), "lr", lr, "a number or a tensor with one number")
    known = not isinstance(lr, Tensor) or lr.device.type == "cpu"
    check(not known or _NUMBER[0](lr.item() if isinstance(lr, Tensor) else lr), "lr", lr, _NUMBER[1])


def check_rows(group: Options, *, fixed_radius: bool = False) -> None:
    """The layout of a group cuts its parameters, and rows of a fixed radius have at least two numbers."""
    params, joint = group["params"], group.get("joint")
    if group.get("rows") is None:
        check(not joint, "joint", joint, 'given together with "rows"')
        return
    layout = Layout(group["rows"])
    for fails, kind, remedy in (
        (is_flattened, "parameters that FullyShardedDataParallel made flat", "fully_shard keeps their rows"),
        (is_lazy, "parameters of lazy modules that have no shape yet", "run the model once first"),
        (torch.is_complex, "complex parameters", "torch.view_as_real makes them real"),
    ):
        if any(map(fails, params)):
            raise ValueError(f"rows must be None for {kind}, got {layout.spec!r}: {remedy}")
    group["rows"] = layout.spec
    shapes = [tuple(param.shape) for param in params]
    sizes = [layout.size(shape) for shape in shapes]
    # ZeroRedundancyOptimizer hands single parameters to ranks: rows of a part of the set are not invariant.
    check(not joint or len(shapes) > 1, "joint", len(shapes), "for two parameters or more, which stay together")
    if joint and len({n for n, _ in sizes}) > 1:
        raise ValueError(f"rows {layout.spec!r} cut the joint shapes {shapes} into different numbers of rows")
    short = [shape for shape, (n, d) in zip(shapes, sizes, strict=True) if n and d == 1 and not joint]
    if short and fixed_radius:
        raise ValueError(
            f"rows must have at least two numbers each on the unit sphere, got {layout.spec!r} for the shape "
            f"{short[0]}: a row of one number would become 1 or -1; leave this parameter without rows"
        )
    if short:
        why = "rows of one number, whose direction is only a sign: such parameters are best left without rows"
        warn_once("rows=%r cuts a parameter of shape %s into %s", str(layout.spec), short[0], why)


@functools.cache
def warn_once(says: str, *values: object) -> None:
    """Log a warning once: somebody may have an optimizer for each of many parameters."""
    logger.warning(says, *values)


def check_gradients(group: Options, optimizer: str, *, sparse: bool) -> None:
    """Gradients that this optimizer can step on; `sparse`: those of parameters without rows may be sparse."""
    has_rows = group.get("rows") is not None
    for param in group["params"]:
        if param.grad is None:
            continue
        if param.grad.layout != torch.strided and (has_rows or not sparse):
            what = f"dense gradients{' on rows' if sparse else ''}, got {param.grad.layout}"
            raise RuntimeError(f"{optimizer} needs {what}; torch.optim.SparseAdam exists")
        for dtype in (param.dtype, param.grad.dtype):
            if dtype not in _DTYPES and not dtype.is_complex:
                raise RuntimeError(f"{optimizer} needs parameters and gradients of {_NAMES}, got {dtype}")
