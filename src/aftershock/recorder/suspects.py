"""Which steps did it: those without which the event is gone, where the run without others keeps it."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.dynamics import Step
from ..core.trajectory import Trajectory
from .event import BARS, Event
from .neighbours import Likeness
from .reruns import Done, Run, Values, run_again

LEAST = 2  # suspects that are run without where placebos show already that nobody did it
LARGEST = 4  # steps that may do it together
KIN = 3  # steps of a rare kind that nobody suspects, from which on these alone are its placebos


@dataclass(frozen=True)
class Trial:
    """A run in which some steps never come: what it leaves of the event."""

    steps: tuple[int, ...]  # places in the path
    values: Values
    left: float
    departs: float = 0.0  # from the recorded values, as a share of the event's height
    blows_up: bool = False

    @property
    def removes(self) -> bool:
        return self.left <= BARS.half and not self.blows_up

    @property
    def keeps(self) -> bool:
        """The event is still there, about as large and at its place."""
        return BARS.half < self.left < 1 / BARS.half and self.departs <= BARS.half


@dataclass
class Inquiry:
    """Suspects and placebos, and whom to blame."""

    suspects: list[Trial]
    placebos: list[Trial]
    replaced: list[Trial] = field(default_factory=list)  # suspects that were given batches like their own instead
    replaced_placebos: list[Trial] = field(default_factory=list)
    kin: bool = False  # whoever is judged by batches like its own is of a rare kind of data, beside others of that kind
    own: Trial | None = None  # without several steps whose batches are high by themselves
    group: Trial | None = None
    group_replaced: bool = False  # its steps were given batches like their own, and not left out
    group_placebos: list[Trial] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps the runs took."""
        singles = (self.suspects, self.placebos, self.replaced, self.replaced_placebos)
        together = (self.group_placebos, [t for t in (self.group, self.own) if t is not None])
        return sum(len(t.values) for trials in (*singles, *together) for t in trials)

    @property
    def changing(self) -> int:
        """How many placebos remove half of the event, double it or move it."""
        return sum(not t.keeps for t in self.placebos)

    @property
    def share(self) -> float:
        """Of the placebos: those that remove half of the event, double it or move it."""
        return _changing(self.placebos)

    @property
    def blamed(self) -> tuple[int, ...]:
        """Steps without which half of it is gone, where that is so of hardly any other step."""
        if self.group is not None:
            special = self.group.removes and _changing(self.group_placebos) <= BARS.specific
            return self.group.steps if special else ()
        judged = {t.steps for t in self.replaced}  # by what batches like their own do
        alone = [t for t in self.suspects if t.steps not in judged]
        return *_special(alone, self.placebos), *self.blamed_by_replacing

    @property
    def cleared(self) -> list[Trial]:
        """Those without which half is gone, and which keep the event with batches like their own in their place."""
        removing = {t.steps for t in self.suspects if t.removes}
        return [t for t in self.replaced if t.steps in removing and not t.removes]

    @property
    def blamed_by_replacing(self) -> tuple[int, ...]:
        """Those with batches like their own in whose place half is gone."""
        return _special(self.replaced, self.replaced_placebos) if self.group is None else ()


def _changing(trials: Sequence[Trial]) -> float:
    return sum(not t.keeps for t in trials) / len(trials) if trials else 1.0


def _special(suspects: Sequence[Trial], placebos: Sequence[Trial]) -> tuple[int, ...]:
    """Suspects that remove half, and clearly more than any placebo does, where hardly any of these changes it."""
    guilty = sorted((t for t in suspects if t.removes), key=lambda t: t.left)
    if not placebos or _changing(placebos) > BARS.specific or len(guilty) > BARS.together:
        return ()
    least = min(t.left for t in placebos)
    return tuple(t.steps[0] for t in guilty if t.left <= BARS.clear * least)


