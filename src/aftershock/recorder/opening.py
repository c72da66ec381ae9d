"""From a flight to its event: which window is replayed, with which code, and what of it is explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core.batches import Batch
from ..core.contributions import Layers
from ..errors import InvalidInput
from .alarm import ALARM, robust_z
from .choice import chosen_step, nothing_seen, said_of
from .descriptions import Describe
from .event import BARS, Event
from .findings import AFTER, Findings
from .instruments import HEIGHTS
from .not_a_number import NotANumberFinding, not_a_number
from .quantity import Quantity, seen
from .recorder import FlightRecorder
from .records import Source
from .replay import Replay, replay, untaken
from .store import Flight
from .sweep import Swept

OTHERS = 8  # batches run on the weights of a step, to tell a bad batch from bad weights


@dataclass(frozen=True)
class Code:
    """What a file cannot hold: the model's code, the loss, what they need, and how a batch is shown."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    dataset: Any
    constant: Sequence[nn.Module]
    describe: Describe | None

    @classmethod
    def of(cls, flight: Flight, recorder: FlightRecorder | None, given: dict[str, Any]) -> Code:
        """As given, else as the recorder has it."""
        if recorder is not None:
            given = {name: getattr(recorder, name) if value in (None, ()) else value for name, value in given.items()}
        if given["model"] is None or given["loss_fn"] is None:
            raise InvalidInput(
                f"{flight.folder} was recorded by another process: explain() needs model= and loss_fn= as the training "
                "script builds them (on the command line: --build module:function)"
            )
        return cls(**given)


def open_event(
    flight: Flight, code: Code, step: int | None, of: str | None, window: int | None, memory: str | int | None = None
) -> Findings:
    """The window around the step that is asked for, replayed, and the event in it: of the loss, or of the gradient norm
    where that is asked for or stands out alone. Why nothing can be predicted where a step is not finite."""
    chosen = chosen_step(flight, step, of)
    asked, target = _asked(flight, chosen)
    replayed = _untaken(flight, asked, code) if target is None else _replayed(flight, target, window, code, memory)
    rise = flight.rise if of != "norm" and asked == target == flight.trigger else None
    by_loss = event = _event(replayed, "loss", rise)
    norm_first = rise is None and asked == target and _norm_first(replayed, by_loss)
    if rise is None and asked == target:
        event = _event(replayed, _measured(by_loss, norm_first, of, named=step is not None))
    nothing = Swept.nothing(Layers.of(replayed.trajectory.dynamics.layout).names, replayed.last)
    found = Findings(flight, replayed, event, nothing, asked, by_loss, norm_first, rise=rise)
    found.which = said_of(flight, step, chosen, asked)
    found.nothing_seen = "" if step is not None else nothing_seen(flight)
    found.nan = _not_a_number(flight, replayed, asked, code) if asked != target else None
    if target is None:
        found.refused = "the first recorded step is not finite"
    elif found.nan is not None:
        found.refused = f"step {asked} is not finite, and the {event.quantity} before it is not what happened"
    return found


def _event(replayed: Replay, quantity: Quantity, known: tuple[float, float] | None = None) -> Event:
    values = [seen(quantity, step) for step in replayed.trajectory.steps]
    return Event.of(values, replayed.last, replayed.records[0].step, quantity, known)


def _norm_first(replayed: Replay, by_loss: Event) -> bool:
    """Does the gradient norm stand out as far as a trigger asks, and no loss of the stretch?"""
    if (by_loss.is_one and by_loss.peak > ALARM.threshold * by_loss.sigma) or replayed.last < BARS.fewest:
        return False
    *before, last = [seen("gradient norm", step) for step in replayed.trajectory.steps[: replayed.last + 1]]
    return robust_z(last, before) > ALARM.threshold


def _measured(by_loss: Event, norm_first: bool, of: str | None, *, named: bool) -> Quantity:
    """What is explained: as asked for; else the norm where it stands out, and the loss is ordinary. A loss that is
    somewhat high is explained where its step was asked for."""
    ordinary = not by_loss.is_one or (by_loss.peak <= HEIGHTS.ordinary * by_loss.sigma and not named)
    return "gradient norm" if of == "norm" or (of is None and norm_first and ordinary) else "loss"


def _asked(flight: Flight, step: int) -> tuple[int, int | None]:
    """The first step up to this one that is not finite, and the finite one before it, if any; else the step itself."""
    if step not in flight.records:
        raise InvalidInput(f"step {step} was not recorded: the flight holds steps {min(flight.records)}–{flight.last}")
    first = next((n for n in sorted(flight.records) if n <= step and not flight.records[n].finite), None)
    if first is None:
        return step, step
    return first, max((n for n in flight.records if n < first), default=None)


def _replayed(flight: Flight, target: int, window: int | None, code: Code, memory: str | int | None) -> Replay:
    """The window before the step, and what was recorded of the event after it."""
    window = flight.run["window"] if window is None else window
    first = target if target == min(flight.records) in flight.states else flight.start(target, window)
    forward, last = flight.records[target].forward, target
    while last < target + AFTER and last + 1 in flight.records:
        following = flight.records[last + 1]
        if not following.finite or following.forward != forward:
            break
        last += 1
    records = [flight.records[number] for number in range(first, last + 1)]
    given = (code.model, code.loss_fn, code.dataset, last - target, code.constant, memory)
    return replay(records, window, flight.states, *given)


def _untaken(flight: Flight, first: int, code: Code) -> Replay:
    """The first recorded step where it is not finite already: there is nothing to replay before it."""
    return untaken(flight.records[first], flight.states, code.model, code.loss_fn, code.dataset, code.constant)


def _not_a_number(flight: Flight, replayed: Replay, asked: int, code: Code) -> NotANumberFinding | None:
    """The step that is not finite, run again from the state before it, and other batches on the same weights."""
    record, trajectory = flight.records[asked], replayed.trajectory
    before = [s for s, r in zip(trajectory.steps, replayed.records) if r.step < asked]
    later = [r for n, r in sorted(flight.records.items()) if n > asked][:OTHERS]
    if before and asked != replayed.records[len(before) - 1].step + 1:
        return None
    source = Source(trajectory.device, code.dataset)
    others = [s.batch for s in before[-OTHERS:]] or [r.batch(source) for r in later]
    draws = [s.random for s in before[-OTHERS:]] or [r.fed[0].random for r in later]
    state = trajectory.state(len(before))
    return not_a_number(trajectory.dynamics.loss, state, record.batch(source), record.fed[0].random, others, draws)


def _layers(replayed: Replay) -> list[str]:
    return Layers.of(replayed.trajectory.dynamics.layout).names
