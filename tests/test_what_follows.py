"""What came after a spike, before a step that is not finite, and below a slow rise: what the verdict says of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidFile
from aftershock.recorder.drift import Drift, SlowRise
from aftershock.recorder.event import Event
from aftershock.recorder.store import Seen
from aftershock.recorder.triggers import AtStep
from aftershock.recorder.unrecorded import after
from aftershock.recorder.words import percent, plus_minus

from .cases import mlp
from .test_explain_too_little import squares

SPIKE = 40
Rate = Callable[[int], float]


def run(
    folder: Path,
    steps: int,
    change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda step, x, y: (x, y),
    rate: Rate = lambda step: 1e-2,
    **options: Any,
) -> ak.FlightRecorder:
    torch.manual_seed(0)
    model = mlp(6, 16, 1, activation=nn.GELU).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate(0), weight_decay=0.0)
    recorder = ak.FlightRecorder(model, optimizer, squares, folder, **{"window": 24, "after": 8} | options)
    with recorder:
        for i in range(steps):
            x = torch.randn(16, 6, dtype=torch.float64)
            batch = change(i, x, torch.tanh(x.sum(1, keepdim=True)))
            optimizer.param_groups[0]["lr"] = rate(i)
            optimizer.zero_grad()
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
            if options.get("stop") == i:
                break
    return recorder


def bad(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y + 9 * (step == SPIKE)


def explained(recorder: ak.FlightRecorder, step: int | None = SPIKE) -> ak.FlightExplanation:
    return ak.explain(recorder, step=step, verify=1, placebos=2, treatments=False)


@pytest.mark.parametrize("count", [0, 2])
def test_a_step_that_is_not_finite_soon_after_a_spike_is_named(tmp_path: Path, count: int) -> None:
    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return bad(step, x * (math.nan if step > SPIKE + count else 1.0), y)

    first = SPIKE + count + 1
    found = explained(run(tmp_path, SPIKE + 12, change))
    assert found.verdict.endswith(
        f"The loss or gradient of step {first} is not finite: step={first} (--step {first}) explains that."
    )
    assert f"{count} of 8 steps after the spike are known: the next is not finite." in str(found.certificate)
    assert ak.explain(tmp_path, step=first, model=found_model(), loss_fn=squares).kind == "not a number"


def found_model() -> nn.Module:
    return mlp(6, 16, 1, activation=nn.GELU).double()


@pytest.mark.parametrize("count", [0, 3, 8])
def test_how_many_steps_after_a_spike_are_recorded_so_far(tmp_path: Path, count: int) -> None:
    told = f"{count} of 8 steps after the spike are recorded so far."
    assert (told in str(explained(run(tmp_path, SPIKE + count + 1, bad, triggers=[])).certificate)) == (count < 8)


def test_a_window_that_was_closed_is_no_window_that_still_records(tmp_path: Path) -> None:
    recorder = run(tmp_path, SPIKE + 90, bad, triggers=[AtStep(SPIKE - 6)])  # no longer in the ring
    assert "2 of 8 steps after the spike are recorded: the window closed then." in str(explained(recorder).certificate)
    whole: Any = SimpleNamespace(after=8, after_wanted=8, after_ends="closed")
    assert after(whole) == ""


def test_no_step_after_a_spike_is_said_where_none_was_wanted(tmp_path: Path) -> None:
    recorder = run(tmp_path, SPIKE + 30, bad, triggers=[AtStep(SPIKE)], after=0, window=12)
    assert "0 of 1 steps after the spike are recorded" in str(explained(recorder).certificate)


def test_a_model_that_was_put_into_another_mode_closes_no_window(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(6, 16, 1, activation=nn.GELU).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, squares, tmp_path, window=24, triggers=[]) as recorder:
        for i in range(SPIKE + 12):
            model.train(i <= SPIKE + 3)
            x = torch.randn(16, 6, dtype=torch.float64)
            batch = bad(i, x, torch.tanh(x.sum(1, keepdim=True)))
            optimizer.zero_grad()
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    told = "3 of 16 steps after the spike are replayed: the next ran in another mode"
    assert told in str(explained(recorder).certificate)


def test_a_share_is_told_with_its_spread() -> None:
    given = [(0.001, nan), (0.25, nan), (math.inf, nan), (0.25, 0.0123), (0.001, 0.12), (0.04, 0.0), (0.3, 1e-5)]
    assert [percent(*each) for each in given] == [
        *("less than 1%", "25%", "infinitely much (it diverges)"),
        *("25% ± 1.2%", "0% ± 12%", "4%", "30% ± 0.001%"),
    ]
    assert [plus_minus(spread) for spread in (nan, 0.0, 0.0123, 7.0)] == ["", "", " ± 0.012", " ± 7"]


def test_a_rate_that_made_the_next_step_infinite_is_named(tmp_path: Path) -> None:
    last = SPIKE - 1
    found = explained(run(tmp_path, SPIKE + 3, rate=lambda step: 1e-2 if step < last else 1e300), None)
    assert (found.kind, found.hyperparameter) == ("not a number", "lr")
    said = f"Before it, lr changed from 0.01 to 1e+300 at step {last}: with the former value step {SPIKE} is finite"
    assert f"{said} (replayed)." in found.verdict

    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y * (1e200 if step == SPIKE else 1.0)  # whose square is not finite, at any rate

    other = explained(run(tmp_path / "other", SPIKE + 3, change, lambda step: 1e-2 if step < last else 2e-2), None)
    assert (other.kind, other.hyperparameter) == ("not a number", None)
    assert f"with the former value step {SPIKE} is not finite either (replayed)." in other.verdict


def test_a_slow_rise_is_measured_from_the_lowest_median(tmp_path: Path) -> None:
    """Labels go apart little by little, and stay: the window's losses lie above what the trigger saw from the first."""

    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + (1 - 2 * (torch.arange(16) % 2))[:, None] * (0.2 + 0.04 * min(max(0, step - 60), 20))

    drift = Drift(over=16, patience=16)
    recorder = run(tmp_path, 130, change, triggers=[drift], window=16)
    found = explained(recorder, None)
    assert found.facts.event.usual == pytest.approx(drift._lowest.median, rel=1e-3)
    assert found.verdict.startswith("The loss has risen slowly: its running median is ")
    assert "What began this is not known: the window's first losses, from step " in found.verdict
    assert (
        "Next time record with a window= that reaches back to where the loss was lowest, more than 16" in found.verdict
    )
    assert "spike" not in found.verdict


