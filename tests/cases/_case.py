"""What a hand-labelled model is, and the few helpers that its definitions share."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Spec = str | int | tuple[str | int, ...]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model, an example batch and the truth about its parameters; what is not named here is rest.

    `rows`: parameters that are invariant on their own, with their finest layout.
    `joint_rows`: sets that are invariant only together, with their finest common layout.
    `no_effect`: parameters whose small changes leave the output alone.
    `facts`: invariances that are true but stay in the rest: sets of gains and biases, sets that overlap
    a smaller joint one, model-wide sets, functions of the weight whose autograd gradient is not theirs.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    rows: dict[str, Spec] = field(default_factory=dict)
    joint_rows: dict[frozenset[str], Spec] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    facts: frozenset[frozenset[str]] = frozenset()

    @property
    def joint(self) -> set[frozenset[str]]:
        return set(self.joint_rows)


def case(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], Inputs],
    *,
    rows: Mapping[str, Spec] | None = None,
    joint: Mapping[str, Spec] | None = None,
    no_effect: str = "",
    frozen: str = "",
    facts: tuple[str, ...] = (),
) -> Case:
    """A Case whose sets of names are written as one string, separated by spaces."""
    return Case(
        name=name,
        build=build,
        inputs=inputs,
        rows=dict(rows or {}),
        joint_rows={frozenset(names.split()): spec for names, spec in (joint or {}).items()},
        no_effect=frozenset(no_effect.split()),
        frozen=frozenset(frozen.split()),
        facts=frozenset(frozenset(names.split()) for names in facts),
    )


@dataclass(frozen=True)
class PairCase:
    """A model, an example batch and all of its pairs: the parameters of both sides, and the number of sets."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    pairs: dict[tuple[frozenset[str], frozenset[str]], int]


def pair_case(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], Inputs], pairs: Mapping[str, int]
) -> PairCase:
    """A PairCase whose sides are written as "a.weight a.bias | b.weight"."""
    sides = {tuple(frozenset(side.split()) for side in both.split("|")): n for both, n in pairs.items()}
    return PairCase(name, build, inputs, {(a, b): n for (a, b), n in sides.items()})


def net(**layers: nn.Module) -> nn.Sequential:
    """A chain of named layers."""
    return nn.Sequential(OrderedDict(layers))


class Apply(nn.Module):
    """A function as a layer without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Custom(nn.Module):
    """Named layers and parameters, and a forward function that takes the module first."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Inputs]:
    """Inputs: one normal tensor."""
    return lambda: ((torch.randn(*shape).to(dtype),), {})


def tokens(*shape: int, vocabulary: int = 11) -> Callable[[], Inputs]:
    """Inputs: one tensor of token numbers."""
    return lambda: ((torch.randint(vocabulary, shape),), {})


def parameter(*shape: int) -> nn.Parameter:
    """A normal parameter."""
    return nn.Parameter(torch.randn(*shape))


def freeze(model: nn.Module, *names: str) -> nn.Module:
    """The model with these parameters not trained."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def zero(model: nn.Module, *names: str) -> nn.Module:
    """The model with these parameters initialized to zero."""
    for name in names:
        nn.init.zeros_(model.get_parameter(name))
    return model


def fill(tensor: Tensor, value: float) -> Tensor:
    """The tensor with every entry set to one value."""
    return nn.init.constant_(tensor, value)


images = randn(6, 3, 8, 8)
vectors = randn(10, 6)
sequences = randn(3, 5, 8)
