"""Passes that are recorded once as CUDA graphs and played back.

With small batches a GPU waits for Python: a recorded gradient of a 0.4B model takes a quarter of the time of the same
gradient launched anew, with the same bits. A pass is recorded for one shape of batch, compared with plain passes at two
places, and played back from then on. What cannot be recorded (a model that looks at a number on the way) or is not the
same when it is played (a counter in Python) runs as ever.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .batches import Accumulated, Batch
from .keeper import Left
from .layout import Layout
from .memory import set_aside
from .randomness import RandomState, drawing_from
from .reductions import norms
from .structure import flatten

if TYPE_CHECKING:
    from .loss import LossFunction

MOST = 6  # recordings of one model: each holds a pass's activations, and a gradient's the gradient
LOOKED = 32  # shapes of batches that are tried at all: where every batch has its own, recording is given up
TOGETHER = 4  # vectors whose Hessian products are recorded in one pass; where there are fewer, the rest are zero
LARGE = 2**25  # parameters from which a recorded pass over one row costs less than its share of many rows together
LAUNCHING = 0.7  # of a pass's time, from which it pays to record it
APART = 1.1  # how far from the first place, as a factor of θ, a recording is compared again
SCATTER = 3.0  # where plain passes do not repeat their bits: how much further apart a recording may be
LONG = 32  # steps of a path from which it pays to record its gradient

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """What a recording is bound to: what is computed, and everything of a batch but the numbers on the device."""

    kind: str
    evaluating: bool
    structure: Any
    leaves: tuple[Any, ...]  # of tensors on the device their shape, stride and dtype; all else as it is

    @classmethod
    def of(cls, kind: str, evaluating: bool, batch: Batch, device: torch.device) -> tuple[Shape, list[Tensor]]:
        """The shape, and the tensors that are copied in."""
        leaves, structure = flatten(batch)
        inputs = [x for x in leaves if isinstance(x, Tensor) and x.device == device]
        seen = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) and x.device == device else x for x in leaves]
        return cls(kind, evaluating, structure, tuple(seen)), inputs

    def fits(self, other: Shape) -> bool:
        alike = self.kind == other.kind and self.evaluating == other.evaluating and self.structure == other.structure
        return alike and all(map(_equal, self.leaves, other.leaves))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    try:
        return a is b or bool(type(a) is type(b) and a == b)
    except Exception:  # an object that cannot be compared is another one
        return False


@dataclass(frozen=True)
class Played:
    """What a pass gave: the loss, the gradient as a flat vector and its norm, buffers, randomness."""

    loss: Tensor
    grad: Float[Tensor, " param"] | None
    present: tuple[bool, ...]
    norm: Tensor | None
    buffers: dict[str, Tensor]
    random: RandomState

    def grads(self, layout: Layout) -> list[Tensor | None]:
        """The gradient by parameter."""
        assert self.grad is not None
        return [view if ok else None for view, ok in zip(layout.views(self.grad), self.present)]


def typical(batches: Iterable[Batch]) -> tuple[Batch, Batch] | None:
    """Two batches to record a pass with, from the middle: the first or the last may be of another shape. None where
    each is made of several."""
    plain = [batch for batch in batches if not isinstance(batch, Accumulated)]
    return (plain[len(plain) // 2], plain[min(len(plain) // 2 + 1, len(plain) - 1)]) if plain else None


# A pass at θ over a batch: the parameters that are put in place, and what is computed with the model.
Program = Callable[[nn.Module], tuple[Tensor, list[Tensor | None], Tensor | None]]
Make = Callable[[Float[Tensor, " param"], Batch], tuple[list[Tensor], Program]]


@dataclass(frozen=True)
class Looked:
    """What came of trying to record a pass: neither where it cannot be, busy where it keeps the GPU busy anyway."""

    function: object  # the loss, or another function of the model
    shape: Shape
    recording: Recording | None = None
    busy: bool = False


class Player:
    """The recordings of one model, whichever function of it they are of, and what was measured while they were there.

    Nobody else keeps a recording: whoever plays one or counts it asks here, so that none outlives its being given back.
    """

    def __init__(self, layout: Layout, *, wanted: bool) -> None:
        self.layout, self.wanted = layout, wanted
        self._looked: list[Looked] = []
        self._theta: list[Float[Tensor, " param"]] = []  # where recordings read θ: one place for all of them
        self._vectors: list[Float[Tensor, "change param"]] = []  # and where products read their vectors
        self._measured: WeakKeyDictionary[object, dict[type, Any]] = WeakKeyDictionary()

    @property
    def pays(self) -> bool:
        """Whether passes of this model are recorded, however few there are."""
        return self.wanted and self.layout.size >= LARGE

    @property
    def recordings(self) -> int:
        """How many there are."""
        return sum(known.recording is not None for known in self._looked)

    def has(self, kind: str) -> bool:
        """Whether there is one of this kind, for whatever batch."""
        return any(known.shape.kind == kind and known.recording is not None for known in self._looked)

    @property
    def nbytes(self) -> int:
        """What the recordings keep on the device."""
        kept = [known.recording.nbytes for known in self._looked if known.recording is not None]
        return sum(kept) + sum(place.nbytes for place in (*self._theta, *self._vectors))

    @property
    def vectors(self) -> Float[Tensor, "change param"]:
        """Whose Hessian products the next pass of that kind gives."""
        if not self._vectors:
            self._vectors.append(self.layout.zeros(TOGETHER))
        return self._vectors[0]

    def measured(self, path: object, kind: type[T], measure: Callable[[], T]) -> T:
        """What passes along a path hold in memory: measured once, and anew after recordings were given back."""
        known = self._measured.setdefault(path, {})
        if kind not in known:
            known[kind] = measure()
        found: T = known[kind]
        return found

    def give_back(self) -> None:
        """Give their memory back, and record nothing more."""
        self.wanted = False
        self._looked.clear()
        self._measured.clear()
        self._theta.clear()
        self._vectors.clear()

    def spare_vectors(self) -> None:
        """Give their place back where no recording reads them."""
        if not self.has("products"):
            self._vectors.clear()

    def looked_at(
        self, function: object, kind: str, batch: Batch, *, evaluating: bool
    ) -> tuple[Looked | None, list[Tensor]]:
        """What came of trying to record this pass, None where nobody has tried; and what would be copied into it."""
        shape, inputs = Shape.of(kind, evaluating, batch, self.layout.device)
        return self._known(function, shape), inputs

    def _known(self, function: object, shape: Shape) -> Looked | None:
        return next((x for x in self._looked if x.function is function and x.shape.fits(shape)), None)

    def rehearse(
        self,
        loss: LossFunction,
        kind: str,
        make: Make,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batches: Sequence[Batch],
        random: RandomState,
        *,
        evaluating: bool = False,
        derivative: bool = False,
    ) -> bool:
        """Record a pass over batches of this shape, unless that was tried before; says whether it is played back.

        Costs about seven passes, once; two where a pass keeps the GPU busy by itself and is not recorded. `batches` are
        two of one shape, or the same one twice. derivative: it is differentiated twice.
        """
        placed = [loss.place(batch) for batch in batches]
        (shape, _), (other, _) = (Shape.of(kind, evaluating, batch, self.layout.device) for batch in placed)
        known = self._known(loss.loss_fn, shape)
        if not self.wanted or known is not None or not other.fits(shape):
            return known is not None and known.recording is not None
        if self.recordings >= MOST or len(self._looked) >= LOOKED:
            return False
        found = Looked(loss.loss_fn, shape)
        with contextlib.suppress(Exception):  # whatever it is, a plain pass says it in its own words
            work = _Work(loss, make, buffers, random, evaluating, derivative)
            work.plain(theta, placed[0])  # what happens only once is over
            if _launching(self.layout.device, lambda: work.plain(theta, placed[0])) < LAUNCHING:
                found = replace(found, busy=True)
            else:
                found = replace(found, recording=self._recorded(work, theta, placed))
        self._looked.append(found)
        return found.recording is not None

    def _recorded(self, work: _Work, theta: Float[Tensor, " param"], batches: Sequence[Batch]) -> Recording | None:
        if not self._theta:
            self._theta.append(self.layout.zeros())
        made = Recording(work, self._theta[0], batches[0])
        return made if made.faithful(work, theta, batches) else None


@dataclass(frozen=True)
class _Work:
    """A pass, and what it is given beside θ and the batch."""

    loss: LossFunction
    make: Make
    buffers: Mapping[str, Tensor]
    random: RandomState
    evaluating: bool
    derivative: bool

    def run(
        self, parameters: Sequence[Tensor], program: Callable[[nn.Module], Any], left: list[Left]
    ) -> tuple[Any, dict[str, Tensor], RandomState]:
        return self.loss.call(
            parameters, self.buffers, self.random, program,
            derivative=self.derivative, evaluating=self.evaluating, left=left,
        )  # fmt: skip

    def plain(self, theta: Float[Tensor, " param"], batch: Batch) -> Played:
        """By running the user's code."""
        layout = self.loss.layout
        parameters, program = self.make(theta, batch)
        (loss, grads, norm), after, random = self.run(parameters, program, [])
        return Played(loss, _joined(layout, grads), _present(grads), norm, after, random)


