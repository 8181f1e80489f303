"""One training and its curves, whether it is carried out alone or together with others."""

import math
from dataclasses import dataclass, field

from steradian.lab.config import Config

__all__ = ["CURVES", "PARTS", "Member"]

PARTS = ("train", "validation", "test")
CURVES = tuple(f"{part}_{what}" for part in PARTS for what in ("loss", "accuracy"))
"""One number per epoch: mean loss and accuracy in percent. Training's are over its augmented batches."""


@dataclass
class Member:
    """One of the trainings that are carried out together, and what is known of it.

    Attributes:
        config: what is trained.
        curves: by name in `CURVES`, one number for each finished epoch.
    """

    config: Config
    curves: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CURVES})

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""
        return len(self.curves["train_loss"])

    @property
    def diverged(self) -> bool:
        """The last epoch's training loss is not a number, or what came of the last epoch of all gives none."""
        if not self.epoch:
            return False
        # The very last step shows in no training loss. Earlier, what is evaluated may recover.
        ended = self.epoch >= self.config.epochs and math.isnan((self.curves["validation_loss"] or [0.0])[-1])
        return ended or not math.isfinite(self.curves["train_loss"][-1])
