"""Which param group each followed parameter is in, as that changes."""

from collections.abc import Sequence
from operator import is_

from torch.optim import Optimizer

from steradian.watching._followed import Followed
from steradian.watching._station import Station

__all__ = ["Membership"]


class Membership:
    """Follows the param groups of an optimizer.

    `load_state_dict` puts new ones in the place of the old: the rows get their settings. Rows whose parameter was
    taken out of its group are gone: they do not move, or under settings that are not those of their place.

    Args:
        optimizer: the optimizer.
        stations: where its rows are.
    """

    def __init__(self, optimizer: Optimizer, stations: Sequence[Station]) -> None:
        self.optimizer = optimizer
        self.stations = stations
        self._members = self._now()

    def _now(self) -> list[tuple[dict[str, object], list[object]]]:
        return [(group, list(group["params"])) for group in self.optimizer.param_groups]

    def _changed(self) -> bool:
        groups = self.optimizer.param_groups
        return len(groups) != len(self._members) or not all(
            group is known and len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, (known, params) in zip(groups, self._members, strict=True)
        )

    def look(self) -> list[str]:
        """Take the groups as they are now; returns the names of rows that are gone since the last look."""
        if not self._changed():
            return []
        self._members = self._now()
        groups = self.optimizer.param_groups
        owner = {id(param): group for group in groups for param in group["params"]}
        lost: list[str] = []
        for station in self.stations:
            for k, old in enumerate(station.options):
                entries = [entry for entry in station.followed if entry.options is old]
                owners = (owner.get(id(entry.params[0])) for entry in entries)
                kept = any(group is old for group in groups)
                new = old if kept else next((group for group in owners if group is not None), old)
                station.options[k] = new
                for entry in entries:
                    entry.options = new
                    if not entry.gone and not _is_in(entry, new, owner):
                        entry.gone = True
                        lost.append(entry.name)
        return lost


def _is_in(entry: Followed, group: dict[str, object], owner: dict[int, dict[str, object]]) -> bool:
    """A joint set has the settings of its first parameter; the others may be in other groups."""
    return owner.get(id(entry.params[0])) is group and all(id(param) in owner for param in entry.params)
