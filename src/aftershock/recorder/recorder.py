"""`FlightRecorder`: watches a live training loop without touching it, and keeps its last steps replayable."""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from ..api.point import TrainingPoint
from ..api.schedule import LearningRate
from ..core import capture as reading
from ..core.adamw import Hyper
from ..core.batches import Batch
from ..core.clipping import TORCH_EPSILON, global_norm
from ..core.hooks import Hooks
from ..core.live_loop import Unused
from ..core.live_optimizer import read_hyper, unwrapped_optimizer
from ..core.loss import Autocast
from ..core.randomness import RandomState
from ..errors import InvalidInput
from .forecast import Forecast, forecast
from .records import Fed, Forward, Record, Source, encode
from .store import Ring
from .triggers import Trigger, default_triggers
from .writer import Writer

Arguments = ParamSpec("Arguments")
LIVE: WeakValueDictionary[Path, FlightRecorder] = WeakValueDictionary()  # by directory, so that a path finds its model


def guarded(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Nothing that fails in here may reach the training loop: the recorder stops and says so once."""

    @functools.wraps(method)
    def safe(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        recorder: Any = arguments[0]
        if not recorder.recording:
            return
        try:
            method(*arguments, **options)
        except Exception as error:
            recorder._stop(f"{type(error).__name__}: {error}")

    return safe


def clip_factor(norm: float, clip: float | None) -> float:
    """c = min(1, max_norm / (n + 1e-6)), as `clip_grad_norm_` has it."""
    return 1.0 if clip is None else min(1.0, clip / (norm + TORCH_EPSILON))


class Observer:
    """A hook of which a copy or a pickle of what it watches keeps nothing: loops copy models (moving averages)."""

    def __init__(self, watch: Callable[..., None] | None = None) -> None:
        self.watch = watch

    def __call__(self, *arguments: Any) -> None:
        if self.watch is not None:
            self.watch(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return Observer()

    def __reduce__(self) -> tuple[type[Observer], tuple[()]]:
        return Observer, ()


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """What loss_fn may call instead of the model; the inside of a compiled part stays as it is."""
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    if not compiled and not isinstance(module, torch.jit.ScriptModule):
        for child in module.children():
            yield child
            yield from _parts(child)


@dataclass(frozen=True)
class _Update:
    """What the optimizer's hook saw of one update."""

    norm: Tensor | None  # None where the loop tells it
    hypers: tuple[Hyper, ...]


class FlightRecorder:
    """Record a training loop; when something happens, the window before it can be replayed and explained.

        with ak.FlightRecorder(model, optimizer, loss_fn, "flight", clip=1.0) as recorder:
            for batch in loader:
                ...                         # forward, backward, clipping, optimizer.step(), scheduler.step()
                recorder.step(batch, loss)  # after optimizer.step()

    Training is equal to the bit to training without it. Nothing is raised into the loop: a failure of the
    recorder's own stops the recording and warns once.

    loss_fn: `loss_fn(model, batch)` gives the loss of what is passed to `step`, from the model alone. The random
        state is read when the model or a part of it is first called; numbers drawn before that are not replayed.
    window: how many steps back any step can be explained. every: steps between states on disk (default: window).
    triggers: what keeps a window; default: spikes of the loss and the gradient norm, and NaN.
    clip: `max_norm` of `clip_grad_norm_`, where the loop clips. Gradients are seen when they are already clipped.
    hooks, unused, constant: as in `capture`.
    dataset: where `step` is given indices, what they index; batches are then `default_collate`d from it.

    Costs a copy of every batch, a norm of the gradient per step unless it is told, and a copy of θ, m, v every
    `every` steps; files are written by a thread of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Batch], Tensor],
        directory: str | Path = "flight",
        *,
        window: int = 64,
        every: int | None = None,
        triggers: Sequence[Trigger] | None = None,
        clip: float | None = None,
        dataset: Any = None,
        hooks: Hooks | None = None,
        unused: Unused | None = None,
        constant: Sequence[nn.Module] = (),
    ) -> None:
        every = window if every is None else every
        if window < 2 or every < 1:
            raise InvalidInput(f"window is at least 2 steps and every at least 1; got {window} and {every}")
        self.model, self.loss_fn, self.clip = model, loss_fn, clip
        self.hooks, self.unused, self.constant = hooks, unused, constant
        self.optimizer = unwrapped_optimizer(optimizer, hooks)
        self.directory, self.window, self.every = Path(directory).resolve(), window, every
        self.triggers = default_triggers() if triggers is None else tuple(triggers)
        self.recording = False
        self.flights: list[Path] = []
        self.recent: deque[Record] = deque(maxlen=window)
        self.dataset = dataset

    # --- the life of a recording

    def __enter__(self) -> Self:
        first = self._capture()
        self.source = Source(first.loss.layout.device, self.dataset)
        self._order = [p for p in reading.unwrapped(self.model).parameters() if p.requires_grad]
        self._counts = {id(p): self._count(p) for p in self._order}
        self._step = max(first.state.counts)
        self._ring = Ring(self.directory, self.window)
        self._writer = Writer(capacity=self.window)
        self._fed: list[Fed] = []
        self._losses: list[Tensor | float] = []
        self._index = 0
        self._random: RandomState | None = None
        self._forward: Forward | None = None
        self._update: _Update | None = None
        self._asked: str | None = None
        self._told = False  # does the loop tell the norms before clipping?
        for trigger in self.triggers:
            trigger.begin(self.window)
        self._handles = [
            self.model.register_forward_pre_hook(Observer(self._before_forward)),
            self.optimizer.register_step_post_hook(Observer(self._after_optimizer)),
        ]
        self._part_handles = [
            part.register_forward_pre_hook(Observer(self._before_forward)) for part in _parts(self.model)
        ]
        self.recording = True
        self._begin(first)
        LIVE[self.directory] = self
        return self

    @guarded
    def _begin(self, first: reading.Captured) -> None:
        self._ring.begin()
        self._save(first)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in [*self._handles, *self._part_handles]:
            handle.remove()
        for trigger in self.triggers:
            trigger.end()
        self._writer.close()
        self._check_writer()
        self.recording = False

    def wait(self) -> None:
        """Until everything recorded so far is on disk."""
        if self.recording:
            self._writer.wait()
            self._check_writer()

    # --- what the loop calls

    @guarded
    def micro(self, batch: Batch, loss: Tensor | float, *, index: int | None = None) -> None:
        """A micro-batch whose gradient is accumulated; `loss` as it was backpropagated (its share of the mean)."""
        self._feed(batch, loss, index)

    @guarded
    def step(
        self,
        batch: Batch,
        loss: Tensor | float,
        *,
        index: int | None = None,
        norm: Tensor | float | None = None,
        divisor: float | None = None,
    ) -> None:
        """One update, after `optimizer.step()`: the batch that was fed (the last, with accumulation) and its loss.

        index: the batch's place in the data, for skip lists; default: how many batches were recorded before it.
        norm: what `clip_grad_norm_` returned, where the loop clips; spikes of the gradient norm need it, and it saves
            a pass over the gradients.
        divisor: by what the loop divided each micro-batch's loss; default: by their number.
        """
        self._feed(batch, loss, index)
        self.finish(norm, divisor)

    @guarded
    def before_forward(self) -> None:
        """Read what a step's forward pass begins with, where the pass does not begin with a call of the model."""
        device = self.source.device
        self._random = RandomState.now(device)
        autocast = Autocast.now(device)
        modules = reading.unwrapped(self.model).named_modules()
        evaluating = tuple(name for name, part in modules if not part.training)
        self._forward = Forward(autocast.enabled, autocast.dtype, evaluating)

    @guarded
    def take(self, fed: Fed, loss: Tensor | float) -> None:
        """A micro-batch that is already copied, with its part of the step's loss."""
        self._fed.append(fed)
        self._losses.append(loss.detach().reshape(()).clone() if isinstance(loss, Tensor) else float(loss))

    @guarded
    def finish(self, norm: Tensor | float | None = None, divisor: float | None = None) -> None:
        """The update that was made with the micro-batches taken since the last one."""
        update, self._update = self._update, None
        fed, self._fed = tuple(self._fed), []
        losses, self._losses = self._losses, []
        if update is None or self._forward is None:
            return  # GradScaler skipped it: nothing was updated
        if norm is None and update.norm is None:
            raise InvalidInput("step() was told the gradient's norm before and not this time; tell it always or never")
        self._told = norm is not None
        raw = math.nan if norm is None else float(norm)
        record = Record(
            step=self._step,
            fed=fed,
            loss=float(sum(losses[1:], start=losses[0])),
            norm=raw * clip_factor(raw, self.clip) if update.norm is None else float(update.norm),
            raw_norm=raw,
            hypers=update.hypers,
            clip=self.clip,
            forward=self._forward,
            divisor=divisor,
        )
        self._step += 1
        self.recent.append(record)
        self._writer.put(functools.partial(self._ring.add, record))
        self._check_writer()
        if self._step % self.every == 0:
            if self._saving() is not None:
                self._writer.wait()  # a disk that is slower than training: one copy of the state at a time
            self._save(self._capture())
        self._trigger(record)

    def trigger(self, reason: str) -> None:
        """Keep the window that ends with the next recorded step."""
        self._asked = reason

    def forecast(
        self, batch: Batch, *, horizon: int = 16, futures: int = 4, seed: int = 0, lr: LearningRate = "constant"
    ) -> Forecast:
        """What this batch would do to the coming losses if it were the next step's: see `recorder.forecast`.

        lr: as in `follow`, for `horizon` steps; default: the present learning rates.
        """
        point = TrainingPoint(self._capture())
        if self._forward is not None:  # inside the loop's autocast and modes, as its steps ran
            point.loss.autocast = Autocast(self._forward.autocast, self._forward.autocast_dtype)
        past = [record.batch(self.source) for record in self.recent]
        return forecast(point, batch, past, horizon=horizon, futures=futures, clip=self.clip, seed=seed, lr=lr)

    # --- hooks

    @guarded
    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._random is None and torch.is_grad_enabled():
            self.before_forward()  # the first call of a step counts; validation runs without gradients
            if module is self.model:  # so loss_fn calls the model, and its parts need not be watched
                for handle in self._part_handles:
                    handle.remove()
                self._part_handles = []

    @guarded
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        grads = [p.grad for p in self._order]
        first = next((p for p in self._order if p.grad is not None), None)
        if first is None:
            return
        count, before = self._count(first), self._counts[id(first)]
        self._counts[id(first)] = count
        if count == before:
            return  # a fused optimizer under GradScaler runs its hooks on skipped steps too
        norm = None if self._told else global_norm(grads, range(len(grads)))
        hypers = tuple(read_hyper(group, optimizer) for group in optimizer.param_groups)
        self._update = _Update(norm, hypers)

    # --- inside

    def _feed(self, batch: Batch, loss: Tensor | float, index: int | None) -> None:
        if self._random is None:
            raise InvalidInput("the model was not called with gradients since the last step: record after the forward")
        structure, tensors = encode(batch)
        self._index = self._index if index is None else index
        self.take(Fed(structure, tensors, self._index, self._random), loss)
        self._index += 1
        self._random = None

    def _trigger(self, record: Record) -> None:
        reasons = [reason for trigger in self.triggers if (reason := trigger.fires(record))]
        if self._asked is not None:
            reasons, self._asked = [self._asked, *reasons], None
        if reasons:
            self._writer.put(lambda: self.flights.append(self._ring.freeze(record.step, "; ".join(reasons))))

    def _capture(self) -> reading.Captured:
        return reading.read(
            self.model, self.optimizer, self.loss_fn, hooks=self.hooks, unused=self.unused, constant=self.constant
        )

    def _save(self, captured: reading.Captured) -> None:
        self._saving = ref(captured)
        self._writer.put(functools.partial(self._ring.add_state, max(captured.state.counts), captured))

    def _count(self, parameter: nn.Parameter) -> float:
        return float(self.optimizer.state.get(parameter, {}).get("step", 0))

    def _check_writer(self) -> None:
        if self._writer.error is not None and self.recording:
            self._stop(f"{type(self._writer.error).__name__}: {self._writer.error}")

    def _stop(self, reason: str) -> None:
        self.recording = False
        warnings.warn(f"the flight recorder has stopped, training goes on: {reason}", RuntimeWarning, stacklevel=2)
