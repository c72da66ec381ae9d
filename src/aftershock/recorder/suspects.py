"""Which steps did it: those without which the event is gone, where the run without others keeps it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.trajectory import Trajectory
from .event import BARS, Event
from .reruns import Losses, Run, run_again

LEAST = 2  # suspects that are run without where placebos show already that nobody did it
LARGEST = 4  # steps that may do it together


@dataclass(frozen=True)
class Trial:
    """A run in which some steps never come: what it leaves of the event."""

    steps: tuple[int, ...]  # places in the path
    losses: Losses
    left: float

    @property
    def removes(self) -> bool:
        return self.left <= BARS.half

    @property
    def keeps(self) -> bool:
        """The event is still there, and about as large."""
        return BARS.half < self.left < 1 / BARS.half


Trials = Callable[[Sequence[tuple[int, ...]]], list[Trial]]


@dataclass
class Inquiry:
    """Suspects and placebos, and whom to blame."""

    suspects: list[Trial]
    placebos: list[Trial]
    group: Trial | None = None
    group_placebos: list[Trial] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the placebos: those that remove half of the event, or double it."""
        return _changing(self.placebos)

    @property
    def blamed(self) -> tuple[int, ...]:
        """Steps without which half of it is gone, where that is so of hardly any other step."""
        if self.group is not None:
            special = self.group.removes and _changing(self.group_placebos) <= BARS.specific
            return self.group.steps if special else ()
        guilty = sorted((t for t in self.suspects if t.removes), key=lambda t: t.left)
        if not self.placebos or self.share > BARS.specific or len(guilty) > BARS.together:
            return ()
        least = min(t.left for t in self.placebos)
        return tuple(t.steps[0] for t in guilty if t.left <= BARS.clear * least)


def _changing(trials: Sequence[Trial]) -> float:
    return sum(not t.keeps for t in trials) / len(trials) if trials else 1.0


def inquire(
    trajectory: Trajectory,
    event: Event,
    suspected: Sequence[int],
    *,
    placebos: int,
    seed: int,
    least: int = LEAST,
    own_batch: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> Inquiry:
    """Run again without as many steps that nobody suspects as placebos are asked for, then without each suspect.

    Where a third of the placebos change the event, nobody can be blamed, and `least` suspects are run without. Where
    few do and somebody seems guilty, or where it is close, more placebos are drawn, at most as many again; one that
    removes the event, where the others do not, is a suspect from then on. Where no earlier step alone removes half,
    suspects are left out together.

    own_batch: the explained step's batch is bad by itself, so that it may be the only one.
    """

    def trials(sets: Sequence[tuple[int, ...]]) -> list[Trial]:
        runs = [Run(min(steps), dict.fromkeys(steps)) for steps in sets]
        found = run_again(trajectory, runs, event.last, tick, event.decided)
        return [Trial(steps, losses, event.left(losses, frozenset(steps))) for steps, losses in zip(sets, found)]

    def singles(steps: Sequence[int]) -> list[Trial]:
        return trials([(i,) for i in steps])

    innocent = [i for i in range(event.onset) if i not in set(suspected)]
    draw = random.Random(seed)
    draw.shuffle(innocent)
    if not suspected:
        return Inquiry([], [])
    found = Inquiry([], singles(innocent[:placebos]))
    if found.placebos and found.share > BARS.unspecific:
        found.suspects = singles(suspected[:least])
        return found
    found.suspects = singles(suspected)
    more = placebos // 2
    if 0 < found.share <= BARS.specific and _guilty(found, event):
        found.placebos += singles(innocent[placebos : placebos + more])
    while BARS.specific < found.share <= BARS.unspecific and len(found.placebos) < min(2 * placebos, len(innocent)):
        found.placebos += singles(innocent[len(found.placebos) : len(found.placebos) + more])
    if found.share <= BARS.specific:
        found.suspects += [t for t in found.placebos if t.removes]
        found.placebos = [t for t in found.placebos if not t.removes]
        if not _guilty(found, event) and not (own_batch and any(t.removes for t in found.suspects)):
            _find_group(found, trials, event, placebos, draw)
    return found


def _guilty(found: Inquiry, event: Event) -> bool:
    """Does an earlier step alone remove half? Without the explained one its own loss is gone, whoever raised it."""
    return any(t.removes and t.steps != (event.step,) for t in (*found.suspects, *found.placebos))


def _find_group(found: Inquiry, trials: Trials, event: Event, placebos: int, draw: random.Random) -> None:
    """Suspects that do it together, and other groups of as many steps."""
    found.group = _together(trials, [t for t in found.suspects if t.steps != (event.step,)])
    if found.group is not None:
        size, others = len(found.group.steps), [i for i in range(event.onset) if i not in found.group.steps]
        drawn = [tuple(sorted(draw.sample(others, size))) for _ in range(placebos) if len(others) >= size]
        found.group_placebos = trials(drawn)


def _together(trials: Trials, suspects: Sequence[Trial]) -> Trial | None:
    """Suspects left out one on top of the other, that which leaves least alone first, until half of the event is gone;
    then those that are not needed come back."""
    order = [t.steps[0] for t in sorted(suspects, key=lambda t: t.left)][:LARGEST]
    for size in range(2, len(order) + 1):
        (group,) = trials([tuple(sorted(order[:size]))])
        if group.removes:
            break
    else:
        return None
    for step in order[: size - 1]:  # without the last it was not half
        rest = tuple(i for i in group.steps if i != step)
        if len(rest) > 1:
            (fewer,) = trials([rest])
            group = fewer if fewer.removes else group
    return group
