"""Numbers that arrive late, as they do from a GPU: here from one that is made up. `test_cuda.py` has the real one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import aftershock as ak
from aftershock.recorder import recorder as recording
from aftershock.recorder.store import open_flight
from aftershock.recorder.transfer import Landing, Transfer
from aftershock.recorder.triggers import AtStep

from . import test_recorder as loops
from .test_recorder_windows import Live


class Event:
    """Passes when as many others have been made after it as it takes, or when somebody waits for it."""

    def __init__(self, slow: type[Slow]) -> None:
        self.slow, self.due = slow, slow.made + slow.takes

    def query(self) -> bool:
        return self.slow.made > self.due

    def synchronize(self) -> None:
        self.due = -1
        self.slow.waited.append(self)


class Slow(Transfer):
    """Every landing takes a while."""

    takes, made = 3, 0  # one landing a step
    waited: ClassVar[list[Event]] = []

    def carry(self, owned: Sequence[torch.Tensor], numbers: Sequence[Any] = ()) -> Landing:
        Slow.made += 1
        return replace(super().carry(owned, numbers), event=Event(Slow))  # type: ignore[arg-type]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    Slow.waited, Slow.takes, Slow.made = [], 3, 0
    monkeypatch.setattr(recording, "Transfer", Slow)
    return Slow


def test_late_numbers_trigger_late_and_nothing_is_lost(tmp_path: Path, slow: type[Slow]) -> None:
    seen: list[tuple[int, int]] = []
    made = 0
    live = Live(tmp_path, after=3, triggers=[AtStep(9)], on_trigger=lambda what: seen.append((what.step, made)))
    with live.recorder as recorder:
        for made in range(20):  # noqa: B007  (read by on_trigger)
            live.step()
        assert not slow.waited, "the loop waited"
    ((at, told),) = seen
    assert at == 9
    assert 9 < told < 9 + recording.LATE
    flight = open_flight(tmp_path)
    assert (flight.trigger, flight.last, flight.missing) == (9, 12, ())
    assert [record.step for record in recorder.recent] == list(range(12, 20))
    assert slow.waited, "at the end everything is waited for"
    assert "to the bit" in str(ak.explain(recorder, verify=0, references=0).certificate)


def test_a_gpu_that_is_far_behind_is_waited_for(tmp_path: Path, slow: type[Slow]) -> None:
    slow.takes = 10**9
    live = Live(tmp_path)
    with live.recorder:
        live.step(recording.LATE)
        assert not slow.waited
        live.step(2)
        assert slow.waited
        live.recorder.wait()
        assert open_flight(tmp_path).last == recording.LATE + 1


@pytest.mark.parametrize("name", ["scaler skips a step", "scaler skips a step, fused", "accumulation"])
def test_a_skipped_step_is_known_late_too(name: str, tmp_path: Path, slow: type[Slow]) -> None:
    options = loops.LOOPS[name]
    _, _, losses, _ = loops.train(None, **options)
    _, _, seen, recorder = loops.train(tmp_path, window=8, every=3, **options)
    assert seen == losses
    assert recorder is not None
    made = loops.STEPS - (1 if "overflow" in options else 0)
    assert [r.step for r in recorder.recent] == list(range(made))[-8:]
    found = ak.explain(recorder, step=made - 1, verify=0, references=0, window=5)
    assert "to the bit" in str(found.certificate)


def test_what_is_owned_is_a_copy() -> None:
    x = torch.arange(6.0).reshape(2, 3).mT
    transfer = Transfer(torch.device("cpu"))
    landing = transfer.carry(transfer.own([x]), [x[2, 1], 3, None])
    x.zero_()
    (copied,) = landing.tensors
    assert copied.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copied.stride() == (1, 3)
    five, three, none = landing.numbers()
    assert (five, three, landing.ready) == (5, 3, True)
    assert math.isnan(none)


def test_numbers_that_were_sent_together_are_told_apart() -> None:
    sent = torch.stack([torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.float32)])
    landing = Landing((), (math.nan, 7.0, math.nan, math.nan), sent, (0, 3))
    first, second, third, last = landing.numbers()
    assert (first, second, last) == (1.5, 7.0, float(torch.tensor(0.1)))
    assert math.isnan(third)


def test_a_micro_batch_and_its_loss_are_recorded_as_they_were(tmp_path: Path) -> None:
    """A loop that keeps them in buffers of its own overwrites them before the update."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    x, held = torch.empty(4, 2), torch.empty(())

    def loss_fn(m: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).square().mean()

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path) as recorder:
        losses = []
        for micro in range(2):
            x.fill_(micro + 1.0)
            loss = loss_fn(model, x) / 2
            loss.backward()
            losses.append(float(loss.detach()))
            held.copy_(loss.detach())
            if micro == 0:
                recorder.micro(x, held)
        optimizer.step()
        recorder.step(x, held)
    (record,) = recorder.recent
    assert [fed.tensors[0].unique().tolist() for fed in record.fed] == [[1.0], [2.0]]
    assert losses[0] != losses[1]
    assert record.loss == pytest.approx(sum(losses), rel=1e-6)
