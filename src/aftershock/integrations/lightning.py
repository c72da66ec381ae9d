"""The flight recorder as a Lightning callback."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.batches import Batch
from ..core.reductions import TotalNorm
from ..errors import InvalidInput, UnsupportedClipping
from ..extras import require
from ..recorder.recorder import FlightRecorder
from ..recorder.triggers import Trigger
from .distributed import RankRecorder, recorder_for

if not TYPE_CHECKING and find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:
    import pytorch_lightning as lightning  # the same library by itself
else:
    require("lightning", "lightning", "callbacks of Lightning")
    import lightning.pytorch as lightning


def training_loss(module: nn.Module, fed: Batch) -> Tensor:
    """The loss of `module.training_step`, from what `FlightCallback` records: (batch, its index).

    It is the loss_fn of a recorded LightningModule; `build()` of the command line returns `(module, training_loss)`.

    >>> class Classifier(lightning.LightningModule):
    ...     def training_step(self, batch):
    ...         return loss_fn(model, batch)
    >>> bool(training_loss(Classifier(), (probe, 0)) == loss_fn(model, probe))
    True
    """
    batch, index = fed
    step: Any = module.training_step
    wanted = "batch_idx" in (names := inspect.signature(step).parameters) or len(names) > 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*self.log.*")  # there is no Trainer in a replay
        found = step(batch, index) if wanted else step(batch)
    return found["loss"] if isinstance(found, dict) else found


def _clip(trainer: lightning.Trainer) -> float | None:
    return float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None


class FlightCallback(lightning.Callback):
    """Record a Lightning run: `Trainer(callbacks=[FlightCallback("flight", window=64)])`.

    Automatic optimization with one AdamW; accumulation, clipping by norm, schedulers and precision are the
    Trainer's. `others` (after, keep, on_trigger) are the recorder's, which is `callback.recorder`; under DDP every
    rank has one, and rank 0 writes. A `training_step` that reads `self.trainer` cannot be replayed.

    >>> class Classifier(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Linear(2, 2).double()
    ...     def training_step(self, batch):
    ...         return loss_fn(self.net, batch)
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=1e-2)
    >>> callback = FlightCallback("flight", window=8)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **quiet)
    >>> trainer.fit(Classifier(), torch.utils.data.DataLoader(batches, batch_size=None))
    >>> [record.step for record in callback.recorder.recent]
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        directory: str | Path = "flight",
        *,
        window: int = 64,
        every: int | None = None,
        triggers: Sequence[Trigger] | None = None,
        **others: Any,
    ) -> None:
        self.directory = directory
        self.options: dict[str, Any] = {"window": window, "every": every, "triggers": triggers, **others}
        self.recorder: FlightRecorder | RankRecorder | None = None
        self._norm: Tensor | None = None
        self._total_norm = TotalNorm()
        self._clip: float | None = None
        self._updated = self._clips = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise InvalidInput(
                "FlightCallback records automatic optimization with one optimizer; with manual optimization use "
                "aftershock.FlightRecorder inside training_step"
            )
        clip = _clip(trainer)
        if clip is not None and trainer.gradient_clip_algorithm == "value":
            raise UnsupportedClipping(
                'the Trainer clips gradients by value; aftershock models gradient_clip_algorithm="norm"'
            )
        self.recorder = recorder_for(
            pl_module,
            trainer.optimizers[0],
            training_loss,
            self.directory,
            clip=clip,
            **self.options,
        )
        self.recorder.__enter__()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._norm = None
        self._updated = False
        if self.recorder is not None:
            with trainer.precision_plugin.train_step_context():  # its autocast is part of the forward pass
                self.recorder.before_forward()

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._updated = True
        self._clip = _clip(trainer)  # as it is right now; another callback may change it
        self._clips = self._clips or self._clip is not None  # norms are told from then on
        if self._clips:  # the last look at gradients before clipping
            self._norm = self._total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # divided by accumulate_grad_batches, and not scaled as a GradScaler scales what goes backward
        loss = outputs["loss"] if outputs else None
        if self.recorder is None or loss is None:
            return  # training_step returned None: nothing was computed
        fed = (batch, batch_idx)
        if self._updated:  # an epoch's last update may have fewer micro-batches; their losses are divided all the same
            divisor = trainer.accumulate_grad_batches
            self.recorder.step(fed, loss, index=batch_idx, norm=self._norm, clip=self._clip, divisor=divisor)
        else:
            self.recorder.micro(fed, loss, index=batch_idx)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.close()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording; what is on disk is complete."""
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
