"""A loop that trains something else from some step on: said at once, and nothing is recorded that is not its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak

STEPS, CHANGED = 12, 6


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


Change = Callable[[nn.Sequential, torch.optim.Optimizer], torch.optim.Optimizer]


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model[0].requires_grad_(True)
    return optimizer


def extend(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return optimizer


def anew(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(change: Change, folder: Path | None) -> tuple[nn.Module, ak.FlightRecorder | None]:
    model, optimizer = fresh()
    recorder = None if folder is None else ak.FlightRecorder(model, optimizer, loss_fn, folder).__enter__()
    generator = torch.Generator().manual_seed(1)
    for i in range(STEPS):
        batch = torch.randn(8, 4, generator=generator)
        optimizer = change(model, optimizer) if i == CHANGED else optimizer
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        if recorder is not None:
            recorder.step(batch, loss)
    if recorder is not None:
        recorder.__exit__(None, None, None)
    return model, recorder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, r"parameters were frozen or unfrozen \('0.weight'\)"),
        (extend, "the optimizer was given other parameters"),
        (anew, "the optimizer that the recorder was given makes no steps"),
    ],
)
def test_it_is_said_once_and_what_came_before_stays(tmp_path: Path, change: Change, words: str) -> None:
    with pytest.warns(RuntimeWarning, match=words) as said:
        model, recorder = trained(change, tmp_path)
    assert len(said) == 1
    assert recorder is not None
    assert [record.step for record in recorder.recent] == list(range(CHANGED))
    plain, _ = trained(change, None)
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(mine, theirs)


def test_steps_that_a_scaler_skips_are_no_other_optimizer(tmp_path: Path) -> None:
    """Three updates in a row that are not made, and the weights stay."""
    model, optimizer = fresh()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with warnings.catch_warnings(), ak.FlightRecorder(model, optimizer, loss_fn, tmp_path) as recorder:
        warnings.simplefilter("error")
        for i in range(STEPS):
            batch = torch.full((8, 4), torch.inf) if 3 <= i < 6 else torch.randn(8, 4)
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            recorder.step(batch, loss)
    assert len(recorder.recent) == STEPS - 3
