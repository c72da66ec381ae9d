"""The user's own training loop, proved: a few of its steps beside the path's, compared to the bit after each."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..api.path import Path
from ..api.point import capture
from ..core.agreement import Match, compare, read_live
from ..core.batches import Batch
from ..core.randomness import restored_random
from ..errors import AftershockError, InvalidInput
from .building import Built
from .findings import Finding

SUBJECT = "your loop"
STEPS = 5
HOW = (
    "let build() also return train_step, your own function train_step(model, optimizer, batch) that makes one whole "
    "training step, and where the loop has them batches, clip and scheduler"
)


def prove_loop(built: Built) -> Finding:
    """Run the built model's own train_step and compare it with its path. Model and optimizer are used up.

    Costs `STEPS` training steps, and as many of the path's.
    """
    if built.train_step is None:
        return Finding(SUBJECT, "note", f"not proved: {HOW}")
    device = next((p.device for p in built.model.parameters()), torch.device("cpu"))
    with restored_random(device):
        try:
            return _verdict(*_compared(built, _one_step(built)))
        except AftershockError as error:
            return Finding(SUBJECT, "refused", str(error))


def _verdict(steps: int, rounded: Match | None, parted: Match | None) -> Finding:
    if parted is not None:
        return Finding(SUBJECT, "refused", f"is not what aftershock follows. {parted}")
    if rounded is not None:
        return Finding(SUBJECT, "approximated", f"{steps} steps of train_step agree to rounding. {rounded}")
    return Finding(SUBJECT, "supported", f"{steps} steps of train_step are equal to the path to the bit")


def _compared(built: Built, one_step: Callable[[Batch], Any]) -> tuple[int, Match | None, Match | None]:
    """(steps compared, the first that differs by rounding, the first that differs by more)."""
    batches = [built.batch] * STEPS if built.batches is None else list(built.batches)
    rounded, start = None, 0
    path = _followed(built, batches)
    for i, batch in enumerate(batches):
        loss = _number(_ran(one_step, batch, i))
        live = read_live(built.model, built.optimizer, path.trajectory)
        found = compare(path.trajectory, live, i + 1 - start, i - start, loss)
        if not found and not found.rounding:
            return i + 1, rounded, _at(found, start)
        if found.rounding:
            rounded = _at(found, start) if rounded is None else rounded
            if i + 1 < len(batches):  # begin again where the loop is, so that rounding does not hide what comes
                path, start = _followed(built, batches[i + 1 :]), i + 1
    return len(batches), rounded, None


def _followed(built: Built, batches: list[Batch]) -> Path:
    assert built.optimizer is not None
    point = capture(built.model, built.optimizer, built.loss_fn)
    return point.follow(copy.deepcopy(batches), lr=built.scheduler, clip=built.clip)


def _at(found: Match, start: int) -> Match:
    """The same, counted from the loop's first step."""
    assert found.step is not None
    return replace(found, step=found.step + start, since=found.since + start, steps=found.steps + start)


def _one_step(built: Built) -> Callable[[Batch], Any]:
    """train_step(model, optimizer, batch), or train_step(batch) over what build() made."""
    assert built.train_step is not None
    train_step = built.train_step
    takes = [p for p in inspect.signature(train_step).parameters.values() if p.default is p.empty]
    if len(takes) == 3:
        return lambda batch: train_step(built.model, built.optimizer, batch)
    if len(takes) == 1:
        return train_step
    raise InvalidInput(f"train_step takes (model, optimizer, batch), or (batch); this one takes {len(takes)} arguments")


def _ran(one_step: Callable[[Batch], Any], batch: Batch, i: int) -> Any:
    try:
        return one_step(batch)
    except Exception as error:
        raise InvalidInput(f"train_step failed at step {i}: {type(error).__name__}: {error}") from error


def _number(returned: Any) -> float | None:
    """The loss, where train_step returns it."""
    if isinstance(returned, torch.Tensor):
        return float(returned.detach()) if returned.numel() == 1 else None
    return float(returned) if isinstance(returned, float) else None
