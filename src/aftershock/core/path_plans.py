"""What is decided by memory before there is a path: whether a model fits at all, and how many states are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OutOfMemory
from .capture import Captured
from .dynamics import Step
from .footprint import measured_on
from .layout import Layout
from .memory import budget, free, readable
from .structure import flatten
from .trajectory import Keep

LIFTED_VECTORS = 16  # float64 copies of the parameters that a check holds at once, with room to spare
TIMES = 3  # what training holds, that an explanation may keep
LEAST = 2**30  # bytes that burden nobody


def require_fit(name: str, parameters: int, itemsize: int, copies: int, device: torch.device) -> None:
    """Refuse a model of which so many copies at once do not fit, one of which is there already."""
    there = free(device) + parameters * itemsize
    each = max(itemsize, torch.float32.itemsize)
    needed = copies * parameters * each
    if needed > there:
        raise OutOfMemory(
            f"{name} has {parameters / 1e6:,.0f} million parameters, of which {copies} copies are held at once, "
            f"{readable(needed)}, and {readable(there)} are free on {device}. What would fit: a model of up to "
            f"{there / (copies * each) / 1e6:,.0f} million parameters, or a device with more memory"
        )


def fits_lifted(layout: Layout, memory: str | int | None) -> bool:
    """Whether a check can work in float64: a copy of the model, and what is held beside it."""
    return LIFTED_VECTORS * torch.float64.itemsize * layout.size <= budget(memory, layout.device)


def plan_states(
    steps: int, state: int, keep: Keep | None, memory: str | int | None, device: torch.device
) -> tuple[Keep, int]:
    """How a path of so many steps is kept, and one of how many states: all where a quarter of the memory holds them,
    else about √H, or as few as fit; the rest are recomputed. Rows gain more from memory than the path does."""
    room = budget(memory, device) // 4
    if keep == "graphs" or (keep != "checkpoints" and (keep == "states" or (steps + 1) * state <= room)):
        return keep or "states", 1
    fit = room // state - 1  # beside the first, which is always there
    return "checkpoints", max(math.isqrt(steps), -(-steps // fit) if fit > 0 else steps + 1)


def plan_window(captured: Captured, steps: Sequence[Step], memory: str | int | None) -> tuple[Keep, int]:
    """How a recorded window is kept, and one of how many states: all that fit beside the sweep's cotangents, which may
    take half of the memory; the rest are recomputed.

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
    peak, _, besides = measured_on(captured.loss.layout.device, lambda: captured.loss.gradient(*at))
    tensors = (x for step in steps for x in flatten(step.batch)[0] if isinstance(x, Tensor))
    return state.nbytes + peak + besides + sum(x.nbytes for x in tensors if x.device == torch.device("cpu"))
