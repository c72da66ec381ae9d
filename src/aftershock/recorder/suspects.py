"""Which steps did it: those without which the event is gone, where the run without others keeps it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ..core.trajectory import Trajectory
from .event import BARS, Event
from .groups import compare_several, look_further
from .scatter import Scatter
from .trials import Inquiry, Runs, Trial

REPEATS = Scatter()  # of a run that repeats itself
LEAST = 2  # suspects that are run without where placebos show already that nobody did it


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
    scatter: Scatter = REPEATS,
    tick: Callable[[], None] = lambda: None,
) -> Inquiry:
    """Run again without steps that nobody suspects, the placebos, and without each suspect, until it is decided.

    The placebos come first, one by one: once more than a third of those asked for change the event, nobody can be
    blamed, and `least` suspects are run without. Then the suspects. Where one removes half, and a few placebos change
    the event, one more for each of these, and where it is close up to as many again. A placebo that removes the event,
    where the others do not, is a suspect from then on. Suspects of a rare kind of data are judged by what batches like
    their own do in their place. Where that blames nobody, suspects are left out together, or given batches like their
    own instead.

    reserve: further suspects, where one removes half, but not clearly more than placebos do.
    repeated: steps that saw one batch, which is left out wherever it came.
    groups: also leave out several suspects at once.
    own: steps of the event whose batches are high by themselves, which may be all there is to it.
    scatter: of the unchanged run; where it does not repeat itself, whatever removes half is run a second time.
    """
    runs, draw = Runs(trajectory, event, tick, scatter), random.Random(seed)
    alike = {other for i in suspected for other in runs.likeness.kin(i, runs.before)} - set(suspected)
    innocent = [i for i in runs.before if i not in {*suspected, *alike}]
    draw.shuffle(innocent)
    innocent += sorted(alike)  # of a suspect's own kind only where others are too few: kin are asked in another way
    found = Inquiry([], [], asked=placebos, spent=runs.spent)

    def compare(count: int) -> None:
        """Leave out placebos up to this many, until so many change it that nobody can be blamed; where a batch is high
        by itself, until so many remove it."""
        few = BARS.unspecific * placebos
        while len(found.placebos) < min(count, len(innocent)) and (found.removing if own else found.changing) <= few:
            found.placebos.append(runs.placebo((innocent[len(found.placebos)],)))

    if not suspected:
        return found
    compare(placebos)
    unstable = found.changing > BARS.unspecific * placebos
    found.suspects = [runs.accused((i,)) for i in (suspected[:least] if unstable and not own else suspected)]
    found.own = runs.accused(own) if own else None
    if unstable:
        return found
    if found.changing and _guilty(found, event):
        compare(placebos + found.changing)
        if found.share > BARS.specific:
            compare(2 * placebos)
    if found.share <= BARS.specific:
        _decide(runs, found, reserve, repeated, innocent[:placebos], draw, groups=groups)
    return found


def _decide(
    runs: Runs,
    found: Inquiry,
    reserve: Sequence[int],
    repeated: Sequence[tuple[int, ...]],
    innocent: Sequence[int],
    draw: random.Random,
    *,
    groups: bool,
) -> None:
    """Whom to blame, where hardly any placebo changes the event."""
    event = runs.event
    found.turned = tuple(t.steps for t in found.placebos if t.removes)
    found.suspects += [runs.suspected(t) for t in found.placebos if t.removes]
    found.placebos = [t for t in found.placebos if not t.removes]
    if _guilty(found, event) and not set(found.blamed) - {event.step}:
        known = {t.steps[0] for t in (*found.suspects, *found.placebos)}
        found.suspects += [runs.accused((i,)) for i in reserve if i not in known]
    if _guilty(found, event):
        _among_kin(runs, found, len(innocent), draw)
        compare_several(runs, found, len(innocent), draw)
        _clear(runs, found)
        if not found.blamed:
            look_further(runs, found, repeated, innocent, draw, groups=groups)
    elif found.own is None or not any(t.removes for t in (*found.suspects, found.own)):
        look_further(runs, found, repeated, innocent, draw, groups=groups)


def _clear(runs: Runs, found: Inquiry) -> None:
    """Where each of several steps removes the event, clear those that keep it with the batches most like their own in
    their place: what is missed without them is their kind of data, of which there may be too few here to tell it."""
    several = [i for i in found.alone if i != runs.event.step]
    if len(several) > 1 and not found.acquitted:
        instead = [runs.replaced((i,), several) for i in several]
        found.replaced += [t for t in instead if t.keeps]


def _guilty(found: Inquiry, event: Event) -> list[Trial]:
    """Earlier steps of which each alone removes half, the first that which leaves least. Without the explained one its
    own value is gone, whoever raised it."""
    tried = (*found.suspects, *found.placebos)
    return sorted((t for t in tried if t.removes and t.steps != (event.step,)), key=lambda t: t.left)


def _among_kin(runs: Runs, found: Inquiry, placebos: int, draw: random.Random) -> None:
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
