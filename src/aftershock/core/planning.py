"""What a piece of work needs in memory, known before it starts, and how it is cut to fit.

How work is cut to fit is decided in four modules and nowhere else: `path_plans` before there is a path, `footprint`
for recorded passes, `sweep_plans` for rankings and explanations, this one for rows. What may be used they ask of
`memory` and `host`, and what rows hold of `row_costs`. Memory is counted in copies of the flat vector and in what the
model's own passes hold, which is measured once. Work that runs out in spite of its plan is halved where it runs
(`Sharing.in_pieces`, `respond`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import OutOfMemory
from .footprint import Curvature, Footprint, record_gradient, room
from .lanes import LANES
from .memory import budget, enough, free, lacking, readable
from .probe import Probe, Watch
from .responses import ANSWERS, Pass
from .row_costs import Load, pool_bytes, rollout_bytes
from .trajectory import Trajectory

# of the room, for lanes: of 1.4B two then fit, and fewer rows at once, which together take less time and less memory
LANE_SHARE = 0.6
# rows × steps from which lanes are recorded: by an estimate for 0.4B three more pay after about 90, but later work
# finds them there
LANE_STEPS = 48
READING_HOLDS = 3  # vectors beside rows that are read: the control's raw gradient, the change's, and ξ


def _record_probe(trajectory: Trajectory, probe: Probe) -> None:
    """Record the values of a probe of a large model, on as many lanes as its gradient."""
    state, (loss, batch, random, _) = trajectory.state(0), probe.arguments(trajectory, 0)
    at = (state.theta, state.buffers, (batch, batch), random)
    loss.rehearse("value", *at, evaluating=probe.evaluating, lanes=len(loss.player.lanes))


def plan_lanes(trajectory: Trajectory, rows: int, steps: int, available: int) -> None:
    """Before so many exact rows take so many steps within some bytes: the gradient of a large model, where it is
    recorded, on as many lanes as rows use and there is room for; what further lanes hold is given back."""
    player, batches = trajectory.dynamics.loss.player, trajectory.typical
    if not player.pays or batches is None:
        return
    vector = Footprint.of(trajectory).vector
    recorded = trajectory.dynamics.loss.recorded("gradient", batches[0])
    if recorded is None:
        return
    each = recorded[0].nbytes + 2 * vector  # beside it θ, and the gradient of a change
    left = min(available, free(trajectory.device)) + player.lane_bytes
    lanes = max(1, min(LANES, rows, int(LANE_SHARE * left) // each))
    player.narrow(lanes)
    if rows * steps >= LANE_STEPS:
        record_gradient(trajectory, lanes)


def plan_rerun_lanes(trajectory: Trajectory, rows: int, steps: int, memory: str | int | None) -> None:
    """The same before reruns, in all that may be used."""
    plan_lanes(trajectory, rows, steps, room(trajectory, memory))


@dataclass(frozen=True)
class Plan:
    """Passes over the path and their peak, beside what is in memory already."""

    passes: tuple[Pass, ...]
    peak: int
    available: int
    chunks: int  # how often the path is walked


@dataclass(frozen=True)
class Work:
    """Responses to so many changes at one step, each at so many scales.

    by_scale: the changes have a ξ, so that one tangent serves all scales.
    rounding: one more exact row, which tells what rounding alone does.
    kept: as if the path kept every state.
    """

    watch: Watch
    changes: int
    scales: int
    by_scale: bool = True
    rounding: bool = False
    kept: bool = False

    def units(self, answers: Sequence[str]) -> int:
        """What a pass cuts into chunks: changes, and the row of rounding."""
        return self.changes + (self.rounding and "exact" in answers)

    def load(self, each: Pass) -> Load:
        """The rows of the largest chunk of a pass."""
        changes = min(each.at_once, self.changes)
        rows = changes * self.scales
        tangents, have = changes if self.by_scale else rows, each.answers
        exact = (rows + (each.at_once > self.changes)) * ("exact" in have)
        return Load(exact, rows * ("semilinear" in have), tangents * ("tangent" in have), each.parked)


def plan_responses(work: Work, answers: Sequence[str], memory: str | int | None) -> Plan:
    """The fewest passes that fit: all answers at once, else the truth apart from predictions, else each alone.

    Where predictions do not fit beside recorded passes, these serve the truth and then give their memory back. Where
    not even one exact row fits beside them they give it back first, then rows are parked in host memory.
    """
    trajectory, probe = work.watch.trajectory, work.watch.probe
    loss = trajectory.dynamics.loss
    Footprint.of(trajectory)  # what is recorded is in memory before the rest is planned
    if tuple(answers) != ("exact",):
        loss.player.narrow()
        Curvature.of(trajectory)
    _plan_work_lanes(work, answers, memory)
    if not probe.own and loss.player.pays:
        _record_probe(trajectory, probe)
    if loss.player.recordings:
        with contextlib.suppress(OutOfMemory):
            return _plan(work, answers, memory, park=False)
        loss.player.narrow()
        with contextlib.suppress(OutOfMemory):
            return _plan(work, answers, memory, park=False)
        if (in_turn := _plan_in_turn(work, answers, memory)) is not None:
            return in_turn
        loss.player.give_back()
    return _plan(work, answers, memory, park=True)


def _plan_work_lanes(work: Work, answers: Sequence[str], memory: str | int | None) -> None:
    if "exact" in answers:
        trajectory, rows = work.watch.trajectory, work.changes * work.scales + work.rounding
        plan_rerun_lanes(trajectory, rows, work.watch.horizons, memory)


def _plan_in_turn(work: Work, answers: Sequence[str], memory: str | int | None) -> Plan | None:
    """Exact rows with what is recorded, then predictions with the room of it; None where one of them does not fit."""
    trajectory, predictions = work.watch.trajectory, tuple(answer for answer in answers if answer != "exact")
    if "exact" not in answers or not predictions:
        return None
    player = trajectory.dynamics.loss.player
    _plan_work_lanes(work, answers, memory)
    held = player.nbytes
    try:
        truth = _plan(work, ("exact",), memory, park=False)
        with player.aside():
            left = budget(memory, trajectory.device) + held * (memory is None)  # what is free does not hold them
            rest = _plan(work, predictions, left, park=False)
    except OutOfMemory:
        return None
    passes = (*truth.passes, *(replace(each, unrecorded=True) for each in rest.passes))
    return Plan(passes, max(truth.peak, rest.peak - held), truth.available, truth.chunks + rest.chunks)


def plan_reruns(watch: Watch, count: int, memory: str | int | None) -> int:
    """The peak of so many exact reruns of other batches; raises where not even one fits."""
    return plan_responses(Work(watch, count, 1), ("exact",), memory).peak


def _plan(work: Work, answers: Sequence[str], memory: str | int | None, *, park: bool) -> Plan:
    available = room(work.watch.trajectory, memory)
    wanted = tuple(answer for answer in ANSWERS if answer in answers)
    predictions = tuple(answer for answer in wanted if answer != "exact")
    truth: list[tuple[str, ...]] = [("exact",)] if "exact" in wanted else []
    splits: list[list[tuple[str, ...]]] = [
        [wanted],
        [*truth, predictions],
        [*truth, *((answer,) for answer in predictions)],
    ]
    # what has no exact rows has no lanes beside the first either
    spare = work.watch.trajectory.dynamics.loss.player.lane_bytes
    for parts in splits:
        found = [_fitting(work, part, available + spare * ("exact" not in part)) for part in parts if part]
        passes = [each for each in found if each is not None]
        whole = len(parts) == 1
        if len(passes) == len(found) and (not whole or passes[0].at_once == work.units(wanted) or len(wanted) == 1):
            return _planned(work, passes, available, spare)
    rest = [_fitting(work, (answer,), available + spare) for answer in predictions]
    parked = Pass(("exact",), 1, parked=True)
    elsewhere = work.watch.trajectory.device.type != "cpu"
    if park and truth and elsewhere and all(rest) and pass_bytes(work, parked) <= available:
        return _planned(work, [parked, *(each for each in rest if each is not None)], available, spare)
    raise OutOfMemory(_advice(work, wanted, memory, available))


def at_once(
    trajectory: Trajectory,
    count: int,
    load: Callable[[int], Load],
    memory: str | int | None,
    held: Callable[[int], float],
    what: str,
) -> int:
    """How many of `count` pieces of work fit. Where not even one does, recorded passes give their memory back; where
    it still does not, that is refused.

    load: the rows of so many of them. held: copies of the flat vector beside those and a control that is not kept.
    what: one of them, for the error.
    """
    player, each = trajectory.dynamics.loss.player, load(1)
    vector, control = Footprint.of(trajectory).vector, 3 * (trajectory.spacing > 1)
    if each.predicted:
        player.narrow()
        Curvature.of(trajectory)  # what it records is in memory before the rest is planned
    else:
        plan_rerun_lanes(trajectory, load(count).exact, len(trajectory), memory)

    def needed(n: int) -> int:
        return int(vector * (control + held(n))) + rollout_bytes(trajectory, load(n))

    for give_back in (player.narrow, player.give_back, None):
        available = room(trajectory, memory)
        found = next((n for n in _sizes(count) if needed(n) <= available), None)
        if found is not None:
            return found
        if give_back is None or not player.recordings:
            break
        give_back()
    raise OutOfMemory(
        f"{what} {lacking(needed(1), available)}. What would fit: {enough(needed(1))}, a smaller model or a smaller "
        "batch"
    )


def plan_readings(watch: Watch, rows: int, reading: Callable[[int], int], memory: str | int | None) -> int:
    """How many of so many reruns of one change are carried together: all that fit, and where they run alone one for
    each lane.

    reading: the bytes on the way while so many of them are read.
    """
    trajectory = watch.trajectory
    vector = Footprint.of(trajectory).vector
    available = room(trajectory, memory)
    idle = 3 * vector * (trajectory.spacing > 1)  # a control that nobody asks for is not carried

    def needed(n: int) -> int:
        together = trajectory.together("gradient", n + 1)
        copied = 3 * (together and trajectory.kept(watch.first) is None)  # together the control is copied
        started = (3 * n + 2) * vector  # a gradient and its copy are on the way to the last row
        carried = rollout_bytes(trajectory, Load(exact=n)) - idle * (not together)
        return (READING_HOLDS + copied) * vector + max(started, carried) + reading(n)

    if needed(1) > available:
        raise OutOfMemory(
            f"one rerun {lacking(needed(1), available)}. What would fit: {enough(needed(1))}, a smaller model or a "
            "smaller batch"
        )
    lanes = len(trajectory.dynamics.loss.player.lanes)
    sizes = (n for n in range(rows, 1, -1) if n <= lanes or trajectory.together("gradient", n + 1))
    return next((n for n in sizes if needed(n) <= available), 1)


def plan_history(trajectory: Trajectory, cotangents: int, memory: str | int | None, *, sums: int = 0) -> torch.device:
    """Where so many cotangents of a sweep are kept: beside the model, or in host memory where they do not fit.

    sums: further vectors that stay beside the model. The products of a large model are recorded first.
    """
    if trajectory.dynamics.loss.player.pays:
        trajectory.dynamics.loss.player.narrow()
        Curvature.of(trajectory)
    layout = trajectory.dynamics.layout
    device, vector = trajectory.device, layout.padded_size * layout.dtype.itemsize
    left = room(trajectory, memory) - sums * vector
    if device.type != "cpu" and left <= 0:
        raise OutOfMemory(
            f"the sweep carries {sums} vectors of {readable(vector)} each on {device}, and "
            f"{readable(room(trajectory, memory))} may be used. What would fit: a smaller model, or a device with more "
            "memory"
        )
    if device.type == "cpu" or cotangents * vector <= left // 2:
        return device
    if cotangents * vector <= budget(None, torch.device("cpu")):
        return torch.device("cpu")
    raise OutOfMemory(
        f"the sweep passes {cotangents} cotangents of {readable(vector)} each, which fit neither on {device} nor in "
        'host memory; rank at one outcome (by="response"), or at a shorter horizon'
    )


def pass_bytes(work: Work, each: Pass) -> int:
    """The peak of one chunk of a pass, beside the model and the path."""
    load = work.load(each)
    trajectory = work.watch.trajectory
    replayed = trajectory.spacing > 1 and not work.kept and not each.apart
    carried = rollout_bytes(
        trajectory, load, own=work.watch.probe.own, rounding=work.rounding, late=not work.by_scale, replayed=replayed,
        reading=work.watch.reading(),
    )  # fmt: skip
    # gradients of changes in rows are there until the last one is used, in lanes one for each, and so is the control's
    carried += Footprint.of(trajectory).vector * each.holds_gradient
    lanes = len(trajectory.dynamics.loss.player.lanes) or work.changes
    waiting = (min(each.at_once, work.changes, lanes) + 2) * Footprint.of(trajectory).vector * each.shocks_in_rows
    before = replace(load, exact=min(load.exact, work.changes * work.scales))  # the row of rounding starts last
    v = Footprint.of(trajectory).vector
    pool = pool_bytes(trajectory, 1 + min(each.at_once, work.changes)) if each.shocks_in_rows else None
    pooled = _control_bytes(work, apart=each.apart) + (pool or 0)
    jittered = v * (each.apart and work.rounding)  # the last row takes the control's place, but for a θ of its own
    started = _control_bytes(work, apart=each.apart) + 3 * v * (_held(load) + load.predicted) + jittered
    return max(pooled, _start_bytes(work, before, each.apart) + waiting, started, carried)


def _start_bytes(work: Work, load: Load, apart: bool) -> int:
    """While rows are started, one change after another: what they are so far, and what the last one takes."""
    trajectory, at = work.watch.trajectory, work.watch.at
    f = Footprint.of(trajectory)
    v = f.vector
    control, exact = _control_bytes(work, apart=apart), _held(load)
    rows = 3 * v * (exact + load.predicted)
    gradient = rows - 3 * v * min(exact, work.scales) + max(f.gradient, 3 * v)
    # beside its raw gradient and ξ: the state in which it ends, then its tangent, for which one change alone has no
    # place yet
    waiting = 3 * v * load.linear * (work.by_scale and load.linear == 1)
    apply = (2 if work.scales > 1 else 1) * v + f.update
    own = load.exact > 0 or (load.semilinear == 1 and (work.by_scale or not load.linear))  # the end becomes a row
    end = 2 * v * work.by_scale + 3 * v * (not own) + max(apply, f.counting) - waiting
    clipped = 2 * v * trajectory.steps[at].clip.binds
    write = (2 * v + 3 * v * (load.linear > 1) + f.piece + clipped) * (load.linear > 0 and work.by_scale)
    return control + max(gradient, rows + max(end, write))


def _control_bytes(work: Work, *, apart: bool) -> int:
    """The control's step: its raw gradient, and the states before and after it where they are not kept; where the
    control goes apart, the one after it is not needed."""
    trajectory, at = work.watch.trajectory, work.watch.at
    times = (at,) if apart else (at, at + 1)
    made = 0 if work.kept else sum(trajectory.kept(time) is None for time in times)
    return Footprint.of(trajectory).vector * (1 + 3 * made)


def _held(load: Load) -> int:
    """Exact rows on the device."""
    return min(load.exact, 1) if load.parked else load.exact


def _fitting(work: Work, answers: tuple[str, ...], available: int) -> Pass | None:
    """As many changes at once as fit, in chunks of one size; None where not even one does."""
    units = work.units(answers)
    passes = (Pass(answers, n, apart=_apart(work, answers, n)) for n in _sizes(units))
    found = next((each for each in passes if pass_bytes(work, each) <= available), None)
    return None if found is None else replace(found, at_once=math.ceil(units / math.ceil(units / found.at_once)))


def _apart(work: Work, answers: tuple[str, ...], at_once: int) -> bool:
    """Whether the control goes before rows that are cut into chunks, where they run alone and it is not kept."""
    trajectory = work.watch.trajectory
    alone = not trajectory.together("gradient", work.load(Pass(answers, at_once)).exact + 1)
    cut = answers == ("exact",) and at_once < work.units(answers)
    return cut and alone and work.by_scale and trajectory.spacing > 1 and not work.kept


def _planned(work: Work, passes: Sequence[Pass], available: int, spare: int) -> Plan:
    """The passes, with gradients of the changes themselves in rows, and with the control's held from chunk to chunk,
    where that still fits."""
    trajectory, chosen = work.watch.trajectory, []
    for each in passes:
        exact = "exact" in each.answers
        limit = available + spare * (not exact)
        pays = trajectory.together("pool", 1 + each.at_once) or (exact and spare > 0)
        rows = replace(each, shocks_in_rows=work.by_scale and pays)
        each = rows if pass_bytes(work, rows) <= limit else each
        held = replace(each, holds_gradient=each.at_once < work.units(each.answers))
        chosen.append(held if pass_bytes(work, held) <= limit else each)
    peaks = (pass_bytes(work, each) - spare * ("exact" not in each.answers) for each in chosen)
    chunks = sum(math.ceil(work.units(each.answers) / each.at_once) for each in chosen)
    return Plan(tuple(chosen), max(peaks), available, chunks)


def _advice(work: Work, answers: Sequence[str], memory: str | int | None, available: int) -> str:
    """What is missing, and what would fit. Changes are cut apart already, and a longer horizon takes no more memory."""
    trajectory = work.watch.trajectory
    one = {answer: pass_bytes(work, Pass((answer,), 1)) for answer in answers}
    worst = max(one, key=lambda answer: one[answer])
    fits = [enough(one[worst])]
    if some := [answer for answer in answers if one[answer] <= available]:
        fits.append(f"answers={some}")
    single = replace(work, scales=1)
    if work.scales > 1 and _fits(single, answers, available):
        fits.append(f"one scale at a time (now {work.scales})")
    left = available - trajectory.not_kept * (memory is None)  # a budget is for what is beside the path
    if trajectory.keep == "checkpoints" and _fits(replace(work, kept=True), answers, left):
        fits.append(f'keep="states" in follow(), where the path takes {readable(trajectory.not_kept)} more')
    return (
        f"the {worst} answer to one change {lacking(one[worst], available)}. What would fit: {', '.join(fits)}; a "
        "smaller batch needs less"
    )


def _fits(work: Work, answers: Sequence[str], available: int) -> bool:
    """Whether each answer to one change does by itself."""
    return all(pass_bytes(work, Pass((answer,), 1)) <= available for answer in answers)


def _sizes(changes: int) -> list[int]:
    """Chunk sizes to try, the largest first: every number of changes up to 16, then coarser."""
    sizes = {changes, *range(1, min(changes, 16) + 1)}
    size = changes
    while size > 16:
        sizes.add(size)
        size = -(-size // 2)
    return sorted(sizes, reverse=True)
