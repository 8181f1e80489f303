"""One training as plain data, with a permanent key; and names as people type them."""

import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Self

__all__ = ["METHODS", "PRECISIONS", "Config", "chosen", "meant"]

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
            object.__setattr__(self, name, _plain(name, getattr(self, name), _number, "a finite number"))
        for name in ("epochs", "batch_size", "seed", "milestones", "width"):
            object.__setattr__(self, name, _plain(name, getattr(self, name), operator.index, "a whole number"))
        for name in ("model", "data", "norm"):
            _check(isinstance(getattr(self, name), str), name, getattr(self, name), "a string")
        _check(isinstance(self.betas, tuple) and len(self.betas) == 2, "betas", self.betas, "β1 and β2")
        _check(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "in [0, 1)")
        _check(isinstance(self.milestones, tuple), "milestones", self.milestones, "a list of epochs")
        _check(self.method in METHODS, "method", self.method, f"one of {', '.join(METHODS)}")
        _check(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        _check(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        _check(self.batch_size >= 2, "batch_size", self.batch_size, "at least 2")
        _check(self.seed >= 0, "seed", self.seed, "at least 0")
        _check(self.seed < 2**63, "seed", self.seed, "below 2^63")
        _check(self.lr > 0, "lr", self.lr, "positive")
        _check(self.rest_lr is None or self.rest_lr > 0, "rest_lr", self.rest_lr, "positive")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        _check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        _check(self.gamma > 0, "gamma", self.gamma, "positive")
        _check(self.start is None or isinstance(self.start, str), "start", self.start, "the key of a training")
        _check(self.width is None or self.width >= 1, "width", self.width, "at least 1")
        _check(isinstance(self.released, bool), "released", self.released, "True or False")

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
        epochs = _plain("epochs", epochs, operator.index, "a whole number")
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


def _plain(name: str, value: Any, convert: Callable[[Any], float], expected: str) -> Any:
    """A number, or a tuple of them, as plain Python numbers; None stays None."""
    if value is None and name in ("rest_lr", "width"):
        return None
    try:
        return tuple(map(convert, value)) if name in ("betas", "milestones") else convert(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be {expected}, got {value!r}") from error


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _check(valid: bool, name: str, value: object, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name with the same letters and digits; None if there is none.

    >>> known = ("Adam", "AdamW†", "Adam w/o (ab)")
    >>> meant("adamw", known), meant("Adam-wo-ab", known), meant("Adam without (ab)", known), meant("Lion", known)
    ('AdamW†', 'Adam w/o (ab)', 'Adam w/o (ab)', None)
    """
    every = list(known)
    return name if name in every else next((each for each in every if _bare(each) == _bare(name)), None)


def chosen(what: str, names: Sequence[str] | str | None, known: Sequence[str]) -> list[str]:
    """The known names that are meant; all of them if none is given.

    Raises:
        ValueError: a name is unknown.
    """
    if not names:
        return list(known)
    given = [names] if isinstance(names, str) else list(names)
    found = [meant(name, known) for name in given]
    if unknown := [name for name, each in zip(given, found, strict=True) if each is None]:
        raise ValueError(f"{what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    return [name for name in found if name is not None]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).replace("without", "wo")
