"""Watches the optimizers of a Lightning trainer."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steradian.watching.callbacks import Watching

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import Callback, LightningModule, Trainer

__all__ = ["WatchCallback"]


class WatchCallback(Watching, Callback):
    """`Trainer(callbacks=[WatchCallback(to="runs/a")])` watches all optimizers of a fit, also if an exception ends it.

    The loss of each step is recorded with the run and, after each epoch, what the module logged. A fit that resumes
    from a checkpoint continues its step numbers. Several optimizers are one run. An error of the callback is logged; it
    does not end the training. `watch` is that of the last fit; None before the first.

    Args:
        groups: what `find_groups` found, or a function of the module that finds it: rows of these are proved. None: all
            weights are watched, and those that the optimizers' param groups declare count as rows.
        to: as for `watch`; "loggers" means the trainer's own loggers.
        **options: the other options of `Watch`; `config` is by default the module's hyperparameters.
    """

    _next_step: int | None = None
    _logged_at = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start, after checkpoints are restored and the sanity check is over."""
        with self.training_goes_on():
            self._stop()
            self._logged_at = trainer.global_step
            config = dict(getattr(pl_module, "hparams", {}))
            self.begin(trainer.optimizers, pl_module, _sinks(self.to, trainer), step=self._next_step, config=config)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a step; a batch that only accumulates gradients has no step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1 and trainer.global_step != self._logged_at:
            self._logged_at = trainer.global_step
            self.record({"loss": loss})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the module logged, such as a validation accuracy; the loss of the step is recorded already."""
        metrics = trainer.callback_metrics.items()
        self.record({name: value for name, value in metrics if value.numel() == 1 and name != "loss"})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop; the loggers are still open."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop without waiting for other ranks; everything observed is recorded."""
        self._stop(exception)

    def state_dict(self) -> dict[str, Any]:
        """The number of the next step, for optimizers that do not count."""
        return {"next_step": self._next_step if self.watch is None else self.watch.next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with this number."""
        self._next_step = state_dict.get("next_step")

    def _stop(self, error: BaseException | None = None) -> None:
        self.stop(error)
        if self.watch is not None and error is None:
            self._next_step = self.watch.next_step


def _sinks(to: Any, trainer: Trainer) -> Any:
    """`to` with the trainer's loggers in place of "loggers"."""
    if isinstance(to, list | tuple):
        return [_sinks(one, trainer) for one in to]
    return [logger.log_metrics for logger in trainer.loggers] if isinstance(to, str) and to == "loggers" else to
