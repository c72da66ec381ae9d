"""What the run without a step, or with a treatment, leaves of the event, beside plain torch: the share itself, or the
least that it is."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder.event import BARS, Event
from aftershock.recorder.explanation import SHOWN, FlightExplanation
from aftershock.recorder.findings import AFTER
from aftershock.recorder.other_runs import other_runs
from aftershock.recorder.words import at_least

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
    without: Collection[int] = (),
    recorder: ak.FlightRecorder | None = None,
    decay: dict[int, float] | None = None,
    treat: Callable[[int, torch.optim.AdamW], None] = lambda step, optimizer: None,
) -> list[float]:
    """The losses of a plain loop that does not take some of the steps; another weight decay at some; with what `treat`
    does to the optimizer right before it steps."""
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
            treat(step, optimizer)
            optimizer.step()
        if recorder is not None:
            recorder.step(batch, loss)
    return losses


@pytest.fixture(scope="module", autouse=True)
def _single_values() -> Iterator[None]:
    """This event is low enough for running medians (tests/test_lasting.py); here it is measured by single losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aftershock.recorder.event.BARS", replace(BARS, noisy=math.inf))
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FlightExplanation:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path_factory.mktemp("flight"), window=WINDOW) as recorder:
        trained(recorder=recorder)
    return ak.explain(recorder, SPIKE, verify=[49, 58, 63], treatments=False)


def truth(step: int) -> tuple[float, float]:
    """(what the run without a step leaves of the whole event, what of it is there once that is more than half)."""
    return shares(trained(without=[step]))


def shares(losses: list[float]) -> tuple[float, float]:
    """The same of any other run of the loop."""
    path, other = (some[SPIKE - WINDOW : SPIKE + AFTER + 1] for some in (trained(), losses))
    event = Event.of(path, WINDOW)

    def excess(losses: list[float]) -> float:
        return sum(max(0.0, loss - event.level) for loss in losses)

    def share(last: int) -> float:
        theirs, ours = other[event.onset : last + 1], path[event.onset :]
        return max(excess(theirs) / excess(ours), (max(theirs) - event.usual) / (max(ours) - event.usual))

    found = [share(last) for last in range(WINDOW, len(path))]
    return found[-1], next((one for one in found if one > 0.5), found[-1])


def test_what_is_left_is_true_and_where_a_run_ended_early_the_least_that_is(found: FlightExplanation) -> None:
    ended = [c for c in found.culprits if c.left_so_far]
    assert {c.step for c in ended if c.role == "suspect"} == {49, 58, 63}
    placebos = [c for c in ended if c.role == "placebo"]  # which end later: once the event is there and over
    assert placebos
    assert all(0.5 < c.left <= truth(c.step)[0] + 1e-3 for c in placebos)
    for culprit in (c for c in ended if c.role == "suspect"):
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
        assert f"≥ {at_least(culprit.left)}" in text or culprit not in found.culprits[:SHOWN]
        assert f"without it ≥ {at_least(culprit.left)} of the event is left" in page
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
    assert f"without step 63, the most suspected, at least {at_least(suspect.left)} of it stays" in found.verdict


def test_the_least_is_rounded_down() -> None:
    assert (at_least(0.5169), at_least(1.1176), at_least(0.5799, 0.02)) == ("51%", "111%", "57% ± 2%")


# --- treatments


def by_hand(name: str) -> Callable[[int, torch.optim.AdamW], None]:
    """A treatment of this name, in plain torch: what it does before a step."""
    numbers = re.findall(r"steps? (\d+)(?:–(\d+))?", name)[0]
    first, last = int(numbers[0]), int(numbers[1] or numbers[0])

    def treat(step: int, optimizer: torch.optim.AdamW) -> None:
        (group,), inside = optimizer.param_groups, first <= step <= last
        if name.startswith("half the learning rate"):
            group["lr"] = 1e-2 if inside else 2e-2
        elif name.startswith("Adam restarted") and inside:
            optimizer.state.clear()
        elif name.startswith("clipping") and inside:
            nn.utils.clip_grad_norm_(group["params"], float(name.split()[2]))
        elif name.startswith("β2"):
            group["betas"] = (0.9, float(name.split()[2]) if inside else 0.999)

    return treat


