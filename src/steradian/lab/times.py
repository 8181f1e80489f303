"""What a column took on the device, beside what a plain loop would have taken."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from steradian.lab.tables import Column, duration

__all__ = ["plain_loops", "time_rows"]

_IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "digits": 1_438}
"""Training images; a share of 5 % of them is held out."""


def plain_loops(bench: Path) -> dict[str, tuple[float, str]]:
    """By network, milliseconds per step of the plain loop that `benchmarks/fleet.py` measured, and on what."""
    if not bench.exists():
        return {}
    try:
        told: dict[str, Any] = json.loads(bench.read_text(encoding="utf-8"))
        device = str(told["environment"]["device"])
        plain = [row for row in told["rows"] if str(row["way"]).startswith("plain")]
        return {str(row["network"]): (float(row["ms per run and step"]), device) for row in plain}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{bench} is not what benchmarks/fleet.py writes ({error!r}): run it again") from error


def time_rows(columns: Iterable[Column], plain: dict[str, tuple[float, str]]) -> tuple[list[str], list[list[str]]]:
    """For each column: trainings, steps, device time, and the time of a plain loop for the same steps.

    Ours holds everything: compiling, evaluations, checkpoints. The plain loop's is its steps alone.
    """
    heads = ["column", "trainings", "steps", "device", "our time", "ms per training and step"]
    heads += ["plain loop, ms per step", "plain loop, the same steps", "ratio"]
    lines = []
    for column in columns:
        every = [result for found in column.results.values() for result in found]
        seconds = sum(result.seconds for result in every)
        steps = sum(len(r.curves["train_loss"]) * _steps(column.data, r.config.batch_size) for r in every)
        device = ", ".join(sorted({result.environment.get("device", "") for result in every}))
        line = [column.name, str(len(every)), f"{steps:,}" if steps else "", device, duration(seconds)]
        line.append(f"{1e3 * seconds / steps:.3g}" if steps else "")
        each, where = plain.get(column.model, (0.0, ""))
        if each and steps and where == device:
            estimate = steps * each / 1e3
            line += [f"{each:.3g}", duration(estimate), f"{estimate / seconds:.1f} ×" if seconds else ""]
        else:
            line += ["not measured there", "", ""]
        lines.append(line)
    return heads, lines


def _steps(data: str, batch: int) -> int:
    """In an epoch; 0 where the size of the data is not known."""
    images = _IMAGES.get(data, 0)
    return (images - max(1, round(0.05 * images))) // batch if images else 0
