"""What is usual in a run: its spread where it is level, the spread around the fall where it learns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import aftershock as ak
from aftershock.recorder.alarm import ALARM, robust_z, scatter, usual

NOISE = 40


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=15), st.floats(0, 3))
def test_few_values_and_rising_ones_have_their_median_and_spread(values: list[float], rise: float) -> None:
    assert usual(values) == scatter(values)
    rising = [x + rise * i for i, x in enumerate(sorted(values) * 3)]
    assert usual(sorted(rising)) == scatter(sorted(rising))


@pytest.mark.parametrize("length", [16, 33, 64])
def test_a_fall_is_no_spread(length: int) -> None:
    """Noise of σ = 1 around a line: the spread around it is about 1, however far it falls."""
    draw = random.Random(length)
    values = [-0.5 * i + draw.gauss(0, 1) for i in range(length)]
    middle, sigma = usual(values)
    assert 0.5 < sigma < 2
    assert -0.5 * length < middle < -0.5 * length + 0.5 * length / 4 + 1  # a quarter behind at most
    assert scatter(values)[1] > 2 * sigma or length < 33
    assert robust_z(values[-1] + 60, values) > ALARM.threshold
    level = [draw.gauss(0, 1) for _ in range(length)]
    assert usual(level) == scatter(level)


def counting(count: int, noise: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    start, step = (torch.randint(low, 61, (count, 16, 1), generator=generator) for low in (0, 1))
    rows = (start + step % 3 * torch.arange(9)) % 61
    rows[noise] = torch.randint(61, (16, 9), generator=generator)
    return list(rows)


def test_a_batch_of_noise_is_seen_while_the_loss_falls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the window the loss falls by as much as the batch is above it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 24), nn.Flatten(0, 1), nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 61))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def loss_fn(m: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(rows[:, :-1]), rows[:, 1:].flatten())

    losses = []
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=32) as recorder:
        for batch in counting(64, noise=NOISE):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
            losses.append(float(loss.detach()))
    middle, spread = scatter(losses[NOISE - 32 : NOISE])
    assert losses[NOISE] - middle < ALARM.threshold * spread  # the fall alone would hide it
    assert f"step {NOISE}: the loss is" in capsys.readouterr().err
    found = ak.explain(recorder, verify=1, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", (NOISE,))
