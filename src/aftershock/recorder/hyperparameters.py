"""Which hyperparameters changed in a window: jumps, excursions that return, restarts, slow ramps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from ..core.dynamics import Step
from .event import BARS
from .records import Record


@dataclass(frozen=True)
class Schedule:
    """The numbers that decide what is a change, of which kind, and how unusual it is."""

    jump: float = 1.1  # a change of less than a tenth in one step is no event
    ramp: float = 1.2  # the same over the window
    alike: float = 2.0  # increments of a smooth schedule differ by less from one step to the next
    equal: float = 1.05  # those of a linear warm-up
    begun: float = 0.1  # of its last value: a warm-up that is seen from its beginning starts below
    ahead: int = 2  # increments that a warm-up may have made beyond the run's steps, as where it starts with one
    told: float = 0.5  # of the way to the new value, in the logarithm: from there on the change is told
    returned: float = 0.1  # of an excursion: what may be left of it where the schedule went on meanwhile
    most: float = 1e3  # ratios beyond it, such as from zero, are equally unusual
    # What the logarithm of a change's ratio counts for, by kind; by reason, not measured. No schedule goes away and
    # returns, so that an excursion comes before a jump; a ramp is slow enough for v to follow; a warm-up is meant.
    weights: Mapping[str, float] = field(
        default_factory=lambda: {"excursion": 1.5, "jump": 1.0, "restart": 1.0, "ramp": 0.5, "warm-up": 0.1}
    )
    harmless: float = 0.3  # weight of a change towards smaller steps, which seldom raise a loss


SCHEDULE = Schedule()
NAMES = ("lr", "weight_decay", "beta1", "beta2", "eps", "clip")
NAMED = 2  # parameter groups whose values are told, where they differ


@dataclass(frozen=True)
class HyperChange:
    """One hyperparameter that changed, in one or more parameter groups.

    kind: "jump", "excursion" (it returns at `until`), "restart" (a falling rate jumps up), "ramp", "warm-up".
    """

    name: str
    kind: str
    at: int  # index in the window of the first step with another value
    until: int  # the first index with the former value again; the window's length where it stays
    steps: tuple[int, int]  # the same as step numbers: the first and the last with another value
    far: tuple[int, int]  # the first and the last at which it is more than half of the way to `now`
    groups: tuple[int, ...]  # one for clip, which has none: 0
    was: tuple[float, ...]  # by group; no clipping is infinite
    now: tuple[float, ...]  # after the change; the most extreme value of an excursion
    ratio: float  # the largest, of rates, decay, eps, clip, and of the memory 1/(1−β) of a beta
    unusual: float  # by which changes are ordered
    of: int  # how many groups there are

    @property
    def brief(self) -> bool:
        """It lasts for so few steps that leaving them out undoes it as well."""
        return self.until - self.at <= BARS.together

    def covers(self, other: HyperChange) -> bool:
        """Does holding the former value undo another, later change, too?"""
        later = self.at < other.at < self.until and not set(self.groups).isdisjoint(other.groups)
        return later and self.name == other.name

    def hold(self, step: Step) -> Step:
        """The step with this hyperparameter at its former value, where it had another."""
        return self._held(step) if self.at <= step.index < self.until else step

    def has_former(self, step: Step) -> bool:
        """Has the step the former value, as after an excursion?"""
        held = self._held(step)
        return held.hypers == step.hypers and held.max_norm == step.max_norm

    def _held(self, step: Step) -> Step:
        if self.name == "clip":
            return replace(step, max_norm=None if math.isinf(self.was[0]) else self.was[0])
        hypers = list(step.hypers)
        for group, was in zip(self.groups, self.was):
            hyper = hypers[group]
            hypers[group] = hyper.with_lr(was) if self.name == "lr" else replace(hyper, **{self.name: was})  # type: ignore[arg-type]
        return replace(step, hypers=tuple(hypers))

    @property
    def sentence(self) -> str:
        first, last = self.steps
        alike = len(set(zip(self.was, self.now))) == 1
        was, now = (" and ".join(map(_said, values[: 1 if alike else NAMED])) for values in (self.was, self.now))
        name = self.name if alike and len(self.groups) == self.of else f"{self.name} of {self._groups}"
        if self.kind == "excursion":
            return f"{name} was {now} instead of {was} at {span(*self.far)}"
        if self.kind == "restart":
            return f"{name} was restarted at step {first}: from {was} to {now}"
        if self.kind == "jump":
            return f"{name} changed from {was} to {now} at step {first}"
        how = "was warming up" if self.kind == "warm-up" else "changed slowly"
        return f"{name} {how}, from {was} to {now} over {span(first, last)}"

    @property
    def _groups(self) -> str:
        shown, more = " and ".join(map(str, self.groups[:NAMED])), len(self.groups) - NAMED
        several = "s" if len(self.groups) > 1 else ""
        return f"parameter group{several} {shown}{f' (and {more} more)' if more > 0 else ''}"


def hyperparameters(records: Sequence[Record]) -> list[HyperChange]:
    """Every change in a window, the most unusual first: how large, how abrupt, and whether towards larger steps."""
    numbers = [record.step for record in records]
    found: dict[tuple[str, str, int, int], list[_Member]] = {}
    for name in NAMES:
        for group in _groups(records[0], name):
            values = [_value(record, group, name) for record in records]
            for kind, at, until, now in _events(name, values, numbers):
                member = _Member(group, values[at - 1], now, _far(name, values, at, until, now))
                found.setdefault((name, kind, at, until), []).append(member)
    changes = [_change(*key, members, numbers, of=len(_groups(records[0], key[0]))) for key, members in found.items()]
    return sorted(changes, key=lambda change: -change.unusual)


def one_of_each(changes: Sequence[HyperChange]) -> list[HyperChange]:
    """Changes in their order, but the second of one name after the first of every other: one that changes all the time
    does not keep another from being asked."""
    names = [change.name for change in changes]
    places = sorted(range(len(names)), key=lambda i: names[:i].count(names[i]))
    return [changes[i] for i in places]


class _Member(NamedTuple):
    """A change in one parameter group."""

    group: int
    was: float
    now: float
    far: tuple[int, int]  # places in the window


def _change(
    name: str, kind: str, at: int, until: int, members: Sequence[_Member], numbers: Sequence[int], *, of: int
) -> HyperChange:
    """The same change of several groups as one."""
    groups, was, now, far = zip(*members)
    ratio = max((_ratio(name, *pair) for pair in zip(was, now)), key=lambda r: abs(_log(r)))
    smaller = ratio > 1 if name == "eps" else ratio < 1 and not name.startswith("beta")
    unusual = abs(_log(ratio)) * SCHEDULE.weights[kind] * (SCHEDULE.harmless if smaller else 1.0)
    first, last = min(x for x, _ in far), max(x for _, x in far)
    steps, between = (numbers[at], numbers[until - 1]), (numbers[first], numbers[last])
    return HyperChange(name, kind, at, until, steps, between, groups, was, now, ratio, unusual, of)


def _far(name: str, values: Sequence[float], at: int, until: int, now: float) -> tuple[int, int]:
    """The first and the last place of a change at which it is more than half of the way to `now`, in the logarithm."""
    way = [abs(_log(_ratio(name, values[at - 1], value))) for value in (*values[at:until], now)]
    places = [at + i for i, part in enumerate(way[:-1]) if part >= SCHEDULE.told * way[-1]]
    return places[0], places[-1]


def _groups(record: Record, name: str) -> range:
    return range(1 if name == "clip" else len(record.hypers))


def _value(record: Record, group: int, name: str) -> float:
    if name == "clip":
        return math.inf if record.clip is None else record.clip
    return float(getattr(record.hypers[group], name))


def _events(name: str, values: Sequence[float], numbers: Sequence[int]) -> list[tuple[str, int, int, float]]:
    """(kind, at, until, value) of every change of one series."""
    smooth = _smooth(values)
    jumps = [
        i
        for i in range(1, len(values))
        if not smooth[i] and abs(_log(_ratio(name, values[i - 1], values[i]))) > math.log(SCHEDULE.jump)
    ]
    found: list[tuple[str, int, int, float]] = []
    waiting = list(jumps)
    while waiting:
        at = waiting.pop(0)
        was = values[at - 1]
        back = next((i for i in waiting if _returned(was, values[at], values[i])), None)
        if back is not None:
            extreme = max(values[at:back], key=lambda x: abs(_log(_ratio(name, was, x))))
            found.append(("excursion", at, back, extreme))
            waiting = [i for i in waiting if i > back]
        else:
            restart = name == "lr" and values[at] > was and _falls(values[:at]) and _falls(values[at:])
            found.append(("restart" if restart else "jump", at, len(values), values[at]))
    for first, last in zip([0, *jumps], [*jumps, len(values)]):
        found += _ramp(name, values[first:last], numbers[first:last], first)
    return found


def _smooth(values: Sequence[float]) -> list[bool]:
    """Which steps belong to a ramp: three increments in a row of one sign and about one size, or two equal ones."""
    steps = [0.0, *(y - x if x != y else 0.0 for x, y in pairwise(values))]
    out = [False] * len(values)

    def alike(i: int, j: int, factor: float) -> bool:
        a, b = steps[i], steps[j]
        return a * b > 0 and math.isfinite(a) and math.isfinite(b) and max(a / b, b / a) <= factor

    for i in range(1, len(values) - 1):
        long = i + 2 < len(values) and alike(i, i + 1, SCHEDULE.alike) and alike(i + 1, i + 2, SCHEDULE.alike)
        if long or alike(i, i + 1, SCHEDULE.equal):
            for j in range(i, i + 3 if long else i + 2):
                out[j] = True
    return out


def _returned(was: float, changed: float, value: float) -> bool:
    if math.isinf(was) or math.isinf(changed):
        return value == was
    return abs(value - was) <= SCHEDULE.returned * abs(changed - was)


def _falls(values: Sequence[float]) -> bool:
    """Never rises, and falls somewhere, or is too short to tell."""
    return all(x >= y for x, y in pairwise(values)) and (len(values) < 2 or values[0] > values[-1])


def _ramp(name: str, values: Sequence[float], numbers: Sequence[int], first: int) -> list[tuple[str, int, int, float]]:
    """A stretch without jumps whose value changes all the same; it ends with the next jump."""
    changed = [i for i in range(1, len(values)) if values[i] != values[i - 1]]
    if not changed or abs(_log(_ratio(name, values[0], values[-1]))) < math.log(SCHEDULE.ramp):
        return []
    kind = "warm-up" if name == "lr" and _warms_up(values, numbers) else "ramp"
    return [(kind, first + changed[0], first + len(values), values[-1])]


def _warms_up(values: Sequence[float], numbers: Sequence[int]) -> bool:
    """A rise in equal increments that began near zero, in the window or at the run's first steps."""
    steps = [y - x for x, y in pairwise(values) if y != x]
    if min(steps) <= 0 or max(steps) > SCHEDULE.equal * min(steps):
        return False
    return values[0] <= SCHEDULE.begun * values[-1] or values[0] / steps[0] <= numbers[0] + SCHEDULE.ahead


def _ratio(name: str, was: float, now: float) -> float:
    if name.startswith("beta"):
        was, now = 1 / max(1 - was, 1e-12), 1 / max(1 - now, 1e-12)
    if was == now:
        return 1.0
    return math.inf if was == 0 or math.isinf(now) else 0.0 if math.isinf(was) else now / was


def _log(ratio: float) -> float:
    return math.log(min(max(ratio, 1 / SCHEDULE.most), SCHEDULE.most))


def _said(value: float) -> str:
    return "off" if math.isinf(value) else f"{value:.4g}"


def span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}–{last}"
