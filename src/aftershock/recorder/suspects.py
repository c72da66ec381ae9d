"""Which steps did it: those without which the event is gone, where the run without others keeps it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.trajectory import Trajectory
from .event import BARS, Event
from .reruns import Losses, Run, run_again

ROUNDS = 3  # further steps that a group may take in
WORTH = 0.1  # of the event: what another step must add to a group
TRIED = 4  # steps that are tried in one round


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
    tick: Callable[[], None] = lambda: None,
) -> Inquiry:
    """Run again without each suspect, and without as many steps that nobody suspects as placebos are asked for.

    Where some placebos change the event too, as many are drawn once more; one that removes it, where the others do
    not, is a suspect from then on. Where no suspect alone removes half, suspects are left out together, one more at a
    time.
    """

    def trials(sets: Sequence[tuple[int, ...]]) -> list[Trial]:
        runs = [Run(min(steps), dict.fromkeys(steps)) for steps in sets]
        found = run_again(trajectory, runs, event.last, tick)
        return [Trial(steps, losses, event.left(losses, frozenset(steps))) for steps, losses in zip(sets, found)]

    innocent = [i for i in range(event.onset) if i not in set(suspected)]
    draw = random.Random(seed)
    draw.shuffle(innocent)
    found = Inquiry(trials([(i,) for i in suspected]), [])
    if not suspected:
        return found
    found.placebos = trials([(i,) for i in innocent[:placebos]])
    if 0 < found.share <= BARS.unspecific:
        found.placebos += trials([(i,) for i in innocent[placebos : 2 * placebos]])
    if found.share <= BARS.specific:
        found.suspects += [t for t in found.placebos if t.removes]
        found.placebos = [t for t in found.placebos if not t.removes]
    guilty = any(t.removes for t in found.suspects)
    if not guilty and found.share <= BARS.specific:
        found.group = _together(trials, found.suspects)
        if found.group is not None and found.group.removes:
            size, others = len(found.group.steps), [i for i in range(event.onset) if i not in found.group.steps]
            drawn = [tuple(sorted(draw.sample(others, size))) for _ in range(placebos) if len(others) >= size]
            found.group_placebos = trials(drawn)
    return found


def _together(trials: Callable[[Sequence[tuple[int, ...]]], list[Trial]], suspects: Sequence[Trial]) -> Trial | None:
    """Suspects left out one on top of the other, each round the one that leaves least."""
    best = min(suspects, key=lambda t: t.left)
    order = [t.steps[0] for t in sorted(suspects, key=lambda t: t.left)]
    for _ in range(ROUNDS):
        rest = [i for i in order if i not in best.steps][:TRIED]
        found = trials([tuple(sorted((*best.steps, i))) for i in rest])
        next_best = min(found, key=lambda t: t.left, default=best)
        if next_best.left > best.left - WORTH:
            break
        best = next_best
        if best.removes:
            break
    return best if len(best.steps) > 1 else None
