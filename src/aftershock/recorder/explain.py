"""`explain`: what kind of event a spike was, who or what did it, and what would have prevented it; all by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any

from torch import Tensor, nn

from ..api.progress import progress
from ..api.reruns import VERIFY, reruns
from ..core.batches import Batch
from ..core.contributions import Layers
from ..core.given import max_norm, whole
from ..core.probe import own_loss
from ..core.randomness import Randomness, seed_of
from ..errors import (
    HiddenState,
    InvalidInput,
    Nondeterministic,
    OutOfMemory,
    UnsupportedAttention,
    UnsupportedModel,
    WrongHessian,
)
from .candidates import one_batch, suspected
from .choice import find_flight, with_clip
from .descriptions import Describe, Kept, kept
from .event import BARS, Event
from .explanation import FlightExplanation
from .findings import AFTER, Findings
from .hyperparameters import HyperChange, hyperparameters, one_of_each, span
from .instruments import data, later_events, own_batches, update_sizes
from .labels import labelled
from .not_a_number import is_finite
from .opening import OTHERS, Code, open_event
from .recorder import FlightRecorder
from .records import Source
from .reruns import Run, state_after
from .stability import GROWTH, amplification, sharpness
from .suspects import LEAST, inquire
from .sweep import sweep
from .treatments import Outcome, Treatment, not_by_luck, possible, proved, try_all, twice

PLACEBOS = 8
SHOWN = 3  # suspects whose batches are described where nobody is blamed
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
    memory: str | int | None = None,
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
    placebos: how many steps that nobody suspects are left out in the same way; fewer where they show at once that
        nobody did it. A step is blamed only if the run without it loses half of the event, and the runs without others
        do not.
    treatments: also try what would have prevented it; the mildest alone where somebody is blamed.
    examples: in how many of the blamed steps to look inside.
    describe: turns a batch into a text or an image (an array), kept as `found.descriptions` for the blamed steps and
        the explained one; default: the recorder's.
    memory: what states, the sweep and reruns may use, "8GiB" or bytes; what does not fit is computed again, and nothing
        is predicted where half of it does not hold the sweep. Default: on a CPU three times what training holds, but at
        least 1 GiB (the sweep may take more: a vector of all weights per step); on a GPU half of what is free.
    generator: draws the placebos; or an integer seed.

    First the window is replayed and compared with the record (`ReplayMismatch`). Costs, in gradients: a replay from
    the last state before the window, 2–3 per step for one adjoint sweep, about 16 for the
    proofs that Hessian products are right, about 70 for how fast the run amplifies, and for each run without a step or
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
    few, named = reruns(verify, "recorded steps")
    placebos = whole(placebos, "placebos= is a number of steps", 0)
    references = whole(references, "references= is a number of neighbours", 0)
    examples = whole(examples, "examples= is a number of steps", 0)
    window = None if window is None else whole(window, "window= is a number of steps", 1)
    step = None if step is None else whole(step, "step= is the number of an update")
    max_norm(clip)
    found, recorder = find_flight(flight, step)
    given = {"model": model, "loss_fn": loss_fn, "dataset": dataset, "constant": constant, "describe": describe}
    code = Code.of(found, recorder, given)
    f = open_event(with_clip(found, clip), code, step, of, window, memory)
    asking, f.clip = f.nan is None and f.is_event and not f.lost_in_scatter, clip
    if f.refused is None:
        _predict(f, references, watched=asking)
    if asking:
        _ask(f, few, named, placebos, treatments, seed_of(generator))
    elif f.nan is not None and f.asked != f.explained:
        _hold_before(f, code)
    if code.describe is not None:
        f.descriptions = _described(f, code.describe, code)
    return FlightExplanation(labelled(f, examples))


def _described(f: Findings, describe: Describe, code: Code) -> dict[int, Kept]:
    """The blamed steps' batches, or those of the suspects where nobody is blamed, and that of the explained step."""
    records, source = f.replayed.records, Source(f.replayed.trajectory.device, code.dataset)
    shown = f.blamed or [t.steps[0] for t in f.inquiry.suspects][:SHOWN]
    wanted = [*(records[i] for i in (*shown, f.replayed.last)), f.flight.records[f.asked]]
    return {record.step: kept(describe, record.batch(source)) for record in wanted}


