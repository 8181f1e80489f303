"""Watches the optimizer of a transformers `Trainer`."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from steradian.watching.callbacks import GroupsOf, counted, groups_of, unwrapped
from steradian.watching.watch import Watch

__all__ = ["WatchCallback"]


class WatchCallback(TrainerCallback):
    """Follows the optimizer from the start of a training to its end.

    What the trainer logs (loss, gradient norm, evaluations) is recorded with the run. A training that goes on from a
    checkpoint goes on with its step numbers. The trainer does not tell its callbacks of an exception: what was
    observed is then recorded when the process ends, when the next training begins, or by `stop()`.

    Args:
        groups: what `find_groups` found, or a function of the model that finds it. None: the rows that the
            optimizer's param groups name; where they name none, those found with the model's `dummy_inputs`.
        every: observe every so many steps.
        to: as for `watch`.
        **options: the other options of `Watch`. Without a `config` it is the trainer's arguments.

    Attributes:
        watch: that of the last training; None before the first.

    `Trainer(model, args, callbacks=[WatchCallback(to="runs/first")], …)` is all it takes.
    """

    def __init__(self, groups: GroupsOf = None, *, every: int = 1, to: Any = None, **options: Any) -> None:
        self.groups = groups
        self.every = every
        self.to = to
        self.options = options
        self.watch: Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any
    ) -> None:
        """Start; a checkpoint is restored by now."""
        self.stop()
        optimizer, model = unwrapped(found["optimizer"]), found["model"]
        inputs = None if self.groups is not None else getattr(model, "dummy_inputs", None)
        groups = groups_of(self.groups, model, [optimizer], inputs, "the model's dummy_inputs")
        first = None if counted(optimizer) or not state.global_step else state.global_step
        options = {"step": first, "config": args.to_sanitized_dict(), **self.options}
        self.watch = Watch(optimizer, groups, every=self.every, to=self.to, **options).start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **found: Any,
    ) -> None:
        """Record the numbers that the trainer logs."""
        if self.watch is not None and self.watch.running:
            self.watch.log({name: value for name, value in (logs or {}).items() if isinstance(value, int | float)})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        """Stop."""
        self.stop()

    def stop(self) -> None:
        """Stop now: everything that was observed is recorded."""
        if self.watch is not None:
            self.watch.stop()
