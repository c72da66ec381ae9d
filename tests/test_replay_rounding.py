"""A run recorded with other kernels than it is replayed with, as on a GPU: rounding that grows is no mismatch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import ReplayMismatch
from aftershock.recorder.replay import SAME_RUN, Replay, _Proof

from .cases import make

WIDTH, STEPS, WINDOW = 32, 80, 40
LATE = 70
EDITED = 8  # where rounding is still far smaller than an edit of one in a hundred
Batch = tuple[Tensor, Tensor]


class Turned(nn.Module):
    """A deep network whose sums run backwards where `turned`: the same numbers, rounded otherwise."""

    turned = False

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x.flip(1) @ weight.flip(0) if Turned.turned else x @ weight).tanh()
        return x


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def recorded(folder: Path, *, edit: float = 1.0, at: int = EDITED) -> tuple[ak.FlightRecorder, list[float]]:
    """At a rate at which rounding grows; edit: what the gradients of one step are multiplied with, untold."""
    torch.manual_seed(0)
    Turned.turned = False
    model = Turned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    losses = []
    with ak.FlightRecorder(model, optimizer, loss_fn, folder, window=WINDOW, triggers=()) as recorder:
        for i in range(STEPS):
            batch = (torch.randn(8, WIDTH), torch.randn(8, WIDTH).tanh())
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            if i == at:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad *= edit
            optimizer.step()
            recorder.step(batch, loss)
            losses.append(float(loss.detach()))
    return recorder, losses


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    yield
    Turned.turned = False


def replayed(recorder: ak.FlightRecorder, *, turned: bool = True) -> ak.FlightExplanation:
    Turned.turned = turned
    return ak.explain(recorder, step=STEPS - 1, verify=0, references=0, examples=0)


def test_rounding_that_grows_is_accepted_and_told(tmp_path: Path) -> None:
    recorder, losses = recorded(tmp_path)
    found = replayed(recorder)  # steps lie between the state and the window
    away = abs(float(found.data["loss"][-1]) - losses[-1])
    assert away > SAME_RUN.agree * losses[-1], "the runs did not part: the test shows nothing"
    assert "as rounding that grows" in str(found.certificate)
    assert found.facts.event.value_spread >= away


def test_an_edit_is_no_rounding(tmp_path: Path) -> None:
    recorder, _ = recorded(tmp_path, edit=0.99)
    with pytest.raises(ReplayMismatch, match=f"part at step {EDITED}"):
        replayed(recorder)


def test_an_edit_where_rounding_has_long_grown_is_no_rounding(tmp_path: Path) -> None:
    """Replayed with its own kernels the run is equal to the bit, up to where it was edited."""
    recorder, _ = recorded(tmp_path, edit=0.9, at=LATE)
    with pytest.raises(ReplayMismatch, match=f"part at step {LATE}"):
        replayed(recorder, turned=False)


@pytest.mark.parametrize(("spread", "accepted"), [(1e-9, False), (0.5, True)])
def test_a_difference_that_grows_is_rounding_only_where_rounding_grows(spread: float, accepted: bool) -> None:
    """A gradient that was left over: each step is ten times further from the replay than the one before it."""
    proof = _Proof.__new__(_Proof)
    away = [10.0**-k for k in range(5, 0, -1)]

    def steps(shares: list[float]) -> list[Any]:
        return [SimpleNamespace(loss=1 + share, clip=SimpleNamespace(norm=1.0, factor=1.0)) for share in shares]

    proof.agree, proof.steps = SAME_RUN.agree, steps([0.0] * len(away))
    proof.records = [SimpleNamespace(loss=1 + share, norm=1.0) for share in away]  # type: ignore[misc]
    proof.runs = [tuple(steps([-spread * share for share in away]))]
    assert proof._within() == accepted


def test_one_replayed_step_is_one_step() -> None:
    path = make("tanh_mlp").path(1)
    assert str(Replay(path, (), 0, 1, 0.0)).startswith("One step was replayed: every loss is equal")
    assert str(Replay(path, (), 0, 1, 1e-9)).startswith("One step was replayed: losses agree")
    assert str(Replay(path, (), 0, 2, 0.0)).startswith("The 2 steps were replayed: every loss is equal")
