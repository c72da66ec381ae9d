"""The truth about a spike, from plain torch alone: the run without each step, and with each treatment.

An event is measured over a stretch: from the first high loss before the trigger to the window's end. `left` is what
remains of it in another run: the larger of the shares of its area and of its peak. An event that came sooner is not
gone: a loss before the stretch counts, too, where the recorded one was usual.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import theilslopes
from torch import Tensor, nn

from .spike_runs import Loop, Window

HALF, LITTLE, SIGMAS = 0.5, 0.2, 3.0
TOLD = 8.0  # robust σ from which a trigger tells a loss
TAIL = 4  # last losses of the stretch
JITTERED = 8  # runs
AGAIN = 3  # runs with a treatment where a run does not repeat itself
BACK = (1, 2, 4, 8)
QUANTILE = 0.9

Losses = Mapping[int, float]  # by step; a step that was left out has none


@dataclass(frozen=True)
class Event:
    """A stretch of high losses against the usual ones before it."""

    onset: int
    last: int
    usual: float
    sigma: float
    area: float
    peak: float

    @classmethod
    def of(cls, losses: Losses, trigger: int) -> Event:
        """Of a run's losses, from its first step to its last."""
        first, last, onset = min(losses), max(losses), trigger
        for _ in range(2):  # once with all losses before the trigger, then with those before the onset
            usual, sigma = _usual([losses[n] for n in range(first, onset)])
            onset = trigger
            while onset - 1 > first + 1 and losses[onset - 1] > usual + SIGMAS * sigma:
                onset -= 1
        stretch = range(onset, last + 1)
        area = sum(max(0.0, losses[n] - usual - SIGMAS * sigma) for n in stretch)
        return cls(onset, last, usual, sigma, area, max(losses[n] - usual for n in stretch))

    def left(self, losses: Losses) -> float:
        """Of its area or its peak, the larger share; infinite where the other run breaks. An event without area, whose
        peak lies within the spread of losses that fell before it, has none to remove: its peak decides."""
        high = [losses[n] - self.usual for n in range(self.onset, self.last + 1) if n in losses]
        if not all(map(math.isfinite, high)):
            return math.inf
        area = sum(max(0.0, x - SIGMAS * self.sigma) for x in high)
        return max(area / self.area if self.area else 0.0, max(high) / self.peak)

    def sooner(self, path: Losses, losses: Losses) -> float:
        """Of its peak: how high another run rises before the stretch, where the path is usual."""
        calm = [n for n in losses if n < self.onset and path[n] <= self.usual + SIGMAS * self.sigma]
        high = [losses[n] - self.usual for n in calm]
        return max((x if math.isfinite(x) else math.inf for x in high), default=0.0) / self.peak

    def departs(self, path: Losses, losses: Losses) -> float:
        """Of its peak: how far another run's losses are from the path's in the stretch, at most."""
        apart = [abs(losses[n] - path[n]) for n in range(self.onset, self.last + 1) if n in losses]
        return max((x if math.isfinite(x) else math.inf for x in apart), default=0.0) / self.peak

    @property
    def little(self) -> float:
        """The height up to which another run has no event: a fifth of the peak, where that is still ordinary (no
        trigger tells it, or it is within twice the usual loss): a fifth of a blow-up is a blow-up. Of an event that
        hardly passes the usual spread, or does not, half: else nothing would have to be done to prevent it."""
        ordinary = max(SIGMAS * self.sigma, min(LITTLE * self.peak, max(TOLD * self.sigma, abs(self.usual))))
        return min(ordinary, HALF * self.peak)

    def prevented(self, losses: Losses, trigger: int) -> bool:
        """Nowhere high in the stretch, and at its end, where that is after the trigger, half as high at most."""
        high = {n: losses[n] - self.usual for n in range(self.onset, self.last + 1) if n in losses}
        if not all(map(math.isfinite, high.values())) or max(high.values()) > self.little:
            return False
        tail = [x for n, x in high.items() if n > trigger][-TAIL:]
        return len(tail) < TAIL or statistics.fmean(tail) <= max(SIGMAS * self.sigma, HALF * self.little)


