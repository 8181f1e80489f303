"""One table for everything that is recorded: run, step, group, quantity, statistic, value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "STATISTICS", "Records", "statistics"]

COLUMNS = ("run", "step", "group", "quantity", "statistic", "value")
STATISTICS = ("min", "q10", "median", "q90", "max", "mean")


def statistics(values: ArrayLike) -> dict[str, float]:
    """The statistics of one quantity over the rows of a group.

    >>> statistics([1.0, 2.0, 3.0])["median"]
    2.0
    """
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        raise ValueError("statistics need at least one row")
    low, tenth, median, ninetieth, high = np.quantile(array, [0, 0.1, 0.5, 0.9, 1])
    return dict(zip(STATISTICS, map(float, (low, tenth, median, ninetieth, high, array.mean())), strict=True))


@dataclass
class Records:
    """Rows of the table of one run, gathered in memory.

    >>> records = Records("adam")
    >>> records.add(0, "conv1.weight", {"radius": [1.0, 3.0]})
    >>> records.table().query("statistic == 'mean'")["value"].tolist()
    [2.0]
    """

    run: str
    rows: list[tuple[str, int, str, str, str, float]] = field(default_factory=list)

    def add(self, step: int, group: str, quantities: Mapping[str, ArrayLike]) -> None:
        """Reduce each quantity over the rows of a group to its statistics."""
        for quantity, values in quantities.items():
            for statistic, value in statistics(values).items():
                self.rows.append((self.run, step, group, quantity, statistic, value))

    def table(self) -> "pd.DataFrame":
        """Everything recorded so far, as a pandas table with the columns `COLUMNS`."""
        import pandas as pd

        columns: Any = COLUMNS
        return pd.DataFrame(self.rows, columns=list(columns))