def _ask(f: Findings, few: int, named: Sequence[int], placebos: int, treatments: bool, seed: int) -> None:
    """The instruments, then the runs with something changed."""
    trajectory, last = f.replayed.trajectory, f.replayed.last
    steps = trajectory.steps
    f.updates = update_sizes(trajectory, Layers.of(trajectory.dynamics.layout))
    onset = f.event.onset  # those after it may be as bad as the explained one
    before = [s.batch for s in steps[max(0, onset - OTHERS) : onset]]
    after = [s.batch for s in steps[last + 1 : last + 1 + AFTER]]
    f.data = data(trajectory, last, before, after, f.event.quantity)
    f.changes = _changes(f)
    if f.data.kind == "shift":
        return  # no earlier step did it, and no treatment of the weights prevents it
    if f.rise is None and f.data.kind != "own batch":
        f.event = f.event.less(later_events(trajectory, f.event, last + 1))
    if not f.rose_before:  # else what began it is not among these steps
        _inquire(f, few, named, placebos, seed)
    _treat(f, treatments and not f.rose_before)


def _inquire(f: Findings, few: int, named: Sequence[int], placebos: int, seed: int) -> None:
    """The runs without steps."""
    accused, reserve = suspected(f, few, named)
    data = "" if f.data is None else f.data.kind
    with progress("running again without suspects and placebos", len(accused) + placebos) as tick:
        f.inquiry = inquire(
            f.replayed.trajectory,
            f.event,
            accused,
            placebos=placebos,
            seed=seed,
            reserve=reserve,
            repeated=one_batch(f.replayed.records, [i for i in accused if i < f.replayed.last]),
            groups=f.growth is None or f.growth.linear_ok,  # else any few steps left out make another run of it
            least=len(accused) if named else LEAST,
            own=own_batches(f.replayed.trajectory, f.event) if data == "own batch" else (),
            scatter=f.scatter,
            tick=tick,
        )


def _treat(f: Findings, treatments: bool) -> None:
    """The runs with hyperparameters at their former values, which may be all there is to it; then with treatments."""
    trajectory, event = f.replayed.trajectory, f.event
    held = [_held(trajectory.steps, change, event) for change in f.changes]
    with progress("running again with treatments", 12) as tick:
        outcomes = try_all(trajectory, event, held, tick)
        f.held = [_sure(f, change, outcome) for change, outcome in zip(f.changes, outcomes)]
        if not treatments:
            return
        wanted = list(possible(trajectory, event))
        most = RERUN * len(trajectory.steps) - sum(f.inquiry.spent) if f.blamed else math.inf
        f.outcomes = proved(trajectory, event, try_all(trajectory, event, wanted, tick, most=most))
        f.untried = len(wanted) - len(f.outcomes)


def _sure(f: Findings, change: HyperChange, outcome: Outcome) -> Outcome:
    """What a former value removes, where that is no luck."""
    trajectory, event = f.replayed.trajectory, f.event
    if not f.rose_before and (not change.brief or f.inquiry.share > BARS.specific):
        outcome = not_by_luck(trajectory, event, outcome)
    return twice(trajectory, event, outcome) if f.scatter.known and outcome.removes else outcome


def _changes(f: Findings) -> list[HyperChange]:
    """Those that are held at their former value; they may end after the spike: what is held is held over all of it."""
    changes = hyperparameters(f.replayed.records)
    return one_of_each([c for c in changes if c.kind != "warm-up" and c.at <= f.replayed.last])[:HELD]


def _held(steps: Sequence[Any], change: HyperChange, event: Event) -> Treatment:
    """The run with a hyperparameter at its former value, as long as this change lasts: another may follow it."""
    first, last = change.steps
    rest = steps[change.until : event.last + 1]
    when = f"from step {first} on" if all(map(change.has_former, rest)) else f"at {span(first, last)}"
    name = f"{change.name} held at its former value {when}"
    return Treatment(name, Run(change.at, {s.index: change.hold(s) for s in steps[change.at : event.last + 1]}), 5)


def _hold_before(f: Findings, code: Code) -> None:
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
            f.growth, f.sharp = amplification(trajectory, last, enough=GROWTH.too_fast), sharpness(trajectory, last - 1)
            if not f.growth.linear_ok:
                f.refused = f.growth.sentence
                return
        with progress("adjoint sweep", last) as tick:
            f.swept = sweep(trajectory, last, f.event.quantity, references=references, tick=tick)
    except (WrongHessian, Nondeterministic, HiddenState, UnsupportedAttention, UnsupportedModel, OutOfMemory) as error:
        f.refused = str(error)
