"""Events of the gradient norm alone: measured, blamed and treated by the norm, against plain torch loops."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidInput
from aftershock.report.flight_figures import course_figure

from .test_report import Tags

CULPRIT, STEPS, CLIP = 54, 76, 0.1


class Gain(nn.Module):
    """The gain multiplies the gradient of `direction`, and hardly the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(1e-4 * torch.randn(6, dtype=torch.float64))
        self.gain = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.direction).mean() * self.gain.exp()


def loss_fn(model: Gain, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return 1 + 0.1 * x[:, 0].mean() + model(x) + 1e-6 * model.gain * (model.gain - 2 * target)


@dataclass
class Flown:
    recorder: ak.FlightRecorder
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    states: list[tuple[Any, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def again(self, start: int, stop: int, **change: Any) -> list[float]:
        """Norms before clipping from `start` on in a plain loop; `without` a step, or with `half` the rate at some."""
        model = Gain()
        optimizer = made(model)
        model.load_state_dict(self.states[start][0])
        optimizer.load_state_dict(copy.deepcopy(self.states[start][1]))
        rates, norms = [group["lr"] for group in optimizer.param_groups], []
        for step in range(start, stop):
            optimizer.zero_grad()
            loss_fn(model, self.batches[step]).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            if step != change.get("without"):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate / 2 if step in change.get("half", ()) else rate
                optimizer.step()
        return norms


def made(model: Gain) -> torch.optim.Optimizer:
    groups = [{"params": [model.direction], "lr": 1e-6}, {"params": [model.gain], "lr": 0.4}]
    return torch.optim.AdamW(groups, eps=1e-12, weight_decay=0.0)


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> Flown:
    """At one step the gain is pulled far away by a gradient of ordinary norm; the norms of the steps after it rise."""
    torch.manual_seed(0)
    model = Gain()
    optimizer = made(model)
    with ak.FlightRecorder(
        model, optimizer, loss_fn, tmp_path_factory.mktemp("flight"), clip=CLIP, window=40
    ) as recorder:
        run = Flown(recorder)
        for step in range(STEPS):
            x = 0.01 * torch.randn(64, 6, dtype=torch.float64) + 0.01 * torch.randn(6, dtype=torch.float64).sign()
            batch = x, torch.tensor(2000.0 if step == CULPRIT else 0.0, dtype=torch.float64) + torch.randn(())
            run.batches.append(batch)
            run.states.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            recorder.step(batch, loss, norm=norm)
            run.norms.append(float(norm))
    return run


@pytest.fixture(scope="module")
def found(flown: Flown) -> Any:
    return ak.explain(flown.recorder)


def test_the_step_that_raised_the_norm_is_blamed_for_it(flown: Flown, found: Any) -> None:
    step = found.facts.event.explained
    assert (found.quantity, found.kind, found.blamed) == ("gradient norm", "batch", (CULPRIT,))
    assert found.verdict.startswith(f"The gradient norm of step {step} stands out, {flown.norms[step]:.4g}, ")
    assert (
        f"Step {CULPRIT} did it: there is no spike without it, and without any of 8 other steps it stays"
        in found.verdict
    )
    assert f"It raised the gradient norm at step {step} by" in found.verdict
    np.testing.assert_allclose(found.course, np.array(flown.norms)[found.data["place"]], rtol=1e-12)  # before clipping


def test_norms_without_a_step_are_those_of_a_plain_loop(flown: Flown, found: Any) -> None:
    step, first, stop = found.facts.event.explained, int(found.data["place"][0]), STEPS
    assert flown.again(first, stop) == pytest.approx(flown.norms[first:], rel=1e-12)
    tried = [c for c in found.culprits if c.role]
    assert len(tried) > 8
    for one in tried:
        without = flown.again(one.step, stop, without=one.step)
        assert one.measured == pytest.approx(flown.norms[step] - without[step - one.step], rel=1e-6, abs=1e-9)
    small = [c for c in tried if abs(c.measured) < 0.2 * found.size]  # a prediction is of the slope
    assert sum(abs(c.predicted - c.measured) for c in small) < 0.1 * sum(abs(c.measured) for c in small)


def test_treatments_are_judged_by_the_norm(flown: Flown, found: Any) -> None:
    first = found.facts.event.onset
    name = f"half the learning rate at step {first - 1}, 1 before it"
    curve = found.data["treatment_value"].sel(treatment=name)
    stop = int(found.data["place"][-1]) + 1
    again = flown.again(first - 1, stop, half=[first - 1])
    known = np.isfinite(curve.values[-len(again) :])
    assert known.sum() > 5
    np.testing.assert_allclose(curve.values[-len(again) :][known], np.array(again)[known], rtol=1e-6)
    assert abs(again[-1] / flown.norms[stop - 1] - 1) > 0.05  # not the run as it was


def test_words_name_the_norm(found: Any, tmp_path: Path) -> None:
    assert "gradient norm after it" in str(found)
    page = Tags.of(found.report(tmp_path / "page.html")).text
    assert f"The spike of the gradient norm at step {found.facts.event.explained}" in page
    assert "loss of step" not in page
    figure = course_figure(found)
    assert list(figure.data[0].y) == pytest.approx(found.course.tolist())


def test_the_loss_can_be_asked_for_instead(flown: Flown, found: Any) -> None:
    step = found.facts.event.explained
    calm = ak.explain(flown.recorder, step=step, of="loss", verify=0, treatments=False)
    assert (calm.quantity, calm.kind) == ("loss", "no spike")
    assert 'this was about the loss (of="norm", --of norm, explains the norm)' in calm.verdict
    early = ak.explain(flown.recorder, step=CULPRIT - 4, of="norm", verify=0, treatments=False)
    assert early.verdict.startswith(f"Step {CULPRIT - 4} is no spike: its gradient norm {flown.norms[CULPRIT - 4]:.4g}")
    with pytest.raises(InvalidInput, match='"loss" or "norm"'):
        ak.explain(flown.recorder, of="update")