class Recording:
    """One pass as a CUDA graph: inputs are copied in, the graph runs, results are copied out."""

    def __init__(self, work: _Work, theta: Float[Tensor, " param"], batch: Batch) -> None:
        self.layout, self._theta = work.loss.layout, theta
        leaves, structure = flatten(batch)
        own = [x.clone() if isinstance(x, Tensor) and x.device == theta.device else x for x in leaves]
        self._inputs = [x for x in own if isinstance(x, Tensor) and x.device == theta.device]
        self._graph = torch.cuda.CUDAGraph()
        self._buffers: dict[str, Tensor] = {}
        parameters, program = work.make(theta, structure.unflatten(own))

        def record(model: nn.Module) -> Any:
            def whole() -> tuple[Tensor, Tensor | None, tuple[bool, ...], Tensor | None]:
                loss, grads, norm = program(model)
                return loss, _joined(self.layout, grads), _present(grads), norm

            self._buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in work.buffers}
            found, self.nbytes, idle = _recorded(self._graph, theta.device, whole)
            set_aside(self, idle)
            return found

        left: list[Left] = []
        found, after, drawn = work.run(parameters, record, left)
        self.result, self._grad, self._present, self._norm = found
        self._moving = [name for name in self._buffers if name in work.loss.moving]
        self._draws = True
        replaced = any(after[name].data_ptr() != b.data_ptr() for name, b in self._buffers.items())
        if left or replaced or not drawn.same(replace(work.random, cuda=drawn.cuda)):
            raise RuntimeError("this pass leaves something in Python, which playing it back would not")

    def faithful(self, work: _Work, theta: Float[Tensor, " param"], batches: Sequence[Batch]) -> bool:
        """Whether it gives what plain passes give: to the bit, or as nearly as these repeat themselves."""
        draws = False
        for at, batch in ((theta, batches[0]), (APART * theta, batches[-1])):
            plain, inputs = work.plain(at, batch), Shape.of("", False, batch, theta.device)[1]
            played = self.play(at, work.buffers, inputs, work.random)
            draws |= not plain.random.same(work.random)
            same = plain.random.same(played.random) and plain.present == played.present
            if not same or any(not torch.equal(plain.buffers[name], b) for name, b in played.buffers.items()):
                return False
            off = _apart(plain, played)
            if off > 0 and not off <= SCATTER * _apart(plain, work.plain(at, batch)):
                return False
        self._draws = draws
        return True

    def play(
        self,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        random: RandomState,
    ) -> Played:
        """The pass at other numbers; nobody has looked whether what it gives is finite."""
        random = self.run(theta, buffers, inputs, random)
        after = {**buffers, **{name: self._buffers[name].clone() for name in self._moving}}
        grad, norm = (None if x is None else x.clone() for x in (self._grad, self._norm))
        return Played(self.result.clone(), grad, self._present, norm, after, random)

    def run(
        self,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        random: RandomState,
    ) -> RandomState:
        """The same, left in the recording's own memory, of which `result` is to be read before the next run."""
        self._theta.copy_(theta)
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(inputs))
        if self._buffers:
            torch._foreach_copy_(list(self._buffers.values()), [buffers[name] for name in self._buffers])
        if self._draws:
            with drawing_from(random, theta.device) as drawing:
                self._graph.replay()
            random = drawing.after
        else:
            self._graph.replay()
        return random


