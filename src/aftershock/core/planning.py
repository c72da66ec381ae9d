"""What a piece of work needs in memory, known before it starts, and how it is cut to fit.

Every decision that depends on free memory is made here. Memory is counted in copies of the flat vector and in what
the model's own passes hold, which is measured once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import AftershockError, OutOfMemory
from .graphs import GradientGraph
from .memory import budget, readable
from .responses import ANSWERS, Pass
from .rows import AT_ONCE, row_gradients
from .trajectory import Keep, Trajectory

# gradients of a pool held at once: their product with the adjoints then reads those once a chunk
POOL_AT_ONCE, POOL_IN_CACHE = 128, 32


FEW = 3  # rows whose memory stands for that of many


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, of those made while it watches: `peak` is their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in given:
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.now += self._live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes at the peak of a piece of work, and what its result still holds."""
    with Meter() as meter:
        result = work()
        held = meter.now
    del result
    return meter.peak, held


@dataclass(frozen=True)
class Footprint:
    """What the model's passes hold beside θ, in bytes; gradients, of the size of θ, are included."""

    vector: int  # one copy of the flat vector
    gradient: int  # of one row alone
    row: int  # of each row, where rows run together
    graph: int  # a gradient with its graph, kept
    product: int  # of one vector, on top of the graph
    together: bool

    @classmethod
    def of(cls, trajectory: Trajectory) -> Footprint:
        """Measured once on the first step: about 10 g."""
        known: Footprint | None = getattr(trajectory, "footprint", None)
        if known is None:
            known = trajectory.footprint = _footprint(trajectory)  # type: ignore[attr-defined]
        return known