def _usual(losses: Sequence[float]) -> tuple[float, float]:
    """The median of the last quarter, and the robust spread around a straight line through all (Theil and Sen's): what
    a run has learnt before the event is no spread, and the loss that it began with not its usual one."""
    slope = float(theilslopes(losses).slope)
    level = [x - slope * i for i, x in enumerate(losses)]
    middle = statistics.median(level)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in level)
    return statistics.median(losses[-max(1, len(losses) // 4) :]), spread


# --- the run without some steps


def without(loop: Loop, first: int, last: int, steps: Sequence[int]) -> dict[int, float]:
    """Losses from `first` on; these steps never come."""
    return {number: loop.step(number) for number in range(first, last + 1) if number not in steps}


def leave_one_out(window: Window, loop: Loop, event: Event) -> dict[int, tuple[float, float]]:
    """What is left of the event without each step up to the trigger, and how far that run departs from the path."""
    found = {}
    for number in range(window.start, window.trigger + 1):
        losses = {n: window.losses[n - window.start] for n in range(event.onset, number)}
        losses |= without(loop.twin(), number, event.last, [number])
        path = window.by_step
        found[number] = max(event.left(losses), event.sooner(path, losses)), event.departs(path, losses)
        same = loop.step(number) == window.losses[number - window.start]
        assert same or not window.repeats, "the plain loop does not repeat itself"
    return found


# --- treatments


@dataclass(frozen=True)
class Treatment:
    """A change of the loop from step `first` on, until before step `stop` where it ends."""

    name: str
    first: int
    stop: int
    update: Callable[[Loop, int], None]


def halved(loop: Loop, number: int) -> None:
    loop.optimizer.param_groups[0]["lr"] = loop.rate(number) / 2
    loop.optimizer.step()


def another_beta2(beta2: float) -> Callable[[Loop, int], None]:
    def update(loop: Loop, number: int) -> None:
        loop.optimizer.param_groups[0]["betas"] = (0.9, beta2)
        loop.update(number)

    return update


def clipped(largest: float) -> Callable[[Loop, int], None]:
    def update(loop: Loop, number: int) -> None:
        nn.utils.clip_grad_norm_(loop.model.parameters(), largest)
        loop.update(number)

    return update


def restarted(first: int) -> Callable[[Loop, int], None]:
    """Adam begins anew: m, v and count are gone."""

    def update(loop: Loop, number: int) -> None:
        if number == first:
            loop.optimizer.state.clear()
        loop.update(number)

    return update


def stable(loop: Loop, number: int) -> None:
    """Each tensor's update divided by max(1, RMS of g/√v̂), as StableAdamW has it."""
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.update(number)
    with torch.no_grad():
        for p, was in zip(loop.model.parameters(), before):
            p.copy_(was + (p - was) / max(1.0, _rms(loop, p)))


def _rms(loop: Loop, p: Tensor) -> float:
    state, group = loop.optimizer.state[p], loop.optimizer.param_groups[0]
    v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    assert p.grad is not None
    return float((p.grad**2 / v.clamp(min=group["eps"] ** 2)).mean().sqrt())


def treatments(window: Window, loop: Loop, event: Event) -> list[Treatment]:
    """Each from 1, 2, 4, 8 steps before the onset on; halved rates end with the onset or, also, with the trigger."""
    largest = _quantile_norm(window, loop.twin(), event)
    found = []
    for k in BACK:
        first = max(event.onset - k, window.start)
        end = window.last + 1
        found += [
            Treatment(f"lr halved {k}", first, event.onset, halved),
            Treatment(f"Adam restarted {k}", first, end, restarted(first)),
            Treatment(f"beta2 0.95 {k}", first, end, another_beta2(0.95)),
            Treatment(f"beta2 0.9 {k}", first, end, another_beta2(0.9)),
            Treatment(f"clip {k}", first, end, clipped(largest)),
            Treatment(f"stable {k}", first, end, stable),
        ]
        if event.onset < window.trigger:
            first = max(window.trigger - k, window.start)
            found.append(Treatment(f"lr halved before the trigger {k}", first, window.trigger, halved))
    return found


def _quantile_norm(window: Window, loop: Loop, event: Event) -> float:
    """Of the gradient norms before the event."""
    norms = []
    for number in range(window.start, event.onset):
        loop.backward(number)
        norms.append(float(torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None]).norm()))
        loop.update(number)
    return float(torch.tensor(norms).quantile(QUANTILE))


def treated(loop: Loop, first: int, last: int, treatment: Treatment) -> dict[int, float]:
    losses = {}
    for number in range(first, last + 1):
        _, loss = loop.backward(number)
        losses[number] = float(loss)
        (treatment.update if treatment.first <= number < treatment.stop else Loop.update)(loop, number)
    return losses


# --- all of it


def truth(window: Window, loop: Loop) -> dict[str, Any]:
    """JSON: the event, what is left without each step, and what each treatment does."""
    event, cures = Event.of(window.by_step, window.trigger), {}
    first, early = _before(window, loop, event)
    for treatment in treatments(window, loop.twin(), event):
        runs = [treated(early.twin(), first, window.last, treatment) for _ in range(1 if window.repeats else AGAIN)]
        left = [max(event.left(losses), event.sooner(window.by_step, losses)) for losses in runs]
        prevents = [_prevents(window, event, losses) for losses in runs]
        cures[treatment.name] = {
            "left": statistics.median(left),
            "prevents": all(prevents),
            "mostly": statistics.mean(prevents) > HALF,
        }
    left = leave_one_out(window, loop.twin(), event)
    return {
        "event": {"onset": event.onset, "usual": event.usual, "sigma": event.sigma, "peak": event.peak},
        "left": {str(number): value for number, (value, _) in left.items()},
        "departs": {str(number): value for number, (_, value) in left.items()},
        "share": statistics.mean(value <= HALF for value, _ in left.values()),
        "treatments": cures,
    }


def names_treatment(said: str, known: str) -> bool:
    """Does a verdict's treatment mean this one? The family by a word of its name, and the number of steps."""
    families = {
        "lr halved": r"lr|rate", "Adam restarted": r"restart", "beta2 0.95": r"(β2|beta2)\D*0\.95",
        "beta2 0.9": r"(β2|beta2)\D*0\.9(?!\d)", "clip": r"clip", "stable": r"stable|rms",
    }  # fmt: skip
    family = next(name for name in families if known.startswith(name))
    steps = re.findall(r"(?<![\d.])\d+(?![\d.])", said)
    return re.search(families[family], said, re.IGNORECASE) is not None and known.split()[-1] in (steps[-1:] or ["1"])


def clip_as_said(said: str, window: Window, loop: Loop) -> bool:
    """Does clipping at the bound, and at the steps, that a verdict names prevent the event?"""
    found = re.match(r"clipping at (\S+) at steps (\d+)–(\d+)", said)
    if found is None:
        return False
    bound, first, last = float(found[1]), int(found[2]), int(found[3])
    early, event = loop.twin(), Event.of(window.by_step, window.trigger)
    without(early, window.start, first - 1, [])
    losses = treated(early, first, window.last, Treatment(said, first, last + 1, clipped(bound)))
    return _prevents(window, event, losses)


def by_luck(window: Window, loop: Loop, name: str) -> bool:
    """Does a treatment leave the event in one of a few runs whose weights differ by a rounding before it?"""
    event = Event.of(window.by_step, window.trigger)
    treatment = next(each for each in treatments(window, loop.twin(), event) if each.name == name)
    first, early = _before(window, loop, event)
    for seed in range(JITTERED):
        moved, draws = early.twin(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in moved.model.parameters():
                p += p * torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=draws).sign().to(p.device)
        if not _prevents(window, event, treated(moved, first, window.last, treatment)):
            return True
    return False


def _before(window: Window, loop: Loop, event: Event) -> tuple[int, Loop]:
    """The first step that a treatment may change, and the loop before it."""
    first, early = max(window.start, event.onset - max(BACK)), loop.twin()
    without(early, window.start, first - 1, [])
    return first, early


def _prevents(window: Window, event: Event, losses: dict[int, float]) -> bool:
    sooner = event.sooner(window.by_step, losses) * event.peak
    return event.prevented(losses, window.trigger) and sooner <= event.little
