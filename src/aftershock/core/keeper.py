"""What user code leaves behind ends with its call: read before, put back after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedModel
from .reach import Reach
from .things import Attributes, Globals, PlainTensor, Thing


@dataclass(frozen=True)
class Left:
    """A thing that a call left changed."""

    thing: Thing
    before: Any
    after: Any

    @property
    def names(self) -> list[str]:
        return self.thing.names(self.before, self.after)

    @property
    def key(self) -> tuple[str, ...]:
        return (type(self.thing).__name__, self.thing.label, *self.names)

    @property
    def counts(self) -> bool:
        return self.thing.counts(self.before, self.after)

    def apply(self, times: int) -> None:
        """Leave it as this call did, made `times` over."""
        self.thing.write(self.thing.later(self.before, self.after, times))


class Keeper:
    """Everything that calls of one function with one model could leave changed, as it is outside of them."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        self.model, self.function = model, function
        self._harmless: set[tuple[str, ...]] = set()  # what was left, and seen to change nothing

    def not_judged(self, left: Sequence[Left]) -> list[Left]:
        """What has not been left before."""
        return [each for each in left if each.key not in self._harmless]

    def settle(self, left: Sequence[Left]) -> None:
        """What was left changes nothing."""
        self._harmless |= {each.key for each in left}

    @cached_property
    def _reach(self) -> Reach:
        return Reach.of(self.model, self.function)

    @cached_property
    def _dictionaries(self) -> list[Attributes]:
        """Most things are dictionaries, and most calls change none: all are compared at once."""
        return [x for x in self._reach.things if isinstance(x, Attributes) and not isinstance(x, Globals)]

    @cached_property
    def _held(self) -> list[Any]:
        return [thing.held for thing in self._dictionaries]

    @cached_property
    def _others(self) -> list[Thing]:
        return [x for x in self._reach.things if not isinstance(x, Attributes) or isinstance(x, Globals)]

    @cached_property
    def _empty(self) -> list[Any]:
        return [thing.held for thing in self._reach.empty]

    @contextlib.contextmanager
    def untouched(self, left: list[Left]) -> Iterator[None]:
        """`left` is filled with what the block changed; all of it is put back."""
        copies = [held.copy() for held in self._held]
        seen = [thing.read() for thing in self._others]
        hooks = RemovableHandle.next_id
        try:
            yield
        finally:
            left += self._changed(copies, seen, hooks)
            for each in left:
                each.thing.write(each.before)
        for each in left:
            if isinstance(each.thing, PlainTensor) and not each.thing.small:
                raise UnsupportedModel(
                    f"`{each.names[0]}` is a large tensor that the model or loss_fn writes to and that is neither a "
                    "parameter nor a buffer, so that it cannot be followed; register it with register_buffer"
                )

    def _changed(self, copies: Sequence[Any], seen: Sequence[Any], hooks: int) -> list[Left]:
        left = []
        try:
            untouched = self._held == copies
        except Exception:  # tensors are compared by element
            untouched = False
        if not untouched:
            pairs = zip(self._dictionaries, copies)
            left += [Left(thing, copy, thing.read()) for thing, copy in pairs if not thing.same(copy)]
        left += [Left(thing, was, thing.read()) for thing, was in zip(self._others, seen) if not thing.same(was)]
        if any(self._empty):
            left += [Left(thing, {}, thing.read()) for thing in self._reach.empty if thing.held]
        if RemovableHandle.next_id != hooks:  # looked at only where a hook was registered since
            left += [Left(thing, {}, thing.read()) for thing in self._reach.hooks if thing.held]
        return left
