"""What any optimizer really does on the spheres, step by step: `watch` and its records."""

from steradian.watch._block import Alert
from steradian.watch.monitor import Watch, watch

__all__ = ["Alert", "Watch", "watch"]
