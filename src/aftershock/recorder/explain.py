"""`explain`: what kind of event a spike was, who or what did it, and what would have prevented it; all by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn

from ..api.progress import progress
from ..api.ranking import VERIFY, reruns
from ..core.batches import Batch
from ..core.contributions import Layers
from ..core.probe import own_loss
from ..core.randomness import Randomness, seed_of
from ..errors import (
    HiddenState,
    InvalidInput,
    Nondeterministic,
    UnsupportedAttention,
    UnsupportedModel,
    WrongHessian,
)
from .choice import chosen_step, find_flight, nothing_seen, page_name, said_of, with_clip
from .descriptions import Describe, Kept, kept
from .event import BARS, FEWEST, Event
from .explanation import FlightExplanation
from .findings import AFTER, Findings, labelled
from .groups import LARGEST
from .hyperparameters import HyperChange, hyperparameters, one_of_each
from .instruments import ORDINARY, data, own_batches, update_sizes
from .not_a_number import NotANumberFinding, is_finite, not_a_number
from .quantity import Quantity, seen
from .recorder import FlightRecorder
from .records import Record, Source
from .replay import Replay, replay, untaken
from .reruns import Run, state_after
from .stability import TOO_FAST, amplification, sharpness
from .store import Flight
from .suspects import LEAST, inquire
from .sweep import Swept, sweep
from .treatments import Treatment, not_by_luck, proved, try_all
from .triggers import THRESHOLD, risen, robust_z

PLACEBOS = 8
OTHERS = 8  # batches run on the spike's weights, to tell a bad batch from bad weights
SHOWN = 3  # suspects whose batches are described where nobody is blamed
RESERVE = 3  # further suspects where one removes half of the event, and it is not clear that it is special
REPEATED = 3  # further steps that are suspected because they saw the inputs of a suspect
RERUN = 9  # times the window's steps, that runs with something changed may take once somebody is blamed
HELD = 3  # hyperparameters that are held at their former value


def explain(
    flight: FlightRecorder | str | FilePath,
    step: int | None = None,
    *,
    of: str | None = None,
    model: nn.Module | None = None,
    loss_fn: Callable[[nn.Module, Batch], Tensor] | None = None,
    dataset: Any = None,
    constant: Sequence[nn.Module] = (),
    clip: float | None = None,
    window: int | None = None,
    references: int = 0,
    verify: int | Sequence[int] = VERIFY,
    placebos: int = PLACEBOS,
    treatments: bool = True,
    examples: int = 1,
    describe: Describe | None = None,
    generator: Randomness = 0,
) -> FlightExplanation:
    """Say what kind of event raised the loss, or the gradient norm, of `step`, which steps did it if any, and what
    would have prevented it.

    flight: a recorder, or its directory; a directory recorded by another process needs `model` and `loss_fn`
        (and `dataset`, where indices were recorded, and `constant`, as the recorder was told). Weights of `model` are
        not used.
    step: updates made before it; default: the largest event of the run's worst window. Where it or one before it is
        not finite, the first that is not is told apart, and the last finite one before it explained.
    of: what is explained, "loss" or "norm"; default: the loss, and the gradient norm (before clipping) where it stands
        out and the loss does not.
    clip: `max_norm` of `clip_grad_norm_`, where the loop clips and the recorder was not told, or told otherwise.
    window: how many steps back to look; default: as recorded.
    references: neighbours whose mean gradient stands for an ordinary batch, where contributions against one are wanted
        beside those against no step: as many gradients per step.
    verify: how many steps to run again without: the highest predicted, and some with the largest gradients; fewer
        where placebos show that nobody did it; or the numbers of the steps.
    placebos: how many steps that nobody suspects are left out in the same way; half of them where no suspect removes
        the event, fewer where they show at once that nobody did it. A step is blamed only if the run without it loses
        half of the event, and the runs without others do not.
    treatments: also try what would have prevented it; the mildest alone where somebody is blamed.
    examples: in how many of the blamed steps to look inside.
    describe: turns a batch into a text or an image (an array), kept as `found.descriptions` for the blamed steps and
        the explained one; default: the recorder's.
    generator: draws the placebos; or an integer seed.

    First the window is replayed and compared with the record (`ReplayMismatch`). Costs, in gradients: a replay from
    the last state before the window, 2–3 per step for one adjoint sweep, about 10 for each
    proof that Hessian products are right, about 70 for how fast the run amplifies, and for each run without a step or
    with a treatment one per step after it.

    >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight", window=12) as recorder:
    ...     for batch in batches[:5] * 3 + batches[5:]:
    ...         recorder.step(batch, train_step(batch))
    >>> found = ak.explain(recorder, step=55, verify=1, placebos=2, treatments=False)
    >>> found.kind, found.blamed, found.skip
    ('own batch', (55,), [15])
    """
    if of not in (None, "loss", "norm"):
        raise InvalidInput(f'of= is what is explained, "loss" or "norm"; got {of!r}')
    if not isinstance(verify, Iterable):
        verify = reruns(verify)
    found, recorder = find_flight(flight, step)
    found = with_clip(found, clip)
    given = {"model": model, "loss_fn": loss_fn, "dataset": dataset, "constant": constant, "describe": describe}
    code = _Code.of(found, recorder, given)
    chosen = chosen_step(found, step, of)
    asked, target = _asked(found, chosen)
    replayed = _replayed(found, target, window, code) if target is not None else _untaken(found, asked, code)
    nan = _not_a_number(found, replayed, asked, code) if asked != target else None
    nothing, by_loss = Swept.nothing(_layers(replayed), replayed.last), _event(replayed, "loss")
    rise = risen(found.reason) if of != "norm" and asked == target == found.trigger else None
    if rise is not None:
        by_loss = _event(replayed, "loss", rise)
    norm_first = rise is None and asked == target and _norm_first(replayed, by_loss)
    if rise is None and asked == target:
        event = _event(replayed, _measured(by_loss, norm_first, of, named=step is not None))
    else:
        event = by_loss
    findings = Findings(found, replayed, event, nothing, asked, by_loss, norm_first, nan=nan, rise=rise)
    asking = nan is None and event.is_one and not findings.lost_in_scatter
    if target is None:
        findings.refused = "the first recorded step is not finite"
    elif nan is not None:
        findings.refused = f"step {asked} is not finite, and the {event.quantity} before it is not what happened"
        _hold_before(findings, code)
    else:
        _predict(findings, references, watched=asking)
    if asking:
        _ask(findings, verify, placebos, treatments, seed_of(generator))
    told = labelled(findings, examples)
    told.attrs |= {
        "which": said_of(found, step, chosen, asked),
        "nothing_seen": "" if step is not None else nothing_seen(found),
        "page": page_name(found, asked, event.quantity),
        "run": found.run["id"],
    }
    if clip is not None:
        told.attrs["replay"] += f" That is with clip={clip:g}, which explain() was told."
    if code.describe is not None:
        told.attrs["descriptions"] = _described(findings, code.describe, code)
    return FlightExplanation(told)


def _event(replayed: Replay, quantity: Quantity, known: tuple[float, float] | None = None) -> Event:
    values = [seen(quantity, step) for step in replayed.trajectory.steps]
    return Event.of(values, replayed.last, replayed.records[0].step, quantity, known)


def _norm_first(replayed: Replay, by_loss: Event) -> bool:
    """Does the gradient norm stand out as far as a trigger asks, and no loss of the stretch?"""
    if (by_loss.is_one and by_loss.peak > THRESHOLD * by_loss.sigma) or replayed.last < FEWEST:
        return False
    *before, last = [seen("gradient norm", step) for step in replayed.trajectory.steps[: replayed.last + 1]]
    return robust_z(last, before) > THRESHOLD


def _measured(by_loss: Event, norm_first: bool, of: str | None, *, named: bool) -> Quantity:
    """What is explained: as asked for; else the norm where it stands out, and the loss is ordinary. A loss that is
    somewhat high is explained where its step was asked for."""
    ordinary = not by_loss.is_one or (by_loss.peak <= ORDINARY * by_loss.sigma and not named)
    return "gradient norm" if of == "norm" or (of is None and norm_first and ordinary) else "loss"


def _described(f: Findings, describe: Describe, code: _Code) -> dict[str, Kept]:
    """The blamed steps' batches, or those of the suspects where nobody is blamed, and that of the explained step."""
    records, source = f.replayed.records, Source(f.replayed.trajectory.device, code.dataset)
    shown = f.blamed or [t.steps[0] for t in f.inquiry.suspects][:SHOWN]
    wanted = [*(records[i] for i in (*shown, f.replayed.last)), f.flight.records[f.asked]]
    return {str(record.step): kept(describe, record.batch(source)) for record in wanted}


