"""A setting that changed in the window is a cause only where it is one: not where a batch did it at the new value, and
not where leaving out anything removes the event."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder import treatments
from aftershock.recorder.event import BARS, Event
from aftershock.recorder.reruns import Run
from aftershock.recorder.treatments import Outcome, Treatment, not_by_luck

FIRST, RAISED, WRONG, BACK, STEPS = 176, 195, 224, 234, 238
RARE = {*range(0, WRONG + 1, 4), BACK}
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def feeds(wrong: bool) -> list[Batch]:
    """Two sources; the rare one comes with wrong labels once, and is sound when it comes back."""
    centres, found = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), []
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(4000 + i)
        labels = torch.randint(4, (32,), generator=generator)
        inputs = torch.zeros(32, 2, 16)
        inputs[:, int(i in RARE)] = centres[labels] + torch.randn(32, 16, generator=generator)
        found.append((inputs.flatten(1), (labels + 2) % 4 if wrong and i == WRONG else labels))
    return found


def trained(batches: Sequence[Batch], folder: Path | None, raised: int = RAISED) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, recorder = [], None
    for i, batch in enumerate(batches):
        if i == FIRST and folder is not None:
            recorder = ak.FlightRecorder(model, optimizer, loss_fn, folder, triggers=()).__enter__()
        optimizer.param_groups[0]["lr"] = 1e-2 if i < raised else 2e-2  # on purpose, and long before
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if recorder is not None:
            recorder.step(batch, loss)
    if recorder is not None:
        recorder.__exit__(None, None, None)
    return losses, recorder


def test_a_batch_that_did_it_at_a_raised_rate_is_named_and_the_rate_beside_it(tmp_path: Path) -> None:
    losses, recorder = trained(feeds(wrong=True), tmp_path)
    sound, _ = trained(feeds(wrong=False), None)
    before, _ = trained(feeds(wrong=True), None, raised=STEPS)
    assert losses[BACK] > 4 * max(sound[BACK], before[BACK])  # the truth: both are needed, and the batch is the odd one
    found = ak.explain(recorder, step=BACK, verify=2, treatments=False)
    assert (found.kind, found.blamed, found.hyperparameter) == ("batch", (WRONG,), None)
    assert found.verdict.startswith(f"Step {WRONG} did it")
    assert "No batch is to blame" not in found.verdict
    assert f"lr changed from 0.01 to 0.02 at step {RAISED}; with the former value, too, there is no" in found.verdict


@pytest.mark.parametrize("back", [None, 2])
def test_a_former_value_removes_an_event_by_luck_where_a_step_left_out_brings_it_back(
    monkeypatch: pytest.MonkeyPatch, back: int | None
) -> None:
    high, calm = [1.0] * 20 + [9.0, 9.0], [1.0] * 22
    event = Event.of(high, 20)
    asked: list[Run] = []

    def run_again(trajectory: Any, runs: Sequence[Run], last: int, **_: Any) -> list[dict[int, float]]:
        asked.extend(runs)
        values = high if back is not None and len(asked) == back else calm
        return [{i: values[i] for i in range(run.at, last + 1) if i not in run.left_out} for run in runs]

    monkeypatch.setattr(treatments, "run_again", run_again)
    held = Treatment("weight_decay held", Run(8, {8: None}), 5)
    gone, there = (Outcome(held, {}, left, left == 0, delays=False, after=1.0) for left in (0.0, 0.8))
    found = not_by_luck(None, event, gone)  # type: ignore[arg-type]
    assert (found == gone) is (back is None)
    assert len(asked) == (BARS.moved if back is None else back)
    if back is not None:
        assert (found.left, found.prevents) == (pytest.approx(1.0), False)
    assert not_by_luck(None, event, there) == there  # type: ignore[arg-type]  # what stays need not be asked again