def test_a_spike_whose_window_a_slow_rise_joined_is_explained_as_a_spike(tmp_path: Path) -> None:
    """A rise that is told four steps after the spike, from far below it."""
    said = SlowRise.of(0.2, 1e-6, 0.03)
    rise: Any = SimpleNamespace(
        begin=lambda window: None, fires=lambda seen: said if seen.step == SPIKE + 4 else None, end=lambda: None
    )
    found = explained(run(tmp_path, SPIKE + 12, bad, triggers=[AtStep(SPIKE), rise]), None)
    assert f"; step {SPIKE + 4}: {said}" in found.facts.recording.reason
    assert (found.facts.event.rise, found.kind, found.blamed) == (None, "own batch", (SPIKE,))


def test_the_numbers_of_a_drift_are_kept_beside_its_words() -> None:
    said = SlowRise.of(0.236, 0.02708, 0.0348)
    assert said == "the loss has risen slowly: its running median is 0.236, 6.0 robust σ above 0.02708"
    for rise in (None, (said.lowest, said.sigma)):
        values = json.loads(json.dumps(Seen(9, said, 0.1, rise).to_json()))
        assert Seen.of(values, Path()).rise == rise
    with pytest.raises(InvalidFile, match="which step it was kept for, and why"):
        Seen.of({"step": 9, "reason": said, "height": 10**400}, Path())  # an integer that no float holds
    for wrong in ("high", [1.0], [1.0, -1.0], [math.nan, 1.0], [1.0, "x"], [10**400, 1.0]):
        with pytest.raises(InvalidFile, match="from where the loss has risen"):
            Seen.of({**Seen(9, said, 0.1).to_json(), "rise": wrong}, Path())


def test_an_event_that_is_measured_from_what_was_known_before() -> None:
    event = Event.of([0.3] * 9, 8, known=(0.1, 0.01))
    assert (event.usual, event.onset, event.is_one) == (0.1, 3, True)


def test_an_own_batch_beside_hardly_any_other_step_says_so(tmp_path: Path) -> None:
    recorder = run(tmp_path, SPIKE + 9, bad, window=6)
    found = ak.explain(recorder, step=SPIKE, treatments=False)
    assert found.kind == "own batch"
    assert found.verdict.startswith("The window is short: only ")
    assert "record with a larger window= next time" in found.verdict
    there = re.search(r"only (\d+) step", found.verdict)
    assert there is not None
    assert f"Only {there[1]} step(s) that nobody suspects lie before the event" in str(found.certificate)
    longer = ak.explain(run(tmp_path / "longer", SPIKE + 9, bad), step=SPIKE, window=6, treatments=False)
    assert "what others do not do; more is recorded, pass a larger window=." in longer.verdict
