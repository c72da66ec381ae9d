"""What user code can change and leave behind: containers, variables, tensors, generators. Each is read and put back."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, MutableMapping
from operator import is_
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None))
COPIED_BYTES = 2**16  # a larger tensor is not copied at every call: it is watched, and refused where it is written to
EMPTY = object()  # a variable without a value


def same_value(a: object, b: object) -> bool:
    """The same object, or equal numbers or text."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


class Thing(ABC):
    """One object that user code can change in place."""

    def __init__(self, label: str, held: Any) -> None:
        self.label = label
        self.held = held

    @abstractmethod
    def read(self) -> Any:
        """What `write` needs to bring the object back to what it is now."""

    def same(self, seen: Any) -> bool:
        return all(map(is_, self.held, seen)) and len(self.held) == len(seen)

    @abstractmethod
    def write(self, seen: Any) -> None: ...

    def names(self, before: Any, after: Any) -> list[str]:
        """What of it changed, in the user's words."""
        return [self.label]

    def later(self, before: Any, after: Any, times: int) -> Any:
        """What it would be after `times` such changes: numbers run on, the rest is as it was left."""
        return after

    def counts(self, before: Any, after: Any) -> bool:
        """Whether a number in it changed."""
        return False


class Attributes(Thing):
    """A dictionary, or the attributes of a module or object."""

    held: MutableMapping[Any, Any]

    def __init__(self, label: str, held: MutableMapping[Any, Any], attributes: bool = False) -> None:
        super().__init__(label, held)
        self.attributes = attributes

    def read(self) -> dict[Any, Any]:
        return dict(self.held)

    def same(self, seen: Mapping[Any, Any]) -> bool:
        return not self._changed(seen, self.held)

    def write(self, seen: Mapping[Any, Any]) -> None:
        self.held.clear()
        self.held.update(seen)

    def names(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[str]:
        dotted = f"{self.label}." if self.label else ""
        return [
            f"{dotted}{key}" if self.attributes else f"{self.label}[{key!r}]" for key in self._changed(before, after)
        ]

    def later(self, before: Mapping[Any, Any], after: Mapping[Any, Any], times: int) -> dict[Any, Any]:
        return {key: run_on(before.get(key), value, times) for key, value in after.items()}

    def counts(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
        return any(is_count(before.get(key), after.get(key)) for key in self._changed(before, after))

    def _changed(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[Any]:
        keys = dict.fromkeys([*before, *after])
        return [key for key in keys if not same_value(before.get(key, EMPTY), after.get(key, EMPTY))]


class Globals(Attributes):
    """The global variables that a function names."""

    def __init__(self, held: MutableMapping[str, Any], names: tuple[str, ...]) -> None:
        super().__init__("", held, attributes=True)
        self.variables = names

    def read(self) -> dict[str, Any]:
        return {name: self.held[name] for name in self.variables if name in self.held}

    def same(self, seen: Mapping[str, Any]) -> bool:
        return not self._changed(seen, self.read())

    def write(self, seen: Mapping[str, Any]) -> None:
        for name in self.variables:
            self.held.pop(name, None)
        self.held.update(seen)

    def names(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[str]:
        return [f"the global variable {name}" for name in self._changed(before, after)]


class Items(Thing):
    """A list, deque or set."""

    held: list[Any] | deque[Any] | set[Any]

    def read(self) -> Any:
        return self.held.copy()

    def write(self, seen: Any) -> None:
        self.held.clear()
        self.held.update(seen) if isinstance(self.held, set) else self.held.extend(seen)

    def later(self, before: Any, after: Any, times: int) -> Any:
        if isinstance(after, set) or len(before) != len(after):
            return after
        return type(after)(run_on(x, y, times) for x, y in zip(before, after))

    def counts(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and any(not same_value(x, y) and is_count(x, y) for x, y in zip(before, after))


class Variable(Thing):
    """A variable of a function that encloses another."""

    held: CellType

    def read(self) -> Any:
        try:
            return self.held.cell_contents
        except ValueError:
            return EMPTY

    def same(self, seen: Any) -> bool:
        return same_value(seen, self.read())

    def write(self, seen: Any) -> None:
        if seen is not EMPTY:
            self.held.cell_contents = seen

    def later(self, before: Any, after: Any, times: int) -> Any:
        return run_on(before, after, times)

    def counts(self, before: Any, after: Any) -> bool:
        return is_count(before, after)


class PlainTensor(Thing):
    """A tensor that is neither a parameter nor a buffer; torch counts what is written to it."""

    held: Tensor

    def __init__(self, label: str, held: Tensor) -> None:
        super().__init__(label, held)
        self.small = held.numel() * held.element_size() <= COPIED_BYTES

    def read(self) -> tuple[int, Tensor | None]:
        return self.held._version, self.held.detach().clone() if self.small else None

    def same(self, seen: tuple[int, Tensor | None]) -> bool:
        return seen[0] == self.held._version

    def write(self, seen: tuple[int, Tensor | None]) -> None:
        if seen[1] is not None:
            with torch.no_grad():
                self.held.detach().copy_(seen[1])

    def later(self, before: Any, after: Any, times: int) -> Any:
        return after[0], run_on(before[1], after[1], times)

    def counts(self, before: Any, after: Any) -> bool:
        return is_count(before[1], after[1])


class Generator(Thing):
    """A random generator that is not one of the global ones."""

    held: torch.Generator | random.Random

    def read(self) -> Any:
        return self.held.get_state() if isinstance(self.held, torch.Generator) else self.held.getstate()

    def same(self, seen: Any) -> bool:
        return self.alike(self.read(), seen)

    def alike(self, one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else one == other

    def write(self, seen: Any) -> None:
        if isinstance(self.held, torch.Generator):
            self.held.set_state(seen)
        else:
            self.held.setstate(seen)


class NumpyGenerator(Thing):
    """A generator of NumPy's, by the bits inside it."""

    held: np.random.Generator | np.random.RandomState

    def read(self) -> Any:
        if isinstance(self.held, np.random.RandomState):
            return self.held.get_state(legacy=False)
        return self.held.bit_generator.state

    def same(self, seen: Any) -> bool:
        return self.alike(self.read(), seen)

    def alike(self, one: Any, other: Any) -> bool:
        return _flat(one) == _flat(other)

    def write(self, seen: Any) -> None:
        if isinstance(self.held, np.random.RandomState):
            self.held.set_state(seen)
        else:
            self.held.bit_generator.state = seen


class Array(Thing):
    """A small array of NumPy's."""

    held: np.ndarray

    def read(self) -> np.ndarray:
        return self.held.copy()

    def same(self, seen: np.ndarray) -> bool:
        return self.held.tobytes() == seen.tobytes()

    def write(self, seen: np.ndarray) -> None:
        self.held[...] = seen


GENERATORS = (Generator, NumpyGenerator)


def thing_of(label: str, held: Any) -> Thing | None:
    """How an object is watched; None where it cannot change, or not in a way that is known here."""
    if isinstance(held, Tensor):
        return None if isinstance(held, torch.nn.Parameter) or held.is_meta else PlainTensor(label, held)
    if isinstance(held, dict):
        return Attributes(label, held)
    if isinstance(held, list | deque | set):
        return Items(label, held)
    if isinstance(held, torch.Generator):
        return Generator(label, held)
    if isinstance(held, random.Random):  # SystemRandom has no state
        return None if isinstance(held, random.SystemRandom) else Generator(label, held)
    if isinstance(held, np.random.Generator | np.random.RandomState):
        return NumpyGenerator(label, held)
    if isinstance(held, np.ndarray):
        return Array(label, held) if held.nbytes <= COPIED_BYTES and held.flags.writeable else None
    return None


def is_count(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return isinstance(before, Tensor) and after.numel() == 1 and before.shape == after.shape
    return type(before) is type(after) and isinstance(after, int | float) and not isinstance(after, bool)


def run_on(before: Any, after: Any, times: int) -> Any:
    """A counter after `times` steps like the one seen; anything else as it was left."""
    return before + times * (after - before) if is_count(before, after) else after


def _flat(state: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in state.values():
        found += _flat(value) if isinstance(value, dict) else [value.tobytes() if hasattr(value, "tobytes") else value]
    return found