@dataclass(frozen=True)
class _Runs:
    """The recorded run again without some steps."""

    trajectory: Trajectory
    event: Event
    tick: Callable[[], None]

    def accused(self, steps: tuple[int, ...]) -> Trial:
        """Does it remove half of the event? The run ends once it cannot."""
        return self._trial(dict.fromkeys(steps), self.event.stays, self.event.left_by_then)

    def placebo(self, steps: tuple[int, ...]) -> Trial:
        """The same of steps that nobody suspects, over the whole event: it may double, too."""
        return self._trial(dict.fromkeys(steps), self.event.decided, self.event.left)

    def replaced(self, steps: tuple[int, ...], bad: Collection[int] = (), *, placebo: bool = False) -> Trial:
        """The steps with batches like their own in place of them, none of which is of a step that may be `bad` too.

        placebo: nobody suspects them, and the whole event is looked at: it may double, too.
        """
        same = self.likeness.same({*steps, *bad}, self.before)
        sound = [i for i in self.before if i not in same]
        done, left = (self.event.decided, self.event.left) if placebo else (self.event.stays, self.event.left_by_then)
        return self._trial({i: self.likeness.stand_in(i, sound) for i in steps}, done, left)

    @property
    def before(self) -> range:
        """The steps before the event."""
        return range(self.event.onset)

    @functools.cached_property
    def likeness(self) -> Likeness:
        return Likeness(self.trajectory.steps)

    def kin(self, accused: Collection[int], suspected: Collection[int]) -> dict[int, list[int]]:
        """For each of the accused, earlier steps with data of the same rare kind that nobody suspects; where these are
        too few, suspects, too. None saw the inputs of one of the accused."""
        same, found = self.likeness.same(accused, self.before), dict[int, list[int]]()
        for i in accused:
            others = [other for other in self.likeness.kin(i, self.before) if other not in same]
            sound = [other for other in others if other not in suspected]
            found[i] = sound if len(sound) >= KIN else others
        return found

    def _trial(self, steps: Mapping[int, Step | None], done: Done, left: Callable[..., float]) -> Trial:
        run, event, out = Run(min(steps), steps), self.event, frozenset(steps)
        (values,) = run_again(self.trajectory, [run], event.last, self.tick, done, event.quantity)
        return Trial(tuple(steps), values, left(values, out), event.departs(values, out), event.blows_up(values, out))


