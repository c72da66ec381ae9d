"""The recorder in loops that compile with fullgraph=True: they run as without it, and their steps are replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftershock as ak
from aftershock.errors import ReplayMismatch

STEPS = 8
TOLD = "the model is called in compiled code"
QUICK = {"verify": 0, "placebos": 0, "treatments": False, "examples": 0}
EXACT = "every loss is equal to the recorded one to the bit"
Batch = tuple[Tensor, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def compiled(function: LossFunction) -> LossFunction:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


def train(
    folder: Path | None, called: LossFunction, given: LossFunction, *, whole: bool = False, draws: bool = False,
    told: bool = False, step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.step(),
) -> tuple[ak.FlightRecorder | None, list[float]]:  # fmt: skip
    """A loop that draws its batches beforehand, or each before its step; `whole`: the model itself is compiled."""
    torch.manual_seed(0)
    model = Net()
    if whole:
        torch._dynamo.reset()
        model.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(STEPS)]
    recorder = None if folder is None else ak.FlightRecorder(model, optimizer, given, folder, window=STEPS)
    losses = []
    with nullcontext() if recorder is None else recorder:
        for batch in data:
            if draws:
                batch = (torch.randn(5, 4), batch[1])
            optimizer.zero_grad()
            if told and recorder is not None:
                recorder.before_forward()
            loss = called(model, batch)
            loss.backward()
            step(optimizer)
            losses.append(loss.item())
            if recorder is not None:
                recorder.step(batch, loss)
    return recorder, losses


@pytest.mark.parametrize("what", ["model", "loss_fn", "loss_fn, recorder given it plain"])
def test_a_compiled_loop_runs_and_is_replayed(what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    called = loss_fn if what == "model" else compiled(loss_fn)
    given = called if what == "loss_fn" else loss_fn
    _, alone = train(None, called, given, whole=what == "model")
    recorder, losses = train(tmp_path / "flight", called, given, whole=what == "model")
    assert losses == alone
    assert capfd.readouterr().err.count(TOLD) == 1
    assert recorder is not None
    assert [record.loss for record in recorder.recent] == losses
    assert EXACT in str(ak.explain(recorder, step=STEPS - 1, **QUICK).certificate)


def test_draws_between_steps_are_replayed_where_the_loop_says_where_loss_fn_begins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    called = compiled(loss_fn)
    silent, _ = train(tmp_path / "silent", called, called, draws=True)
    assert capfd.readouterr().err.count(TOLD) == 1
    with pytest.raises(ReplayMismatch):
        ak.explain(silent, step=STEPS - 1, **QUICK)
    told, _ = train(tmp_path / "told", called, called, draws=True, told=True)
    assert TOLD not in capfd.readouterr().err
    assert EXACT in str(ak.explain(told, step=STEPS - 1, **QUICK).certificate)


def test_an_update_that_no_hook_sees_is_recorded(tmp_path: Path) -> None:
    """As where optimizer.step() is compiled; here the step below its hooks, which takes no time to compile."""
    recorder, losses = train(tmp_path / "flight", loss_fn, loss_fn, step=torch.optim.AdamW.step.__wrapped__)
    assert recorder is not None
    assert [record.loss for record in recorder.recent] == losses
    assert EXACT in str(ak.explain(recorder, step=STEPS - 1, **QUICK).certificate)


def test_a_wrapper_around_compiled_code_stays() -> None:
    """`functools.wraps` copies torch's marks of a compiled function onto what is none."""
    inner = compiled(loss_fn)

    @functools.wraps(inner)
    def doubled(model: nn.Module, batch: Batch) -> Tensor:
        return 2 * inner(model, batch)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    assert ak.capture(model, optimizer, inner).loss.loss_fn is loss_fn
    assert ak.capture(model, optimizer, doubled).loss.loss_fn is doubled