def _footprint(trajectory: Trajectory) -> Footprint:
    loss, step, state = trajectory.dynamics.loss, trajectory.steps[0], trajectory.state(0)
    vector = loss.layout.padded_size * loss.layout.dtype.itemsize
    given = (step.batch, step.random, step.where)
    at = (state.theta, state.buffers, *given)
    gradient, _ = measured(lambda: loss.gradient(*at))
    two = state.theta[None].expand(2, -1)
    row_gradients(loss, two, [state.buffers] * 2, *given, step.present)  # now it is known whether rows can be shared
    row, together = gradient, loss.sharing.tries("gradient", 2)
    if together:
        both, _ = measured(lambda: row_gradients(loss, two, [state.buffers] * 2, *given, step.present))
        row = both // 2
    try:
        _, graph = measured(lambda: GradientGraph(loss, *at))
        rows = few if together else few[:1]
        whole, _ = measured(lambda: GradientGraph(loss, *at).products(rows))
    except AftershockError:  # a model without second derivatives has exact answers only
        graph, whole, rows = gradient, 2 * gradient, few[:1]
    return Footprint(vector, gradient, row, graph, (whole - graph) // len(rows), together)


def plan_states(
    steps: int, state: int, keep: Keep | None, memory: str | int | None, device: torch.device
) -> tuple[Keep, int]:
    """How a path of so many steps is kept, and one of how many states: all where half of the memory holds them, else
    about √H, or as few as fit; the rest are recomputed."""
    room = budget(memory, device) // 2
    if keep == "graphs" or (keep != "checkpoints" and (keep == "states" or (steps + 1) * state <= room)):
        return keep or "states", 1
    fit = room // state - 1  # beside the first, which is always there
    return "checkpoints", max(math.isqrt(steps), -(-steps // fit) if fit > 0 else steps + 1)


@dataclass(frozen=True)
class Plan:
    """Passes over the path and their peak, beside what is in memory already."""

    passes: tuple[Pass, ...]
    peak: int
    available: int

    def chunks(self, changes: int) -> int:
        """How often the path is walked."""
        return sum(math.ceil(changes / each.at_once) for each in self.passes)


def plan_responses(
    trajectory: Trajectory, changes: int, scales: int, answers: Sequence[str], memory: str | int | None
) -> Plan:
    """The fewest passes that fit: all answers at once, else the truth apart from predictions, else each alone.

    Where not even one exact row fits beside the model, rows are parked in host memory.
    """
    available = budget(memory, trajectory.dynamics.layout.device)
    wanted = tuple(answer for answer in ANSWERS if answer in answers)
    predictions = tuple(answer for answer in wanted if answer != "exact")
    truth: list[tuple[str, ...]] = [("exact",)] if "exact" in wanted else []
    splits: list[list[tuple[str, ...]]] = [
        [wanted],
        [*truth, predictions],
        [*truth, *((answer,) for answer in predictions)],
    ]
    for parts in splits:
        found = [_fitting(trajectory, part, changes, scales, available) for part in parts if part]
        passes = [each for each in found if each is not None]
        whole = len(parts) == 1
        if len(passes) == len(found) and (not whole or passes[0].at_once == changes or len(wanted) == 1):
            return _planned(trajectory, passes, scales, available)
    rest = [_fitting(trajectory, (answer,), changes, scales, available) for answer in predictions]
    parked = Pass(("exact",), 1, parked=True)
    if truth and all(rest) and pass_bytes(trajectory, parked, scales) <= available:
        return _planned(trajectory, [parked, *(each for each in rest if each is not None)], scales, available)
    raise OutOfMemory(_advice(trajectory, wanted, scales, available))


def at_once(trajectory: Trajectory, count: int, exact: int, predicted: int, memory: str | int | None) -> int:
    """How many of `count` pieces of work fit, each carrying so many exact and predicted rows; at least one."""
    available = budget(memory, trajectory.dynamics.layout.device)
    fits = (n for n in _sizes(count) if rollout_bytes(trajectory, n * exact, n * predicted, n) <= available)
    return next(fits, 1)


def plan_history(trajectory: Trajectory, cotangents: int, memory: str | int | None) -> torch.device:
    """Where so many cotangents of a sweep are kept: beside the model, or in host memory where they do not fit."""
    device, vector = trajectory.dynamics.layout.device, Footprint.of(trajectory).vector
    if device.type == "cpu" or cotangents * vector <= budget(memory, device) // 2:
        return device
    if cotangents * vector <= budget(None, torch.device("cpu")):
        return torch.device("cpu")
    raise OutOfMemory(
        f"the sweep passes {cotangents} cotangents of {readable(vector)} each, which fit neither on {device} nor in "
        'host memory; rank at one outcome (by="response"), or at a shorter horizon'
    )


def plan_pool(trajectory: Trajectory, outcomes: int, memory: str | int | None) -> int:
    """How many gradients of a pool are held at once: many read the adjoints fewer times."""
    footprint, device = Footprint.of(trajectory), trajectory.device
    room = budget(memory, device) - (5 * outcomes + 3) * footprint.vector
    most = POOL_IN_CACHE if device.type == "cpu" else POOL_AT_ONCE
    return max(1, min(most, room // (footprint.row + 2 * footprint.vector)))


def pass_bytes(trajectory: Trajectory, each: Pass, scales: int) -> int:
    """The peak of one chunk of a pass."""
    rows = each.at_once * scales
    predicted = rows * ("semilinear" in each.answers) + each.at_once * ("tangent" in each.answers)
    exact = rows * ("exact" in each.answers)
    return rollout_bytes(trajectory, exact, predicted, each.at_once, parked=each.parked)


def rollout_bytes(trajectory: Trajectory, exact: int, predicted: int, changes: int, *, parked: bool = False) -> int:
    """The peak of a rollout of so many rows, beside the path: what is carried, and the largest work on the way."""
    f = Footprint.of(trajectory)
    v, together = f.vector, f.together and trajectory.dynamics.loss.sharing.tries("gradient", exact + 1)
    control = 3 * v * (trajectory.keep == "checkpoints")
    carried = 3 * v * predicted
    work = [7 * v]  # the control's step and one change at it: the state after it, raw gradients, ξ, δx
    if exact and parked:
        work.append(control + 3 * v + f.gradient)
    elif exact:
        carried += 3 * v * (exact + together)
        # together all gradients stay until every row has stepped; activations of so many rows at once
        pieces = min(AT_ONCE, exact + 1)
        work.append((exact + 1) * v + pieces * (f.row - v) if together else control + f.gradient)
    if predicted:
        pieces = min(AT_ONCE, predicted) if f.together else 1
        work.append(control + f.graph + v + v * predicted + pieces * (f.product - v))
    return carried + max(work)


def _fitting(
    trajectory: Trajectory, answers: tuple[str, ...], changes: int, scales: int, available: int
) -> Pass | None:
    """As many changes at once as fit; None where not even one does."""
    passes = (Pass(answers, n) for n in _sizes(changes))
    return next((each for each in passes if pass_bytes(trajectory, each, scales) <= available), None)


def _planned(trajectory: Trajectory, passes: Sequence[Pass], scales: int, available: int) -> Plan:
    vector = Footprint.of(trajectory).vector
    needs = [pass_bytes(trajectory, each, scales) for each in passes]
    in_rows = [need + (each.at_once + 2) * vector <= available for need, each in zip(needs, passes)]
    chosen = tuple(replace(each, shocks_in_rows=room) for each, room in zip(passes, in_rows))
    return Plan(chosen, max(needs), available)


def _advice(trajectory: Trajectory, answers: Sequence[str], scales: int, available: int) -> str:
    one = {answer: pass_bytes(trajectory, Pass((answer,), 1), scales) for answer in answers}
    worst = max(one, key=lambda answer: one[answer])
    return (
        f"the {worst} answer to one change needs {readable(one[worst])} beside the model and the path, and "
        f"{readable(available)} may be used. Fewer scales at once (now {scales}), "
        'keep="checkpoints" in follow(), a smaller batch or a larger memory= would fit'
    )


def _sizes(changes: int) -> list[int]:
    """Chunk sizes to try, the largest first: every number of changes up to 16, then coarser."""
    sizes = {changes, *range(1, min(changes, 16) + 1)}
    size = changes
    while size > 16:
        sizes.add(size)
        size = -(-size // 2)
    return sorted(sizes, reverse=True)
