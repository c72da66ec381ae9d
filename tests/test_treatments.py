"""A treatment is named only where it prevents the event from a start one rounding away, too."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import xarray as xr

from aftershock.recorder import treatments
from aftershock.recorder.event import Event
from aftershock.recorder.other_runs import outcome
from aftershock.recorder.reruns import Run
from aftershock.recorder.treatments import Outcome, Treatment, proved, try_all, twice
from aftershock.recorder.verdict import treated

EVENT = Event.of([1.0] * 20 + [9.0] + [1.0] * 4, 20)
CALM = dict.fromkeys(range(19, 25), 1.0)


def outcomes() -> list[Outcome]:
    """Two that prevent the event, the milder one second, and one that does not."""
    given = [("clipping", 20, True), ("half the rate", 1, True), ("Adam restarted", 11, False)]
    return [
        Outcome(Treatment(name, Run(19), changed), {}, 0.0 if prevents else 1.0, prevents, False, 1.0)
        for name, changed, prevents in given
    ]


@pytest.mark.parametrize(
    ("again", "prevents", "lucky"),
    [
        ([1.0], [True, True, False], [False, False, False]),
        ([7.4, 1.0], [True, False, False], [False, True, False]),
        ([7.4, 7.4], [False, False, False], [True, True, False]),
    ],
)
def test_what_helps_once_may_be_luck(
    monkeypatch: pytest.MonkeyPatch, again: list[float], prevents: list[bool], lucky: list[bool]
) -> None:
    """`again`: the highest loss from one rounding away, of the mildest that prevents it, then of the next."""
    high = list(again)

    def run_again(trajectory: Any, runs: list[Run], *_: Any, **__: Any) -> list[dict[int, float]]:
        assert [run.jittered for run in runs] == [True]
        return [CALM | {20: high.pop(0)}]

    monkeypatch.setattr(treatments, "run_again", run_again)
    found = proved(None, EVENT, outcomes())  # type: ignore[arg-type]
    assert not high
    assert [o.prevents for o in found] == prevents
    assert [o.lucky for o in found] == lucky
    data = xr.Dataset(
        {
            "treatment_prevents": ("treatment", prevents),
            "treatment_lucky": ("treatment", lucky),
            "treatment_delays": ("treatment", [False] * 3),
            "treatment_blows_up": ("treatment", [False] * 3),
            "treatment_left": ("treatment", [o.left for o in found]),
            "treatment_left_spread": ("treatment", [math.nan] * 3),
            "treatment_left_so_far": ("treatment", [o.so_far for o in found]),
        }
    )
    assert [outcome(data, i) for i in range(2)] == [
        "prevents it, and leaves 80% from one rounding away" if one else "prevents it" for one in lucky[:2]
    ]
    if any(prevents):
        return
    said = treated(SimpleNamespace(treatment=None, data=data))  # type: ignore[arg-type]
    assert said.startswith("2 of the 3 treatments that were tried prevent it, and none does so too")


@pytest.mark.parametrize(("high", "removes"), [(1.5, True), (3.0, True), (8.0, False)])
def test_what_a_second_run_does_not_do_is_not_told(monkeypatch: pytest.MonkeyPatch, high: float, removes: bool) -> None:
    """A former value after which no event is left: in the second run a loss of up to `high`, of 9."""
    monkeypatch.setattr(treatments, "run_again", lambda *_, **__: [CALM | {20: high}])
    first = Outcome(Treatment("lr held", Run(19), 5), CALM, 0.0, True, False, 1.0)
    told = twice(None, EVENT, first)  # type: ignore[arg-type]
    left = (high - 1) / 8
    assert (told.removes, told.prevents, told.lucky) == (removes, high < 2, high >= 2)
    assert told.left == pytest.approx(0.0 if told.prevents else left, abs=1e-3)
    assert told.left_apart == pytest.approx(left, abs=1e-3)


@pytest.mark.parametrize(("most", "tried", "calls"), [(math.inf, 5, 1), (30, 5, 2), (17, 3, 1), (18, 4, 2), (4, 0, 0)])
def test_treatments_run_together_as_far_as_the_budget_surely_lasts(
    monkeypatch: pytest.MonkeyPatch, most: float, tried: int, calls: int
) -> None:
    """Runs of 5 or 7 steps at most, of which the first two end after two steps: what they spare is for the next."""
    ran: list[list[int]] = []

    def run_again(trajectory: Any, runs: list[Run], *_: Any) -> list[dict[int, float]]:
        ran.append([run.at for run in runs])
        return [dict.fromkeys(range(run.at, 22 if run.at == 20 else 25), 9.0 if run.at == 20 else 1.0) for run in runs]

    monkeypatch.setattr(treatments, "run_again", run_again)
    wanted = [Treatment(str(i), Run(at), i) for i, at in enumerate([20, 20, 18, 18, 18])]
    found = try_all(None, EVENT, wanted, most=most)  # type: ignore[arg-type]
    assert [o.treatment for o in found] == wanted[:tried]
    assert len(ran) == calls
    assert sum(len(o.values) for o in found) <= most
