"""A recorded window run again, and the proof that it is the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import torch
from torch import Tensor, nn

from ..api.path import Path
from ..api.point import TrainingPoint
from ..api.storage import load_captured
from ..core.batches import Batch
from ..core.calls import Autocast
from ..core.capture import Captured
from ..core.dynamics import Dynamics, Step
from ..core.gradient_causes import EDITED
from ..core.noise import jitter
from ..core.path_plans import plan_window
from ..core.trajectory import Keep, Trajectory
from ..errors import NotFinite, ReplayMismatch
from .parting import Recorded, clipped_alike, parting, said
from .quantity import Quantity, recorded, seen
from .records import Forward, Record, Source


@dataclass(frozen=True)
class SameRun:
    """The numbers that decide whether a replay is the recorded run."""

    agree: float = 1e-4  # relative: rounding of another kernel stays far below, another batch or mask far above
    agree_autocast: float = 1e-3  # the same where products are rounded to 16 bits
    scattered: float = 10.0  # times the spread of the replays so far: kernels round more often than once a step
    wide: float = 1e-2  # relative: losses of two replays that differ by more, which may be as much as a spike


SAME_RUN = SameRun()
REPLAYS = 4  # at most, of a run that does not repeat itself: as many as tell that the recording is one of them


@dataclass(frozen=True)
class Replay:
    """A window of a flight, replayed: `records[i]` is step i of the path, `last` the one that is explained."""

    path: Path
    records: tuple[Record, ...]
    last: int
    proved: int  # steps compared with the record: the window's, and those between the last state and it
    deviation: float  # the largest relative difference of a replayed loss from the recorded one; 0: to the bit
    again: tuple[tuple[Step, ...], ...] = ()  # further replays, where the run does not repeat itself

    @property
    def trajectory(self) -> Trajectory:
        return self.path.trajectory

    def runs(self, quantity: Quantity = "loss") -> list[list[float]]:
        """The values of the unchanged run, step by step: of this replay, and where the run does not repeat itself of
        every further one and of the recording."""
        runs = [[seen(quantity, step) for step in steps] for steps in (self.trajectory.steps, *self.again)]
        comparable = quantity == "loss" or all(record.clip is None for record in self.records)  # a clipped norm is not
        if self.again and comparable:
            runs.append([recorded(quantity, record) for record in self.records])
        return runs

    def __str__(self) -> str:
        if not self.proved:
            return "Nothing was replayed: the first recorded step is not finite."
        replayed = f"The {self.proved} steps were replayed" if self.proved > 1 else "One step was replayed"
        if self.deviation == 0:
            return f"{replayed}: every loss is equal to the recorded one to the bit."
        if self.again:
            widest = max(max(values) - min(values) for values in zip(*self.runs()))
            return (
                f"The recording is not equal to the bit to its replay: it and {1 + len(self.again)} replays, which "
                f"start a rounding away from each other, differ by up to {widest:.2g} in the loss, as rounding that "
                "grows."
            )
        return f"{replayed}: losses agree with the recorded ones to {self.deviation:.1e} (relative), not to the bit."


def replay(
    records: Sequence[Record],
    window: int,
    states: Mapping[int, FilePath],
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    dataset: object = None,
    after: int = 0,
    constant: Sequence[nn.Module] = (),
    memory: str | int | None = None,
) -> Replay:
    """Run the recorded steps again from the state before the first; raises `ReplayMismatch` where they part.

    The explained step is the last but `after`; it, the `window` steps before it and those after it become the path.
    Costs one gradient per step. A run that does not repeat itself is replayed one to four times more, each time from a
    state that differs by a rounding: a recording that is as far from the replay as these are is accepted.

    states: files of recorded states by step: the first step's is needed; where the runs part, later ones tell why.
    memory: what the path and work along it may use (`plan_window`).
    """

    def state_before(step: int) -> Captured | None:
        if step not in states:
            return None
        return load_captured(states[step], model, loss_fn, constant=constant, where_saved=True)

    captured = state_before(records[0].step)
    assert captured is not None
    _set_surroundings(captured.loss.model, records)
    captured.loss.autocast = _precision(records)
    source = Source(captured.loss.layout.device, dataset)
    lead = max(0, len(records) - 1 - after - window)
    before, rest = records[:lead], records[lead:]
    proof = _Proof(captured, records, source, state_before, memory)
    if before:
        captured = replace(captured, state=proof.follow(captured, before, spacing=lead).state(lead))
    trajectory = proof.follow(captured, rest)
    path = Path(TrainingPoint(captured), trajectory, memory)
    return Replay(path, tuple(rest), len(rest) - 1 - after, len(records), proof.worst, proof.again(lead))


def untaken(
    record: Record,
    states: Mapping[int, FilePath],
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    dataset: object = None,
    constant: Sequence[nn.Module] = (),
) -> Replay:
    """A recorded step that is not finite, with the state before it: a path of one step that was not taken."""
    captured = load_captured(states[record.step], model, loss_fn, constant=constant, where_saved=True)
    _set_surroundings(captured.loss.model, [record])
    captured.loss.autocast = _precision([record])
    batch = record.batch(Source(captured.loss.layout.device, dataset))
    step = Step(0, batch, record.fed[0].random, record.hypers, record.clip, own_random=True, loss=record.loss)
    trajectory = Trajectory.untaken(Dynamics(captured.loss), captured.state, step)
    return Replay(Path(TrainingPoint(captured), trajectory, None), (record,), 0, 0, 0.0)


def _follow(
    captured: Captured,
    some: Sequence[Record],
    source: Source,
    records: Sequence[Record],
    *,
    spacing: int | None = None,
    memory: str | int | None = None,
) -> Trajectory:
    """spacing: one of so many states is kept; default: as `memory` allows (`plan_window`)."""
    steps = [
        Step(i, record.batch(source), record.fed[0].random, record.hypers, record.clip, own_random=True)
        for i, record in enumerate(some)
    ]
    kept: Keep = "checkpoints"
    if spacing is None:
        kept, spacing = plan_window(captured, steps, memory)
    try:
        return Trajectory.follow(Dynamics(captured.loss), captured.state, steps[0].random, steps, kept, spacing)
    except NotFinite as error:
        raise ReplayMismatch(
            f"the replay from step {some[0].step} on is not finite where the recorded run was: {error}. "
            f"{said(clipped_alike(records) or EDITED)}"
        ) from error


def _precision(records: Sequence[Record]) -> Autocast:
    """Autocast, and the loss scale that most of the steps had. A scaler changes it seldom, and all that differs is what
    float16 loses at the one and not at the other."""
    forward, scales = records[0].forward, Counter(record.scale for record in records)
    return Autocast(forward.autocast, forward.autocast_dtype, scales.most_common(1)[0][0])


def _set_surroundings(model: nn.Module, records: Sequence[Record]) -> None:
    """The modes the steps ran in, which must be the same throughout."""
    forwards: set[Forward] = {record.forward for record in records}
    if len(forwards) > 1:
        step = next(record.step for record in records if record.forward != records[0].forward)
        raise ReplayMismatch(
            f"at step {step} the model ran in other modes (train, eval, autocast) than at step {records[0].step}; a "
            "window is replayed in one: explain a step whose window lies on one side"
        )
    evaluating = set(records[0].forward.evaluating)
    for name, module in model.named_modules():
        module.training = name not in evaluating


class _Proof:
    """Replays one stretch after another and compares them with the record."""

    def __init__(
        self,
        first: Captured,
        records: Sequence[Record],
        source: Source,
        recorded: Recorded,
        memory: str | int | None = None,
    ) -> None:
        self.first, self.records, self.source, self.recorded, self.memory = first, records, source, recorded, memory
        coarsest = max(torch.finfo(dtype).eps for dtype in first.loss.layout.dtypes)
        self.agree = max(SAME_RUN.agree_autocast if first.loss.autocast.enabled else SAME_RUN.agree, coarsest)
        self.worst = 0.0
        self.steps: list[Step] = []  # replayed so far
        self.runs: list[tuple[Step, ...]] = []  # of replays of all records that start a rounding away

    def again(self, since: int) -> tuple[tuple[Step, ...], ...]:
        """Further replays."""
        return tuple(run[since:] for run in self.runs)

    def follow(self, captured: Captured, some: Sequence[Record], spacing: int | None = None) -> Trajectory:
        trajectory = _follow(captured, some, self.source, self.records, spacing=spacing, memory=self.memory)
        self.steps += trajectory.steps
        parted = self._parted(some, trajectory)
        if parted is not None and not self._scattered():
            raise ReplayMismatch(self._words(some, parted, trajectory))
        return trajectory

    def _parted(self, some: Sequence[Record], trajectory: Trajectory) -> int | None:
        """The first step whose loss or gradient norm is another one."""
        first: int | None = None
        for i, (record, step) in enumerate(zip(some, trajectory.steps)):
            self.worst = max(self.worst, _off(record.loss, step.loss))
            if first is None and any(_off(was, now) > self.agree for _, was, now in _pairs(record, step)):
                first = i
        return first

    def _words(self, some: Sequence[Record], i: int, trajectory: Trajectory) -> str:
        record = some[i]
        name, was, now = next(
            pair for pair in _pairs(record, trajectory.steps[i]) if _off(pair[1], pair[2]) > self.agree
        )
        return (
            f"recorded and replayed runs part at step {record.step}, {record.step - self.records[0].step} step(s) "
            f"after the state that the replay starts from: its {name} was {was:.6g} and is {now:.6g} in the replay. "
            f"{said(parting(some, i, trajectory, self.records, self.recorded))}"
        )

    def _scattered(self) -> bool:
        """Is the recording one of the replays that start a rounding away? One of them is asked; more where it does not
        tell, or where losses scatter so widely that their scatter must be known well."""
        while len(self.runs) < REPLAYS and not (self.runs and self._within() and not self._widely()):
            try:
                self.runs.append(self._rounding_away(seed=len(self.runs)))
            except ReplayMismatch:  # not finite
                return False
        return self._within()

    def _widely(self) -> bool:
        pairs = [(step.loss, other.loss) for run in self.runs for step, other in zip(self.steps, run)]
        return any(_off(*pair) > SAME_RUN.wide for pair in pairs)

    def _rounding_away(self, seed: int) -> tuple[Step, ...]:
        """All steps from a first state that differs by a rounding; only what was seen is kept, no state."""
        state = self.first.state
        theta = state.theta + jitter(self.first.loss.layout, state, seed=seed)
        captured = replace(self.first, state=replace(state, theta=theta))
        first_alone = len(self.records) + 1
        steps = _follow(captured, self.records, self.source, self.records, spacing=first_alone).steps
        return tuple(replace(step, batch=None) for step in steps)

    def _within(self) -> bool:
        """Does the recording differ from the replay about as far as replays do from each other, up to every step?

        Another batch, mask or rule is far more than a rounding where it comes, however little it is. And a recording
        that was equal to the bit while replays had long parted does not part from it by rounding.
        """
        widest = {"loss": 0.0, "gradient norm": 0.0}
        equal, parted = True, False
        for i, (record, step) in enumerate(zip(self.records, self.steps)):
            seen = [{name: now for name, _, now in _pairs(record, run[i])} for run in (self.steps, *self.runs)]
            early = equal and parted
            for name, was, now in _pairs(record, step):
                values = [each[name] for each in seen]
                widest[name] = max(widest[name], max(values) - min(values))
                off = _off(was, now)
                if off > self.agree and (early or abs(was - now) > SAME_RUN.scattered * widest[name]):
                    return False
                equal = equal and off == 0
                parted = parted or _off(max(values), min(values)) > self.agree
        return True


def _off(was: float, now: float) -> float:
    return abs(was - now) / max(abs(was), abs(now), 1e-300)


def _pairs(record: Record, step: Step) -> tuple[tuple[str, float, float], ...]:
    """What was recorded of a step and what is seen of it."""
    return ("loss", record.loss, step.loss), ("gradient norm", record.norm, step.clip.norm * step.clip.factor)
