"""What the passes of a model hold in memory: measured once, by counting the tensors that are alive, and on a GPU what
kernels take besides, which its allocator sees."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import AftershockError
from .adamw import CACHED_BYTES, GPU_BYTES, adamw_step
from .batches import Accumulated, Batch
from .fused import available
from .gates import Pattern, recording
from .graphs import GradientGraph
from .memory import budget, free, note_peak, ran_out
from .pools import Pool
from .rehearsals import rehearse_products
from .rows import row_gradients
from .structure import flatten
from .trajectory import Trajectory

CLOSED_FORM = 9  # pieces of the flat vector that are alive at once where a step is linearized
COUNTING = 4  # and where coordinates with v = 0 are counted
FEW = 3  # rows whose memory stands for that of many
ROOM = 8  # copies of the flat vector that must be free where a pass is recorded, which takes two and the activations
# and where Hessian products of so many vectors are recorded at once, which takes two for each; rows are beside them
PRODUCTS_ROOM = {4: 40, 2: 24, 1: 16}
PRODUCTS_TOGETHER = 16  # that a path may use where products of several vectors are tried, which takes ten beside it


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, of those made while it watches: `peak` is their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = [x.untyped_storage() for x in _tensors(out)]
        new = [storage for storage in new if storage._cdata not in self._live]
        if new:
            given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
            for storage in new:
                if storage._cdata not in given:
                    self._see(storage)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:  # two outputs, one storage
            return
        self._live[key] = storage.nbytes()
        self.now += self._live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes at the peak of a piece of work, and what its result still holds."""
    with Meter() as meter:
        result = work()
        held = meter.now
    del result
    return meter.peak, held


def measured_on(device: torch.device, work: Callable[[], object]) -> tuple[int, int, int]:
    """The same, and what kernels took besides at the peak: workspaces of convolutions, which are no tensors. Those are
    read off torch's statistics of the device, whose peak is reset."""
    if device.type != "cuda":
        return *measured(work), 0
    note_peak(device)
    before = torch.cuda.memory_allocated(device)
    peak, held = measured(work)
    return peak, held, max(0, torch.cuda.max_memory_allocated(device) - before - peak)


def peak_on(device: torch.device, work: Callable[[], object]) -> int:
    """All that a piece of work takes at its peak."""
    peak, _, besides = measured_on(device, work)
    return peak + besides


