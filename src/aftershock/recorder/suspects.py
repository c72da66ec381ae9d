"""Which steps did it: those without which the event is gone, where the run without others keeps it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.trajectory import Trajectory
from .event import BARS, Event
from .reruns import Done, Losses, Run, run_again

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


@dataclass
class Inquiry:
    """Suspects and placebos, and whom to blame."""

    suspects: list[Trial]
    placebos: list[Trial]
    group: Trial | None = None
    group_placebos: list[Trial] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps the runs took."""
        whole = [*self.suspects, *self.placebos, *self.group_placebos, *([self.group] if self.group else [])]
        return sum(len(t.losses) for t in whole)

    @property
    def changing(self) -> int:
        """How many placebos remove half of the event, or double it."""
        return sum(not t.keeps for t in self.placebos)

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


@dataclass(frozen=True)
class _Runs:
    """The recorded run again without some steps."""

    trajectory: Trajectory
    event: Event
    tick: Callable[[], None]

    def accused(self, steps: tuple[int, ...]) -> Trial:
        """Does it remove half of the event? The run ends once it cannot."""
        losses = self._losses(steps, self.event.stays)
        return Trial(steps, losses, self.event.left_by_then(losses, frozenset(steps)))

    def placebo(self, steps: tuple[int, ...], *, whole: bool = True) -> Trial:
        """The same of steps that nobody suspects; the whole event says whether it doubles, too."""
        losses = self._losses(steps, self.event.decided if whole else self.event.stays)
        return Trial(steps, losses, self.event.left(losses, frozenset(steps)))

    def _losses(self, steps: tuple[int, ...], done: Done) -> Losses:
        run = Run(min(steps), dict.fromkeys(steps))
        return run_again(self.trajectory, [run], self.event.last, self.tick, done)[0]


def inquire(
    trajectory: Trajectory,
    event: Event,
    suspected: Sequence[int],
    *,
    placebos: int,
    seed: int,
    repeated: Sequence[tuple[int, ...]] = (),
    groups: bool = True,
    least: int = LEAST,
    own_batch: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> Inquiry:
    """Run again without steps that nobody suspects, the placebos, and without each suspect, until it is decided.

    Half of the placebos come first, one by one, the others where one of them changed the event: once more than a third
    of those asked for do, nobody can be blamed, and `least` suspects are run without. Then the suspects. Where one
    removes half, the other placebos; where few of them change it, half as many again, and as many where it is close.
    A placebo that removes the event, where the others do not, is a suspect from then on. Where no earlier step alone
    removes half, steps are left out together.

    repeated: steps that saw one batch, which is left out wherever it came.
    groups: also leave out several suspects at once.
    own_batch: the explained step's batch is bad by itself, so that it may be the only one.
    """
    runs, draw = _Runs(trajectory, event, tick), random.Random(seed)
    innocent = [i for i in range(event.onset) if i not in set(suspected)]
    draw.shuffle(innocent)
    found, half = Inquiry([], []), placebos // 2

    def compare(count: int) -> None:
        """Leave out placebos up to this many, until so many change it that nobody can be blamed."""
        while len(found.placebos) < min(count, len(innocent)) and found.changing <= BARS.unspecific * placebos:
            at = len(found.placebos)
            found.placebos.append(runs.placebo((innocent[at],), whole=at < half))

    if not suspected:
        return found
    compare(half)
    if found.changing:
        compare(placebos)
    unstable = found.changing > BARS.unspecific * placebos
    found.suspects = [runs.accused((i,)) for i in (suspected[:least] if unstable else suspected)]
    if unstable:
        return found
    if any(t.removes for t in found.suspects):
        compare(placebos)
    if found.changing and _guilty(found, event):
        compare(placebos + half)
        if found.share > BARS.specific:
            compare(2 * placebos)
    if found.share <= BARS.specific:
        found.suspects += [t for t in found.placebos if t.removes]
        found.placebos = [t for t in found.placebos if not t.removes]
        if not _guilty(found, event) and not (own_batch and any(t.removes for t in found.suspects)):
            alone = sorted((t for t in found.suspects if t.steps != (event.step,)), key=lambda t: t.left)
            found.group = _group(runs, alone, repeated, alone[:LARGEST] if groups else [])
            found.group_placebos = _other_groups(runs, found.group, placebos, draw)
    return found


def _guilty(found: Inquiry, event: Event) -> bool:
    """Does an earlier step alone remove half? Without the explained one its own loss is gone, whoever raised it."""
    return any(t.removes and t.steps != (event.step,) for t in (*found.suspects, *found.placebos))


def _group(
    runs: _Runs, alone: Sequence[Trial], repeated: Sequence[tuple[int, ...]], growing: Sequence[Trial]
) -> Trial | None:
    """Steps that do it together, each of them needed: one batch wherever it came; else suspects one on top of the
    other, until half of the event is gone.

    A step is needed if half of the event comes back with it: the smallest group that removes half is left.
    """
    tried = {t.steps: t for t in alone}

    def without(steps: tuple[int, ...]) -> Trial:
        if steps not in tried:
            tried[steps] = runs.accused(steps)
        return tried[steps]

    larger = [tuple(sorted(t.steps[0] for t in growing[:size])) for size in range(2, len(growing) + 1)]
    group = next((trial for steps in (*repeated, *larger) if (trial := without(steps)).removes), None)
    for step in group.steps if group is not None else ():
        rest = tuple(i for i in group.steps if i != step)  # type: ignore[union-attr]
        if rest and without(rest).removes:
            group = without(rest)
    return group


def _other_groups(runs: _Runs, group: Trial | None, placebos: int, draw: random.Random) -> list[Trial]:
    """As many steps left out together elsewhere, until so many change the event that the group is nothing special."""
    found = list[Trial]()
    if group is None:
        return found
    others = [i for i in range(runs.event.onset) if i not in group.steps]
    while len(found) < placebos and len(others) >= len(group.steps):
        found.append(runs.placebo(tuple(sorted(draw.sample(others, len(group.steps))))))
        if sum(not t.keeps for t in found) > BARS.specific * placebos:
            break
    return found
