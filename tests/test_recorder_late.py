"""Numbers that arrive late, as they do from a GPU: here from one that is made up. `test_cuda.py` has the real one."""

from __future__ import annotations

from collections.abc import Sequence
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

    takes, made = 6, 0  # two landings a step
    waited: ClassVar[list[Event]] = []

    def carry(self, values: Sequence[Any]) -> Landing:
        Slow.made += 1
        return Landing(super().carry(values).values, Event(Slow))  # type: ignore[arg-type]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    Slow.waited, Slow.takes, Slow.made = [], 6, 0
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


def test_what_is_carried_is_a_copy(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3).mT
    landing = Transfer(torch.device("cpu")).carry([x, 3, None])
    x.zero_()
    copied, three, none = landing.values
    assert copied.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copied.stride() == (1, 3)
    assert (three, none, landing.ready) == (3, None, True)
