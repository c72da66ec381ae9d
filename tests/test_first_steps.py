"""A run that blows up before there is a spread to compare with: it is told where that is clear, and never where the
first steps only fall, scatter and warm up."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder.event import Event
from aftershock.recorder.store import open_flight
from aftershock.recorder.triggers import Spike, Triggered

from .cases import cross_entropy, mlp

STEPS = 16  # in which a robust spread is not yet known


def fired(losses: list[float], of: str = "loss", window: int = 64) -> list[int]:
    spike = Spike(of)
    spike.begin(window)
    records = [SimpleNamespace(loss=loss, told_norm=loss, clip=None) for loss in losses]
    return [i for i, record in enumerate(records) if spike.fires(record)]  # type: ignore[arg-type]


def losses_of(
    seed: int, *, rate: float, warmup: int, batch: int, classes: int, raised: float | None = None
) -> list[float]:
    """The first losses of a plain loop: classes of noisy clusters, or a noisy function where there are none.

    raised: the rate from step 6 on.
    """
    torch.manual_seed(seed)
    model = mlp(8, 32, classes or 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    centres, losses = 2 * torch.randn(max(classes, 1), 8), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / warmup)
        if raised is not None and step >= 6:
            optimizer.param_groups[0]["lr"] = raised
        noise = torch.randn(batch, 8)
        optimizer.zero_grad()
        if classes:
            labels = torch.randint(classes, (batch,))
            loss = F.cross_entropy(model(centres[labels] + noise), labels)
        else:
            loss = F.mse_loss(model(noise), 1 + torch.tanh(noise.sum(1, keepdim=True)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_the_first_steps_of_ordinary_runs_are_calm() -> None:
    settings = [(3e-4, 1), (3e-3, 10), (1e-2, 5)]
    alarms = [
        (seed, rate, warmup, batch, classes)
        for seed in range(2)
        for rate, warmup in settings
        for batch in (4, 16, 64)
        for classes in (0, 10)
        if fired(losses_of(seed, rate=rate, warmup=warmup, batch=batch, classes=classes))
    ]
    assert alarms == []


def test_a_rate_that_is_too_high_is_told_and_explain_agrees_that_it_is_a_spike() -> None:
    runs = [losses_of(seed, rate=1e-2, warmup=6, batch=16, classes=c, raised=5.0) for seed in range(6) for c in (0, 10)]
    blown = [run for run in runs if sum(loss > 5 * max(run[:7]) for loss in run[7:]) >= 5]
    assert len(blown) >= 6  # the setting does what it is for
    told = [fired(run)[:1] for run in blown]
    assert all(told)
    assert all(Event.of(run[: step + 1], step).is_one for run, (step,) in zip(blown, told))


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([2.3, 2.2, 2.4, 2.2, 2.1, 20.0, 2.1, 2.0], [5]),  # a single loss far above all
        ([2.3, 2.2, 2.4, 2.2, 2.5, 7.0, 2.6, 2.3], []),  # three times as high is not enough by itself ..
        ([2.3, 2.2, 2.4, 2.2, 2.5, 3.9, 7.5, 9.0, 8.0], [7]),  # .. and is for two in a row
        ([2.3, 2.2, 2.4, 2.2, 2.1, 20.0, 21.0, 19.0, 50.0, 52.0], [5, 8]),  # once for one rise, and for twice as much
        ([2.3, 9000.0, 160.0, 80.0], [1]),
        ([2.3, 200.0, 160.0, 80.0], []),  # one loss is no scale
        ([0.0, 0.3, 0.0, 0.2, 0.1], []),  # a loss of zero is none either
        ([0.0, 0.0, 0.0, 0.0, 0.1], []),
        ([-0.01, 0.5, -0.3, 0.2, 0.4, -0.6], []),
        ([4.0, 2.0, 1.0, 0.5, 0.25, 4.5, 4.0], []),  # back to where it began
    ],
)
def test_what_is_far_above_so_few(losses: list[float], told: list[int]) -> None:
    assert fired(losses) == told
    assert fired(losses, "norm") == []  # norms rise in the first steps of ordinary runs


def test_noise_alarms_less_often_than_later() -> None:
    """Losses of single examples, which no rule tells from a jump for certain."""
    draws = random.Random(0)
    runs = [[draws.gauss(0, 1) ** 2 for _ in range(3 * STEPS)] for _ in range(400)]
    first = sum(any(step < STEPS for step in fired(run)) for run in runs)
    later = sum(any(step >= 2 * STEPS for step in fired(run)) for run in runs)
    assert first < 0.12 * len(runs)  # 34 of 400, and 122 in as many steps of a run that is known
    assert first < 0.5 * later


def test_a_run_that_had_only_begun_says_so(tmp_path: Path) -> None:
    """Too high a rate after too short a warm-up."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    centres, seen = torch.randn(10, 32, dtype=torch.float64), list[Triggered]()
    with ak.FlightRecorder(model, optimizer, cross_entropy, tmp_path, after=4, on_trigger=seen.append) as recorder:
        for step in range(14):
            optimizer.param_groups[0]["lr"] = 0.1 * min(10, step + 1)
            labels = torch.randint(10, (4,))
            batch = centres[labels] + torch.randn(4, 32, dtype=torch.float64), labels
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    assert [one.step for one in seen] == [8]
    losses = [record.loss for record in recorder.recent]
    words = f"the loss is {losses[8]:.4g}, where the highest of the 8 before it is {max(losses[:8]):.4g}"
    assert seen[0].reason == words
    found = ak.explain(recorder, examples=0)
    assert (found.kind, found.blamed, found.facts.event.explained) == ("instability", (), 8)
    assert found.verdict.startswith("The window is short: only 6 step(s) that nobody suspects lie before it")
    assert "what others do not do; the run had only begun. No batch did this." in found.verdict
    first = ak.explain(recorder, step=2, verify=0, placebos=0, treatments=False, examples=0)
    assert first.verdict.startswith(
        "Only 2 step(s) before it are recorded, too few to know what is usual: the run had only begun."
    )


def test_the_worst_window_may_be_that_of_the_second_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=20, after=2, triggers=[Spike()]) as recorder:
        for step in range(30):
            batch = torch.randn(8, 3), torch.randn(8, 1) + {1: 200.0, 25: 20.0}.get(step, 0.0)
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    assert [path.name for path in recorder.flights] == ["step-000001", "step-000025"]
    assert open_flight(tmp_path).trigger == 1


@pytest.mark.parametrize("window", [2, 8, 64])
def test_a_short_window_is_watched_as_well(window: int) -> None:
    """A spread needs 16 losses, however few steps are kept."""
    usual = [1 + 0.1 * (i % 3) for i in range(40)]
    assert fired([*usual, 9.0], window=window) == [40]
    assert fired([*usual[:6], 9.0], window=window) == [6]
