"""Watches the optimizers of a Lightning trainer."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from steradian.watching.callbacks import GroupsOf, groups_of, unwrapped
from steradian.watching.watch import Watch, counted_steps

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import Callback, LightningModule, Trainer

__all__ = ["WatchCallback"]


class WatchCallback(Callback):
    """Watches every optimizer of the trainer from the start of a fit to its end, also if an exception ends it.

    The loss of each step is recorded with the run and, after each epoch, what the module logged. A fit that resumes
    from a checkpoint continues its step numbers.

    Args:
        groups: what `find_groups` found, or a function of the module that finds it. None: the rows that the
            optimizers' param groups declare; if they declare none, those found with the module's `example_input_array`.
        every: observe steps whose number is a multiple of this.
        to: as for `watch`; "loggers" means the trainer's own loggers. With several optimizers a folder holds one
            run for each: "optimizer-0", "optimizer-1", ….
        **options: the other options of `Watch`; `config` is by default the module's hyperparameters.

    Attributes:
        watches: one for each optimizer, since the start of the last fit.

    `Trainer(callbacks=[WatchCallback(lambda module: find_groups(module, images), to="runs/first")])` is all it takes.
    """

    def __init__(self, groups: GroupsOf = None, *, every: int = 1, to: Any = None, **options: Any) -> None:
        super().__init__()
        self.groups = groups
        self.every = every
        self.to = to
        self.options = options
        self.watches: list[Watch] = []
        self._next_steps: list[int] = []
        self._logged_at = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start, after checkpoints are restored and the sanity check is over."""
        self._stop()
        self.watches = []
        optimizers = [unwrapped(optimizer) for optimizer in trainer.optimizers]
        inputs = getattr(pl_module, "example_input_array", None)
        groups = groups_of(self.groups, pl_module, optimizers, inputs, "the module's example_input_array")
        options = {"config": dict(getattr(pl_module, "hparams", {})), **self.options}
        self._logged_at = trainer.global_step
        watches = []
        for k, optimizer in enumerate(optimizers):
            first = self._next_steps[k] if k < len(self._next_steps) and counted_steps(optimizer) is None else None
            to = _sinks(self.to, k if len(optimizers) > 1 else None, trainer)
            watches.append(Watch(optimizer, groups, every=self.every, to=to, **{"step": first, **options}))
        for watch in watches:
            self.watches.append(watch.start())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a step; a batch that only accumulates gradients has no step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1 and trainer.global_step != self._logged_at:
            self._logged_at = trainer.global_step
            for watch in self.watches:
                watch.log(loss=loss)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the module logged, such as a validation accuracy; the loss of the step is recorded already."""
        metrics = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        metrics.pop("loss", None)
        for watch in self.watches:
            watch.log(metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop; the loggers are still open."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop without waiting for other ranks; everything observed is recorded."""
        self._stop(exception)

    def state_dict(self) -> dict[str, Any]:
        """The number of each optimizer's next step, for optimizers that do not count."""
        return {"next_steps": [watch.next_step for watch in self.watches] or self._next_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with these numbers."""
        self._next_steps = list(state_dict["next_steps"])

    def _stop(self, error: BaseException | None = None) -> None:
        for watch in self.watches:
            watch.__exit__(None if error is None else type(error), error, None)
        if error is None:
            self._next_steps = [watch.next_step for watch in self.watches] or self._next_steps


def _sinks(to: Any, k: int | None, trainer: Trainer) -> Any:
    """`to` for the k-th of several optimizers: folders get a subfolder for each, "loggers" are the trainer's."""
    if isinstance(to, list | tuple):
        return [_sinks(one, k, trainer) for one in to]
    if isinstance(to, str) and to == "loggers":
        return [logger.log_metrics for logger in trainer.loggers]
    return Path(to) / f"optimizer-{k}" if k is not None and isinstance(to, str | Path) else to