def _ask(f: Findings, verify: int | Sequence[int], placebos: int, treatments: bool, seed: int) -> None:
    """The instruments, then the runs with something changed."""
    replayed, event, trajectory = f.replayed, f.event, f.replayed.trajectory
    steps, last = trajectory.steps, replayed.last
    f.updates = update_sizes(trajectory, Layers.of(trajectory.dynamics.layout))
    before = [s.batch for s in steps[max(0, last - OTHERS) : last]]
    after = [s.batch for s in steps[last + 1 : last + 1 + AFTER]]
    f.data = data(trajectory, last, before, after, event.quantity)
    f.changes = _changes(f)
    if f.data.kind == "shift":
        return  # no earlier step did it, and no treatment of the weights prevents it
    held = [_held(steps, change, event) for change in f.changes]
    if f.rose_before:  # what began it is not among these steps
        f.held = try_all(trajectory, event, held, more_only=True)
        return
    suspected, reserve = _suspected(f, verify)
    with progress("running again without suspects and placebos", len(suspected) + placebos) as tick:
        least = LEAST if isinstance(verify, int) else len(suspected)
        own = own_batches(trajectory, event) if f.data.kind == "own batch" else ()
        repeated = _one_batch(replayed.records, [i for i in suspected if i < last])
        f.inquiry = inquire(
            trajectory,
            event,
            suspected,
            placebos=placebos,
            seed=seed,
            reserve=reserve,
            repeated=repeated,
            groups=f.growth is None or f.growth.linear_ok,  # else any few steps left out make another run of it
            least=least,
            own=own,
            tick=tick,
        )
    steps_left = math.inf if not f.blamed else RERUN * len(steps) - sum(f.inquiry.spent)
    with progress("running again with treatments", 12) as tick:
        outcomes = try_all(trajectory, event, held, tick, more_only=not treatments, most=steps_left)
    f.held, f.outcomes = outcomes[: len(held)], proved(trajectory, event, outcomes[len(held) :])
    doubtful = [not c.brief or f.inquiry.share > BARS.specific for c in f.changes]
    f.held = [not_by_luck(trajectory, event, o) if doubt else o for o, doubt in zip(f.held, doubtful)]


