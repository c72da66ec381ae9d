"""Several steps that did it together: none of them alone removes the event."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence

from .event import BARS
from .trials import Inquiry, Runs, Trial, changing, mildest

LARGEST = 4  # steps that may do it together


def look_further(
    runs: Runs,
    found: Inquiry,
    repeated: Sequence[tuple[int, ...]],
    innocent: Sequence[int],
    draw: random.Random,
    *,
    groups: bool,
) -> None:
    """One batch left out wherever it came; else suspects left out one on top of the other, where the event is gone
    then, and where that is not clear batches like a suspect's own in its place, or in all places of one batch."""
    event, least = runs.event, mildest(found.placebos)
    alone = sorted((t for t in found.suspects if t.steps != (event.step,)), key=lambda t: t.compared)
    group, instead = _first(runs.accused, repeated), None
    if group is None:
        greedy = _greedy(runs, alone, least) if groups else None
        gone = greedy is not None and greedy.left <= BARS.slight
        if greedy is not None and gone and _gone_without(runs, found, greedy, innocent, draw):
            return
        doing = [t for t in alone[:LARGEST] if t.compared < least and t.steps[0] < event.onset]
        if not found.replaced:
            _replace(runs, found, doing, innocent)
        if found.blamed_by_replacing:
            return
        instead = _first(runs.replaced, repeated)
        group = greedy if instead is None and not gone else None  # one that other groups acquitted is not tried again
    if group is not None:
        _compare_group(runs, found, group, len(innocent), draw)
    elif instead is not None:
        _compare_group(runs, found, instead, len(innocent), draw, replaced=True)


def compare_several(runs: Runs, found: Inquiry, placebos: int, draw: random.Random) -> None:
    """Where each of several steps removes the event, leave out as many others at once: if that removes it, too, a run
    is changed by anything that is large enough, and none of them did it."""
    several = [i for i in found.alone if i != runs.event.step]
    if len(several) > 1:
        others = [i for i in runs.before if i not in {*several, *(i for t in found.suspects for i in t.steps)}]
        found.several = _other_groups(runs.placebo, others, len(several), placebos, draw)


def _greedy(runs: Runs, alone: Sequence[Trial], least: float) -> Trial | None:
    """Steps left out one on top of the other: in each round that which leaves least beside those that are left out
    already, until half is gone and no further one removes more. None where the first does not do more than any placebo.

    Of a rare kind of data, the latest of its kind are tried before other suspects: what acts together may do nothing
    alone, and so be no suspect.
    """
    tried = list(alone)
    if all(t.compared > least - BARS.slight for t in alone):
        known = {t.steps[0] for t in alone}
        kin = {i for step in known for i in runs.likeness.kin(step, runs.before)} - known
        tried += [runs.accused((i,)) for i in sorted(kin, reverse=True)[: BARS.kin] if runs.in_budget]
    group = min(tried, key=lambda t: t.compared, default=None)
    if group is None or group.compared >= least:
        return None
    same = sorted(runs.likeness.kin(group.steps[0], runs.before), reverse=True)
    others = [t.steps[0] for t in sorted(tried, key=lambda t: t.compared) if t is not group]
    candidates = list(dict.fromkeys([*(i for i in others if i in same), *same, *others]))[:LARGEST]
    while len(group.steps) < LARGEST and group.compared > BARS.slight and runs.in_budget:
        more = [runs.accused(tuple(sorted((*group.steps, i)))) for i in candidates if i not in group.steps]
        best = min(more, key=lambda t: t.compared, default=group)
        if best.compared >= group.compared - BARS.slight * group.removes:
            break
        group = best
    return group if group.removes and len(group.steps) > 1 else None


def _gone_without(runs: Runs, found: Inquiry, group: Trial, innocent: Sequence[int], draw: random.Random) -> bool:
    """Is a group to blame without which the event is gone? Where as many steps of its own kind of data that nobody
    suspects, or of any, do not remove it."""
    group, back = _needed(runs, group)
    if len(group.steps) < 2:
        return False
    suspected = {i for t in found.suspects for i in t.steps}
    alike = {i for some in runs.kin(group.steps, suspected).values() for i in some} - set(group.steps)
    others = [i for i in runs.before if i not in {*suspected, *group.steps}]
    pool = sorted(alike) if math.comb(len(alike), len(group.steps)) >= BARS.kin else others
    among = _other_groups(runs.placebo, pool, len(group.steps), len(innocent), draw)
    if changing(among) > BARS.specific:
        return False
    found.group, found.group_back, found.group_placebos, found.kin = group, back, among, pool is not others
    return True


def _replace(runs: Runs, found: Inquiry, doing: Sequence[Trial], innocent: Sequence[int]) -> None:
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


def _first(run: Callable[[tuple[int, ...]], Trial], groups: Sequence[tuple[int, ...]]) -> Trial | None:
    """The first group without which half of the event is gone."""
    return next((t for steps in groups if (t := run(steps)).removes), None)


def _compare_group(
    runs: Runs,
    found: Inquiry,
    group: Trial,
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
        sound, (found.group, found.group_back) = runs.placebo, _needed(runs, group)
    if found.group is None:
        return
    size = len(found.group.steps)
    among = _other_groups(sound, alike if math.comb(len(alike), size) >= BARS.kin else others, size, placebos, draw)
    if size > 1:
        found.group_placebos = among
    elif found.group_replaced:
        found.replaced, found.group, found.replaced_placebos = [found.group], None, among
    else:
        found.group = None  # one step that was left out is judged already


def _needed(runs: Runs, group: Trial) -> tuple[Trial, float]:
    """The group less every step that can come back alone and brings hardly anything of the event back, and what is left
    at least with one of the others back."""
    for step in group.steps:
        rest = _less(group, step)
        if rest and (trial := runs.accused(rest)).removes and trial.left <= group.left + BARS.slight:
            group = trial
    without = [_less(group, step) for step in group.steps if len(group.steps) > 1]
    return group, min((runs.accused(rest).left for rest in without), default=math.inf)


def _less(group: Trial, step: int) -> tuple[int, ...]:
    return tuple(i for i in group.steps if i != step)


def _adding(run: Callable[[tuple[int, ...]], Trial], steps: tuple[int, ...]) -> Trial | None:
    """The group with batches like their own in place of theirs, less every step whose own batch, put back, adds nothing
    to the event: that one is sound."""
    group = run(steps)
    for step in steps:
        rest = _less(group, step)
        if rest and group.removes and (trial := run(rest)).compared <= group.left + BARS.slight:
            group = trial
    return group if group.removes else None


def _other_groups(
    run: Callable[[tuple[int, ...]], Trial],
    others: Sequence[int],
    size: int,
    placebos: int,
    draw: random.Random,
) -> list[Trial]:
    """As many steps elsewhere, until so many change the event that the group is nothing special."""
    found = dict[tuple[int, ...], Trial]()
    while len(found) < min(placebos, math.comb(len(others), size)):
        steps = tuple(sorted(draw.sample(others, size)))
        found[steps] = found.get(steps) or run(steps)
        if sum(not t.keeps for t in found.values()) > BARS.specific * placebos:
            break
    return list(found.values())
