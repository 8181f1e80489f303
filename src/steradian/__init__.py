"""Steradian: the spheres that a normalized network trains on, and what optimizers do on them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steradian import balance, equivalence, geometry, groups, image, optim, phenomena, scheme
    from steradian.balance import equilibrium
    from steradian.discovery import find_groups
    from steradian.groups import Groups
    from steradian.reporting.page import report
    from steradian.watching.match import match
    from steradian.watching.watch import watch

__version__ = "0.2.0"

__all__ = [
    "Groups",
    "__version__",
    "balance",
    "equilibrium",
    "equivalence",
    "find_groups",
    "geometry",
    "groups",
    "image",
    "match",
    "optim",
    "phenomena",
    "report",
    "scheme",
    "watch",
]

_WITHIN = {  # functions and classes, and the module that each of them is in
    "Groups": "groups",
    "equilibrium": "balance",
    "find_groups": "discovery",
    "match": "watching.match",
    "report": "reporting.page",
    "watch": "watching.watch",
}
_MORE = ("discovery", "lab", "reporting", "watching")  # which most programs import by themselves, or not at all


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that a command without torch does not wait for torch."""
    if name not in __all__ and name not in _MORE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WITHIN.get(name, name)}")
    found = globals()[name] = getattr(module, name) if name in _WITHIN else module
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