def _changes(f: Findings) -> list[HyperChange]:
    """Those that are held at their former value; they may end after the spike: what is held is held over all of it."""
    changes = hyperparameters(f.replayed.records)
    return one_of_each([c for c in changes if c.kind != "warm-up" and c.at <= f.replayed.last])[:HELD]


def _held(steps: Sequence[Any], change: HyperChange, event: Event) -> Treatment:
    """The run with a hyperparameter at its former value."""
    name = f"{change.name} held at its former value from step {change.steps[0]} on"
    return Treatment(name, Run(change.at, {s.index: change.hold(s) for s in steps[change.at : event.last + 1]}), 5)


def _hold_before(f: Findings, code: _Code) -> None:
    """Which hyperparameters changed before a step that is not finite, and whether it is with each at its former value:
    the run up to it, and one gradient."""
    trajectory, last, record = f.replayed.trajectory, f.replayed.last, f.flight.records[f.asked]
    if f.nan is None or f.nan.kind in ("batch values", "finite"):
        return
    f.changes = _changes(f)
    batch = record.batch(Source(trajectory.device, code.dataset))
    for change in f.changes:
        state = state_after(trajectory, _held(trajectory.steps, change, f.event).run, last)
        finite = state is not None and is_finite(trajectory.dynamics.loss, state, batch, record.fed[0].random)
        f.finite_with.append(finite)


