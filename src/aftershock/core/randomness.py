"""Where randomness comes from: what a caller gives, and the global states of torch, Python and NumPy, put back after.

A loop draws from any of them (dropout, `random.random()` in a branch, `np.random.beta` for mixup). Reading and setting
through the public calls costs NumPy 0.1 ms; its documented memory is copied instead, which costs a microsecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInput, Nondeterministic

NUMPY_BYTES = 625 * 4  # of the Mersenne twister: 624 words and the position in them

Randomness = int | torch.Generator  # what every public function that draws takes as `generator=`


def generator_of(given: Randomness) -> torch.Generator:
    """A seed as a generator on the CPU; a generator as it is."""
    if isinstance(given, torch.Generator):
        return given
    return torch.Generator().manual_seed(seed_of(given))


def seed_of(given: Randomness) -> int:
    """For draws that torch does not make: a seed as it is, or the next integer of a generator."""
    if isinstance(given, torch.Generator):
        return int(torch.randint(2**31, (), generator=given, device=given.device))
    if not isinstance(given, int | np.integer):
        raise InvalidInput(f"generator= is a torch.Generator or an integer seed; got {given!r}")
    return int(given)


@dataclass(frozen=True)
class NumpyState:
    """`np.random`'s global generator: its memory, and the second number of the last pair of normal draws."""

    words: bytes
    gauss: float = math.nan  # NaN where there is none

    @classmethod
    def now(cls, known: NumpyState | None = None) -> NumpyState:
        """`known`: what the generator was last seen or set to, which saves reading the spare normal number.

        Without a spare number every draw moves the words, so that the same words are the same state.
        """
        words = ctypes.string_at(_numpy_memory(), NUMPY_BYTES)
        if known is not None and math.isnan(known.gauss) and known.words == words:
            return known
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (the user's own generator)
        return cls(words, state["gauss"] if state["has_gauss"] else math.nan)

    def install(self) -> None:
        words = np.frombuffer(self.words, np.uint32)
        spare = not math.isnan(self.gauss)
        state = {"key": words[:-1], "pos": int(words[-1])}
        np.random.set_state(  # noqa: NPY002
            {"bit_generator": "MT19937", "state": state, "has_gauss": int(spare), "gauss": self.gauss if spare else 0.0}
        )

    def replaces(self, other: NumpyState) -> None:
        """Install this state where `other` is in force."""
        if not (math.isnan(self.gauss) and math.isnan(other.gauss)):
            self.install()
        elif self.words != other.words:
            ctypes.memmove(_numpy_memory(), self.words, NUMPY_BYTES)

    def same(self, other: NumpyState) -> bool:
        return self.words == other.words and _same_spare(self.gauss, other.gauss)


@dataclass(frozen=True)
class RandomState:
    """The global generators at one moment: torch's for the CPU and the device, Python's and NumPy's."""

    cpu: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]
    numpy: NumpyState

    @classmethod
    def now(cls, device: torch.device, known: NumpyState | None = None) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), NumpyState.now(known))

    def same(self, other: RandomState) -> bool:
        cuda = self.cuda is None or (other.cuda is not None and _same_bytes(self.cuda, other.cuda))
        return (
            cuda
            and _same_bytes(self.cpu, other.cpu)
            and _same_python(self.python, other.python)
            and self.numpy.same(other.numpy)
        )

    def install(self, device: torch.device, over: NumpyState | None = None) -> None:
        """`over`: NumpyState in force, where it is known."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        random.setstate(self.python)
        if over is None:
            self.numpy.install()
        else:
            self.numpy.replaces(over)

    def tensors(self) -> dict[str, Tensor]:
        """As a file holds it."""
        _, words, spare = self.python
        gauss = [math.nan if spare is None else spare, self.numpy.gauss]
        found = {
            "cpu": self.cpu,
            "python": torch.from_numpy(np.array(words, np.int64)),
            "numpy": torch.frombuffer(bytearray(self.numpy.words), dtype=torch.int32),
            "gauss": torch.from_numpy(np.array(gauss, np.float64)),
        }
        return found if self.cuda is None else {**found, "cuda": self.cuda}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> RandomState:
        """The inverse of `tensors`."""
        spare, gauss = tensors["gauss"].tolist()
        python = (3, tuple(tensors["python"].tolist()), None if math.isnan(spare) else spare)
        words = tensors["numpy"].numpy().tobytes()
        return cls(tensors["cpu"], tensors.get("cuda"), python, NumpyState(words, gauss))


@dataclass
class Drawing:
    """A stretch of user code that draws from a given state; `after` is what it leaves."""

    after: RandomState


_put_back: list[NumpyState] = []  # the user's NumPy state as it was last left


@contextlib.contextmanager
def drawing_from(start: RandomState, device: torch.device) -> Iterator[Drawing]:
    """Run with `start` in force; `after` is read at the end, and the user's own states are put back."""
    before = RandomState.now(device, _put_back[0] if _put_back else None)
    start.install(device, over=before.numpy)
    drawing = Drawing(start)
    over = None
    try:
        yield drawing
        after = RandomState.now(device, start.numpy)
        over = after.numpy
        # most models draw nothing: a thousand steps then share one random state
        drawing.after = start if after.same(start) else after
    finally:
        before.install(device, over)
        _put_back[:] = [before.numpy]


@contextlib.contextmanager
def restored_random(device: torch.device) -> Iterator[None]:
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.install(device)


def _same_python(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Each draw moves the position, the last word; when it returns to where it was all words are new."""
    return a[1][-4:] == b[1][-4:] and a[2] == b[2]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Faster than `torch.equal` on a few thousand bytes."""
    return a.numpy().tobytes() == b.numpy().tobytes()


def _same_spare(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _numpy_memory() -> int:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        raise Nondeterministic(
            f"NumPy's global generator was replaced by {type(generator).__name__}, which aftershock cannot follow; "
            "leave np.random as it is, and draw from a generator of your own in the data"
        )
    return generator.ctypes.state_address
