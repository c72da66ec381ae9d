"""`FlightRecorder`: watches a live training loop without touching it, and keeps its last steps replayable."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from ..api.point import TrainingPoint
from ..api.schedule import LearningRate
from ..core import capture as reading
from ..core.batches import Batch
from ..core.calls import Autocast
from ..core.given import max_norm, whole
from ..core.hooks import Hooks
from ..core.live_loop import Unused
from ..core.live_optimizer import read_hyper, unwrapped_optimizer
from ..core.randomness import Randomness
from ..core.reductions import TotalNorm
from ..errors import InvalidInput
from .descriptions import Describe
from .forecast import Forecast, forecast
from .observing import Observer, Trained, guarded
from .passes import UNSEEN, Passes
from .records import Fed, Record, Source, describe
from .ring import Ring
from .runs import claim, release
from .scaling import loss_scale
from .snapshot import Snapshots
from .transfer import Transfer
from .triggers import Trigger, Triggered, default_triggers
from .updates import Pending, ToldClip, Update, Updates, clipped_untold, updates_of
from .windows import Windows, say
from .writer import Writer

LIVE: WeakValueDictionary[str, FlightRecorder] = WeakValueDictionary()  # by run, so that a flight finds its model
BOTH = 16  # steps of which the norm is taken, too, where the loop tells it: does it clip as told?
LATE = 8  # steps by which the GPU may be behind before the loop waits for it: it never runs out of work


class FlightRecorder:
    """Record a training loop; when something happens, the window around it can be replayed and explained.

    Training is equal to the bit to training without it. Nothing is raised into the loop: a failure of the
    recorder's own stops the recording and warns once.

    loss_fn: `loss_fn(model, batch)` gives the loss of what is passed to `step`, from the model alone. The random
        state is read when the model or a part of it is first called; a loss_fn that draws numbers before that needs
        `before_forward`, and the second step reminds of it.
    directory: of one run. Where another run still records there, or has kept a window, this one gets a folder of its
        own inside; else the ring of the one before is dropped.
    window: how many steps back any step can be explained. every: steps between states on disk (default: window).
    after: steps that are recorded after a trigger before its window is closed; a trigger among them joins it, and if
        it is far higher, the window becomes its own.
    keep: windows of this run that are kept on disk; the oldest goes first, but never the one with the worst spike.
    triggers: what keeps a window; default: spikes of the loss and the gradient norm, a slow rise, and NaN.
    on_trigger: called with what was seen (`.step`, `.reason`, `.folder`, `.command`), in the loop's own thread.
    clip: `max_norm` of `clip_grad_norm_`, where the loop clips. Gradients are seen when they are already clipped. One
        that changes is told by `step`.
    hooks, unused, constant: as in `capture`.
    dataset: where `step` is given indices, what they index; batches are then `default_collate`d from it.
    describe: what `explain` shows of a batch: `describe(batch)` returns a text or an image (an array).

    Costs a copy of every batch, a norm of the gradient per step unless it is told, and a copy of θ, m, v every `every`
    steps; a thread of its own writes files. On a GPU the loop does not wait for it: numbers are read some steps later,
    so triggers come late by as much; a state takes its own size of GPU memory until it is on the host.

    >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight", window=4, after=0) as recorder:
    ...     recorder.trigger("look here")  # keeps the window of the next step
    ...     for batch in batches[:5]:
    ...         recorder.step(batch, train_step(batch))  # after backward, clipping, optimizer.step(), scheduler.step()
    ...     recorder.wait()
    ...     harmful = recorder.forecast(batches[5], horizon=2, futures=1).harmful(threshold=0.001)
    >>> [record.step for record in recorder.recent], len(recorder.flights), harmful
    ([41, 42, 43, 44], 1, True)
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
        after: int = 16,
        keep: int = 4,
        triggers: Sequence[Trigger] | None = None,
        on_trigger: Callable[[Triggered], object] | None = None,
        clip: float | None = None,
        dataset: Any = None,
        hooks: Hooks | None = None,
        unused: Unused | None = None,
        constant: Sequence[nn.Module] = (),
        describe: Describe | None = None,
    ) -> None:
        window, after = whole(window, "window= is a number of steps", 2), whole(after, "after= is a number of steps", 0)
        every = window if every is None else whole(every, "every= is a number of steps", 1)
        keep = whole(keep, "keep= is a number of windows", 1)
        max_norm(clip)
        self.model, self.loss_fn, self.clip = model, loss_fn, clip
        self.hooks, self.unused, self.constant = hooks, unused, constant
        self.optimizer = unwrapped_optimizer(optimizer, hooks)
        self.root = self.directory = Path(directory).resolve()
        self.window, self.every, self.after, self.keep = window, every, after, keep
        self.triggers = default_triggers() if triggers is None else tuple(triggers)
        self.on_trigger = on_trigger
        self.dataset, self.describe = dataset, describe
        self.recording = False
        self.run = ""  # its id
        self._inside = self._warned = False
        self._ring: Ring | None = None
        self._windows: Windows | None = None
        self._recent: deque[Record] = deque(maxlen=window)

    # --- the life of a recording

    def __enter__(self) -> Self:
        first = self._capture()
        device = first.loss.layout.device
        self.source = Source(device, self.dataset)
        self._order = [p for p in reading.unwrapped(self.model).parameters() if p.requires_grad]
        self._trained = Trained(reading.unwrapped(self.model), self.optimizer)
        counts = {id(p): float(updates_of(p, self.optimizer)) for p in self._order}
        self._updates = Updates(max(first.state.counts), counts)
        self._saved = self._updates.step
        self._transfer, self._total_norm = Transfer(device), TotalNorm()
        self._snapshots = Snapshots(first, self.model, self.optimizer, self._transfer)
        self._writer = Writer(capacity=self.window)
        self._recent.clear()
        self._fed: list[Fed] = []
        self._losses: list[Tensor | float] = []
        self._index = 0
        self._passes = Passes(self.model, self.loss_fn, device)
        self._update: Update | None = None
        self._unpaired = False  # step() was called, and no update had been made
        self._asked: str | None = None
        self._told = False  # does the loop tell the norms before clipping?
        self._both = BOTH  # further steps of which the norm is taken all the same
        self._clip_told = False  # that the loop clips, and the recorder was not told
        for trigger in self.triggers:
            trigger.begin(self.window)
        self._passes.watch(self._before_forward)
        self._handle = self.optimizer.register_step_post_hook(Observer(self._after_optimizer))
        self.recording = self._inside = True
        self._warned = False
        self._begin()
        return self

    @guarded
    def _begin(self) -> None:
        self.directory, self.run = claim(self.root)
        if self.directory != self.root:
            say(f"{self.root} holds the flight of another run; this one records into {self.directory}")
        about = {"id": self.run, "began": time.time(), "window": self.window, "after": self.after}
        self._ring = Ring(self.directory, about, self.keep, late=0 if self._transfer.stream is None else LATE)
        self._ring.begin()
        self._windows = Windows(self._ring, self._writer, self.after, self.on_trigger)
        self._save()
        LIVE[self.run] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._passes.unwatch()
        self._handle.remove()
        self._settle_all()
        for trigger in self.triggers:
            trigger.end()
        if self._windows is not None:
            self._windows.close()
        self._writer.close()
        self._check_writer()
        self.recording = self._inside = False
        if self._ring is not None:
            release(self.directory)

    def wait(self) -> None:
        """Until everything recorded so far is on disk.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     recorder.step(batches[0], train_step(batches[0]))
        ...     recorder.wait()
        """
        if self._inside:
            self._settle_all()
            self._writer.wait()
            self._check_writer()

    @property
    def recent(self) -> Sequence[Record]:
        """The last `window` updates; waits for them.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     recorder.step(batches[0], train_step(batches[0]))
        >>> [record.step for record in recorder.recent]
        [40]
        """
        self.wait()
        return self._recent

    @property
    def flights(self) -> list[Path]:
        """The windows that this run has closed and kept, the oldest first.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight", after=0) as recorder:
        ...     recorder.trigger("look here")
        ...     recorder.step(batches[0], train_step(batches[0]))
        >>> len(recorder.flights)
        1
        """
        return [] if self._ring is None else list(self._ring.frozen)

    # --- what the loop calls

    def micro(self, batch: Batch, loss: Tensor | float, *, index: int | None = None) -> None:
        """A micro-batch whose gradient is accumulated; `loss` as it was backpropagated (its share of the mean).

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     optimizer.zero_grad()
        ...     first = loss_fn(model, batches[0]) / 2
        ...     recorder.micro(batches[0], first)
        ...     second = loss_fn(model, batches[1]) / 2
        ...     (first + second).backward()
        ...     optimizer.step()
        ...     recorder.step(batches[1], second)
        >>> len(recorder.recent[0].fed)
        2
        """
        self._must_be_inside()
        self._feed(batch, loss, index)
        self._send()

    def step(
        self,
        batch: Batch,
        loss: Tensor | float,
        *,
        index: int | None = None,
        norm: Tensor | float | None = None,
        clip: ToldClip = "as told",
        divisor: float | None = None,
    ) -> None:
        """One update, after `optimizer.step()`: the batch that was fed (the last, with accumulation) and its loss.

        index: the batch's place in the data, for skip lists; default: how many batches were recorded before it.
        norm: what `clip_grad_norm_` returned, where the loop clips; spikes of the gradient norm need it, and it saves
            a pass over the gradients.
        clip: this step's `max_norm`, where it changes from step to step, and None where the loop did not clip; default:
            as the recorder was told.
        divisor: by what the loop divided each micro-batch's loss; default: by their number.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     recorder.step(batches[5], train_step(batches[5]), index=1005)
        >>> recorder.recent[0].indices
        (1005,)
        """
        self._must_be_inside()
        self._feed(batch, loss, index)
        self.finish(norm, divisor, clip)

    @guarded
    def before_forward(self) -> None:
        """Say that `loss_fn` is called next: where it draws random numbers (noise, masks) before it calls the model, or
        the model is called with gradients before it, as a discriminator is in its generator's step.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     recorder.before_forward()  # for each micro-batch, where there are several
        ...     recorder.step(batches[0], train_step(batches[0]))
        >>> len(recorder.recent)
        1
        """
        self._passes.begins()
        self._unpaired = False

    @guarded
    def take(self, fed: Fed, loss: Tensor | float) -> None:
        """A micro-batch that is already copied, with its part of the step's loss; then `finish`.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     recorder.step(batches[0], train_step(batches[0]))
        ...     (fed,) = recorder.recent[0].fed
        ...     recorder.take(fed, train_step(batches[0]))
        ...     recorder.finish()
        >>> [record.step for record in recorder.recent]
        [40, 41]
        """
        self._fed.append(fed)
        self._losses.append(loss.detach().reshape(()) if isinstance(loss, Tensor) else float(loss))

    @guarded
    def finish(
        self, norm: Tensor | float | None = None, divisor: float | None = None, clip: ToldClip = "as told"
    ) -> None:
        """The update that was made with the micro-batches taken since the last one. The arguments are `step`'s.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     recorder.micro(batches[0], train_step(batches[0]))
        ...     recorder.finish()
        >>> len(recorder.recent)
        1
        """
        update, self._update = self._update, None
        fed, self._fed = tuple(self._fed), []
        losses, self._losses = self._losses, []
        asked, self._asked = self._asked, None
        self._passes.end()
        if update is None or self._passes.forward is None:
            self._unpaired = True  # GradScaler skipped it, or optimizer.step() is still to come
            self._asked = asked
            self._trained.not_updated(losses, self._updates.step - 1)
            return
        if norm is None and update.norm is None:
            raise InvalidInput("step() was told the gradient's norm before and not this time; tell it always or never")
        self._told = norm is not None
        loss = sum(losses[1:], start=losses[0])
        numbers = [loss, update.norm, norm, update.count, update.scale, *(hyper.lr for hyper in update.hypers)]
        landing = self._transfer.carry(fed[-1].tensors, numbers)
        fed = (*fed[:-1], replace(fed[-1], tensors=landing.tensors))
        told = self.clip if clip == "as told" else clip
        limit = None if told is None else float(told)  # it may be a tensor
        self._updates.add(Pending(landing, fed, update, self._passes.forward, limit, divisor, asked))
        self._settle(LATE)
        step = self._updates.step
        if step % self.every == 0 and step != self._saved:
            if self._saving() is not None:
                self._writer.wait()  # a disk that is slower than training: one copy of the state at a time
            self._saved = step
            self._save()
        self._check_writer()

    def trigger(self, reason: str) -> None:
        """Keep the window of the next recorded step.

        >>> seen = []
        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight", on_trigger=seen.append) as recorder:
        ...     recorder.trigger("validation got worse")
        ...     recorder.step(batches[0], train_step(batches[0]))
        >>> [(one.step, one.reason) for one in seen]
        [(40, 'validation got worse')]
        """
        self._asked = reason

    def forecast(
        self,
        batch: Batch,
        *,
        horizon: int = 16,
        futures: int = 4,
        generator: Randomness = 0,
        lr: LearningRate = "constant",
    ) -> Forecast:
        """What this batch would do to the coming losses if it were the next step's: see `recorder.forecast`.

        lr: as in `follow`, for `horizon` steps; default: the present learning rates.
        generator: draws the futures; or an integer seed.

        >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
        ...     for batch in batches[:4]:
        ...         recorder.step(batch, train_step(batch))
        ...     usual, bad = (recorder.forecast(batch, horizon=3, futures=2) for batch in batches[4:])
        >>> bad.largest_increase > usual.largest_increase
        True
        """
        recent = self.recent
        past, clip = [record.batch(self.source) for record in recent], recent[-1].clip if recent else self.clip
        point = TrainingPoint(self._capture())
        forward = self._passes.forward
        if forward is not None:  # inside the loop's autocast and modes, as its steps ran
            scale = recent[-1].scale if recent else 1.0
            point.loss.autocast = Autocast(forward.autocast, forward.autocast_dtype, scale)
        return forecast(point, batch, past, horizon=horizon, futures=futures, clip=clip, generator=generator, lr=lr)

    # --- hooks

    @guarded
    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._passes.called(module):
            self._unpaired = False

    @guarded
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        first = next((p for p in self._order if p.grad is not None), None)
        if first is None:
            return
        if self._unpaired:
            raise InvalidInput(
                "recorder.step() was called before optimizer.step(); call it after, once for each optimizer.step()"
            )
        self._trained.updated()
        self._trained.refuse_others()
        taken = not self._told or self._both > 0
        norm = self._total_norm([p.grad for p in self._order if p.grad is not None]) if taken else None
        self._both -= 1
        hypers = tuple(read_hyper(group, optimizer) for group in optimizer.param_groups)
        self._update = Update(norm, first, updates_of(first, self.optimizer), loss_scale(first), hypers)

    # --- inside

    def _must_be_inside(self) -> None:
        if not self._inside and not self._warned:
            self._warned = True
            warnings.warn(
                "recorder.step() was called outside `with recorder:` and records nothing; put the training loop inside",
                RuntimeWarning,
                stacklevel=3,
            )

    @guarded
    def _feed(self, batch: Batch, loss: Tensor | float, index: int | None) -> None:
        random = self._passes.random
        if random is None:
            raise InvalidInput(UNSEEN)
        if not isinstance(loss, Tensor | Real):
            raise InvalidInput(f"loss= is the loss of this batch, a number or a tensor; got {loss!r}")
        if index is not None:
            self._index = whole(index, "index= is the batch's place in the data")
        structure, tensors = describe(batch)
        self.take(Fed(structure, self._transfer.own(tensors), self._index, random), loss)
        self._index += 1
        self._passes.remind_of_draws()
        self._passes.end()

    @guarded
    def _send(self) -> None:
        """The last micro-batch, on its way: what waits for the update is on the host, and its loss as it is now."""
        fed, loss = self._fed[-1], self._losses[-1]
        self._fed[-1] = replace(fed, tensors=self._transfer.carry(fed.tensors).tensors)
        self._losses[-1] = loss.clone() if isinstance(loss, Tensor) else loss

    @guarded
    def _settle_all(self) -> None:
        self._settle(0)

    def _settle(self, late: int) -> None:
        """Hand on what has arrived from the GPU; where more than `late` updates are on their way, wait for them."""
        assert self._windows is not None
        for record, asked in self._updates.arrived(late):
            self._writer.put(functools.partial(self._write, record))
            self._windows.watch(record, self.triggers, asked)
            if not self._clip_told and (said := clipped_untold(record)) is not None:
                self._clip_told = True
                say(said)

    def _write(self, record: Record) -> None:
        assert self._ring is not None
        if self._transfer.stream is not None:  # pinned memory is not kept
            fed = [replace(one, tensors=tuple(tensor.clone() for tensor in one.tensors)) for one in record.fed]
            record = replace(record, fed=tuple(fed))
        self._ring.add(record)
        self._recent.append(record)

    def _capture(self) -> reading.Captured:
        return reading.read(
            self.model, self.optimizer, self.loss_fn, hooks=self.hooks, unused=self.unused, constant=self.constant
        )

    def _save(self) -> None:
        held = [self._snapshots.take()]
        self._saving = ref(held[0])

        def save() -> None:
            assert self._ring is not None
            self._ring.add_state(self._snapshots.landed(held.pop()))  # let go of as soon as it is on the host

        self._writer.put(save)

    def _check_writer(self) -> None:
        if self._writer.error is not None and self.recording:
            self._stop(f"{type(self._writer.error).__name__}: {self._writer.error}")

    def _stop(self, reason: str) -> None:
        self.recording = False
        if self._ring is not None:
            with contextlib.suppress(OSError):  # a full disk may be the reason
                self._ring.stopped(reason)
        warnings.warn(f"the flight recorder has stopped, training goes on: {reason}", RuntimeWarning, stacklevel=2)