def inquire(
    trajectory: Trajectory,
    event: Event,
    suspected: Sequence[int],
    *,
    placebos: int,
    seed: int,
    reserve: Sequence[int] = (),
    repeated: Sequence[tuple[int, ...]] = (),
    groups: bool = True,
    least: int = LEAST,
    own: tuple[int, ...] = (),
    tick: Callable[[], None] = lambda: None,
) -> Inquiry:
    """Run again without steps that nobody suspects, the placebos, and without each suspect, until it is decided.

    Half of the placebos come first, one by one, the others where one of them changed the event: once more than a third
    of those asked for do, nobody can be blamed, and `least` suspects are run without. Then the suspects. Where one
    removes half, the other placebos; where few of them change it, one more for each, and where it is close up to
    as many again. A placebo that removes the event, where the others do not, is a suspect from then on. Suspects of a
    rare kind of data are judged by what batches like their own do in their place. Where no earlier step alone removes
    half, suspects are given batches like their own instead, and else are left out together.

    reserve: further suspects, where one removes half, but not clearly more than placebos do.
    repeated: steps that saw one batch, which is left out wherever it came.
    groups: also leave out several suspects at once.
    own: steps of the event whose batches are high by themselves, which may be all there is to it.
    """
    runs, draw = _Runs(trajectory, event, tick), random.Random(seed)
    alike = {other for i in suspected for other in runs.likeness.kin(i, runs.before)} - set(suspected)
    innocent = [i for i in runs.before if i not in {*suspected, *alike}]
    draw.shuffle(innocent)
    innocent += sorted(alike)  # of a suspect's own kind only where others are too few: kin are asked in another way
    found = Inquiry([], [])

    def compare(count: int) -> None:
        """Leave out placebos up to this many, until so many change it that nobody can be blamed."""
        while len(found.placebos) < min(count, len(innocent)) and found.changing <= BARS.unspecific * placebos:
            found.placebos.append(runs.placebo((innocent[len(found.placebos)],)))

    if not suspected:
        return found
    compare(placebos // 2)
    if found.changing:
        compare(placebos)
    unstable = found.changing > BARS.unspecific * placebos
    found.suspects = [runs.accused((i,)) for i in (suspected[:least] if unstable else suspected)]
    if unstable:
        return found
    if any(t.removes for t in found.suspects):
        compare(placebos)
    if found.changing and _guilty(found, event):
        compare(placebos + found.changing)
        if found.share > BARS.specific:
            compare(2 * placebos)
    if found.share <= BARS.specific:
        found.own = runs.accused(own) if len(own) > 1 else None
        if found.own is not None and found.own.removes:
            compare(placebos)
        _decide(runs, found, reserve, repeated, innocent[:placebos], draw, groups=groups, own_batch=bool(own))
    return found


def _decide(
    runs: _Runs,
    found: Inquiry,
    reserve: Sequence[int],
    repeated: Sequence[tuple[int, ...]],
    innocent: Sequence[int],
    draw: random.Random,
    *,
    groups: bool,
    own_batch: bool,
) -> None:
    """Whom to blame, where hardly any placebo changes the event."""
    event = runs.event
    found.suspects += [t for t in found.placebos if t.removes]
    found.placebos = [t for t in found.placebos if not t.removes]
    if _guilty(found, event) and not set(found.blamed) - {event.step}:
        known = {t.steps[0] for t in (*found.suspects, *found.placebos)}
        found.suspects += [runs.accused((i,)) for i in reserve if i not in known]
    if _guilty(found, event):
        _among_kin(runs, found, len(innocent), draw)
    elif not (own_batch and any(t.removes for t in (*found.suspects, *([found.own] if found.own else [])))):
        _look_further(runs, found, repeated, innocent, draw, groups=groups)


def _guilty(found: Inquiry, event: Event) -> list[Trial]:
    """Earlier steps of which each alone removes half, the first that which leaves least. Without the explained one its
    own value is gone, whoever raised it."""
    tried = (*found.suspects, *found.placebos)
    return sorted((t for t in tried if t.removes and t.steps != (event.step,)), key=lambda t: t.left)


def _among_kin(runs: _Runs, found: Inquiry, placebos: int, draw: random.Random) -> None:
    """Judge suspects of a rare kind of data by what batches like their own do in their place, beside others of it.

    Placebos are mostly of the common kind. Leaving out any step of a rare one may do the same, because less of it is
    learnt; a sound batch in place of a sound one does nothing.
    """
    removing, suspected = [t.steps[0] for t in _guilty(found, runs.event)], [t.steps[0] for t in found.suspects]
    others = runs.kin(removing, suspected)
    judged, sound = [i for i in removing if others[i]], sorted({other for some in others.values() for other in some})
    bad = {*suspected, *removing} - set(sound)
    found.replaced, found.kin = [runs.replaced((i,), bad) for i in judged], bool(judged)
    if any(t.removes for t in found.replaced):
        draw.shuffle(sound)
        found.replaced_placebos = [runs.replaced((i,), bad, placebo=True) for i in sound[:placebos]]


def _look_further(
    runs: _Runs,
    found: Inquiry,
    repeated: Sequence[tuple[int, ...]],
    innocent: Sequence[int],
    draw: random.Random,
    *,
    groups: bool,
) -> None:
    """One batch left out wherever it came; else batches like a suspect's own in its place, or in all places of one
    batch; else, where a suspect does more than any placebo, suspects left out one on top of the other, that which
    leaves least alone first."""
    event, least = runs.event, min((t.left for t in found.placebos), default=0.0)
    alone = sorted((t for t in found.suspects if t.steps != (event.step,)), key=lambda t: t.left)
    group, instead = _first(runs.accused, repeated, alone), None
    if group is None:
        doing = [t for t in alone[:LARGEST] if t.left < least]
        _replace(runs, found, [t for t in doing if t.steps[0] < event.onset], innocent)
        if found.blamed_by_replacing:
            return
        instead = _first(runs.replaced, repeated, ())
        if instead is None and groups:
            order = [t.steps[0] for t in alone[:LARGEST]] if doing else []
            growing = [tuple(sorted(order[:size])) for size in range(2, len(order) + 1)]
            group = _first(runs.accused, growing, alone)
    if group is not None:
        _compare_group(runs, found, group, alone, len(innocent), draw)
    elif instead is not None:
        _compare_group(runs, found, instead, alone, len(innocent), draw, replaced=True)


def _replace(runs: _Runs, found: Inquiry, doing: Sequence[Trial], innocent: Sequence[int]) -> None:
    """Give suspects batches like their own instead; where one removes half, placebos too, up to half of them of its own
    rare kind of data.

    A batch that was left out teaches nothing, and an event may be there because of that.
    """
    found.replaced = [runs.replaced(t.steps) for t in doing]
    removing = [t.steps[0] for t in found.replaced if t.removes]
    if removing:
        kin = runs.kin(removing, [t.steps[0] for t in found.suspects])[removing[0]]
        others = [*kin[: len(innocent) // 2], *(i for i in innocent if i not in kin)]
        found.replaced_placebos = [runs.replaced((i,), placebo=True) for i in others[: len(innocent)]]


def _first(
    run: Callable[[tuple[int, ...]], Trial], groups: Sequence[tuple[int, ...]], alone: Sequence[Trial]
) -> Trial | None:
    """The first group without which half of the event is gone."""
    tried = {t.steps: t for t in alone}
    return next((t for steps in groups if (t := tried.get(steps) or run(steps)).removes), None)


def _compare_group(
    runs: _Runs,
    found: Inquiry,
    group: Trial,
    alone: Sequence[Trial],
    placebos: int,
    draw: random.Random,
    *,
    replaced: bool = False,
) -> None:
    """Only the steps that are needed of a group that was left out, or given batches like its own instead (`replaced`),
    beside other groups in the same way.

    A group of a rare kind of data is always given such batches, and compared with others of its kind, so that no sound
    step of that kind is in it; unless all saw one batch, where what leaving it out does may decide.
    """
    steps, suspected = group.steps, [t.steps[0] for t in found.suspects]
    others = [i for i in runs.before if i not in steps]
    alike = sorted({i for some in runs.kin(steps, suspected).values() for i in some})
    bad = {*suspected, *steps} - set(alike)
    run: Callable[[tuple[int, ...]], Trial] = functools.partial(runs.replaced, bad=bad)
    sound: Callable[[tuple[int, ...]], Trial] = functools.partial(runs.replaced, bad=bad, placebo=True)
    found.group = _adding(run, steps) if alike or replaced else None
    found.kin, found.group_replaced = bool(alike), found.group is not None
    one_batch = runs.likeness.same(steps[:1], steps) == set(steps)
    if found.group is None and not replaced and (one_batch or not alike):
        sound, found.group = runs.placebo, _needed(runs.accused, group, alone)
    if found.group is None:
        return
    size = len(found.group.steps)
    among = _other_groups(sound, alike if math.comb(len(alike), size) >= KIN else others, size, placebos, draw)
    if size > 1:
        found.group_placebos = among
    else:
        found.replaced, found.group, found.replaced_placebos = [found.group], None, among


def _needed(run: Callable[[tuple[int, ...]], Trial], group: Trial, alone: Sequence[Trial]) -> Trial:
    """The group less every step that can come back alone without half of the event coming back with it."""
    tried = {t.steps: t for t in alone}
    for step in group.steps:
        rest = tuple(i for i in group.steps if i != step)
        if rest and (trial := tried.get(rest) or run(rest)).removes:
            group = trial
    return group


def _adding(run: Callable[[tuple[int, ...]], Trial], steps: tuple[int, ...]) -> Trial | None:
    """The group with batches like their own in place of theirs, less every step whose own batch, put back, adds nothing
    to the event: that one is sound."""
    group = run(steps)
    for step in steps:
        rest = tuple(i for i in group.steps if i != step)
        if rest and group.removes and (trial := run(rest)).left <= group.left + BARS.slight:
            group = trial
    return group if group.removes else None


def _other_groups(
    run: Callable[[tuple[int, ...]], Trial], others: Sequence[int], size: int, placebos: int, draw: random.Random
) -> list[Trial]:
    """As many steps elsewhere, until so many change the event that the group is nothing special."""
    found = dict[tuple[int, ...], Trial]()
    while len(found) < min(placebos, math.comb(len(others), size)):
        steps = tuple(sorted(draw.sample(others, size)))
        found[steps] = found.get(steps) or run(steps)
        if sum(not t.keeps for t in found.values()) > BARS.specific * placebos:
            break
    return list(found.values())
