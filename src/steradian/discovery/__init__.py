"""Which slices of which parameters are radially invariant, proved on the model itself."""

from steradian.discovery.find import find_groups

__all__ = ["find_groups"]
