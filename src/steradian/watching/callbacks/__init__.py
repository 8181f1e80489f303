"""Callbacks for training libraries: `callbacks.lightning` and `callbacks.transformers`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from steradian.groups import Groups
from steradian.watching.watch import check_options

__all__ = ["GroupsOf", "check_arguments", "groups_of", "training_goes_on"]

logger = logging.getLogger("steradian")

GroupsOf = Groups | Callable[[Any], Groups] | None
"""What `find_groups` found, a function of the model that finds it, or None."""


def check_arguments(groups: GroupsOf, options: Mapping[str, Any]) -> None:
    """Raise a TypeError or ValueError for what makes no sense, before the training."""
    check_options(**options)
    if groups is not None and not isinstance(groups, Groups) and not callable(groups):
        raise TypeError(f"groups must be what find_groups returned, or a function of it, got {type(groups).__name__}")


def groups_of(groups: GroupsOf, model: nn.Module) -> Groups | nn.Module:
    """What to watch: the groups, or the model if there are none."""
    if groups is None or isinstance(groups, Groups):
        return model if groups is None else groups
    found = groups(model)
    if not isinstance(found, Groups):
        raise TypeError(f"groups must return what find_groups returns, got {type(found).__name__}")
    return found


@contextmanager
def training_goes_on() -> Iterator[None]:
    """An error of the callback is logged, and does not end the training."""
    try:
        yield
    except Exception:
        logger.exception("the callback failed: the training goes on and is not watched")
