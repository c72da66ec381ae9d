"""`python -m benchmarks.culprits`: planted causes, and how often the recorder names them.

Each case trains a small model on usual data and, now and then, a rare shard. Something goes wrong for a few steps; the
rare shard comes back up to 40 steps later. A second run, in which nothing went wrong, says what the planted cause
really did.

What counts as a case is decided before anything is explained: the losses rise by 8 robust σ, and undoing the planted
cause removes half of that (`_counts`). A draw that does not count is drawn again, with another delay and more
strength. Every case that counts is in the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import aftershock as ak
from aftershock.errors import AftershockError
from aftershock.recorder.alarm import scatter
from aftershock.recorder.triggers import AtStep

from .culprit_runs import (
    RARE_EVERY,
    SYSTEMS,
    WARM,
    Step,
    System,
    another_domain,
    spoiled,
    warm,
    wrong_rare_labels,
)
from .spike_truth import HALF, Event
from .spikes import Said

LEAD, LONGEST, AFTER = 24, 40, 16  # recorded steps before the cause, until the spike, and after it
SIGMAS = 8.0
LOUDER = 2.0  # times the bad batch's gradient: the harmless decoy's
TRIES, STRONGER = 3, 3.0  # on one system, each so much stronger than the one before; then on the next system
MOST = 200  # draws: every delay on every system at every strength and more, so that no case is left out
DELAYS = ((1, 3), (4, 10), (11, 20), (21, 40))


# --- what goes wrong


@dataclass(frozen=True)
class Planted:
    """A run's steps with the cause in them and without it, and which steps a right answer names."""

    clean: list[Step]
    steps: list[Step]
    at: tuple[int, ...]  # from the recording's first
    parts: tuple[int, ...] = ()  # steps of which undoing any alone must already remove half
    decoy: int | None = None  # a step whose undoing must not


@dataclass(frozen=True)
class Plant:
    """A kind of cause. `kinds`: what it may rightly be called. `waits`: for the rare shard, at least so many steps."""

    name: str
    make: Callable[[System, list[Step], float, int], Planted]
    kinds: tuple[str, ...]
    hyperparameter: str | None = None
    waits: int | None = None


def _changed(steps: list[Step], at: tuple[int, ...], change: Callable[[Step], Step]) -> list[Step]:
    return [change(step) if i in at else step for i, step in enumerate(steps)]


