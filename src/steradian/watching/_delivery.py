"""Where blocks go: to the sinks and through the alerts; and what is kept to answer the user from."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steradian.watching._block import Block
from steradian.watching._guard import Guard
from steradian.watching.alerts import Alerts
from steradian.watching.records import COLUMNS, read_run
from steradian.watching.sinks import Folder, Sink

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Delivery"]

logger = logging.getLogger("steradian")


class Delivery:
    """Hands every block to every sink, says what is wrong, and keeps what no file does.

    Args:
        sinks: where blocks go.
        alerts: what looks at them.
        guard: around what a sink does, so that one that fails keeps nothing from the others.

    Attributes:
        last: the last block that holds a step.
        blocks: all of them, where no folder keeps them.
    """

    def __init__(self, sinks: Sequence[Sink], alerts: Alerts, guard: Guard) -> None:
        self.sinks = sinks
        self.alerts = alerts
        self.last: Block | None = None
        self._guard = guard
        self.blocks: list[Block] = []

    @property
    def folder(self) -> Folder | None:
        """The sink that keeps everything on disk."""
        return next((sink for sink in self.sinks if isinstance(sink, Folder)), None)

    def open(self, about: Mapping[str, Any]) -> None:
        """Open all sinks, or none."""
        for k, sink in enumerate(self.sinks):
            try:
                sink.open(about)
            except BaseException:
                for opened in self.sinks[:k]:
                    opened.close()
                raise

    def take(self, block: Block) -> None:
        """One block, after those before it."""
        self.last = block if len(block.steps) else self.last
        if self.folder is None:
            self.blocks.append(block)
        for sink in self.sinks:
            with self._guard(fatal=False):
                sink.write(block)
        alerts = self.alerts.look(block)
        for kind in dict.fromkeys(alert.kind for alert in alerts):
            same = [alert for alert in alerts if alert.kind == kind]
            others = f" (and {len(same) - 1} more groups)" if len(same) > 1 else ""
            logger.warning("%s: %s%s", block.run, same[0], others)
        for alert in alerts:
            for sink in self.sinks:
                with self._guard(fatal=False):
                    sink.alert(alert)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks:
            with self._guard(fatal=False):
                sink.close()

    def table(self) -> "pd.DataFrame":
        """Everything that was delivered: run, step, group, quantity, statistic, value."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("records() needs pandas: pip install 'steradian[lab]'; latest() does not") from error

        if self.folder is not None:
            self.folder.drain()
            return read_run(self.folder.store.folder).table
        tables = [block.table() for block in self.blocks]
        if not tables:
            return pd.DataFrame({name: [] for name in COLUMNS})
        table = pd.concat([table.astype({"quantity": str}) for table in tables], ignore_index=True)
        return table.astype({"quantity": "category"})
