"""Checks of the settings and gradients of a param group: an error names the value and what would be right."""

import functools
import logging
import math
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


def is_number(value: object) -> bool:
    """A real number, of Python or numpy."""
    return isinstance(value, Real)


def check_rate(group: Options) -> None:
    """lr: a finite number ≥ 0, or a tensor with one; that of an accelerator is not read."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        check(lr.numel() == 1 and not lr.is_complex(), "lr", lr, "a number or a tensor with one number")
        check(lr.device.type != "cpu" or 0 <= lr.item() < math.inf, "lr", lr, "a number ≥ 0")
    else:
        check_numbers(group, "lr")


def check_numbers(group: Options, *names: str) -> None:
    """Finite numbers ≥ 0."""
    for name in names:
        check(is_number(group[name]) and 0 <= group[name] < math.inf, name, group[name], "a number ≥ 0")


def check_betas(group: Options) -> None:
    """Two numbers in [0, 1)."""
    betas = group["betas"]
    fine = isinstance(betas, list | tuple) and len(betas) == 2
    fine = fine and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
    check(fine, "betas", betas, "two numbers in [0, 1)")


def check_letters(group: Options) -> None:
    """`without`: letters out of "abc", which are put in order."""
    without = group["without"]
    fine = isinstance(without, str) and set(without) <= set("abc") and len(set(without)) == len(without)
    check(fine, "without", without, 'letters out of "abc", each at most once')
    group["without"] = "".join(sorted(without))


def check_corrected(group: Options) -> None:
    """`corrected_decay`: the rate at which the group was made is kept, as torch's schedulers do."""
    corrected = group["corrected_decay"]
    check(isinstance(corrected, bool), "corrected_decay", corrected, "True or False")
    if corrected and group.get("rows") is not None:
        group.setdefault("initial_lr", float(group["lr"]))


def check_rows(group: Options, *, fixed_radius: bool = False) -> None:
    """The layout of a group cuts its parameters, and rows of a fixed radius have at least two numbers."""
    params, joint = group["params"], group.get("joint")
    if group.get("rows") is None:
        check(not joint, "joint", joint, 'given together with "rows"')
        return
    layout = Layout(group["rows"])
    spec = f"got {layout.spec!r}"
    if any(map(is_flattened, params)):
        # Cut as they are now, every number would be a row.
        raise ValueError(
            f"rows must be None for parameters that FullyShardedDataParallel made flat, {spec}: "
            "fully_shard keeps their rows"
        )
    if any(map(is_lazy, params)):
        raise ValueError(
            f"rows must be None for parameters of lazy modules that have no shape yet, {spec}: run the model once first"
        )
    if any(param.is_complex() for param in params):
        raise ValueError(f"rows must be None for complex parameters, {spec}: torch.view_as_real makes them real")
    group["rows"] = layout.spec
    shapes = [tuple(param.shape) for param in params]
    sizes = [layout.size(shape) for shape in shapes]
    if joint and len(shapes) < 2:
        # ZeroRedundancyOptimizer hands single parameters to ranks: rows of a part of the set are not invariant.
        raise ValueError(f"joint must be for two parameters or more, which stay together, got {len(shapes)}")
    if joint and len({n for n, _ in sizes}) > 1:
        raise ValueError(f"rows {layout.spec!r} cut the joint shapes {shapes} into different numbers of rows")
    short = [shape for shape, (n, d) in zip(shapes, sizes, strict=True) if n and d == 1 and not joint]
    if short and fixed_radius:
        raise ValueError(
            f"rows must have at least two numbers each on the unit sphere, {spec} for the shape {short[0]}: "
            "a row of one number would become 1 or -1; leave this parameter without rows"
        )
    if short:
        _warn_of_short_rows(str(layout.spec), short[0])


@functools.cache
def _warn_of_short_rows(spec: str, shape: tuple[int, ...]) -> None:
    logger.warning(
        "rows=%r cuts a parameter of shape %s into rows of one number, whose direction is only a sign: such parameters "
        "are best left without rows",
        *(spec, shape),
    )


def check_unsupported(group: Options) -> None:
    """Settings of torch's optimizers, in a param group or in a state of theirs, that would change the step."""
    for name in ("amsgrad", "differentiable"):
        check(not group.get(name), name, group.get(name), "False: there is no such step here")


def check_gradients(group: Options, optimizer: str, *, sparse: bool) -> None:
    """Gradients that this optimizer can step on; `sparse`: those of parameters without rows may be sparse."""
    has_rows = group.get("rows") is not None
    for param in group["params"]:
        if param.grad is None:
            continue
        if param.grad.layout != torch.strided and (has_rows or not sparse):
            raise RuntimeError(
                f"{optimizer} needs dense gradients{' on rows' if sparse else ''}, got {param.grad.layout}; "
                "torch.optim.SparseAdam exists"
            )
        for dtype in (param.dtype, param.grad.dtype):
            if dtype not in _DTYPES and not dtype.is_complex:
                raise RuntimeError(f"{optimizer} needs parameters and gradients of {_NAMES}, got {dtype}")
