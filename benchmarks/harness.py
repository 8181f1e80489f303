"""What the benchmarks share: medians, a printed table, and JSON under results/ with the environment."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable

RESULTS = Path(__file__).resolve().parent.parent / "results"


def median_ms(work: Callable[[], object], *, repeats: int = 15, warmup: int = 3) -> float:
    """Median wall-clock milliseconds of a call, the device waited for."""
    times = []
    for i in range(warmup + repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= warmup:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


class Table:
    """Rows with named columns, printed and kept as records."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.rows: list[dict[str, object]] = []

    def add(self, *values: object) -> None:
        """Append one row."""
        self.rows.append(dict(zip(self.columns, values, strict=True)))


def environment() -> dict[str, object]:
    """What the figures were measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write(name: str, table: Table, **facts: object) -> None:
    """Print the table and write results/NAME.json."""
    shown = RichTable(*table.columns, title=name)
    for row in table.rows:
        shown.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(shown)
    RESULTS.mkdir(exist_ok=True)
    rows = [{column: None if value != value else value for column, value in row.items()} for row in table.rows]
    record = {"environment": environment(), **facts, "rows": rows}  # JSON has no NaN: what was not measured is null
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
