"""How the recorder looks on: hooks that copies of the model do not have, and failures that the loop does not see."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import torch
from torch import nn

Arguments = ParamSpec("Arguments")
UNSEEN = (
    "the model is called in compiled code, where the recorder cannot look. A replay begins each step with the random "
    "state that the recorder.step() before it left, and with the modes and autocast of its own. Where the loop draws "
    "random numbers in between, or enters autocast, call recorder.before_forward() right before loss_fn"
)


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


class Observer:
    """A hook that does nothing in copies and pickles of what it watches: loops copy models (moving averages).

    Nor does it in compiled code, unless `compiled`: the code would have to be cut in two where the hook looks, and
    under `fullgraph=True` the loop would fail.
    """

    def __init__(self, watch: Callable[..., None] | None = None, *, compiled: bool = False) -> None:
        self.watch, self.compiled = watch, compiled

    def __call__(self, *arguments: Any) -> None:
        if self.watch is not None and (self.compiled or not torch.compiler.is_compiling()):
            self.watch(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return Observer()

    def __reduce__(self) -> tuple[type[Observer], tuple[()]]:
        return Observer, ()


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """What loss_fn may call instead of the model; the inside of a compiled part stays as it is."""
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    if not compiled and not isinstance(module, torch.jit.ScriptModule):
        for child in module.children():
            yield child
            yield from parts_of(child)
