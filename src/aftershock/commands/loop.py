"""The user's own training loop, proved: a few of its steps beside the path's, compared to the bit after each."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..api.path import Path
from ..api.point import TrainingPoint, capture
from ..core.agreement import Match, differences, read_live
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
WORDS = (  # what the hypotheses say of a path, and what the doctor's reader knows
    ("tell follow() and the recorder", "let build() return, and tell the recorder,"),
    ("Tell follow() and the recorder", "Let build() return, and tell the recorder,"),
    (
        "give follow(lr=scheduler), and the doctor scheduler=",
        "let build() return scheduler= too (the recorder sees it)",
    ),
    (
        "Give follow(lr=scheduler), and the doctor scheduler=",
        "Let build() return scheduler= too (the recorder sees it)",
    ),
    ("Give follow() the same schedule", "The recorder sees it by itself; leave it out of train_step for this proof"),
    ("; give follow() its schedule", ""),
    ("Give follow() the batches", "Let build() return the batches"),
    (", or give follow(random=…)", ""),
    ("the batches that the path was given", "the batches of build()"),
    ("otherwise than the path", "and build() does not say so"),
    ("a scheduler that the path was not told", "a scheduler that build() does not return"),
    ("Begin the path after the reset", "Begin after the reset"),
    ("and the path does", "and build() says that it does"),
    ("not the path's", "not"),
    ("the path's step", "AdamW's step"),
    ("the path's", "loss_fn's"),
    (" along the path", ""),
)
UNTOLD = Match(
    False, 0, 0, 0, "hyperparameter", cause="a scheduler is attached to the optimizer, and build() does not return it",
    remedy="give follow(lr=scheduler), and the doctor scheduler=",
)  # fmt: skip


def prove_loop(built: Built) -> list[Finding]:
    """Run the built model's own train_step and compare it with its path: everything that differs, each with what to
    change, or one finding that nothing does. Model and optimizer are used up.

    Costs `STEPS` training steps, and as many of the path's; twice that where something differs.
    """
    if built.train_step is None:
        return [Finding(SUBJECT, "note", f"not proved: {HOW}")]
    device = next((p.device for p in built.model.parameters()), torch.device("cpu"))
    problems: list[Match] = []
    with restored_random(device):
        try:
            steps, rounded = _compared(built, _one_step(built), problems)
        except AftershockError as error:
            return [*map(_refused, problems), Finding(SUBJECT, "refused", str(error))]
    if problems:
        return [_refused(problem) for problem in problems]
    if rounded is not None:
        return [Finding(SUBJECT, "approximated", f"{steps} steps of train_step agree to rounding. {rounded}")]
    return [Finding(SUBJECT, "supported", f"{steps} steps of train_step are equal to the path to the bit")]


def _refused(problem: Match) -> Finding:
    """What `matches` says of a path, said of what build() returns."""
    text = f"at step {problem.step} {problem.what} from what build() describes. Likely cause: {problem.cause}. "
    text += problem.advice
    for of_a_path, of_build in WORDS:
        text = text.replace(of_a_path, of_build)
    return Finding(SUBJECT, "refused", text)


def _compared(built: Built, one_step: Callable[[Batch], Any], problems: list[Match]) -> tuple[int, Match | None]:
    """(steps compared, the first that differs by rounding); `problems` receives the first of each kind that differs by
    more. After one, the path begins again where the loop is."""
    batches = [built.batch] * STEPS if built.batches is None else list(built.batches)
    rounded, start = None, 0
    point, path = _followed(built, batches)
    for i, batch in enumerate(batches):
        loss = _number(_ran(one_step, batch, i))
        found = _differing(built, path, i + 1 - start, loss)
        clip = next((match.clip for match in found if match.clip is not None), None)
        if clip is not None and built.scheduler is None:  # told so, do they still part?
            _add(problems, found, start)
            built = replace(built, clip=clip)
            path = point.follow(copy.deepcopy(batches[start:]), lr="constant", clip=clip)
            found = _differing(built, path, i + 1 - start, loss)
        _add(problems, found, start)
        if found and rounded is None and found[0].rounding:
            rounded = _at(found[0], start)
        if found and found[0].quantity == "count":
            break  # a call is not a step: what comes is its consequence
        if found and i + 1 < len(batches):  # so that this does not hide what comes
            start = i + 1
            point, path = _followed(built, batches[start:])
    if point.captured.loop.scheduled and built.scheduler is None:
        _add(problems, [UNTOLD], 0)
    return len(batches), rounded


def _differing(built: Built, path: Path, made: int, loss: float | None) -> list[Match]:
    """What the last of `made` steps did otherwise than the path."""
    live = read_live(built.model, built.optimizer, path.trajectory)
    return differences(path.trajectory, live, made, made - 1, loss)


def _add(problems: list[Match], found: list[Match], start: int) -> None:
    """What is not known yet. Random numbers that differ after a step that differs are its consequence."""
    for match in found:
        known = any(match.remedy == other.remedy for other in problems)
        consequence = match.quantity == "random" and match is not found[0]
        if not (known or consequence or match.rounding):
            problems.append(_at(match, start))


def _followed(built: Built, batches: list[Batch]) -> tuple[TrainingPoint, Path]:
    assert built.optimizer is not None
    point = capture(built.model, built.optimizer, built.loss_fn, constant=built.constant)
    return point, point.follow(copy.deepcopy(batches), lr=built.scheduler or "constant", clip=built.clip)


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