@pytest.fixture(scope="module")
def treated(tmp_path_factory: pytest.TempPathFactory) -> FlightExplanation:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path_factory.mktemp("flight"), window=WINDOW) as recorder:
        trained(recorder=recorder)
    return ak.explain(recorder, SPIKE, verify=0)


def test_what_a_treatment_leaves_is_true_and_where_its_run_ended_early_the_least_that_is(
    treated: FlightExplanation,
) -> None:
    """The same treatments in a plain loop, to the end of the event. A bound of clipping is told in three digits."""
    known, ended = ("half the learning rate", "Adam restarted", "clipping", "β2"), 0
    names = [name for name in treated.data["treatment"].values.tolist() if name.startswith(known)]
    assert len(names) == 9
    for name in names:
        own, (whole, least) = treated.data.sel(treatment=name), shares(trained(treat=by_hand(name)))
        left = float(own["treatment_left"])
        rough = 2e-2 if name.startswith("clipping") else 1e-3
        assert left == pytest.approx(least, rel=rough), name
        assert left <= whole * (1 + rough), name
        ended += bool(own["treatment_left_so_far"]) and left < whole - 0.1
        assert bool(own["treatment_left_so_far"]) == bool(own["treatment_after"].isnull()), name
    assert ended >= 2  # so that it matters


def test_the_least_that_a_treatment_leaves_is_told_as_such_wherever_it_is_shown(
    treated: FlightExplanation, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    text, page = str(treated), treated.report(tmp_path / "page.html").read_text()
    block = text.split("What would have prevented it", 1)[1].split("\n\n")[0]
    assert block.endswith("\n≥: at least so much; the run ended once half of the event was there.")
    table = page.split("<table class='runs'>", 1)[1].split("</table>", 1)[0]
    assert "≥: at least so much; the run ended once half of the event was there.</caption>" in table
    ended = treated.data["treatment_left"].values[treated.data["treatment_left_so_far"].values].tolist()
    assert len(ended) > 5
    for left in ended:
        assert f"leaves ≥ {at_least(left)}" in block
        assert f"leaves ≥ {at_least(left)}" in table
    assert "so far" not in block + table
    treated.save(tmp_path / "found.zarr")
    assert str(FlightExplanation.load(tmp_path / "found.zarr")) == text


@pytest.mark.parametrize("seed", range(4))
def test_what_is_said_of_a_run_that_ended_early_is_so_of_the_whole_run(seed: int) -> None:
    """Drawn runs: high at once or late, or a long low stretch. None that `fails` prevents the event when it goes on."""
    draw, ended, small = random.Random(seed), 0, 0
    for _ in range(400):
        often = draw.choice([0.0, 0.3])
        late = [40 + 200 * draw.random() if draw.random() < often else 40.0 for _ in range(12)]
        event = Event.of([40 + 0.2 * draw.gauss(0, 1) for _ in range(30)] + [140.0, *late], 30)
        size = event.peak * draw.choice([0.15, 0.19, 0.6, 1.5])
        ends = draw.randint(1, 12)
        whole = {i: event.usual + size * draw.random() * (i < 30 + ends) for i in range(30, event.last + 1)}
        stop = next((i for i in whole if event.fails({j: whole[j] for j in range(30, i + 1)})), event.last)
        run = {i: whole[i] for i in range(30, stop + 1)}
        left, by_then = event.remains(run)
        assert left <= event.left(whole)
        assert (stop < event.last) == (not math.isnan(by_then))
        assert event.prevented(run) == event.prevented(whole)
        assert event.delayed(whole) or not event.delayed(run)
        ended += stop < event.last
        small += event.prevented(whole) and event.left(whole) > 0.5  # a run that may not end at half of the excess
    assert ended > 50
    assert small > 0


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
    assert "that nobody suspects" not in str(found.certificate)  # of as many steps as were wanted, however few were run
    run = other_runs(found)[0]
    end = found.facts.event.end
    losses = trained(without=found.blamed)
    assert run.after == pytest.approx(sum(losses[end - BARS.tail + 1 : end + 1]) / BARS.tail, rel=1e-4)
    assert f"loss after it {run.after:.4g}" in str(found)
