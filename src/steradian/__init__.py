"""Steradian: the spheres that a normalized network trains on, and what optimizers do on them."""

from steradian import equivalence, geometry, groups, image, phenomena, scheme

__version__ = "0.1.0"

__all__ = ["__version__", "equivalence", "geometry", "groups", "image", "phenomena", "scheme"]
