"""Callbacks for training libraries: `callbacks.lightning` and `callbacks.transformers`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from steradian.groups import Groups
from steradian.watching.watch import Options, Watch, counted_steps, inner_optimizers

__all__ = ["GroupsOf", "Watching"]

logger = logging.getLogger("steradian")

GroupsOf = Groups | Callable[[Any], Groups] | None  # what `find_groups` found, or a function of the model that finds it


class Watching:
    """The watch of a callback: an error in it is logged, and does not end the training."""

    def __init__(self, groups: GroupsOf = None, *, to: Any = None, **options: Any) -> None:
        Options.of(options)
        if groups is not None and not isinstance(groups, Groups) and not callable(groups):
            kinds = "what find_groups returned, or a function of it"
            raise TypeError(f"groups must be {kinds}, got {type(groups).__name__}")
        self.groups, self.to, self.options = groups, to, options
        self.watch: Watch | None = None

    def begin(self, optimizers: Any, model: nn.Module, to: Any, *, step: int | None, config: Mapping[str, Any]) -> None:
        """Start to watch, from this step on if the optimizers do not count; the user's options come before these."""
        self.stop()
        self.watch = None
        found = self.groups(model) if callable(self.groups) else self.groups
        if not isinstance(found, Groups | None):
            raise TypeError(f"groups must return what find_groups returns, got {type(found).__name__}")
        inner = inner_optimizers(optimizers)
        options = {"step": step if counted_steps(inner) is None else None, "config": config, **self.options}
        self.watch = Watch(inner, model if found is None else found, to=to, **options).start()

    def record(self, values: Mapping[str, Any]) -> None:
        """Log numbers at the last step."""
        if self.watch is not None and self.watch.running:
            with self.training_goes_on():
                self.watch.log(values)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop now; everything observed is recorded."""
        if self.watch is not None:
            with self.training_goes_on():
                self.watch.__exit__(None if error is None else type(error), error, None)

    @contextmanager
    def training_goes_on(self) -> Iterator[None]:
        """Log an error."""
        try:
            yield
        except Exception:
            logger.exception("the callback failed: the training goes on and is not watched")
