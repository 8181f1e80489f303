"""Steradian: the spheres that a normalized network trains on, and what optimizers do on them."""

from typing import TYPE_CHECKING

from steradian import equivalence, geometry, groups, image, optim, phenomena, scheme
from steradian.discovery import find_groups
from steradian.groups import Groups

if TYPE_CHECKING:
    from steradian.watch import watch
else:
    from steradian import watch  # the package, which can be called

__version__ = "0.1.0"

__all__ = [
    "Groups",
    "__version__",
    "equivalence",
    "find_groups",
    "geometry",
    "groups",
    "image",
    "optim",
    "phenomena",
    "scheme",
    "watch",
]