def _suspected(f: Findings, verify: int | Sequence[int]) -> tuple[list[int], list[int]]:
    """Which steps to run without: those asked for, or the highest predicted and, because a prediction is linear and a
    batch that was bad enough is not, those with the largest gradients (a third of the places) and the one with the
    largest loss; and steps that saw the same inputs as one of them. The explained step itself comes last, where its own
    batch is high. Second, the next highest predicted, in reserve."""
    last = f.replayed.last
    numbers = [record.step for record in f.replayed.records[: last + 1]]
    if not isinstance(verify, int):
        unknown = [number for number in verify if number not in numbers]
        if unknown:
            raise InvalidInput(f"step {unknown[0]} is not among the steps {numbers[0]}–{numbers[-1]} of the window")
        return [numbers.index(number) for number in verify], []
    steps, scores = f.replayed.trajectory.steps[:last], f.swept.total(f.main).nan_to_num(-math.inf)
    loud = sorted(range(last), key=lambda i: -steps[i].clip.norm)
    predicted = [i for i in scores.argsort(descending=True).tolist() if math.isfinite(scores[i])]
    loudest = loud[: verify // 3] if predicted else loud[:verify]
    if len(loudest) < verify and last:
        loudest = list(dict.fromkeys([*loudest, max(range(last), key=lambda i: steps[i].loss)]))
    highest = [i for i in predicted if i not in loudest]
    places = verify - len(loudest)
    chosen, reserve = loudest + highest[:places], highest[places : places + RESERVE] if verify else []
    own = [last] if verify and f.data is not None and f.data.kind in ("own batch", "both") else []
    return chosen + _same_inputs(f.replayed.records, chosen, range(last))[:REPEATED] + own, reserve


def _one_batch(records: Sequence[Record], suspected: Sequence[int]) -> list[tuple[int, ...]]:
    """Suspects that saw the same inputs, few enough to be blamed together."""
    sets = dict.fromkeys(tuple(sorted((i, *_same_inputs(records, [i], suspected)))) for i in suspected)
    return [steps for steps in sets if 1 < len(steps) <= LARGEST]


def _same_inputs(records: Sequence[Record], chosen: Sequence[int], among: Sequence[int]) -> list[int]:
    """Other steps that saw the inputs of a chosen one: the largest of its tensors is equal."""
    seen = [_inputs(records[i]) for i in chosen]
    return [i for i in among if i not in chosen and any(_equal(_inputs(records[i]), x) for x in seen)]


def _inputs(record: Record) -> Tensor | None:
    return max(record.fed[0].tensors, key=lambda x: x.numel(), default=None)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


# --- replay


@dataclass(frozen=True)
class _Code:
    """What a file cannot hold: the model's code, the loss, what they need, and how a batch is shown."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    dataset: Any
    constant: Sequence[nn.Module]
    describe: Describe | None

    @classmethod
    def of(cls, flight: Flight, recorder: FlightRecorder | None, given: dict[str, Any]) -> _Code:
        """As given, else as the recorder has it."""
        if recorder is not None:
            given = {name: getattr(recorder, name) if value in (None, ()) else value for name, value in given.items()}
        if given["model"] is None or given["loss_fn"] is None:
            raise InvalidInput(
                f"{flight.folder} was recorded by another process: explain() needs model= and loss_fn= as the training "
                "script builds them (on the command line: --build module:function)"
            )
        return cls(**given)


def _asked(flight: Flight, step: int) -> tuple[int, int | None]:
    """The first step up to this one that is not finite, and the finite one before it, if any; else the step itself."""
    if step not in flight.records:
        raise InvalidInput(f"step {step} was not recorded: the flight holds steps {min(flight.records)}–{flight.last}")
    first = next((n for n in sorted(flight.records) if n <= step and not flight.records[n].finite), None)
    if first is None:
        return step, step
    return first, max((n for n in flight.records if n < first), default=None)


def _replayed(flight: Flight, target: int, window: int | None, code: _Code) -> Replay:
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
    return replay(records, window, flight.states, code.model, code.loss_fn, code.dataset, last - target, code.constant)


def _untaken(flight: Flight, first: int, code: _Code) -> Replay:
    """The first recorded step where it is not finite already: there is nothing to replay before it."""
    return untaken(flight.records[first], flight.states, code.model, code.loss_fn, code.dataset, code.constant)


def _not_a_number(flight: Flight, replayed: Replay, asked: int, code: _Code) -> NotANumberFinding | None:
    """The step that is not finite, run again from the state before it, and other batches on the same weights."""
    record, trajectory = flight.records[asked], replayed.trajectory
    before = [s for s, r in zip(trajectory.steps, replayed.records) if r.step < asked]
    if before and asked != replayed.records[len(before) - 1].step + 1:
        return None
    source = Source(trajectory.device, code.dataset)
    after = [r.batch(source) for n, r in sorted(flight.records.items()) if n > asked][:OTHERS]
    others = [s.batch for s in before[-OTHERS:]] or after
    state = trajectory.state(len(before))
    return not_a_number(trajectory.dynamics.loss, state, record.batch(source), record.fed[0].random, others)


def _layers(replayed: Replay) -> list[str]:
    return Layers.of(replayed.trajectory.dynamics.layout).names


def _predict(f: Findings, references: int, *, watched: bool) -> None:
    """Every step's contribution by one adjoint sweep, or why there are none.

    watched: first look at how fast the run amplifies; where no linear prediction can follow it, none is made.
    """
    path, last, trajectory = f.replayed.path, f.replayed.last, f.replayed.trajectory
    if last < 2:
        f.refused = "fewer than two steps before it are recorded"
        return
    watch = path.watch(0, own_loss, last)
    try:
        path.require_linear(watch)
        if watched:
            f.growth, f.sharp = amplification(trajectory, last, enough=TOO_FAST), sharpness(trajectory, last - 1)
            if not f.growth.linear_ok:
                f.refused = f.growth.sentence
                return
        with progress("adjoint sweep", last) as tick:
            f.swept = sweep(trajectory, last, f.event.quantity, references=references, tick=tick)
    except (WrongHessian, Nondeterministic, HiddenState, UnsupportedAttention, UnsupportedModel) as error:
        f.refused = str(error)
