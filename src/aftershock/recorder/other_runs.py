"""The runs in which something was done otherwise: what became of the event, and what it cost afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .words import at_least, percent, share

if TYPE_CHECKING:
    import xarray as xr

    from .explanation import FlightExplanation

WORSE = 10.0  # times the event: how much more is not told


@dataclass(frozen=True)
class OtherRun:
    """One thing done otherwise. `values`: by place of the path, none where they were not kept."""

    name: str
    word: str  # what became of the event
    prevents: bool
    values: tuple[float, ...]
    chosen: bool  # the one that the verdict speaks of
    after: float = math.nan  # mean of the last values; NaN where there are none, or the run blows up
    after_spread: float = math.nan  # its ±
    idle: bool = False  # it leaves the event as it is, as far as it was run
    left: float = math.nan
    ended: bool = False  # once half of the event was there, and `left` is told as the least that it leaves


def other_runs(found: FlightExplanation) -> list[OtherRun]:
    """Without the blamed steps, then every treatment, as they were tried."""
    return [*_left_out(found), *_treated(found)]


def with_an_effect(runs: Sequence[OtherRun]) -> tuple[list[OtherRun], list[OtherRun]]:
    """(those worth a line each, those that are told together: they leave the event as it is, as far as they ran)."""
    idle = [run for run in runs if run.idle and not run.chosen]
    return ([run for run in runs if run not in idle], idle) if len(idle) > 1 else (list(runs), [])


def idle_in_words(idle: Sequence[OtherRun], runs: Sequence[OtherRun]) -> str:
    """Such as: 11 others leave it as it is; where some ended early, the least that any of them leaves."""
    which = f"{len(idle)} {'others' if len(idle) < len(runs) else 'treatments'}"
    if not any(run.ended for run in idle):
        return f"{which} leave it as it is"
    return f"{which} leave ≥ {at_least(min(run.left for run in idle))} each"


def untried_in_words(found: FlightExplanation) -> str:
    """How many treatments were not tried and why; nothing where all were."""
    count = found.facts.settings.untried
    if not count:
        return ""
    were = "treatment was" if count == 1 else "treatments were"
    return f"{count} {were} not tried: the proof of who did it took the budget of reruns (verify=0 tries them all)"


def _left_out(found: FlightExplanation) -> list[OtherRun]:
    event, blame = found.facts.event, found.facts.blame
    if event.kind == "own batch" and not blame.group:
        name = f"the batch of step {event.explained} left out"
        numbers = blame.own_left, blame.own_left_spread, blame.own_after, blame.own_after_spread
        return [_without(found, name, *numbers, so_far=blame.own_left_so_far)]
    if event.kind not in ("batch", "group", "own batch"):
        return []
    if blame.group:
        steps = ", ".join(map(str, blame.blamed))
        name = f"the batches of steps {steps} left out together"
        if blame.group_replaced:
            name = f"batches like their own in place of those of steps {steps}"
        numbers = blame.group_left, blame.group_left_spread, blame.group_after, blame.group_after_spread
        return [_without(found, name, *numbers)]
    after = blame.replaced_after, blame.replaced_after_spread
    instead = zip(blame.replaced, blame.replaced_left, blame.replaced_left_spread, *after)
    runs = [_without(found, f"batches like its own in place of step {step}'s", *numbers) for step, *numbers in instead]
    return runs + [_one_left_out(found, step) for step in blame.blamed]


def _one_left_out(found: FlightExplanation, step: int) -> OtherRun:
    data, values = found.data.sel(step=step), found.course.copy()
    at = data["place"].values.tolist().index(step)
    values[at] = np.nan  # its batch was not seen
    values[at + 1 :] -= data["emergence"].values[: len(values) - at - 1]
    numbers = (float(data[name]) for name in ("left", "left_spread", "tail_without", "tail_without_spread"))
    run = _without(found, f"the batch of step {step} left out", *numbers, so_far=bool(data["left_so_far"]))
    return replace(run, values=tuple(values.tolist()))


def _without(
    found: FlightExplanation,
    name: str,
    left: float,
    spread: float,
    after: float,
    after_spread: float,
    *,
    so_far: bool = False,
) -> OtherRun:
    prevents = left <= found.facts.event.gone
    word = "prevents it" if prevents else f"leaves {share(left, spread, so_far=so_far)}"
    run = OtherRun(name, word, prevents, (), chosen=True, after=after, after_spread=after_spread)
    return replace(run, left=left, ended=so_far)


def _treated(found: FlightExplanation) -> list[OtherRun]:
    chosen = "treatment_sufficient" if found.hyperparameter is None else "treatment_held"
    runs = []
    for i in range(found.data.sizes["treatment"]):
        own = found.data.isel(treatment=i)
        run = OtherRun(
            str(own["treatment"].item()),
            outcome(found.data, i),
            bool(own["treatment_prevents"]),
            tuple(own["treatment_value"].values.tolist()),
            chosen=bool(own[chosen]) and not found.blamed,
            after=math.nan if own["treatment_blows_up"] else float(own["treatment_after"]),
            after_spread=float(own["treatment_after_spread"]),
            idle=bool(own["treatment_idle"]),
            left=float(own["treatment_left"]),
            ended=_at_least(own),
        )
        runs.append(run)
    return runs


def _at_least(own: xr.Dataset) -> bool:
    """Is what a treatment leaves told, and as the least that it is?"""
    other = own["treatment_blows_up"] or own["treatment_delays"] or not own["treatment_left"] < WORSE
    return bool(own["treatment_left_so_far"]) and not other


def outcome(data: xr.Dataset, i: int) -> str:
    """What became of the event under a treatment."""
    own = data.isel(treatment=i)
    left = float(own["treatment_left"])
    told = percent(left, float(own["treatment_left_spread"]), so_far=bool(own["treatment_left_so_far"]))
    if own["treatment_prevents"]:
        return "prevents it"
    if own["treatment_blows_up"]:
        return "blows up"
    if own["treatment_delays"]:
        return "delays it"
    if own["treatment_lucky"]:
        return f"prevents it, and leaves {told} from one rounding away"
    return f"leaves {told}" if left < WORSE else "makes it worse"
