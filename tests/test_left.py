"""What the run without a step leaves of the event, beside plain torch: the share itself, or the least that it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder.event import TAIL, Event
from aftershock.recorder.explanation import FlightExplanation
from aftershock.recorder.findings import AFTER
from aftershock.recorder.other_runs import other_runs

WINDOW, BAD, SPIKE, STEPS = 40, (58, 60, 62), 66, 100
Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[Batch]:
    """Three of them are mislabelled: none of the three alone is the spike."""
    draw, found = torch.Generator().manual_seed(3), list[Batch]()
    weights = torch.randn(10, 5, generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        x = torch.randn(32, 10, generator=draw)
        y = (x @ weights).argmax(1)
        found.append((3 * x, (y + 2) % 5) if step in BAD else (x, y))
    return found


def trained(
    without: Collection[int] = (), recorder: ak.FlightRecorder | None = None, decay: dict[int, float] | None = None
) -> list[float]:
    """The losses of a plain loop that does not take some of the steps; another weight decay at some."""
    model = net() if recorder is None else recorder.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2) if recorder is None else recorder.optimizer
    losses = []
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        losses.append(float(loss.detach()))
        optimizer.param_groups[0]["weight_decay"] = (decay or {}).get(step, 0.01)
        if step not in without:
            loss.backward()
            optimizer.step()
        if recorder is not None:
            recorder.step(batch, loss)
    return losses


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FlightExplanation:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path_factory.mktemp("flight"), window=WINDOW) as recorder:
        trained(recorder=recorder)
    return ak.explain(recorder, SPIKE, verify=[49, 58, 63], treatments=False)


def truth(step: int) -> tuple[float, float]:
    """(what the run without a step leaves of the whole event, what of it is there once that is more than half)."""
    path, other = (losses[SPIKE - WINDOW : SPIKE + AFTER + 1] for losses in (trained(), trained(without=[step])))
    event = Event.of(path, WINDOW)

    def excess(losses: list[float]) -> float:
        return sum(max(0.0, loss - event.level) for loss in losses)

    def share(last: int) -> float:
        theirs, ours = other[event.onset : last + 1], path[event.onset :]
        return max(excess(theirs) / excess(ours), (max(theirs) - event.usual) / (max(ours) - event.usual))

    shares = [share(last) for last in range(WINDOW, len(path))]
    return shares[-1], next(one for one in shares if one > 0.5)


def test_what_is_left_is_true_and_where_a_run_ended_early_the_least_that_is(found: FlightExplanation) -> None:
    ended = [c for c in found.culprits if c.left_so_far]
    assert {c.step for c in ended} == {49, 58, 63}
    for culprit in ended:
        whole, least = truth(culprit.step)
        assert culprit.left == pytest.approx(least, rel=1e-3)
        assert culprit.left < whole - 0.1  # so that it matters


def test_the_least_is_told_as_such_wherever_it_is_shown(found: FlightExplanation, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = found.report(tmp_path / "page.html").read_text()
    text = str(found)
    ended = [c for c in found.culprits if c.left_so_far]
    assert "≥: at least so much; the run ended once half of the event was there." in text
    for culprit in ended:
        assert f"≥ {culprit.left:.0%}" in text
        assert f"without it ≥ {culprit.left:.0%} of the event is left" in page
    found.save(tmp_path / "found.zarr")
    assert str(FlightExplanation.load(tmp_path / "found.zarr")) == text


def test_a_verdict_that_quotes_the_least_says_at_least(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=WINDOW) as recorder:
        trained(recorder=recorder)
    found = ak.explain(recorder, SPIKE, verify=[63], treatments=False)
    (suspect,) = (c for c in found.culprits if c.role == "suspect")
    assert (found.kind, suspect.left_so_far) == ("unknown", True)
    assert f"without step 63, the most suspected, at least {suspect.left:.0%} of it stays" in found.verdict


def test_where_a_hyperparameter_did_it_no_treatment_is_left_out(tmp_path: Path) -> None:
    """Without the step of the wrong weight decay it is gone as well; that blames no batch, and saves no run."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=WINDOW) as recorder:
        trained(recorder=recorder, decay={70: 90.0})
    found = ak.explain(recorder, 71)
    assert (found.kind, found.hyperparameter) == ("hyperparameter", "weight_decay")
    every = ak.explain(recorder, 71, verify=0).data["treatment"].values.tolist()
    assert found.data["treatment"].values.tolist() == every
    assert "not tried" not in str(found)


@pytest.mark.parametrize("own", [False, True])
def test_what_comes_after_an_event_that_is_left_out_is_what_a_plain_loop_has(tmp_path: Path, own: bool) -> None:
    """Steps that did it together, and batches that are the spike by themselves."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=WINDOW) as recorder:
        trained(recorder=recorder)
    found = ak.explain(recorder, BAD[0] if own else SPIKE, treatments=False)
    assert (found.kind, len(found.blamed) > 1) == ("own batch" if own else "group", True)
    run = other_runs(found)[0]
    end = found.facts.event.end
    losses = trained(without=found.blamed)
    assert run.after == pytest.approx(sum(losses[end - TAIL + 1 : end + 1]) / TAIL, rel=1e-4)
    assert f"loss after it {run.after:.4g}" in str(found)
