"""A treatment is named only where it prevents the event from a start one rounding away, too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import xarray as xr

from aftershock.recorder import treatments
from aftershock.recorder.reruns import Run
from aftershock.recorder.treatments import Outcome, Treatment, proved
from aftershock.recorder.verdict import outcome, treated

EVENT = SimpleNamespace(
    last=0,
    stays=None,
    quantity="loss",
    prevented=lambda values: values[0] < 1,
    left_by_then=lambda values: 0.8,
    blows_up=lambda values: False,
)


def outcomes() -> list[Outcome]:
    """Two that prevent the event, the milder one second, and one that does not."""
    given = [("clipping", 20, True), ("half the rate", 1, True), ("Adam restarted", 11, False)]
    return [
        Outcome(Treatment(name, Run(0), changed), {0: 0.5}, 0.0 if prevents else 1.0, prevents, False, 0.5)
        for name, changed, prevents in given
    ]


@pytest.mark.parametrize(
    ("again", "prevents", "lucky"),
    [
        ([0.5], [True, True, False], [False, False, False]),
        ([9.0, 0.5], [True, False, False], [False, True, False]),
        ([9.0, 9.0], [False, False, False], [True, True, False]),
    ],
)
def test_what_helps_once_may_be_luck(
    monkeypatch: pytest.MonkeyPatch, again: list[float], prevents: list[bool], lucky: list[bool]
) -> None:
    """`again`: the loss from one rounding away, of the mildest that prevents it, then of the next."""
    left = list(again)
    monkeypatch.setattr(treatments, "run_again", lambda *_, **__: [{0: left.pop(0)}])
    found = proved(None, EVENT, outcomes())  # type: ignore[arg-type]
    assert not left
    assert [o.prevents for o in found] == prevents
    assert [o.lucky for o in found] == lucky
    data = xr.Dataset(
        {
            "treatment_prevents": ("treatment", prevents),
            "treatment_lucky": ("treatment", lucky),
            "treatment_delays": ("treatment", [False] * 3),
            "treatment_blows_up": ("treatment", [False] * 3),
            "treatment_left": ("treatment", [o.left for o in found]),
            "treatment_after": ("treatment", [0.5] * 3),
        }
    )
    assert [outcome(data, i) for i in range(2)] == [
        "prevents it, and leaves 80% from one rounding away" if one else "prevents it" for one in lucky[:2]
    ]
    if any(prevents):
        return
    said = treated(SimpleNamespace(treatment=None, data=data))  # type: ignore[arg-type]
    assert said.startswith("2 of the 3 treatments that were tried prevent it, and none does so too")
