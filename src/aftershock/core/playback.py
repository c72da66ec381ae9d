"""Passes that are recorded once as CUDA graphs and played back.

With small batches a GPU waits for Python: a recorded gradient of a 0.4B model takes a quarter of the time of the same
gradient launched anew, with the same bits. A pass is recorded for one shape of batch, compared with plain passes at two
places, and played back from then on. What cannot be recorded (a model that looks at a number on the way) or is not the
same when it is played (a counter in Python) runs as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from .batches import Accumulated, Batch
from .lanes import Lanes
from .layout import Layout
from .randomness import RandomState
from .recordings import Make, Recording, Shape, Work

if TYPE_CHECKING:
    from .loss import LossFunction

MOST = 6  # passes of one model that are recorded: on each lane they hold activations, and a gradient's the gradient
LOOKED = 32  # shapes of batches that are tried at all: where every batch has its own, recording is given up
LARGE = 2**25  # parameters from which a recorded pass over one row costs less than its share of many rows together
LAUNCHING = 0.7  # of a pass's time, from which it pays to record it
LONG = 32  # steps of a path from which it pays to record its gradient

T = TypeVar("T")
Key = type | tuple[Any, ...]  # what is measured, and of what shape
Measured = WeakKeyDictionary[object, dict[Key, Any]]  # by path


def typical(batches: Iterable[Batch]) -> tuple[Batch, Batch] | None:
    """Two batches to record a pass with, from the middle: the first or the last may be of another shape. None where
    each is made of several."""
    plain = [batch for batch in batches if not isinstance(batch, Accumulated)]
    return (plain[len(plain) // 2], plain[min(len(plain) // 2 + 1, len(plain) - 1)]) if plain else None


@dataclass
class Looked:
    """What came of trying to record a pass: neither where it cannot be, busy where it keeps the GPU busy anyway."""

    function: object  # the loss, or another function of the model
    shape: Shape
    recordings: list[Recording] = field(default_factory=list)  # one for each lane
    busy: bool = False
    alone: bool = False  # two recordings of it cannot be played beside each other


class Player:
    """The recordings of one model, whichever function of it they are of, and what was measured while they were there.

    Nobody else keeps a recording: whoever plays one or counts it asks here, so that none outlives its being given back.
    """

    def __init__(self, layout: Layout, *, wanted: bool) -> None:
        self.layout, self.wanted = layout, wanted
        self.lanes = Lanes(layout)
        self._looked: list[Looked] = []
        self.vectors: Float[Tensor, "change param"] | None = None  # where recorded Hessian products read theirs
        self._measured: Measured = WeakKeyDictionary()
        self._measured_aside: Measured = WeakKeyDictionary()

    @property
    def pays(self) -> bool:
        """Whether passes of this model are recorded, however few there are."""
        return self.wanted and self.layout.size >= LARGE

    @property
    def recordings(self) -> int:
        """How many passes are recorded."""
        return sum(bool(known.recordings) for known in self._looked)

    def has(self, kind: str) -> bool:
        """Whether there is one of this kind, for whatever batch."""
        return any(known.shape.kind == kind and known.recordings for known in self._looked)

    @property
    def nbytes(self) -> int:
        """What the recordings keep on the device."""
        kept = [recording.nbytes for known in self._looked for recording in known.recordings]
        return sum(kept) + self.lanes.nbytes + (0 if self.vectors is None else self.vectors.nbytes)

    def measured(self, path: object, what: Key, measure: Callable[[], T]) -> T:
        """What passes along a path hold in memory: measured once, and anew after recordings were given back."""
        known = self._measured.setdefault(path, {})
        if what not in known:
            known[what] = measure()
        found: T = known[what]
        return found

    def give_back(self) -> None:
        """Give their memory back, and record nothing more."""
        self.wanted = False
        self.release()

    def release(self) -> None:
        """Give their memory back until something is recorded anew."""
        self._looked.clear()
        self._measured.clear()
        self.lanes.narrow(0)
        self.vectors = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As if nothing were recorded, nor could be, to plan work before which recordings are released."""
        held = self.wanted, self.lanes, self._looked, self.vectors, self._measured
        self.wanted, self.lanes, self._looked, self.vectors = False, Lanes(self.layout), [], None
        self._measured = self._measured_aside
        try:
            yield
        finally:
            self.wanted, self.lanes, self._looked, self.vectors, self._measured = held

    def narrow(self, lanes: int = 1) -> None:
        """Give back what further lanes hold: work that has no exact rows needs the room."""
        for known in self._looked:
            del known.recordings[lanes:]
        self.lanes.narrow(lanes)

    @property
    def lane_bytes(self) -> int:
        """What lanes beside the first hold."""
        held = [recording.nbytes for known in self._looked for recording in known.recordings[1:]]
        return sum(held) + self.lanes.nbytes - (self.lanes.nbytes // len(self.lanes) if self.lanes else 0)

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
        lanes: int = 1,
    ) -> bool:
        """Record a pass over batches of this shape, unless that was tried before; says whether it is played back.

        Costs about seven passes, once, and four for each further lane; two where a pass keeps the GPU busy by itself
        and is not recorded. `batches` are two of one shape, or the same one twice. derivative: it is differentiated
        twice. lanes: on how many it is recorded, where its recordings have nothing in common that one changes.
        """
        placed = [loss.place(batch) for batch in batches]
        (shape, _), (other, _) = (Shape.of(kind, evaluating, batch, self.layout.device) for batch in placed)
        known = self._known(loss.loss_fn, shape)
        work = Work(loss, make, buffers, random, evaluating, derivative)
        if known is None:
            full = self.recordings >= MOST or len(self._looked) >= LOOKED
            if not self.wanted or full or not other.fits(shape):
                return False
            known = Looked(loss.loss_fn, shape)
            with contextlib.suppress(Exception):  # whatever it is, a plain pass says it in its own words
                self._record(known, work, theta, placed)
            self._looked.append(known)
        while 0 < len(known.recordings) < lanes and self._widened(known, work, theta, placed[0]):
            pass
        return bool(known.recordings)

    def _record(self, known: Looked, work: Work, theta: Float[Tensor, " param"], batches: Sequence[Batch]) -> None:
        work.plain(theta, batches[0])  # what happens only once is over
        known.busy = _launching(self.layout.device, lambda: work.plain(theta, batches[0])) < LAUNCHING
        if not known.busy:
            made = Recording(work, self.lanes.place(0), batches[0], self.lanes.stream(0))
            known.recordings += [made] if made.faithful(work, theta, batches) else []
            known.alone = not made.separate

    def _widened(self, known: Looked, work: Work, theta: Float[Tensor, " param"], batch: Batch) -> bool:
        """Record the same pass on one lane more. Where it is not the same there, that is not tried again; where memory
        runs out, it is, the next time."""
        lane = len(known.recordings)
        if known.alone:
            return False
        try:
            made = Recording(work, self.lanes.place(lane), batch, self.lanes.stream(lane))
            known.alone = not made.beside(known.recordings[0], self.lanes, work, theta, batch)
            known.recordings += [] if known.alone else [made]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except Exception:  # whatever cannot be recorded again has one lane
            known.alone = True
        self.lanes.narrow(max(len(looked.recordings) for looked in self._looked))
        return len(known.recordings) > lane


def _launching(device: torch.device, work: Callable[[], object]) -> float:
    """The share of a pass's time that goes by until it is launched: near 1 where the GPU waits for Python."""
    torch.cuda.synchronize(device)
    began = perf_counter()
    work()
    launched = perf_counter()
    torch.cuda.synchronize(device)
    return (launched - began) / (perf_counter() - began)
