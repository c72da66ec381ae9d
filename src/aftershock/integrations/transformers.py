"""The flight recorder as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.batches import Batch
from ..core.reductions import TotalNorm
from ..errors import InvalidInput
from ..extras import require
from ..recorder.observing import Observer, guarded
from ..recorder.recorder import FlightRecorder
from ..recorder.triggers import Trigger

require("transformers", "transformers", "callbacks of the Hugging Face Trainer")
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402


def model_loss(model: nn.Module, inputs: Batch) -> Tensor:
    """The loss that a model returns from its inputs, labels among them: what the Trainer minimizes.

    It is the loss_fn of a recorded model; `build()` of the command line returns `(model, model_loss)`. The Trainer
    sets `model.config.use_cache = False`: build() must do so too, or the replay differs by rounding.

    >>> class Classifier(nn.Module):
    ...     def forward(self, inputs, labels):
    ...         return {"loss": loss_fn(model, (inputs, labels))}
    >>> bool(model_loss(Classifier(), {"inputs": probe[0], "labels": probe[1]}) == loss_fn(model, probe))
    True
    """
    return _loss_of(model(**inputs))


def _loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise InvalidInput("the model returned no loss: its inputs hold no labels (compute_loss_func takes them away)")
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]


def _clip(args: TrainingArguments) -> float | None:
    return float(args.max_grad_norm) if args.max_grad_norm else None


class FlightCallback(TrainerCallback):
    """Record a Trainer's run: `Trainer(…, callbacks=[FlightCallback("flight", window=64)])`.

    The loss is the model's own; label smoothing, `compute_loss_func` and an overridden `compute_loss` are not seen.
    The Trainer clips gradients before it calls back, so that their norm is read at the end of each backward pass, of
    which a hook on the loss tells. `others` (after, keep, on_trigger) are the recorder's, which is
    `callback.recorder`.

    >>> from transformers import PrinterCallback, Trainer
    >>> class Classifier(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Linear(2, 2)
    ...     def forward(self, inputs, labels):
    ...         return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}
    >>> callback = FlightCallback("flight", window=8)
    >>> rows = [{"inputs": inputs, "labels": label} for inputs, label in zip(probe[0].float(), probe[1])]
    >>> quiet = {"disable_tqdm": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    >>> arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, **quiet)
    >>> trainer = Trainer(Classifier(), arguments, train_dataset=rows, callbacks=[callback])
    >>> trainer.remove_callback(PrinterCallback)
    >>> done = trainer.train()
    >>> [record.step for record in callback.recorder.recent]
    [0, 1, 2, 3]
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
        self.recorder: FlightRecorder | None = None
        self._inputs: Batch = None
        self._losses: list[Tensor] = []
        self._clip: float | None = None
        self._norm: Tensor | None = None  # of the gradient before clipping
        self._total_norm = TotalNorm()

    # --- what `guarded` asks of a recorder

    @property
    def recording(self) -> bool:
        return self.recorder is not None and self.recorder.recording

    def _stop(self, reason: str) -> None:
        if self.recorder is not None:
            self.recorder._stop(reason)

    # --- the Trainer's events

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        if args.world_size > 1:
            raise InvalidInput(
                "FlightCallback of the Trainer records one process; under DDP record a loop of your own with "
                "aftershock.integrations.distributed.RankRecorder, or train with Lightning"
            )
        if args.label_smoothing_factor:
            raise InvalidInput("the Trainer smooths labels outside the model, where the loss cannot be replayed")
        self.recorder = FlightRecorder(model, optimizer, model_loss, self.directory, clip=_clip(args), **self.options)
        self.recorder.__enter__()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._handle = model.register_forward_hook(Observer(self._after_forward), with_kwargs=True)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._micro()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        self._clip = _clip(args)  # as it was right now; another callback may change it
        self._before_step(getattr(optimizer, "scaler", None))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self._step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording; what is on disk is complete. The Trainer does it unless training ended with an error."""
        if self.recorder is not None:
            self._handle.remove()
            self.recorder.__exit__(None, None, None)

    # --- inside

    @guarded
    def _after_forward(self, module: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> None:
        if torch.is_grad_enabled():  # not in evaluation
            self._inputs = dict(named)
            loss = _loss_of(outputs)
            self._losses.append(loss.detach())
            loss.register_hook(Observer(self._backward_begins))

    @guarded
    def _backward_begins(self, slope: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @guarded
    def _after_backward(self) -> None:
        """All gradients at once, in few kernels; with accumulation the last time has those of all micro-batches."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._norm = self._total_norm(grads)

    @guarded
    def _before_step(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and self._norm is not None:  # gradients were scaled when they were read
            self._norm = self._norm / scaler.scale(torch.ones_like(self._norm))

    def _must_be_seen(self) -> None:
        if not self._losses:
            raise InvalidInput(
                "the model was called where the recorder cannot look, as in code that is compiled with fullgraph=True: "
                "leave fullgraph out while you record"
            )

    @guarded
    def _micro(self) -> None:
        """A micro-batch. What each adds to the step's loss is known when all of them are."""
        self._must_be_seen()
        assert self.recorder is not None
        self.recorder.micro(self._inputs, 0.0)

    @guarded
    def _step(self) -> None:
        self._must_be_seen()
        losses, self._losses = self._losses, []
        # a model that is told num_items_in_batch divides by it; otherwise the Trainer divides by the micro-batches
        divisor = 1 if self._inputs.get("num_items_in_batch") is not None else len(losses)
        shares = [loss / divisor for loss in losses]
        assert self.recorder is not None
        loss = sum(shares[1:], start=shares[0])
        told, self._norm = self._norm, None
        self.recorder.step(self._inputs, loss, norm=told, clip=self._clip, divisor=divisor)