def _present(grads: Sequence[Tensor | None]) -> tuple[bool, ...]:
    return tuple(grad is not None for grad in grads)


def _joined(layout: Layout, grads: Sequence[Tensor | None]) -> Float[Tensor, " param"] | None:
    """Gradients as a flat vector of their own, zero where a parameter has none."""
    if not grads:
        return None
    if any(grad is None for grad in grads):
        return layout.join(grads)
    flat = layout.blank()
    layout.write(flat, grads)
    return flat


def _apart(a: Played, b: Played) -> float:
    """How far two passes are from each other, relative to the first: 0 where their bits are the same."""
    pairs = [(a.loss.reshape(-1), b.loss.reshape(-1))]
    if a.grad is not None and b.grad is not None:
        pairs.append((a.grad, b.grad))
    if all(torch.equal(x, y) for x, y in pairs):
        return 0.0
    return max(float((norms(x - y) / norms(x).clamp(min=1e-30)).max()) for x, y in pairs)


# --- recording


def _launching(device: torch.device, work: Callable[[], object]) -> float:
    """The share of a pass's time that goes by until it is launched: near 1 where the GPU waits for Python."""
    torch.cuda.synchronize(device)
    began = perf_counter()
    work()
    launched = perf_counter()
    torch.cuda.synchronize(device)
    return (launched - began) / (perf_counter() - began)


def _recorded(graph: torch.cuda.CUDAGraph, device: torch.device, work: Callable[[], Any]) -> tuple[Any, int, int]:
    """Run the work once watching for waits, which a recording does not survive, and record it.

    Returns what it gives, the bytes that the recording keeps, and those of them that torch counts as free.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    fresh = generator.clone_state()
    with _ScalarsOnDevice():
        with _refusing_waits():
            work()
        torch.cuda.empty_cache()
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = work()
        except BaseException:
            generator.graphsafe_set_state(fresh)  # a recording that fails leaves it unusable
            raise
    kept = torch.cuda.memory_reserved(device) - reserved
    return found, kept, kept - (torch.cuda.memory_allocated(device) - allocated)


@contextlib.contextmanager
def _refusing_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _ScalarsOnDevice(TorchFunctionMode):
    """`torch.tensor(0.0, device="cuda")` filled in on the device: a copy from the CPU cannot be recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        plain = func is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float)
        if not plain or device is None or torch.device(device).type != "cuda" or kwargs.get("requires_grad"):
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
        return torch.full((), args[0], dtype=dtype, device=device)
