"""A recorded window run again, and the proof that it is the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

from torch import Tensor, nn

from ..api.path import Path
from ..api.point import TrainingPoint
from ..api.storage import load_captured
from ..core.batches import Batch
from ..core.capture import Captured
from ..core.changes import ControlStep, Edit
from ..core.dynamics import Dynamics, Step
from ..core.gradient_causes import EDITED
from ..core.loss import Autocast
from ..core.planning import plan_states
from ..core.probe import Reader, own_loss
from ..core.rollout import Rows, rollout
from ..core.state import JointState
from ..core.trajectory import Trajectory
from ..errors import NotFinite, ReplayMismatch
from .parting import Recorded, clipped_alike, parting, said
from .records import Forward, Record, Source

AGREE = 1e-4  # relative: rounding of another kernel stays far below, another batch or mask far above


@dataclass(frozen=True)
class Replay:
    """A window of a flight, replayed: `records[i]` is step i of the path."""

    path: Path
    records: tuple[Record, ...]
    proved: int  # steps compared with the record: the window's, and those between the last state and it
    deviation: float  # the largest relative difference of a replayed loss from the recorded one; 0: to the bit

    @property
    def trajectory(self) -> Trajectory:
        return self.path.trajectory

    @property
    def last(self) -> int:
        """The path's index of the last step: the one that is explained."""
        return len(self.records) - 1

    def __str__(self) -> str:
        if self.deviation == 0:
            return f"The {self.proved} steps were replayed: every loss is equal to the recorded one to the bit."
        return (
            f"The {self.proved} steps were replayed: losses agree with the recorded ones to {self.deviation:.1e} "
            "(relative), not to the bit."
        )


def replay(
    records: Sequence[Record],
    window: int,
    states: Mapping[int, FilePath],
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    dataset: object = None,
) -> Replay:
    """Run the recorded steps again from the state before the first; raises `ReplayMismatch` where they part.

    Only the last `window` steps before the last become the path. Costs one gradient per step.

    states: files of recorded states by step: the first step's is needed; where the runs part, later ones tell why.
    """
    captured = load_captured(states[records[0].step], model, loss_fn)
    _set_surroundings(captured.loss.model, records)
    forward = records[0].forward
    captured.loss.autocast = Autocast(forward.autocast, forward.autocast_dtype)
    source = Source(captured.loss.layout.device, dataset)
    lead = max(0, len(records) - 1 - window)
    before, after = records[:lead], records[lead:]
    worst = 0.0

    def recorded(step: int) -> Captured | None:
        return load_captured(states[step], model, loss_fn) if step in states else None

    if before:
        trajectory = _follow(captured, before, source, records)
        worst = _proved(before, trajectory, records, recorded)
        captured = replace(captured, state=trajectory.state(lead))
    trajectory = _follow(captured, after, source, records)
    worst = max(worst, _proved(after, trajectory, records, recorded))
    return Replay(Path(TrainingPoint(captured), trajectory, None), tuple(after), len(records), worst)


def _follow(captured: Captured, some: Sequence[Record], source: Source, records: Sequence[Record]) -> Trajectory:
    steps = [
        Step(i, record.batch(source), record.fed[0].random, record.hypers, record.clip, own_random=True)
        for i, record in enumerate(some)
    ]
    keep, spacing = plan_states(len(steps), captured.state.nbytes, None, None, captured.loss.layout.device)
    try:
        return Trajectory.follow(Dynamics(captured.loss), captured.state, steps[0].random, steps, keep, spacing)
    except NotFinite as error:
        raise ReplayMismatch(
            f"the replay from step {some[0].step} on is not finite where the recorded run was: {error}. "
            f"{said(clipped_alike(records) or EDITED)}"
        ) from error


def rerun(trajectory: Trajectory, at: int, edit: Edit, until: int, steps: Sequence[Step] | None = None) -> list[float]:
    """The own losses of steps at+1 … until with `edit` made at step `at`: one gradient per step.

    steps: other steps in the place of the path's, such as ones with another learning rate. A run that diverges
    has an infinite loss from there on.
    """
    start = edit.shock(ControlStep.of(trajectory, at)).endpoint(1.0)[0]
    reader, losses = Reader(trajectory, own_loss), []
    rows = Rows([start], steps=None if steps is None else [steps])
    for moment in rollout(trajectory, at + 1, rows, until):
        losses.append(trajectory.steps[moment.time].loss + float(reader.exact(moment)[0]))
    return losses


def own_value(trajectory: Trajectory, time: int, batch: Batch) -> float:
    """The loss of another batch at the state before step `time`."""
    return _value(trajectory, replace(trajectory.steps[time], batch=batch), trajectory.state(time))


def _value(trajectory: Trajectory, step: Step, state: JointState) -> float:
    loss = trajectory.dynamics.loss
    return float(loss.value(state.theta, state.buffers, step.batch, step.random, step.where).loss)


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


def _proved(some: Sequence[Record], trajectory: Trajectory, records: Sequence[Record], recorded: Recorded) -> float:
    """The largest deviation; raises at the first step whose loss or gradient norm is another one."""
    worst = 0.0
    for i, (record, step) in enumerate(zip(some, trajectory.steps)):
        arrived = step.clip.norm * step.clip.factor
        for name, was, now in (("loss", record.loss, step.loss), ("gradient norm", record.norm, arrived)):
            off = abs(was - now) / max(abs(was), abs(now), 1e-300)
            if off > AGREE:
                raise ReplayMismatch(
                    f"recorded and replayed runs part at step {record.step}, {record.step - records[0].step} step(s) "
                    f"after the state that the replay starts from: its {name} was {was:.6g} and is {now:.6g} in the "
                    f"replay. {said(parting(some, i, trajectory, records, recorded))}"
                )
            if name == "loss":
                worst = max(worst, off)
    return worst
