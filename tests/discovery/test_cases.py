"""find_groups on every hand-labelled model, over several seeds: no false row, no missed row, no trace."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steradian.discovery import find_groups

from cases import CASES, Case

SEEDS = range(5)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

parametrized = pytest.mark.parametrize(
    ("case", "seed"), [pytest.param(c, s, id=f"{c.name}-{s}") for c in CASES for s in SEEDS]
)


def _made(case: Case, seed: int) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(seed)
    model = case.build()
    return model, *case.inputs()


def _spec(spec: Any) -> Any:
    """Layouts compared as what they cut: JSON lists are tuples."""
    return tuple(spec) if isinstance(spec, list) else spec


def _check_labels(case: Case, model: nn.Module, groups: Any) -> None:
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    layouts = case.rows | {name: spec for names, spec in case.joint_rows.items() for name in names}
    found = {
        "layouts": {name: _spec(spec) for name, spec in groups.layouts.items()},
        "joint": set(map(frozenset, groups.joint)),
        "no effect": set(groups.no_effect),
        "frozen": set(groups.frozen),
        "rest": set(groups.rest),
    }
    expected = {
        "layouts": layouts,
        "joint": case.joint,
        "no effect": set(case.no_effect),
        "frozen": set(case.frozen),
        "rest": set(trainable) - set(layouts),
    }
    assert found == expected
    for names in (groups.rest, groups.no_effect, groups.frozen):
        assert len(names) == len(set(names))


def _check_param_groups(case: Case, model: nn.Module, groups: Any) -> None:
    """Each trainable parameter once, with the rows of its label; a joint set alone in its group."""
    names = {id(p): name for name, p in model.named_parameters()}
    param_groups = groups.param_groups()
    handed = [names[id(p)] for group in param_groups for p in group["params"]]
    assert sorted(handed) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    rows, joint = {}, {}
    for group in param_groups:
        members = [names[id(p)] for p in group["params"]]
        if group.get("joint"):
            joint[frozenset(members)] = _spec(group["rows"])
        elif "rows" in group:
            rows |= dict.fromkeys(members, _spec(group["rows"]))
    assert (rows, joint) == (case.rows, case.joint_rows)


@parametrized
def test_the_rows_are_those_of_the_label_and_no_trace_is_left(case: Case, seed: int):
    model, args, kwargs = _made(case, seed)
    unchanged = _trace(model, (args, kwargs))
    groups = find_groups(model, *args, **kwargs)
    unchanged()
    _check_labels(case, model, groups)
    _check_param_groups(case, model, groups)


def _trace(model: nn.Module, inputs: Any) -> Callable[[], None]:
    """Remembers everything that a look at a model could change; the answer checks that it did not."""
    for i, p in enumerate(model.parameters()):
        if p.requires_grad and i % 2:
            p.grad = torch.randn_like(p)
    modules = list(model.named_modules())
    tensors = {f"parameter {name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    tensors |= {f"buffer {name}": b for name, b in model.named_buffers(remove_duplicate=False)}
    tensors |= {f"input {i}": t for i, t in enumerate(_inputs(inputs))}
    grads = {name: p.grad for name, p in model.named_parameters()}
    before = {name: _picture(t) for name, t in (tensors | {f"grad {n}": g for n, g in grads.items()}).items()}
    training = {name: module.training for name, module in modules}
    hooks = {(name, kind): list(getattr(module, kind)) for name, module in modules for kind in _HOOKS}
    generators = torch.get_rng_state(), random.getstate()

    def unchanged() -> None:
        assert list(model.named_modules()) == modules
        after = {f"parameter {name}": p for name, p in model.named_parameters(remove_duplicate=False)}
        after |= {f"buffer {name}": b for name, b in model.named_buffers(remove_duplicate=False)}
        after |= {f"input {i}": t for i, t in enumerate(_inputs(inputs))}
        assert {name: id(t) for name, t in after.items()} == {name: id(t) for name, t in tensors.items()}
        now = {name: p.grad for name, p in model.named_parameters()}
        assert {name: id(g) for name, g in now.items()} == {name: id(g) for name, g in grads.items()}
        pictures = {name: _picture(t) for name, t in (after | {f"grad {n}": g for n, g in now.items()}).items()}
        assert [name for name in before if not _same(before[name], pictures[name])] == []
        assert {name: module.training for name, module in modules} == training
        assert {key: list(getattr(dict(modules)[key[0]], key[1])) for key in hooks} == hooks
        assert torch.equal(torch.get_rng_state(), generators[0])
        assert random.getstate() == generators[1]

    return unchanged


def _inputs(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _inputs(list(value.values()))
    return [t for v in value for t in _inputs(v)] if isinstance(value, list | tuple) else []


def _picture(t: Tensor | None) -> tuple | None:
    if t is None:
        return None
    return t.detach().clone(), t.requires_grad, t.dtype, t.data_ptr(), t.grad is None if t.is_leaf else None


def _same(a: tuple | None, b: tuple | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a[0], b[0]) and a[1:] == b[1:]