def bad_batch(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """One mislabelled batch, and before it a sound one whose gradient is larger."""
    decoy = LEAD - 1 - draw % 12
    loud = _changed(steps, (decoy,), lambda step: replace(step, loudness=LOUDER * strength))
    bad = _changed(loud, (LEAD,), lambda step: spoiled(step, wrong_rare_labels, strength))
    return Planted(steps, bad, (LEAD,), decoy=decoy)


def repeated_batch(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """A mislabelled batch of ordinary norm, three times."""
    at = (LEAD - 2, LEAD - 1, LEAD)
    bad = spoiled(steps[LEAD], wrong_rare_labels, loudness=1.0)
    return Planted(steps, _changed(steps, at, lambda step: bad), at)


def two_together(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """Two mislabelled batches; without either, not half of it happens."""
    at = (LEAD - RARE_EVERY * (1 + draw % 2), LEAD)
    bad = _changed(steps, at, lambda step: spoiled(step, wrong_rare_labels, strength / 2))
    return Planted(steps, bad, at, parts=at)


def rate_bump(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    at = tuple(range(LEAD, LEAD + 1 + draw % 3))
    settings = {"lr": 5 * strength * system.lr}
    return Planted(steps, _changed(steps, at, lambda step: replace(step, settings=settings)), at)


def wrong_restart(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """A schedule that decays, and begins again from a rate that is too high."""
    decayed = [replace(step, settings={"lr": system.lr * 0.98**i}) for i, step in enumerate(steps)]
    at = tuple(range(LEAD, len(steps)))

    def again(i: int) -> Step:
        return replace(steps[i], settings={"lr": 3 * strength * system.lr * 0.98 ** (i - LEAD)})

    return Planted(decayed, [*decayed[:LEAD], *(again(i) for i in at)], at)


def wrong_decay(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    settings = {"weight_decay": 0.2 * strength / system.lr}
    return Planted(steps, _changed(steps, (LEAD,), lambda step: replace(step, settings=settings)), (LEAD,))


def wrong_beta(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """β2 is 0 for a step: v forgets everything but this gradient."""
    settings = {"betas": (0.9, 0.0)}
    return Planted(steps, _changed(steps, (LEAD,), lambda step: replace(step, settings=settings)), (LEAD,))


def not_zeroed(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """A step without zero_grad."""
    return Planted(steps, _changed(steps, (LEAD,), lambda step: replace(step, zeroed=False)), (LEAD,))


def shift(system: System, steps: list[Step], strength: float, draw: int) -> Planted:
    """From here on, all data are of another domain."""
    at = tuple(range(LEAD, len(steps)))
    return Planted(steps, _changed(steps, at, lambda step: spoiled(step, another_domain)), at)


NOT_ZEROED = "step without zero_grad"
PLANTS = (
    Plant("bad batch under a louder decoy", bad_batch, ("batch", "own batch"), waits=1),
    Plant("mislabelled batch of ordinary norm, three times", repeated_batch, ("batch", "group", "own batch"), waits=1),
    Plant("two culprits together", two_together, ("batch", "group"), waits=4),
    Plant("learning rate, 1–3 steps", rate_bump, ("hyperparameter",), "lr"),
    Plant("wrong restart of the schedule", wrong_restart, ("hyperparameter",), "lr"),
    Plant("weight decay, one step", wrong_decay, ("hyperparameter",), "weight_decay"),
    Plant("β2, one step", wrong_beta, ("hyperparameter",), "beta2"),
    Plant(NOT_ZEROED, not_zeroed, ("not zeroed",)),
    Plant("shift of the domain", shift, ("shift",)),
)


# --- one case: drawn, then explained


@dataclass(frozen=True)
class Case:
    """A run that counts, with its losses."""

    plant: Plant
    system: System
    draw: int
    strength: float
    planted: Planted
    trigger: int
    losses: dict[int, float]

    @property
    def delay(self) -> int:
        return self.trigger - LEAD


def drawn(plant: Plant, number: int) -> Case:
    """The first draw that counts."""
    for attempt in range(MOST):
        case = attempted(plant, number, attempt)
        if _counts(case):
            return case
    raise RuntimeError(f"{plant.name}, case {number}: none of {MOST} draws had an effect")


def attempted(plant: Plant, number: int, attempt: int) -> Case:
    """A draw: each attempt has another delay and more strength, and after a few it is the next system's turn."""
    system = SYSTEMS[(number + attempt // TRIES) % len(SYSTEMS)]
    draw, strength = 1000 * number + attempt, STRONGER ** (attempt % TRIES)
    delay = max(plant.waits, 1 + (7 * number + 13 * attempt) % LONGEST) if plant.waits else RARE_EVERY
    count = LEAD + (delay if plant.waits else LONGEST) + AFTER + 1
    planted = plant.make(system, _clean(system, draw, delay, count), strength, draw)
    losses = losses_of(system, draw, planted.steps)
    trigger = _trigger(plant, losses, delay)
    kept = dict(enumerate(losses[: trigger + AFTER + 1]))
    return Case(plant, system, draw, strength, planted, trigger, kept)


def _clean(system: System, draw: int, delay: int, count: int) -> list[Step]:
    """Usual steps; the rare shard comes now and then, and stays away for `delay` steps after step LEAD."""
    generator = torch.Generator().manual_seed(draw)
    rare = {*range(LEAD, -1, -RARE_EVERY), *range(LEAD + delay, count, RARE_EVERY)}
    return [Step(system.draw(generator, i in rare)) for i in range(count)]


def losses_of(system: System, draw: int, steps: list[Step]) -> list[float]:
    loop = warm(system, draw % 2).twin()
    return [float(loop.step(WARM + i, step)[1]) for i, step in enumerate(steps)]


def _trigger(plant: Plant, losses: list[float], delay: int) -> int:
    """When the rare shard comes back; else the first loss from the cause on that is high; else the next step."""
    if plant.waits or plant.name == NOT_ZEROED:
        return LEAD + delay
    middle, sigma = scatter(losses[:LEAD])
    first = LEAD if plant.kinds == ("shift",) else LEAD + 1  # a wrong update is seen one loss later
    high = [i for i in range(first, LEAD + LONGEST + 1) if losses[i] > middle + SIGMAS * sigma]
    return high[0] if high else LEAD + 1


def _counts(case: Case) -> bool:
    """Is there a spike, did the planted cause do it, did the decoy not? A step without zero_grad counts as it is."""
    if case.plant.name == NOT_ZEROED:
        return True
    event = Event.of(case.losses, case.trigger)
    if not case.losses[case.trigger] > event.usual + SIGMAS * event.sigma:
        return False

    def left(undone: tuple[int, ...]) -> float:
        pairs = list(zip(case.planted.clean, case.planted.steps))[: len(case.losses)]
        steps = [clean if i in undone else step for i, (clean, step) in enumerate(pairs)]
        found = losses_of(case.system, case.draw, steps)
        return event.left(dict(enumerate(found)))

    harmless = case.planted.decoy is None or left((case.planted.decoy,)) > HALF
    return harmless and all(left(some) <= HALF for some in (case.planted.at, *((i,) for i in case.planted.parts)))


@dataclass(frozen=True)
class Judged:
    """What was said about a case, and what simpler rules say."""

    plant: str
    system: str
    delay: int
    said: Said
    predicted: bool | None  # is the largest predicted contribution a planted step's?
    named: bool
    kind: bool
    norm: bool
    loss: bool
    previous: bool
    rate: bool
    seconds: float


def judged(case: Case) -> Judged:
    began, steps = time.process_time(), case.planted.steps[: len(case.losses)]
    loop, norms, rates = warm(case.system, case.draw % 2).twin(), [], []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"window": LEAD + LONGEST, "after": AFTER, "clip": case.system.clip}
        options["triggers"] = [AtStep(WARM + case.trigger)]
        with ak.FlightRecorder(loop.model, loop.optimizer, case.system.loss_fn, folder, **options) as recorder:
            for i, step in enumerate(steps):
                batch, loss = loop.step(WARM + i, step)
                recorder.step(batch, loss)
                norms.append(loop.norms[-1])
                rates.append(loop.optimizer.param_groups[0]["lr"])
        said, predicted = _explained(recorder, WARM + case.trigger)
    at, before = {WARM + i for i in case.planted.at}, range(case.trigger)

    def first(values: list[float]) -> bool:
        return WARM + max(before, key=lambda i: values[i]) in at

    return Judged(
        case.plant.name, case.system.name, case.delay, said,
        None if predicted is None else predicted in at,
        _names(case, said, at), said.kind in case.plant.kinds,
        norm=first(norms), loss=first(list(case.losses.values())), previous=WARM + case.trigger - 1 in at,
        rate=first([lr * norm for lr, norm in zip(rates, norms)]), seconds=time.process_time() - began,
    )  # fmt: skip


def _explained(recorder: ak.FlightRecorder, step: int) -> tuple[Said, int | None]:
    try:
        found = ak.explain(recorder, step=step)
    except AftershockError as error:
        kind = "not zeroed" if "gradients of the step before" in str(error) else type(error).__name__
        return Said(kind, (), None, None, str(error)), None
    return Said.of(found), _predicted(found)


def _predicted(found: Any) -> int | None:
    """The step with the largest predicted contribution, where there are predictions."""
    if "contribution" not in found.data:
        return None
    totals = found.data["contribution"].sel(change=found.data["ranked_by"].item()).sum("channel")
    return int(totals["step"].values[int(totals.values.argmax())])


def _names(case: Case, said: Said, at: set[int]) -> bool:
    """Does it name the cause: only planted steps, or the setting, or the kind where that is all there is to name?"""
    if said.kind not in case.plant.kinds:
        return False
    if case.plant.hyperparameter:
        return said.hyperparameter == case.plant.hyperparameter
    if case.plant.kinds[0] in ("not zeroed", "shift"):
        return True
    return bool(said.blamed) and set(said.blamed) <= at


def cases(count: int, only: str = "") -> Iterator[Case]:
    """Kinds of causes in turn, systems and delays spread over each."""
    for i in range(count):
        if only in PLANTS[i % len(PLANTS)].name:
            yield drawn(PLANTS[i % len(PLANTS)], i // len(PLANTS))


# --- the table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.culprits", description=__doc__)
    parser.add_argument("--cases", type=int, default=12 * len(PLANTS))
    parser.add_argument("--quick", action="store_true", help="12 cases")
    parser.add_argument("--only", default="", help="causes whose name holds this")
    parser.add_argument("--out", type=Path, help="write every case as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = [judged(case) for case in cases(12 if options.quick else options.cases, options.only)]
    if options.out:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1, ensure_ascii=False))
    slowest = max(one.seconds for one in found)
    title = (
        f"{len(found)} planted causes, {time.perf_counter() - began:.0f} s (the slowest to explain: {slowest:.1f} s)"
    )
    Console(width=170).print(table(found, title))


def table(found: list[Judged], title: str) -> Table:
    rows = Table(title=title)
    columns = ("named", "right kind", "predicted first", "largest norm", "largest loss", "previous batch", "lr × norm")
    for name in ("", "cases", *columns):
        rows.add_column(name, justify="right" if name else "left")
    groups: dict[str, list[Judged]] = {"all": found}
    for key in ("plant", "system"):
        for one in found:
            groups.setdefault(getattr(one, key), []).append(one)
    for low, high in DELAYS:
        groups[f"delay {low}–{high}"] = [one for one in found if low <= one.delay <= high]
    for name, some in groups.items():
        if some:
            lists = (
                [one.named for one in some], [one.kind for one in some],
                [one.predicted for one in some if one.predicted is not None],
                [one.norm for one in some], [one.loss for one in some],
                [one.previous for one in some], [one.rate for one in some],
            )  # fmt: skip
            shares = (f"{statistics.mean(values):.0%}" if values else "" for values in lists)
            rows.add_row(name, str(len(some)), *shares)
    return rows


if __name__ == "__main__":
    main()
