"""find_groups on every hand-labelled model, over several seeds: no false row, no missed row, the model unchanged."""

from typing import Any

import pytest
import torch
from torch import nn

from discovery.unchanged import remember
from steradian.discovery import find_groups

from cases import CASES, Case

SEEDS = range(5)
FEW_SEEDS = 1
"""Seeds that `make test` runs; `make test-all` runs the others too."""

parametrized = pytest.mark.parametrize(
    ("case", "seed"),
    [
        pytest.param(c, s, id=f"{c.name}-{s}", marks=[pytest.mark.slow] if s >= FEW_SEEDS else [])
        for c in CASES
        for s in SEEDS
    ],
)


def _made(case: Case, seed: int) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(seed)
    model = case.build()
    return model, *case.inputs()


def _spec(spec: Any) -> Any:
    """Specs as tuples: JSON gives lists."""
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
    rows, joint, layouts = {}, {}, groups.layouts
    for group in param_groups:
        members = [names[id(p)] for p in group["params"]]
        if group.get("joint"):
            joint[frozenset(members)] = _spec(group["rows"])
        elif group.get("rows") is not None:
            rows |= dict.fromkeys(members, _spec(group["rows"]))
    assert (rows, joint) == (case.rows, case.joint_rows)
    # A model without rows says so: its only group has "rows": None, where the rest of another has no such key.
    assert any("rows" in group and group["rows"] is None for group in param_groups) == (bool(handed) and not layouts)


@parametrized
def test_rows_equal_the_labels_and_the_model_is_unchanged(case: Case, seed: int):
    model, args, kwargs = _made(case, seed)
    check_unchanged = remember(model, (args, kwargs))
    groups = find_groups(model, *args, **kwargs)
    check_unchanged()
    model = getattr(model, "_orig_mod", model)  # names come back without this prefix
    _check_labels(case, model, groups)
    _check_param_groups(case, model, groups)
