"""One training as plain data, with a permanent key; and names as people type them."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Self

from steradian.lab.registry import SCHEDULES

__all__ = ["PRECISIONS", "Config", "match_name", "match_names"]

PRECISIONS = ("bf16", "float32")
"""Of forward and backward passes: autocast to bfloat16, or float32 throughout."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the result of a training depends on, except the machine.

    >>> Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3).key
    'resnet20-bn-cifar10-adam-s0-...'
    """

    model: str  #: name of a network in `registry.NETWORKS`
    data: str  #: name of the data set
    method: str  #: name of a method in `registry.METHODS`
    lr: float  #: rate on the rows (of all parameters, if `rest_lr` is None)
    norm: str = "bn"  #: one of `models.NORMS`; "": the network has only its own
    weight_decay: float = 0.0  #: λ
    betas: tuple[float, float] = (0.9, 0.99)  #: β1 and β2 of Adam and its variants
    momentum: float = 0.9  #: of SGD-M
    rest_lr: float | None = None  #: rate of the parameters without rows; None: `lr`
    epochs: int = 405  #: number of epochs
    milestones: tuple[int, ...] = (135, 225, 315)  #: where the schedule "steps" multiplies the rate by `gamma`
    gamma: float = 0.1  #: factor of the rate at milestones
    batch_size: int = 128  #: images in a batch
    seed: int = 0  #: of initialization, order and augmentation
    precision: str = "bf16"  #: "bf16" (autocast) or "float32"
    width: int | None = None  #: channels of the first stage; None: the paper's
    start: str | None = None  #: key of the finished training whose weights this one starts from; None: a fresh network
    released: bool = False  #: the network is built as in the paper's released code (see `models.build`)
    schedule: str = "steps"  #: name of a schedule in `registry.SCHEDULES`
    warmup: int = 0  #: epochs in which the rate rises linearly, before the schedules "cosine", "linear" and "constant"
    plugin: str = ""  #: hash of the plugins that it uses, as `registry.plugin_of` gives it

    def __post_init__(self) -> None:
        # 1, 1.0 and numpy's 1.0 are the same rate and must give the same key.
        kinds: dict[str, type] = dict.fromkeys(("lr", "weight_decay", "momentum", "gamma", "betas"), float)
        kinds |= dict.fromkeys(("epochs", "batch_size", "seed", "milestones"), int)
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                vars(self)[name] = tuple(map(kind, value)) if name in ("betas", "milestones") else kind(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} has a value of the wrong kind, {value!r}") from error
        checks = {
            "lr": (0 < self.lr < math.inf, "positive and finite"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "betas": (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "β1 and β2 in [0, 1)"),
            "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch_size": (self.batch_size >= 2, "at least 2"),
            "seed": (self.seed >= 0, "at least 0"),
            "warmup": (0 <= self.warmup < self.epochs, f"at least 0 and less than {self.epochs} epochs"),
            "precision": (self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def key(self) -> str:
        """A readable name that is different for different configurations."""
        # Fields at their defaults are left out, so that a field added later changes no key. Defaults must never change.
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        words = f"{self.model} {self.norm} {self.data} {self.method} s{self.seed}".lower()
        return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + "-" + digest[:8]

    @property
    def column(self) -> str:
        """Network and data: the column of a table."""
        return f"{self.model} {self.data}"

    @property
    def setting(self) -> str:
        """The key without the seed: the same for trainings that differ only by their seed."""
        return replace(self, seed=0).key

    def rate_factor(self, epoch: int) -> float:
        """The factor of the rate in an epoch, counted from 0.

        >>> config = Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3)
        >>> config.rate_factor(134), config.rate_factor(135)
        (1.0, 0.1)
        """
        return SCHEDULES[self.schedule](self, epoch)

    def scaled(self, epochs: int) -> Self:
        """The same training with another number of epochs, and milestones scaled with it.

        >>> Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3).scaled(9).milestones
        (3, 5, 7)
        """
        # The first epoch always has the initial rate.
        milestones = tuple(m and max(1, round(m * epochs / self.epochs)) for m in self.milestones)
        return replace(self, epochs=epochs, milestones=milestones)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, also after JSON; unknown fields raise a ValueError."""
        if unknown := sorted(values.keys() - {f.name for f in fields(cls)}):
            raise ValueError(f"a configuration has unknown fields: {', '.join(unknown)}")
        return cls(**values)


def match_name(name: str, known: Iterable[str]) -> str | None:
    """The known name with the same letters and digits; None if there is none.

    >>> known = ("Adam", "AdamW†", "Adam w/o (ab)")
    >>> [match_name(name, known) for name in ("adamw", "Adam-wo-ab", "Adam without (ab)", "Lion")]
    ['AdamW†', 'Adam w/o (ab)', 'Adam w/o (ab)', None]
    """
    found = [each for each in known if _bare(each) == _bare(name)]
    return name if name in found else next(iter(found), None)


def _bare(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower()).replace("without", "wo") or text


def match_names(what: str, names: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """The known names that match, and all of them if none is given; an unknown name raises a ValueError."""
    known = list(known)
    found = {name: match_name(name, known) for name in names or known}
    if unknown := [name for name, match in found.items() if match is None]:
        near = {_bare(each): each for each in known}
        meant = [repr(near[each]) for name in unknown for each in get_close_matches(_bare(name), near, 1)]
        start = f"did you mean {', '.join(meant)}? " if meant else ""
        there = "; ".join(known) if any("," in name for name in known) else ", ".join(known)
        raise ValueError(f"{start}{what} must be among {there}, got {', '.join(unknown)}")
    return [match for match in found.values() if match is not None]
