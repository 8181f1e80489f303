"""Watches the optimizer of a transformers `Trainer`."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from steradian.watching.callbacks import Watching

__all__ = ["WatchCallback"]


class WatchCallback(Watching, TrainerCallback):
    """`Trainer(model, args, callbacks=[WatchCallback(to="runs/a")], …)` watches the optimizer of a training.

    What the trainer logs (loss, gradient norm, evaluations) is recorded with the run. A training that resumes from a
    checkpoint continues its step numbers. The trainer does not notify callbacks of an exception: what was observed is
    then recorded when the process ends, when the next training begins, or by `stop()`. An error of the callback is
    logged; it does not end the training. `watch` is the one of the last training; None before the first.

    Args:
        groups: what `find_groups` found, or a function of the model that finds it: rows of these are proved. None: all
            weights are watched, and those that the optimizer's param groups declare count as rows.
        to: as for `watch`.
        **options: the other options of `Watch`; `config` is by default the trainer's arguments.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Start, after a checkpoint is restored."""
        with self.training_goes_on():
            first, config = state.global_step or None, args.to_sanitized_dict()
            self.begin(of["optimizer"], of["model"], self.to, step=first, config=config)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        """Record the numbers that the trainer logs."""
        self.record({name: value for name, value in found["logs"].items() if isinstance(value, int | float)})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        """Stop."""
        self.stop()