@dataclass(frozen=True)
class Footprint:
    """What the model's passes hold at their peak beside θ, in bytes; gradients, of the size of θ, are included."""

    vector: int  # one copy of the flat vector
    value: int  # of one forward pass
    gradient: int  # of one row alone
    row: int  # of each row, where rows run together
    pooled: int | None  # of each batch of a pool, where they run together at one θ
    kernels: int  # what kernels take besides where rows or batches run together
    update: int  # of AdamW's own arithmetic
    step: int  # of a row's gradient and AdamW's arithmetic with it
    together: bool
    cpu: bool
    fused: bool  # predicted steps go through memory once

    @classmethod
    def of(cls, trajectory: Trajectory) -> Footprint:
        """Measured once on the step with the largest batch: about 4 g, and 10 where rows and pools run together."""
        return trajectory.dynamics.loss.player.measured(trajectory, cls, lambda: _footprint(trajectory))

    @property
    def piece(self) -> int:
        """What the closed form of a step makes on the way: a dozen pieces of the flat vector, or nothing."""
        return 0 if self.fused else self.plain_piece

    @property
    def plain_piece(self) -> int:
        """The same of rows whose step counts are not the control's, which no kernel steps."""
        return CLOSED_FORM * self.block()

    @property
    def counting(self) -> int:
        """The same where coordinates with v = 0 are counted."""
        return COUNTING * self.block()

    def block(self, rows: int = 1) -> int:
        """A piece of one of so many rows that are gone through together."""
        return min(self.vector, (CACHED_BYTES if self.cpu else GPU_BYTES) // rows)


def _footprint(trajectory: Trajectory) -> Footprint:
    loss, step, state = trajectory.dynamics.loss, trajectory.heaviest, trajectory.state(0)
    vector, device = loss.layout.padded_size * loss.layout.dtype.itemsize, loss.layout.device
    given = (step.batch, step.random, step.where)
    at = (state.theta, state.buffers, *given)
    if loss.player.pays and _recordable(trajectory) >= ROOM * vector:
        record_gradient(trajectory)
    value, gradient = (peak_on(device, work) for work in (lambda: loss.value(*at), lambda: loss.gradient(*at)))
    row, besides = _row(trajectory)
    pooled, further = _pooled(trajectory, gradient)
    zeros = [torch.zeros_like(view) for view in loss.layout.typed_views(state.theta)]
    update = measured(lambda: adamw_step(loss.layout, state, zeros, step.hypers))[0] - 3 * vector
    own = state.clone()
    stepped = peak_on(device, lambda: trajectory.dynamics.launch(step, own, consume=True))
    together, kernels = row is not None, max(besides, further)
    cpu, fused = device.type == "cpu", available(state.theta)
    return Footprint(vector, value, gradient, row or gradient, pooled, kernels, update, stepped, together, cpu, fused)


def _row(trajectory: Trajectory) -> tuple[int | None, int]:
    """Of each of a few rows that run together, and what kernels take besides; None where they do not."""
    loss, step, state = trajectory.dynamics.loss, trajectory.heaviest, trajectory.state(0)
    few = state.theta[None].expand(FEW, -1)

    def rows() -> object:
        return row_gradients(loss, few, [state.buffers] * FEW, step.batch, step.random, step.where, step.present)

    if trajectory.together("gradient", FEW):
        rows()  # now it is known whether they run together
    if not trajectory.together("gradient", FEW):
        return None, 0
    peak, _, besides = measured_on(trajectory.device, rows)
    return peak // FEW, besides


def _pooled(trajectory: Trajectory, gradient: int) -> tuple[int | None, int]:
    """The same of the gradients of a batch at one θ, one of which alone takes so much. Whether they agree with one
    alone is seen with other batches."""
    loss, step, state = trajectory.dynamics.loss, trajectory.heaviest, trajectory.state(0)
    if not (step.present and all(step.present) and trajectory.together("pool", FEW)):
        return None, 0
    first = step.batch.batches[0] if isinstance(step.batch, Accumulated) else step.batch
    batches = [first if trajectory.typical is None else trajectory.typical[0]] * FEW
    pool = Pool(loss, state.theta, state.buffers, batches, step.random, lambda _: step.where, step.present)
    try:
        peak, _, besides = measured_on(trajectory.device, pool.mapped)
    except Exception as error:  # a few of them are too much already, or cannot be mapped and run alone
        return (gradient if ran_out(error) else None), 0
    return peak // FEW, besides


@dataclass(frozen=True)
class Curvature:
    """The same of a gradient with its graph, and of Hessian products."""

    graph: int  # once it is there
    build: int  # while it is made
    product: int  # of one vector alone, beside the graph and the product itself
    products: int  # of each further one together
    played: int  # rows whose products are recorded at a time; 0 where none are

    @classmethod
    def of(cls, trajectory: Trajectory) -> Curvature:
        """Measured once on that step, where something is predicted: about 6 g; 20 where they are recorded."""
        return trajectory.dynamics.loss.player.measured(trajectory, cls, lambda: _curvature(trajectory))


def _curvature(trajectory: Trajectory) -> Curvature:
    loss, step, state = trajectory.dynamics.loss, trajectory.heaviest, trajectory.state(0)
    f, device = Footprint.of(trajectory), loss.layout.device
    if loss.sharing.wanted and room(trajectory, trajectory.memory) < PRODUCTS_TOGETHER * f.vector:
        loss.sharing.settle("product", False)
    if loss.player.pays and loss.player.has("gradient"):
        left = _recordable(trajectory) // f.vector
        _record_products(trajectory, max((count for count, room in PRODUCTS_ROOM.items() if room <= left), default=0))
    few, made = state.theta[None].expand(FEW, -1), list[GradientGraph]()
    at = (state.theta, state.buffers, step.batch, step.random, step.where)
    try:
        build, graph, besides = measured_on(device, lambda: made.append(GradientGraph(loss, *at)))
        build += besides
        if trajectory.together("product", FEW):
            made[0].products(few)
        product, _, besides = measured_on(device, lambda: made[0].products(few[:1]))
        many = measured(lambda: made[0].products(few))[0] - FEW * f.vector
        products = max(many - (product - f.vector), 0) // (FEW - 1)
        product += besides - f.vector
    except AftershockError:  # a model without second derivatives has exact answers only
        build, graph, product, products = f.gradient, f.gradient, f.gradient, f.gradient
    batch, _ = trajectory.typical or (step.batch, None)
    vectors = loss.player.vectors if loss.recorded("products", batch) is not None else None
    return Curvature(graph, build, product, products, 0 if vectors is None else len(vectors))


@dataclass(frozen=True)
class Reading:
    """The same of a probe: of a batch that is larger or smaller than the path's, what it takes itself."""

    value: int  # of one forward pass
    gradient: int
    further: int = 0  # what its graph and a product take beyond the graph of the path's largest batch, while it is made

    @classmethod
    def of(cls, trajectory: Trajectory, batch: Batch, *, evaluating: bool = False, curved: bool = False) -> Reading:
        """Measured once on a batch whose tensors are not shaped as those of the path's largest: about 2 g, and 2 more
        where its curvature is read. batch: None for a probe that is none."""
        key = cls, _shapes(batch), evaluating, curved
        return trajectory.dynamics.loss.player.measured(
            trajectory, key, lambda: _reading(trajectory, batch, evaluating, curved)
        )


def _reading(trajectory: Trajectory, batch: Batch, evaluating: bool, curved: bool) -> Reading:
    f, shapes = Footprint.of(trajectory), _shapes(batch)
    if not shapes or shapes == _shapes(trajectory.heaviest.batch):
        return Reading(f.value, f.gradient)
    loss, state, device = trajectory.dynamics.loss, trajectory.state(0), trajectory.device
    at = (state.theta, state.buffers, batch, trajectory.steps[0].random, "the probe")
    value = peak_on(device, lambda: loss.value(*at, evaluating=evaluating))
    gradient, further = value, 0
    with contextlib.suppress(AftershockError):  # a probe without a derivative has exact answers only
        gradient = peak_on(device, lambda: loss.gradient(*at, evaluating=evaluating))
        if curved:
            product = peak_on(device, lambda: GradientGraph(loss, *at).products(state.theta[None]))
            further = max(0, product - Curvature.of(trajectory).build)
    return Reading(value, gradient, further)


def _shapes(batch: Batch) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    parts = batch.batches if isinstance(batch, Accumulated) else (batch,)
    return tuple((x.shape, x.dtype) for part in parts for x in flatten(part)[0] if isinstance(x, Tensor))


@dataclass(frozen=True)
class Watched:
    """The same of a gradient whose gates are recorded."""

    pattern: int  # its choices, which stay
    gradient: int  # at the peak

    @classmethod
    def of(cls, trajectory: Trajectory) -> Watched:
        """Measured once on that step, where gates are recorded: about 1 g."""
        return trajectory.dynamics.loss.player.measured(trajectory, cls, lambda: _watched(trajectory))


def _watched(trajectory: Trajectory) -> Watched:
    loss, step, state = trajectory.dynamics.loss, trajectory.heaviest, trajectory.state(0)
    at, made = (state.theta, state.buffers, step.batch, step.random, step.where), list[Pattern]()

    def work() -> None:
        made.append(Pattern())
        loss.within(recording(made[0])).gradient(*at)

    peak, held, besides = measured_on(trajectory.device, work)
    return Watched(held, peak + besides)


def room(trajectory: Trajectory, memory: str | int | None) -> int:
    """What may be used beside recorded passes, which a budget is for, too; what is free does not hold them."""
    recorded = trajectory.dynamics.loss.player.nbytes if memory is not None else 0
    return budget(memory, trajectory.device) - recorded


def _recordable(trajectory: Trajectory) -> int:
    return min(room(trajectory, trajectory.memory), free(trajectory.device))


def record_gradient(trajectory: Trajectory, lanes: int = 1) -> None:
    """Record a large model's gradient: its rows then run alone, each faster than its share of many."""
    loss, first, state = trajectory.dynamics.loss, trajectory.steps[0], trajectory.state(0)
    if trajectory.typical is not None:
        loss.rehearse("gradient", state.theta, state.buffers, trajectory.typical, first.random, lanes=lanes)


def _record_products(trajectory: Trajectory, count: int) -> None:
    """The same for its Hessian products, of so many vectors at once."""
    loss, first, state = trajectory.dynamics.loss, trajectory.steps[0], trajectory.state(0)
    if count and trajectory.typical is not None:
        with contextlib.suppress(AftershockError):  # a model without second derivatives
            rehearse_products(loss, state.theta, state.buffers, trajectory.typical, first.random, count)
