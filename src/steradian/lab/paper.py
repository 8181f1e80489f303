"""What the paper reports, read from paper.toml: its accuracies and its best hyper-parameters."""

import tomllib
from importlib.resources import files
from typing import Any, NamedTuple

__all__ = ["ACCURACY", "BEST", "COLUMNS", "GRID", "LEARNING_RATE", "RELEASED", "SETTINGS", "Accuracy", "Setting"]

_PAPER: dict[str, Any] = tomllib.loads((files("steradian.lab") / "paper.toml").read_text(encoding="utf-8"))

COLUMNS = tuple((str(network), str(data)) for network, data in _PAPER["columns"])
"""Network and data of the seven columns."""
EPOCHS: int = _PAPER["epochs"]
"""Of every training in the tables."""
NORM_NAMES: dict[str, str] = _PAPER["norms"]
DATA_NAMES: dict[str, str] = _PAPER["data"]


class Accuracy(NamedTuple):
    """Mean top-1 accuracy in percent and its standard deviation over five seeds."""

    mean: float
    spread: float


class Setting(NamedTuple):
    """Best hyper-parameters: L2 coefficient λ and β2."""

    weight_decay: float
    beta2: float


ACCURACY = {
    norm: {method: dict(zip(COLUMNS, (Accuracy(*cell) for cell in row), strict=True)) for method, row in table.items()}
    for norm, table in _PAPER["accuracy"].items()
}
"""Accuracies by normalization, method and column: tab:results and tab:results2, and SGD-M's from the read-me."""

LEARNING_RATE = dict.fromkeys(ACCURACY["bn"], 1e-3) | {"AdamG†": 1e-2, "SGD-M": 0.1}
"""lr_gsearch, the same for every column; SGD-M's from the authors' read-me."""

GRID = {
    "lr": (1e-4, 1e-3, 1e-2, 1e-1),
    "weight_decay": (0.0, *(1e-3 / 2**k for k in range(7, 0, -1))),
    "beta2": (0.99, 0.999, 0.9999),
}
"""App. D.3, with the 1/2 that the table of best values needs in place of the second 1/32."""


def _settings(table: dict[str, list[list[float]]]) -> dict[str, dict[tuple[str, str], Setting]]:
    made: dict[str, dict[tuple[str, str], Setting]] = {method: {} for method in ACCURACY["bn"]}
    for column in COLUMNS:
        for method, decay, beta2 in zip(ACCURACY["bn-no-affine"], *table[" ".join(column)], strict=True):
            # λ × 10⁴ is printed rounded: 0.31 is 10/32, 0.63 is 10/16.
            nearest = min(GRID["weight_decay"], key=lambda value: abs(1e4 * value - decay))
            made[method][column] = Setting(nearest, beta2)
        made["SGD-M"][column] = Setting(2.5e-4 if column[1] == "cifar10" else 5e-4, 0.99)  # from the read-me
    return made


SETTINGS = {name: _settings(table) for name, table in _PAPER["settings"].items()}
"""Hyper-parameters by their source, "printed" or "released" (docs/decisions/0011-which-hyper-parameters.md)."""
BEST = SETTINGS["printed"]
"""tab:results-transposed: λ and β2 by method and column."""
RELEASED = SETTINGS["released"]
"""The same from the authors' released code, and from the paper's table where the code lacks them."""
