"""What an optimizer's settings and state say before it is watched: how far it is, and its weight decay."""

from collections.abc import Iterable, Mapping
from numbers import Real

from torch import Tensor
from torch.optim import Optimizer

from steradian import optim
from steradian.watching._followed import Followed
from steradian.watching.records import read_run
from steradian.watching.sinks import Folder

__all__ = ["counted", "decays", "first_step"]


def counted(optimizer: Optimizer) -> int | None:
    """How many steps an optimizer has counted; None where it counts none."""
    # Other people's optimizers keep numbers of their own in the state, beside what belongs to a parameter.
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    counts = [state["step"] for state in states if isinstance(state.get("step"), Real | Tensor)]
    return int(max(float(count) for count in counts)) if counts else None


def first_step(optimizer: Optimizer, folder: Folder | None) -> int:
    """The number of the step that comes next: what the optimizer counted, or what was recorded of its run."""
    known = counted(optimizer)
    if known is None and folder is not None and optimizer.state:
        steps = read_run(folder.store.folder).table["step"]
        return int(steps.max()) + 1 if len(steps) else 0
    return known or 0


def decays(optimizer: Optimizer, followed: Iterable[Followed]) -> dict[str, float]:
    """Weight decay by group; 0 where there is one that rows of fixed radius do not feel."""
    found = {}
    for entry in followed:
        decay = entry.options.get("weight_decay", 0)
        decay = decay.item() if isinstance(decay, Tensor) else float(decay or 0)
        if decay:
            found[entry.name] = 0.0 if isinstance(optimizer, optim.AdamG) else decay
    return found
