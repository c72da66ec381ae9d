"""Passes that are recorded once as CUDA graphs and played back.

With small batches a GPU waits for Python: a recorded gradient of a 0.4B model takes a quarter of the time of the same
gradient launched anew, with the same bits. A pass is recorded for one shape of batch, compared with plain passes at two
places, and played back from then on. What cannot be recorded (a model that looks at a number on the way) or is not the
same when it is played (a counter in Python) runs as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from .batches import Accumulated, Batch
from .layout import Layout
from .randomness import RandomState
from .recordings import Make, Recording, Shape, Work

if TYPE_CHECKING:
    from .loss import LossFunction

MOST = 6  # recordings of one model: each holds a pass's activations, and a gradient's the gradient
LOOKED = 32  # shapes of batches that are tried at all: where every batch has its own, recording is given up
TOGETHER = 4  # vectors whose Hessian products are recorded in one pass; where there are fewer, the rest are zero
LARGE = 2**25  # parameters from which a recorded pass over one row costs less than its share of many rows together
LAUNCHING = 0.7  # of a pass's time, from which it pays to record it
LONG = 32  # steps of a path from which it pays to record its gradient

T = TypeVar("T")


def typical(batches: Iterable[Batch]) -> tuple[Batch, Batch] | None:
    """Two batches to record a pass with, from the middle: the first or the last may be of another shape. None where
    each is made of several."""
    plain = [batch for batch in batches if not isinstance(batch, Accumulated)]
    return (plain[len(plain) // 2], plain[min(len(plain) // 2 + 1, len(plain) - 1)]) if plain else None


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
            work = Work(loss, make, buffers, random, evaluating, derivative)
            work.plain(theta, placed[0])  # what happens only once is over
            if _launching(self.layout.device, lambda: work.plain(theta, placed[0])) < LAUNCHING:
                found = replace(found, busy=True)
            else:
                found = replace(found, recording=self._recorded(work, theta, placed))
        self._looked.append(found)
        return found.recording is not None

    def _recorded(self, work: Work, theta: Float[Tensor, " param"], batches: Sequence[Batch]) -> Recording | None:
        if not self._theta:
            self._theta.append(self.layout.zeros())
        made = Recording(work, self._theta[0], batches[0])
        return made if made.faithful(work, theta, batches) else None


def _launching(device: torch.device, work: Callable[[], object]) -> float:
    """The share of a pass's time that goes by until it is launched: near 1 where the GPU waits for Python."""
    torch.cuda.synchronize(device)
    began = perf_counter()
    work()
    launched = perf_counter()
    torch.cuda.synchronize(device)
    return (launched - began) / (perf_counter() - began)
