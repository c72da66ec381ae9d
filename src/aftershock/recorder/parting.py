"""Why a recorded run does not repeat itself, in the words that `path.matches` has for a live one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..core.agreement import Live, compare
from ..core.batches import Accumulated, example_count
from ..core.capture import Captured
from ..core.evidence import Cause
from ..core.gradient_causes import EDITED, NOT_ZEROED, UNRECORDED, chosen, other_clip, scaled_by, whole
from ..core.reductions import norms
from ..core.state_causes import WRITTEN
from ..core.trajectory import Trajectory
from ..errors import InvalidInput
from .draws import COMPILED, REMEDY, drawn_before_the_model
from .records import Record
from .updates import NEAR, arrived_smaller

Recorded = Callable[[int], Captured | None]  # the recorded state before a step, where there is one


@dataclass(frozen=True)
class Clues:
    """The numbers that decide which cause is named."""

    same: float = 1e-4  # relative: losses of one and the same run, norms that clipping made equal
    near: float = 1e-3  # relative: a norm that was computed in another way
    rounded: float = 3e-6  # relative: where the runs are still equal, a norm differs by its own rounding alone
    again: float = 1e-6  # relative: a loss that loss_fn gives a second time
    clipped: int = 4  # one step in so many must have the largest norm of all: fewer may have it by chance
    masks: float = (
        2.0  # times the largest difference that other masks made: the few that are tried need not be the worst
    )
    mostly: float = 0.1  # of a difference, which may be left where its cause is taken into account
    limits: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 8.0)  # times a power of ten: what is chosen


CLUES = Clues()
MASKS = 8  # random states that are tried

ANOTHER_RUN = Cause(
    "gradient",
    "the model or loss_fn is not the one that was recorded; the loss given to step() is not what loss_fn returns; the "
    "batch was changed after it was fed; or loss_fn reads something else that changes from step to step, such as a "
    "weight that is annealed",
    "give explain() the code of the recorded run, and step() the batch and loss as loss_fn has them; what changes from "
    "step to step belongs into the batch",
)
DRAWN = Cause(
    "gradient",
    "loss_fn draws random numbers (noise, masks, times) before it calls the model, which is when the recorder reads "
    "the random state",
    f"this recording cannot be explained. In the next, {REMEDY}",
)
ELSEWHERE = Cause(
    "random",
    "the run was recorded on a GPU and is replayed on a CPU, or the other way round: each draws random numbers and "
    "rounds in its own way",
    "explain it on a machine like the one on which it was recorded; the replay then goes there by itself",
)

ALIKE = "the losses of its micro-batches were not all divided by the same number"
WEIGH = (
    "make each micro-batch's weight a part of it, let loss_fn multiply by it, and tell recorder.step(…, divisor=1) in "
    "the next recording"
)
WEIGHED = Cause("gradient", "the losses of its micro-batches were weighed by their numbers of examples", WEIGH)

OTHER_MASKS = Cause(
    "random",
    f"the loss draws random numbers (dropout, noise), and may have drawn others than the replay does: {COMPILED}; or "
    "the model was called with gradients before the forward pass that is recorded, as where another network is trained "
    f"through it; or something else than the optimizer writes to the weights; or {ANOTHER_RUN.text}",
    "call recorder.before_forward() right before the forward pass whose loss step() is given; averages that are "
    f"swapped in are not modelled; else {ANOTHER_RUN.remedy}",
)

UNSEEN = Cause(
    "gradient",
    "the gradients were changed after the norm was taken that step() is told (a scaler, noise, a second clipping, or "
    f"clipping at another max_norm than clip= says, in this step or from it on); or {WRITTEN.text}",
    "leave that out, it is not modelled; without norm= the recorder takes the norm itself, and tells the two apart; "
    "recorder.step(…, clip=) tells a max_norm that changes",
)


def said(cause: Cause) -> str:
    remedy = cause.remedy
    if cause.clip is not None:
        limit = f"{cause.clip:g}"
        remedy = f"explain this recording with clip={limit} (--clip {limit}), and tell the recorder clip={limit}"
    return f"Likely cause: {cause.text}. {remedy[:1].upper()}{remedy[1:]}"


def parting(
    some: Sequence[Record], i: int, trajectory: Trajectory, records: Sequence[Record], recorded: Recorded
) -> Cause:
    """Why step i of a replayed trajectory is not record i."""
    record, step = some[i], trajectory.steps[i]
    # the loss is another one before any gradient
    forward = abs(record.loss - step.loss) > CLUES.same * abs(record.loss)
    if forward and not _repeats(trajectory, i):
        return UNRECORDED
    changed = _changed_clip(some, i, trajectory, forward=forward)
    if changed is not None:
        return changed
    if not forward and arrived_smaller(record) and chosen(record.norm):
        seen = f"step() was told a norm of {record.raw_norm:.4g}, and the gradients of step {record.step} arrived with"
        return other_clip(record.clip, record.norm, f"{seen} {record.norm:.4g}")
    alike = clipped_alike(records)
    if alike is not None:
        return alike
    if forward and _divided_otherwise(record, step.loss, records):
        return _short(record, records)
    if forward and _weighed(record, i, trajectory):
        return WEIGHED
    known = _by_state(some, i - 1 if forward else i, trajectory, recorded)
    if known is not None:
        return known
    if _not_zeroed(some, i, trajectory):
        return NOT_ZEROED
    if forward and not record.forward.begun and _drawn(trajectory, i):
        return DRAWN
    if forward and _other_masks(record, i, trajectory):
        return OTHER_MASKS
    if (record.fed[0].random.cuda is not None) != (trajectory.device.type == "cuda"):
        return ELSEWHERE
    if forward and record.step == records[0].step:
        return _of_several(ANOTHER_RUN, record)
    unseen = not math.isnan(record.raw_norm)  # step() was told the norms: what arrived is not seen
    clip = _untold_clip(some, i, trajectory) if unseen and i else None
    if clip is not None:
        return clip
    if forward:
        return _of_several(UNSEEN if unseen else WRITTEN, record)
    other = _another_norm(some[:i], trajectory)
    if other is not None:
        return other
    factor = record.norm / (step.clip.norm * step.clip.factor)
    largest = max(other.norm for other in some)
    if whole(factor) or whole(1 / factor) or (factor < 1 and chosen(record.norm) and record.norm >= largest):
        return scaled_by(factor, record.norm, record.clip)
    return _of_several(EDITED, record)


def _of_several(cause: Cause, record: Record) -> Cause:
    """The same, where the step may have weighed its micro-batches: by what nobody knows, such as tokens that count."""
    if len(record.fed) == 1 or record.divisor is not None:
        return cause
    return replace(cause, text=f"{ALIKE}; or {cause.text}", remedy=f"{WEIGH}; else {cause.remedy}")


def _divided_otherwise(record: Record, replayed: float, records: Sequence[Record]) -> bool:
    """Were the losses of an update with fewer micro-batches divided by the number that others have?"""
    few, many = len(record.fed), max(len(other.fed) for other in records)
    divided = abs(record.loss - replayed * few / many) <= CLUES.same * abs(record.loss)
    return record.divisor is None and few < many and divided


def _short(record: Record, records: Sequence[Record]) -> Cause:
    few, many = len(record.fed), max(len(other.fed) for other in records)
    return Cause(
        "gradient",
        f"the update of step {record.step} has {few} micro-batches where others have {many}, and each loss was divided "
        f"by {many} all the same",
        f"tell recorder.step(…, divisor={many}) in the next recording",
    )


def _weighed(record: Record, i: int, trajectory: Trajectory) -> bool:
    """Were the losses of micro-batches of several sizes weighed by these?"""
    step, state, loss = trajectory.steps[i], trajectory.state(i), trajectory.dynamics.loss
    if not isinstance(step.batch, Accumulated):
        return False
    try:
        counts = [example_count(batch) for batch in step.batch.batches]
    except InvalidInput:  # without a tensor
        return False
    weighed = replace(step.batch, weights=tuple(count / sum(counts) for count in counts), divisor=None)
    value = float(loss.value(state.theta, state.buffers, weighed, step.random, step.where).loss)
    return len(set(counts)) > 1 and abs(record.loss - value) <= CLUES.same * abs(record.loss)


def clipped_alike(records: Sequence[Record]) -> Cause | None:
    """Gradients of many steps that arrived with one and the same norm, the largest: somebody clipped them."""
    largest = max(record.norm for record in records)
    same = [record for record in records if abs(record.norm - largest) <= CLUES.same * largest]
    told = same[0].clip
    as_told = told is not None and abs(largest - told) <= CLUES.same * told
    if as_told or len(same) <= max(len(records) // CLUES.clipped, 1):
        return None
    return other_clip(told, largest, f"the gradients of {len(same)} steps arrived with one and the same norm")


def _changed_clip(some: Sequence[Record], i: int, trajectory: Trajectory, *, forward: bool) -> Cause | None:
    """Did a max_norm that was as told in earlier steps change? The norm that arrived shows it; where the loop told the
    norm before clipping instead, the loss after a step that is taken again without clipping."""
    at = i - 1 if forward else i
    if not any(step.clip.binds for step in trajectory.steps[: max(at, 0)]):
        return None
    record, step = some[at], trajectory.steps[at]
    raw, arrived = step.clip.norm, record.norm
    if forward and not (step.clip.binds and _follows(some[i].loss, at, trajectory, None)):
        return None
    if forward or abs(arrived - raw) <= CLUES.near * raw:
        how = "arrived unclipped"
    elif arrived < raw and chosen(arrived):
        how = f"arrived with {arrived:.4g}"
    else:
        return None
    told = "no clip=" if record.clip is None else f"clip={record.clip:g}"
    return Cause(
        "gradient",
        f"max_norm changed at step {record.step}, where the recorder was told {told}: up to then gradients were "
        f"clipped as told, and this one, of norm {raw:.4g}, {how}",
        "tell recorder.step(…, clip=) the max_norm of each step in the next recording, and None where it does not clip",
    )


def _untold_clip(some: Sequence[Record], i: int, trajectory: Trajectory) -> Cause | None:
    """Is the loss of step i what follows where the step before is clipped, and nobody told at what? The loop told the
    norm before clipping, so that what arrived is not seen: what somebody would choose as max_norm is tried, a step and
    a forward pass each."""
    raw = trajectory.steps[i - 1].clip.norm
    if some[i - 1].clip is not None or not 0 < raw < math.inf:
        return None
    powers = (10.0 ** (math.floor(math.log10(raw)) - down) for down in range(3))
    tried = [limit for power in powers for first in CLUES.limits if (limit := first * power) < raw]
    found = [limit for limit in tried if _follows(some[i].loss, i - 1, trajectory, limit)]
    if not found:
        return None
    then = f"step {some[i - 1].step} leads to the recorded loss of the next step"
    if len(found) == 1:
        return other_clip(None, found[0], f"so clipped, {then}")
    return other_clip(
        None, None, f"clipped at {min(found):g} to {max(found):g}, which its loss cannot tell apart, {then}"
    )


def _another_norm(before: Sequence[Record], trajectory: Trajectory) -> Cause | None:
    """Was another norm told than that of the gradients? Of a run's first steps both are known, and the replay repeats
    what arrived; later what is told is all there is."""
    for record, step in zip(before, trajectory.steps):
        if record.scale == 1 and abs(record.raw_norm - step.clip.norm) > NEAR * step.clip.norm:
            return Cause(
                "gradient",
                f"norm= is not the norm of all gradients before clipping: of step {record.step} step() was told "
                f"{record.raw_norm:.4g}, and its gradients arrived with {record.norm:.4g}, as in the replay",
                "tell recorder.step(…, norm=) what clip_grad_norm_ returned for all parameters, with norm_type=2, or "
                "leave norm= out in the next recording",
            )
    return None


def _follows(loss: float, at: int, trajectory: Trajectory, max_norm: float | None) -> bool:
    """Is this the loss after step `at`, had it been clipped at that, or not at all?"""
    step, following, code = trajectory.steps[at], trajectory.steps[at + 1], trajectory.dynamics.loss
    state = trajectory.dynamics.advance(replace(step, max_norm=max_norm), trajectory.state(at))[0]
    found = code.value(state.theta, state.buffers, following.batch, following.random, following.where).loss
    return abs(float(found) - loss) <= min(CLUES.same * abs(loss), CLUES.mostly * abs(following.loss - loss))


def _not_zeroed(some: Sequence[Record], i: int, trajectory: Trajectory) -> bool:
    """Does the gradient of the step before explain the first norm that is another one? A small gradient that is left
    over changes little there, and the losses part only some steps later."""
    for at in range(1, i + 1):
        norm, replayed = some[at].norm, trajectory.steps[at].clip.norm * trajectory.steps[at].clip.factor
        off = abs(replayed - norm)
        if off > CLUES.rounded * norm:
            left = abs(_norm_with_the_one_before(trajectory, at) - norm)
            return left <= min(CLUES.mostly * off, CLUES.near * norm)
    return False


def _norm_with_the_one_before(trajectory: Trajectory, i: int) -> float:
    """The norm that would arrive at step i had the gradient of the step before, as it was clipped, not been cleared."""
    loss, before = trajectory.dynamics.loss, trajectory.steps[i - 1]

    def gradient(at: int) -> Tensor:
        step, state = trajectory.steps[at], trajectory.state(at)
        return loss.layout.join(loss.gradient(state.theta, state.buffers, step.batch, step.random, step.where).grads)

    norm = float(norms(gradient(i) + before.clip.factor * gradient(i - 1)))
    most = trajectory.steps[i].max_norm
    return norm if most is None else min(norm, most)


def _repeats(trajectory: Trajectory, i: int) -> bool:
    """Does loss_fn give the same loss again?"""
    step, state, loss = trajectory.steps[i], trajectory.state(i), trajectory.dynamics.loss
    found = (loss.value(state.theta, state.buffers, step.batch, step.random, step.where).loss for _ in range(3))
    return all(abs(float(value) - step.loss) <= CLUES.again * abs(step.loss) for value in found)


def _drawn(trajectory: Trajectory, i: int) -> bool:
    """Does loss_fn draw numbers that the recorder did not see?"""
    step, state, loss = trajectory.steps[i], trajectory.state(i), trajectory.dynamics.loss
    batch = step.batch.batches[0] if isinstance(step.batch, Accumulated) else step.batch
    return drawn_before_the_model(loss, loss.leaves(state.theta), state.buffers, batch, step.random)


def _other_masks(record: Record, i: int, trajectory: Trajectory) -> bool:
    """May other random numbers have made the recorded loss? Those of other steps are tried: one forward pass each."""
    step, state, loss = trajectory.steps[i], trajectory.state(i), trajectory.dynamics.loss
    others = [other.random for other in trajectory.steps if other.index != i][:MASKS]
    values = [float(loss.value(state.theta, state.buffers, step.batch, random, step.where).loss) for random in others]
    spread = max((abs(value - step.loss) for value in values), default=0.0)
    return CLUES.rounded * abs(step.loss) < spread and abs(record.loss - step.loss) <= CLUES.masks * spread


def _by_state(some: Sequence[Record], since: int, trajectory: Trajectory, recorded: Recorded) -> Cause | None:
    """What the recorded state after the step at which the runs part has to say, where there is one."""
    made = since + 1
    captured = recorded(some[0].step + made)
    if since < 0 or captured is None:
        return None
    live = Live(
        captured.state,
        trajectory.steps[since].hypers,  # each record has its own, and its own random state
        trajectory.steps[made].random if made < len(trajectory) else trajectory.random_after,
        captured.loss.constants,
    )
    found = compare(trajectory, live, made, since)
    return None if found or found.quantity is None else Cause(found.quantity, found.cause, found.remedy)
