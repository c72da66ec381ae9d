"""The runs in which something was done otherwise: what became of the event, and what it cost afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .event import TAIL, percent
from .verdict import outcome

if TYPE_CHECKING:
    from .explanation import FlightExplanation

AS_IT_IS = 0.05  # of the event: what a treatment changes at most that is told together with others


@dataclass(frozen=True)
class OtherRun:
    """One thing done otherwise. `values`: by place of the path, none where they were not kept."""

    name: str
    word: str  # what became of the event
    prevents: bool
    values: tuple[float, ...]
    after: float  # mean of the last values; NaN where there are none, or the run blows up
    chosen: bool  # the one that the verdict speaks of
    idle: bool = False  # it leaves the event as it is


def other_runs(found: FlightExplanation) -> list[OtherRun]:
    """Without the blamed steps, then every treatment, as they were tried."""
    return [*_left_out(found), *_treated(found)]


def with_an_effect(runs: Sequence[OtherRun]) -> tuple[list[OtherRun], list[OtherRun]]:
    """(those worth a line each, those that together say that they leave the event as it is)."""
    idle = [run for run in runs if run.idle and not run.chosen]
    return ([run for run in runs if run not in idle], idle) if len(idle) > 1 else (list(runs), [])


def idle_in_words(idle: Sequence[OtherRun], runs: Sequence[OtherRun]) -> str:
    """Such as: 11 others leave it as it is."""
    return f"{len(idle)} {'others' if len(idle) < len(runs) else 'treatments'} leave it as it is"


def value_after(found: FlightExplanation) -> float:
    """The mean of the last values of the run as it was."""
    return _mean_of_last(found, found.course)


def _mean_of_last(found: FlightExplanation, values: np.ndarray) -> float:
    explained = found.data["place"].values.tolist().index(found.data.attrs["step"])
    return float(np.mean(values[max(explained, len(values) - TAIL) :]))


def _left_out(found: FlightExplanation) -> list[OtherRun]:
    data, attrs = found.data, found.data.attrs
    if found.kind == "own batch" and not attrs["group"]:
        return [_without(found, f"the batch of step {attrs['step']} left out", attrs["own_left"], (), np.nan)]
    if found.kind not in ("batch", "group", "own batch"):
        return []
    if attrs["group"]:
        steps = ", ".join(map(str, found.blamed))
        name = f"the batches of steps {steps} left out together"
        if attrs["group_replaced"]:
            name = f"batches like their own in place of those of steps {steps}"
        return [_without(found, name, attrs["group_left"], (), np.nan)]
    runs, numbers = [], data["place"].values.tolist()
    for step, left in attrs["replaced"].items():
        runs.append(_without(found, f"batches like its own in place of step {step}'s", left, (), np.nan))
    for step in found.blamed:
        values, at = found.course.copy(), numbers.index(step)
        values[at] = np.nan  # its batch was not seen
        values[at + 1 :] -= data["emergence"].sel({"step": step}).values[: len(values) - at - 1]
        left, after = float(data["left"].sel({"step": step})), _mean_of_last(found, values)
        runs.append(_without(found, f"the batch of step {step} left out", left, tuple(values.tolist()), after))
    return runs


def _without(found: FlightExplanation, name: str, left: float, values: tuple[float, ...], after: float) -> OtherRun:
    prevents = left <= found.data.attrs["gone"]
    return OtherRun(
        name, "prevents it" if prevents else f"leaves {percent(left)}", prevents, values, after, chosen=True
    )


def _treated(found: FlightExplanation) -> list[OtherRun]:
    data, chosen = found.data, _chosen(found)
    return [
        OtherRun(
            name,
            outcome(data, i),
            bool(data["treatment_prevents"][i]),
            tuple(data["treatment_value"].values[i].tolist()),
            math.nan if bool(data["treatment_blows_up"][i]) else float(data["treatment_after"][i]),
            name == chosen,
            idle=abs(float(data["treatment_left"][i]) - 1) <= AS_IT_IS and not bool(data["treatment_delays"][i]),
        )
        for i, name in enumerate(map(str, data["treatment"].values))
    ]


def _chosen(found: FlightExplanation) -> str | None:
    """The treatment that the verdict names: the former value of a hyperparameter, or the mildest that prevents it."""
    if found.blamed:
        return None
    if found.hyperparameter is None:
        return found.treatment
    held = f"{found.hyperparameter} held at its former value"
    return next((name for name in map(str, found.data["treatment"].values) if name.startswith(held)), None)
