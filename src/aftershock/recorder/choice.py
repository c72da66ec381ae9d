"""What is explained where nothing, or not everything, was asked for: which step, of which window of which run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from ..errors import InvalidInput
from .alarm import ALARM, scatter
from .event import BARS, Event
from .instruments import HEIGHTS
from .quantity import Quantity
from .recorder import LIVE, FlightRecorder
from .records import Record
from .store import Flight, open_flight
from .updates import clip_factor


def find_flight(flight: FlightRecorder | str | Path, step: int | None = None) -> tuple[Flight, FlightRecorder | None]:
    """The window that holds `step` (default: the worst trigger's), and the recorder of this process that made it.

    A recorder's own run only; of a folder's runs the newest, but first one that has kept a window for `step`. What is
    still on its way to the disk is waited for.
    """
    if isinstance(flight, FlightRecorder):
        if not flight.run:
            raise InvalidInput("this recorder has recorded nothing: train inside `with recorder:`, or name a folder")
        flight.wait()
        return open_flight(flight.directory, step, flight.run), flight
    directory = Path(flight).resolve()
    for recorder in list(LIVE.values()):
        if recorder.directory.is_relative_to(directory) or directory.is_relative_to(recorder.directory):
            recorder.wait()
    found = open_flight(directory, step)
    live = LIVE.get(str(found.run["id"]))
    return found, live if live is not None and found.folder.is_relative_to(live.directory) else None


def chosen_step(flight: Flight, step: int | None, of: str | None = None) -> int:
    """The step that was asked for; else the trigger's, or that of a larger event inside its window; else the last.

    of: "norm" asks for the largest gradient norm of the window, where norms before clipping are known.
    """
    if step is not None or flight.trigger is None:
        return flight.last if step is None else step
    numbers, _ = _around(flight, flight.trigger)
    some = [flight.records[n] for n in numbers if flight.records[n].finite]
    if of == "norm" and some and all(record.clip is None or not math.isnan(record.raw_norm) for record in some):
        return max(some, key=lambda record: record.told_norm).step
    found = _largest(flight, flight.trigger)
    if found == flight.trigger and not _around(flight, found)[1].is_one:
        later = (n for n in sorted(flight.records) if n >= found and not flight.records[n].finite)
        return next(later, found)
    return found


def _largest(flight: Flight, trigger: int) -> int:
    """The highest loss from the trigger on, where it is of another spike than the trigger's, or far higher.

    Where the trigger's own loss is usual, as when the gradient norm rose first, any loss that is not will do.
    """
    numbers, event = _around(flight, trigger)
    losses, at = event.values, event.step
    if not all(map(math.isfinite, losses)):
        return trigger
    highest = max(range(at, len(losses)), key=losses.__getitem__)
    height, own = losses[highest] - event.usual, losses[at] - event.usual
    places = range(at, highest - BARS.settled + 1)
    over = [all(loss <= event.level for loss in losses[i : i + BARS.settled]) for i in places]
    another = height > ALARM.far * own or (any(over) and height > own)
    high = ALARM.threshold if event.is_one else HEIGHTS.ordinary
    return numbers[highest] if another and height > high * event.sigma else trigger


def _around(flight: Flight, step: int) -> tuple[list[int], Event]:
    """The recorded steps that are looked at from this one, and its loss among theirs."""
    first = step - flight.run["window"]
    numbers = [n for n, record in flight.records.items() if first <= n and (n <= step or record.finite)]
    return numbers, Event.of([flight.records[n].loss for n in numbers], numbers.index(step))


def said_of(flight: Flight, asked: int | None, step: int, told: int) -> str:
    """Which run, window and step this is, where there were others to choose from, and what was seen where no loss rose.

    asked: what the caller asked for. step: what was chosen. told: the step that is told apart, where one before it
    is not finite.
    """
    parts = [f"Run {flight.number} of {flight.runs} in {flight.name}."] if flight.runs > 1 else []
    if flight.elsewhere:
        parts.append(f"Another run has a step {asked}, too: that is in {' and '.join(flight.elsewhere)}.")
    parts += [f"Damaged, and passed over: {damage}." for damage in flight.damaged]
    if told != step:
        parts.append(f"Step {step} comes after step {told}, the first that is not finite, and so that one is told.")
    others = [other for other in flight.others if other != told]
    if asked is None and others:
        several, listed = len(others) > 1, ", ".join(map(str, others))
        rest = f"the others are of steps {listed}" if several else f"the other is of step {listed}"
        parts.append(
            f"This is the worst of the {1 + len(flight.others)} windows that the run has kept; {rest} "
            f"(step= explains {'one' if several else 'it'}, --step on the command line)."
        )
    if asked is None and flight.trigger is None:
        parts.append("This is the last step that was recorded (step= explains another).")
    if asked is None and told == step and flight.trigger not in (None, step):
        parts.append(
            f"The window was kept for step {flight.trigger}; step {step} stands out more and is explained here. "
            f"For the other: step={flight.trigger} (--step {flight.trigger})."
        )
    if told == step == flight.trigger and flight.records[step].finite and not _around(flight, step)[1].is_one:
        parts.append(f"The recorder kept this window for what it saw at step {step}: {flight.reason}.{_loss(flight)}")
    return " ".join(parts)


def nothing_seen(flight: Flight) -> str:
    """That nothing was seen in this run, and how high its losses were; nothing where something was."""
    if flight.trigger is not None:
        return ""
    nothing = "Nothing triggered in this run."
    if "stopped" in flight.run:
        why = str(flight.run["stopped"]).rstrip(".")
        nothing = f"Nothing triggered up to step {flight.last}, after which the recorder stopped ({why})."
    since = flight.last - int(flight.run["window"])
    losses = {number: record.loss for number, record in flight.records.items() if record.finite and number > since}
    if not losses:
        return nothing
    highest = max(losses, key=losses.__getitem__)
    middle, sigma = scatter(list(losses.values()))
    lasting = f"from {ALARM.lower * ALARM.threshold:g} where {ALARM.lasting} losses keep up"
    told = f"a spike is told from {ALARM.threshold:g} robust σ above the losses before it on, {lasting}"
    if losses[highest] > middle + ALARM.threshold * sigma:
        told = f"step={highest} explains it"
    return (
        f"{nothing} The highest of the last {len(losses)} losses is {losses[highest]:.4g} at step "
        f"{highest} (median {middle:.4g}, σ {sigma:.2g}); {told}."
    )


def _loss(flight: Flight) -> str:
    """What the losses did, where something else triggered."""
    trigger = flight.trigger
    highest = None if trigger is None else _largest(flight, trigger)
    if highest == trigger:
        return " No loss that was recorded from there on is unusually high."
    return f" The loss rose at step {highest}: step={highest} (--step {highest}) explains that."


def page_name(flight: Flight, step: int, quantity: Quantity) -> str:
    """Such as flight-run2-step216.html, or flight-step216-norm.html."""
    run = f"-run{flight.number}" if flight.runs > 1 else ""
    return f"{flight.name}{run}-step{step}{'' if quantity == 'loss' else '-norm'}.html"


def with_clip(flight: Flight, clip: float | None) -> Flight:
    """The flight as it would have been recorded with this `clip`; the replay proves it."""
    if clip is None:
        return flight

    def clipped(record: Record) -> Record:
        raw = record.raw_norm
        return replace(record, clip=clip, norm=record.norm if math.isnan(raw) else raw * clip_factor(raw, clip))

    return replace(flight, records={number: clipped(record) for number, record in flight.records.items()})
