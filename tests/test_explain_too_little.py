"""Recordings that hold too little to blame anybody: the verdict's first sentence says so, and what to record next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder.triggers import AtStep

from .cases import mlp

WARM, AFTER = 200, 4
FAR = 20.0  # an input beyond it is the one that a noisy loss scatters on


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Scattering:
    """No two runs of it agree on a batch that is far away: the first is the lowest."""

    def __init__(self) -> None:
        self.factors = itertools.cycle((1.0, 5.0, 3.0, 7.0, 2.0))

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch) * (next(self.factors) if float(batch[0].abs().max()) > FAR else 1.0)


def recorded(
    folder: Path,
    before: int,
    change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda step, x, y: (x, y),
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] = squares,
    broken: bool = False,
) -> ak.FlightRecorder:
    """A plain loop whose recorder starts `before` steps before the one to be explained; `change` makes its batches."""
    torch.manual_seed(0)
    model = mlp(6, 16, 1, activation=nn.GELU).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = torch.full((6, 1), 0.2, dtype=torch.float64)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    def drawn() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 6, dtype=torch.float64)
        return x, torch.tanh(x @ weights)

    for _ in range(WARM):
        step(drawn())
    if broken:
        next(iter(model.parameters())).data[0, 0] = math.nan
    triggers = [AtStep(WARM + before)]
    with ak.FlightRecorder(model, optimizer, loss_fn, folder, window=32, after=AFTER, triggers=triggers) as recorder:
        for i in range(before + AFTER + 1):
            batch = change(i, *drawn())
            recorder.step(batch, step(batch))
    return recorder


def first_sentence(found: Any) -> str:
    return found.verdict.partition(". ")[0]


@pytest.mark.parametrize("broken", [False, True])
def test_a_loss_that_is_not_a_number_from_the_first_recorded_step_on(tmp_path: Path, broken: bool) -> None:
    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x if broken else x * (math.nan if step == 0 else 1.0)), y

    found = ak.explain(recorded(tmp_path, 3, change, broken=broken))
    assert (found.kind, found.blamed) == ("not a number", ())
    assert "first recorded step" in first_sentence(found)
    assert "next time start the recorder earlier" in first_sentence(found)
    said = "weights before the step are not finite" if broken else "The batch itself holds values that are not finite"
    assert said in found.verdict
    assert found.skip == ([] if broken else [0])
    assert "Nothing was replayed" in str(found)
    assert found.report(tmp_path / "page.html").stat().st_size > 0
    assert found.verdict in found._repr_html_()


def test_the_first_step_that_is_not_finite_is_told_apart_whichever_is_asked_for(tmp_path: Path) -> None:
    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * (math.nan if step == 1 else 1.0), y

    recorder = recorded(tmp_path, 3, change)
    assert not recorder.model[0].weight.isfinite().any()  # type: ignore[operator,union-attr]
    found = ak.explain(recorder, step=WARM + 3)
    assert found.verdict.startswith(
        f"The loss or gradient of step {WARM + 1} is not finite; step {WARM} is the last finite one"
    )


@pytest.mark.parametrize("before", [0, 1, 2])
def test_what_is_usual_is_not_known_from_two_steps(tmp_path: Path, before: int) -> None:
    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + 9 * (step == before)

    found = ak.explain(recorded(tmp_path, before, change))
    assert first_sentence(found).startswith(f"Only {before} step(s) before it are recorded, too few to know")
    assert "next time" in first_sentence(found)
    assert found.blamed == ()


def test_a_window_too_short_for_placebos(tmp_path: Path) -> None:
    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + 40 * (step == 4) * (torch.arange(16) % 8 == 3)[:, None]

    found = ak.explain(recorded(tmp_path, 10, change))
    assert (found.kind, found.blamed) == ("batch", (WARM + 4,))
    assert first_sentence(found).startswith("The window is short: only 4 step(s) that nobody suspects")
    assert "start the recorder earlier next time" in first_sentence(found)  # not a larger window=: this one is not full


def test_where_nobody_can_be_blamed_the_batch_is_not_accused_in_the_same_breath(tmp_path: Path) -> None:
    """A batch that is high on any weights, and no placebo to compare it with."""

    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + 9 * (step == 20)

    recorder = recorded(tmp_path, 20, change)
    blamed = ak.explain(recorder, treatments=False)
    assert (blamed.kind, blamed.blamed) == ("own batch", (WARM + 20,))
    assert "itself: it is this batch. " in blamed.verdict
    found = ak.explain(recorder, placebos=0, treatments=False)
    assert (found.kind, found.blamed) == ("unknown", ())
    assert "is not known" in found.verdict
    assert "on earlier weights it has" in found.verdict
    assert "it is this batch" not in found.verdict + found._repr_html_()


def test_a_run_whose_replays_differ_by_more_than_the_spike(tmp_path: Path) -> None:
    def change(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 10 * FAR, y + 3) if step == 12 else (x, y)

    found = ak.explain(recorded(tmp_path, 12, change, loss_fn=Scattering()))
    scatter, spike = found.facts.event.value_spread, found.size
    assert scatter > spike > 0  # one loss, and several times it
    assert first_sentence(found).startswith(f"Replays of this run that start a rounding away differ by {scatter:.3g}")
    assert "Next time record a run that repeats itself" in found.verdict
    assert (found.kind, found.blamed, found.tried) == ("unknown", (), 0)
