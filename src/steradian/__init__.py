"""Steradian: the spheres that a normalized network trains on, and what optimizers do on them."""

from steradian import equivalence, geometry, groups, image, optim, phenomena, scheme
from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.watch import watch

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
