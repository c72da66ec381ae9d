"""How much of a window an explanation keeps in memory: its states, and a cotangent per step of its sweep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.capture import Captured
from ..core.dynamics import Step
from ..core.footprint import measured
from ..core.memory import budget
from ..core.structure import flatten
from ..core.trajectory import Keep

TIMES = 3  # what training holds, that an explanation may keep
LEAST = 2**30  # bytes that burden nobody


def plan_window(captured: Captured, steps: Sequence[Step], memory: str | int | None) -> tuple[Keep, int]:
    """How a window is kept, and one of how many states: all that fit beside the sweep's cotangents, which may take half
    of the memory; the rest are recomputed.

    memory: None is on a CPU three times what training holds, but at least 1 GiB; on a GPU half of what is free, since
    an explanation passes its window six times and runs few rows beside it.
    """
    layout, state = captured.loss.layout, captured.state.nbytes
    limit = budget(memory, layout.device)
    if memory is None:
        limit //= 2
        if layout.device.type == "cpu":
            limit = min(limit, max(LEAST, TIMES * _training(captured, steps)))
    cotangents = len(steps) * layout.padded_size * layout.dtype.itemsize
    room = max(limit - cotangents, limit // 2)
    if (len(steps) + 1) * state <= room:
        return "states", 1
    fit = room // state - 1  # beside the first, which is always there
    return "checkpoints", max(2, -(-len(steps) // fit)) if fit > 0 else len(steps) + 1


def _training(captured: Captured, steps: Sequence[Step]) -> int:
    """Bytes that training holds: θ, m and v, a step's gradient and activations, and the window's batches. Measured:
    one gradient."""
    first, state = steps[0], captured.state
    at = (state.theta, state.buffers, first.batch, first.random, first.where)
    peak, _ = measured(lambda: captured.loss.gradient(*at))
    tensors = (x for step in steps for x in flatten(step.batch)[0] if isinstance(x, Tensor))
    return state.nbytes + peak + sum(x.nbytes for x in tensors if x.device == torch.device("cpu"))
