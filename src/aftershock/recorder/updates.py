"""Updates between the loop and the disk: their numbers are read when the GPU has sent them, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.adamw import Hyper
from ..core.clipping import TORCH_EPSILON
from ..core.gradient_causes import chosen
from ..errors import InvalidInput
from .records import Fed, Forward, Record
from .transfer import Landing

NEAR = 2e-2  # relative: a norm that was computed in another way, in bfloat16 for one
ToldClip = float | Literal["as told"] | None  # of one step; "as told": when the recorder was made


def clip_factor(norm: float, clip: float | None) -> float:
    """c = min(1, max_norm / (n + 1e-6)), as `clip_grad_norm_` has it."""
    return 1.0 if clip is None else min(1.0, clip / (norm + TORCH_EPSILON))


def updates_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor | float:
    """How many updates it has seen; a tensor where reading it would be waiting for the GPU."""
    count = optimizer.state.get(parameter, {}).get("step", 0)
    on_gpu = isinstance(count, Tensor) and count.device.type != "cpu"
    return count if on_gpu else float(count)


def arrived_smaller(record: Record) -> bool:
    """Did the gradient arrive smaller than the norm that the loop tells and `clip=` make it? It is seen of steps whose
    norm was taken, too; under a loss scale it may be a scaled one."""
    expected = record.raw_norm * clip_factor(record.raw_norm, record.clip)
    return record.scale == 1 and record.norm < (1 - NEAR) * expected


def clipped_untold(record: Record) -> str | None:
    """What to say where the loop seems to clip otherwise than it tells."""
    if not arrived_smaller(record):
        return None
    told = "no clip= is told" if record.clip is None else f"clip={record.clip:g} is told"
    limit = f"{record.norm:.4g}" if chosen(record.norm) else "max_norm"
    return (
        f"step {record.step}: norm= is {record.raw_norm:.4g}, the gradients arrived with {record.norm:.4g}, and "
        f"{told}. If this is clip_grad_norm_, tell the recorder clip={limit}, or no replay will be this run (what is "
        f"recorded until then is explained with ak.explain(…, clip={limit})); if norm= is another norm than that of "
        "all gradients before clipping, leave it out"
    )


@dataclass(frozen=True)
class Update:
    """What the optimizer's hook saw of one update."""

    norm: Tensor | None  # None where the loop tells it, but for its first steps
    counted: nn.Parameter  # whose count of updates tells that it was made
    count: Tensor | float
    scale: Tensor | float  # of the loss, by a GradScaler
    hypers: tuple[Hyper, ...]


@dataclass(frozen=True)
class Pending:
    """An update whose numbers are on their way from the GPU."""

    landing: Landing  # its batches; loss, norm, norm before clipping, count, loss scale, learning rates
    fed: tuple[Fed, ...]
    update: Update
    forward: Forward
    clip: float | None
    divisor: float | None
    asked: str | None


class Updates:
    """A queue.

    step: the number of the loop's next update. counts: of updates, by the id of each parameter.
    """

    def __init__(self, step: int, counts: Mapping[int, float]) -> None:
        self.step = self._next = step  # of the loop's next update, and of the next that is read
        self._counts = dict(counts)
        self._pending: deque[Pending] = deque()
        self._asked: str | None = None

    def add(self, made: Pending) -> None:
        self._pending.append(made)
        self.step += 1

    def arrived(self, late: int) -> Iterator[tuple[Record, str | None]]:
        """Records, and what was asked of them, in order; waits where more than `late` are on their way."""
        while self._pending:
            ready = self._pending[0].landing.ready
            if not ready and len(self._pending) <= late:
                return
            oldest = self._pending.popleft()
            if not ready:
                oldest.landing.wait()
            asked, self._asked = oldest.asked or self._asked, None
            loss, norm, raw, count, *others = oldest.landing.numbers()
            if self._was_made(oldest.update.counted, count):
                yield self._record(oldest, loss, norm, raw, *others), asked
            else:
                self.step -= 1
                self._asked = asked

    def _was_made(self, counted: nn.Parameter, count: float) -> bool:
        """Not under GradScaler with a fused optimizer, which runs its hooks on skipped steps too."""
        before, self._counts[id(counted)] = self._counts[id(counted)], count
        if count < before:
            raise InvalidInput(
                f"the optimizer's count of updates went back from {before:g} to {count:g}, as after loading a "
                "checkpoint: that is another run; record it in a `with` of its own"
            )
        return count > before

    def _record(self, made: Pending, loss: float, norm: float, raw: float, scale: float, *rates: float) -> Record:
        self._next += 1
        return Record(
            step=self._next - 1,
            fed=made.fed,
            loss=loss,
            norm=raw * clip_factor(raw, made.clip) if made.update.norm is None else norm,
            raw_norm=raw,
            hypers=tuple(_at(hyper, rate) for hyper, rate in zip(made.update.hypers, rates)),
            clip=made.clip,
            forward=made.forward,
            divisor=made.divisor,
            scale=scale,
        )


def _at(hyper: Hyper, rate: float) -> Hyper:
    """The same at its rate, which may have been on the GPU; a tensor where the optimizer has one."""
    return replace(hyper, lr=torch.tensor(rate, dtype=hyper.lr.dtype)) if isinstance(hyper.lr, Tensor) else hyper
