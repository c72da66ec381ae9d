"""What a forward pass begins with: the random state, autocast and modes, read when the model is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.capture import unwrapped
from ..core.randomness import NumpyState, RandomState
from .draws import COMPILED, REMEDY, draws_compiled, may_draw
from .observing import Observer
from .records import Forward
from .triggers import say

UNSEEN = (
    "the model was not called with gradients since the last step: record after the forward; where its call is "
    "compiled, call recorder.before_forward() right before it"
)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """What loss_fn may call instead of the model; the inside of a compiled part stays as it is."""
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    if not compiled and not isinstance(module, torch.jit.ScriptModule):
        for child in module.children():
            yield child
            yield from parts_of(child)


class Passes:
    """The passes of one loop, of which the first with gradients since the last batch is the recorded one."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], device: torch.device) -> None:
        self.model, self.loss_fn, self.device = model, loss_fn, device
        self.random: RandomState | None = None  # before the pass of the batch that is fed next
        self.forward: Forward | None = None
        self._parts = tuple(unwrapped(model).named_modules())
        self._numpy: NumpyState | None = None  # as last seen: what has not moved since need not be read in full
        self._called = False  # was the model called since the last batch?
        self._begins = False  # does the loop say where loss_fn begins?
        self._left: RandomState | None = None  # when the first batch was fed, until it is known what is drawn after it
        self._looked = False
        self._handles: list[RemovableHandle] = []
        self._part_handles: list[RemovableHandle] = []

    def watch(self, hook: Callable[[nn.Module, object], None]) -> None:
        """Let the hook be called before the model and each of its parts."""
        if draws_compiled(self.model):
            say(f"this recording may not be explained later: {COMPILED}")
        self._handles = [self.model.register_forward_pre_hook(Observer(hook))]
        self._part_handles = [part.register_forward_pre_hook(Observer(hook)) for part in parts_of(self.model)]

    def unwatch(self) -> None:
        for handle in [*self._handles, *self._part_handles]:
            handle.remove()

    def called(self, module: nn.Module) -> bool:
        """The model, or a part of it, is called: does a pass begin with that?"""
        if self._called or not torch.is_grad_enabled():  # the first call counts; validation runs without gradients
            return False
        self._called = True
        self._read()
        if module is self.model:  # so loss_fn calls the model, and its parts need not be watched
            for handle in self._part_handles:
                handle.remove()
            self._part_handles = []
        return True

    def begins(self) -> None:
        """The loop says that loss_fn is called next."""
        self._begins = True
        self.end()
        self._read()

    def end(self) -> None:
        """The pass is over: the next call of the model begins another one."""
        self.random, self._called = None, False

    def _read(self) -> None:
        """What a pass that begins now begins with; autocast and modes as they are when the model is called."""
        now = Forward.now(self._parts, self.device, begun=self._begins)
        if self.random is None:
            self.random = RandomState.now(self.device, self._numpy)
            self._numpy = self.random.numpy
        elif self.forward is not None and self.forward.autocast:  # begins() saw it; a part may run without it
            now = replace(now, autocast=True, autocast_dtype=self.forward.autocast_dtype)
        self.forward = now

    def remind_of_draws(self) -> None:
        """Once, and early: random numbers that a replay may draw anew. It only looks: loss_fn is the loop's to call."""
        if self._begins or self._looked:
            return
        if self._left is None:
            self._left = RandomState.now(self.device)
            return
        self._looked = True
        if self.random is not None and not self.random.same(self._left) and may_draw(self.loss_fn):
            say(
                "random numbers are drawn between recorder.step() and the call of the model, and loss_fn names "
                f"something that draws. If it is what drew them, no replay repeats them: {REMEDY}"
            )
