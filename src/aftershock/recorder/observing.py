"""How the recorder looks on: hooks that copies of the model do not have, and failures that the loop does not see."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from ..errors import InvalidInput
from .triggers import say

Arguments = ParamSpec("Arguments")


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


def must_stay_whole() -> bool:
    """Asked by torch while it compiles a call of the model: may it not cut this code in two (`fullgraph=True`)?"""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracing = InstructionTranslator.current_tx()
        return bool(tracing.one_graph or tracing.error_on_graph_break)
    except (ImportError, AttributeError):  # another torch: the hook looks, and where it must not, torch says so
        return False


class Observer:
    """A hook that does nothing in copies and pickles of what it watches: loops copy models (moving averages).

    It cuts compiled code in two. Where torch must not do that it does nothing, so that what is compiled is what it is
    without a recorder; the recorder then says that it has not seen the model being called.
    """

    def __init__(self, watch: Callable[..., None] | None = None) -> None:
        self.watch = watch
        torch.compiler.assume_constant_result(must_stay_whole)  # here: it loads the compiler, as an optimizer does

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling() and must_stay_whole():
            return
        if self.watch is not None:
            self.watch(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return Observer()

    def __reduce__(self) -> tuple[type[Observer], tuple[()]]:
        return Observer, ()


ANOTHER = "for a replay that is another run: make a recorder for it, and record it in a `with` of its own"


class Trained:
    """What is trained, and by whom, as it was when the recording began."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._named, self._optimizer = dict(model.named_parameters()), optimizer
        self._needed, self._grouped = self._needs(), self._in_groups()
        self._versions: int | None = None  # of the weights, when a step came without an update
        self._guards = False  # a loss that was not finite came without an update, and was told

    def refuse_others(self) -> None:
        """Refuse parameters that were frozen, unfrozen or given to the optimizer since."""
        if self._needs() == self._needed and self._in_groups() == self._grouped:
            return
        pairs = zip(self._named, self._needs(), self._needed)
        name = next((name for name, now, before in pairs if now != before), None)
        what = "the optimizer was given other parameters (add_param_group)"
        if name is not None:
            what = f"parameters were frozen or unfrozen ({name!r})"
        raise InvalidInput(f"{what} since the recording began; {ANOTHER}")

    def not_updated(self, losses: Sequence[Tensor | float], last: int) -> None:
        """A step came without an update; `last` is the one before it, with one."""
        self._say_untrained(losses, last)
        self._refuse_another_optimizer()

    def _say_untrained(self, losses: Sequence[Tensor | float], last: int) -> None:
        """A loop that guards against NaN makes no step with such a batch, and so leaves nothing to replay."""
        if not self._guards and not all(math.isfinite(float(loss)) for loss in losses):
            self._guards = True
            say(
                f"after step {last} step() was given a loss that is not finite, and the optimizer made no step with "
                "it, so that it is not recorded and cannot be explained. To find out where it comes from, let the "
                "optimizer step once before the loop's own guard"
            )

    def _refuse_another_optimizer(self) -> None:
        """Refuse weights that have moved since the last step without an update all the same."""
        versions = sum(p._version for p in self._named.values() if p.requires_grad)
        moved, self._versions = self._versions not in (None, versions), versions
        if moved:
            raise InvalidInput(
                "the weights change, and the optimizer that the recorder was given makes no steps: another one was "
                f"made in its place, its step() is compiled, or something else writes to them; {ANOTHER}"
            )

    def updated(self) -> None:
        """The optimizer has made a step."""
        self._versions = None

    def _needs(self) -> list[bool]:
        return [p.requires_grad for p in self._named.values()]

    def _in_groups(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)
