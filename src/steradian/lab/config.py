"""One training as plain data, with a permanent key; and names as people type them."""

import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Self

__all__ = ["METHODS", "PRECISIONS", "Config", "match_name", "match_names"]

METHODS = (
    "SGD-M",
    "Adam",
    "AdamW†",
    "AdamG†",
    "Adam w/o (a)",
    "Adam w/o (ab)",
    "Adam w/o (abc)",
    "SGD",
    "AdaGradG",
    "AdaGrad",
)
"""Rows of the paper's tables, SGD-M, and the three schemes of Section 3.3."""
PRECISIONS = ("bf16", "float32")
"""Of forward and backward passes: autocast to bfloat16, or float32 throughout."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the result of a training depends on, except the machine.

    Attributes:
        model: one of `models.MODELS`.
        data: name of the data set.
        method: one of `METHODS`.
        lr: rate on the rows (of all parameters, if `rest_lr` is None).
        norm: one of `models.NORMS`.
        weight_decay: λ.
        betas: β1 and β2 of Adam and its variants.
        momentum: of SGD-M.
        rest_lr: rate of the parameters without rows; None: `lr`.
        epochs: number of epochs.
        milestones: epochs before which the rate is multiplied by `gamma`.
        gamma: factor of the rate at milestones.
        batch_size: images in a batch.
        seed: of initialization, order and augmentation.
        precision: "bf16" (autocast) or "float32".
        width: channels of the first stage; None: the paper's.
        start: key of the finished training whose weights this one starts from; None: a fresh network.
        released: the network is built as in the paper's released code (see `models.build`).

    >>> Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3).key
    'resnet20-bn-cifar10-adam-s0-...'
    """

    model: str
    data: str
    method: str
    lr: float
    norm: str = "bn"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    momentum: float = 0.9
    rest_lr: float | None = None
    epochs: int = 405
    milestones: tuple[int, ...] = (135, 225, 315)
    gamma: float = 0.1
    batch_size: int = 128
    seed: int = 0
    precision: str = "bf16"
    width: int | None = None
    start: str | None = None
    released: bool = False

    def __post_init__(self) -> None:
        # 1, 1.0 and numpy's 1.0 are the same rate and must give the same key.
        for name in ("lr", "weight_decay", "momentum", "gamma", "betas", "rest_lr"):
            self._convert(name, _number, "a finite number")
        for name in ("epochs", "batch_size", "seed", "milestones", "width"):
            self._convert(name, operator.index, "a whole number")
        self._check("betas", len(self.betas) == 2, "β1 and β2")
        self._check("betas", all(0 <= beta < 1 for beta in self.betas), "in [0, 1)")
        self._check("method", self.method in METHODS, f"one of {', '.join(METHODS)}")
        self._check("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        self._check("epochs", self.epochs >= 1, "at least 1")
        self._check("batch_size", self.batch_size >= 2, "at least 2")
        self._check("seed", self.seed >= 0, "at least 0")
        self._check("lr", self.lr > 0, "positive")
        self._check("rest_lr", self.rest_lr is None or self.rest_lr > 0, "positive")
        self._check("weight_decay", self.weight_decay >= 0, "at least 0")
        self._check("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        self._check("gamma", self.gamma > 0, "positive")
        self._check("width", self.width is None or self.width >= 1, "at least 1")

    def _convert(self, name: str, convert: Callable[[Any], float], expected: str) -> None:
        """Make a field a plain Python number, or a tuple of them; None stays None if it is the default."""
        value = getattr(self, name)
        try:
            if value is not None or name not in ("rest_lr", "width"):
                value = tuple(map(convert, value)) if name in ("betas", "milestones") else convert(value)
        except (TypeError, ValueError):
            self._check(name, False, expected)
        object.__setattr__(self, name, value)

    def _check(self, name: str, valid: bool, expected: str) -> None:
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
        return self.gamma ** sum(epoch >= milestone for milestone in self.milestones)

    def scaled(self, epochs: int) -> Self:
        """The same training with another number of epochs, and milestones scaled with it.

        >>> Config(model="ResNet20", data="cifar10", method="Adam", lr=1e-3).scaled(9).milestones
        (3, 5, 7)
        """
        # The first epoch always has the initial rate.
        milestones = tuple(m and max(1, round(m * epochs / self.epochs)) for m in self.milestones)
        return replace(self, epochs=epochs, milestones=milestones)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is unknown or missing.
        """
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is MISSING}
        wrong = sorted((set(values) - known) | (needed - set(values)))
        if wrong:
            raise ValueError(f"a configuration has unknown or missing fields: {', '.join(wrong)}")
        return cls(**values)


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def match_name(name: str, known: Iterable[str]) -> str | None:
    """The known name with the same letters and digits; None if there is none.

    >>> known = ("Adam", "AdamW†", "Adam w/o (ab)")
    >>> [match_name(name, known) for name in ("adamw", "Adam-wo-ab", "Adam without (ab)", "Lion")]
    ['AdamW†', 'Adam w/o (ab)', 'Adam w/o (ab)', None]
    """

    def bare(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower()).replace("without", "wo")

    return next((each for each in known if bare(each) == bare(name)), None)


def match_names(what: str, names: Sequence[str] | str | None, known: Sequence[str]) -> list[str]:
    """The known names that match; all of them if none is given.

    Raises:
        ValueError: a name is unknown.
    """
    if not names:
        return list(known)
    found = {name: match_name(name, known) for name in ([names] if isinstance(names, str) else names)}
    if unknown := [name for name, match in found.items() if match is None]:
        raise ValueError(f"{what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    return [match for match in found.values() if match is not None]
