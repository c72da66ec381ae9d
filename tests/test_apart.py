"""What earlier steps did is looked for in an event less the losses of later batches that are bad by themselves."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder.event import Event
from aftershock.recorder.explanation import FlightExplanation

WRONG, BACK, BAD, STEPS, SEED = 80, 100, 104, 130, 19
RARE = {*range(20, 81, 5), BACK, BACK + 9}  # steps at which a rare source of data comes
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(without: Collection[int] = (), folder: Path | None = None) -> tuple[list[float], ak.FlightRecorder | None]:
    """A rare source is mislabelled once; when it comes again, sound, its loss is high, and four steps later another
    batch, of random labels, has a far higher one."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.9))
    losses = []

    def steps(recorder: ak.FlightRecorder | None) -> None:
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step + 777 * SEED)
            tokens = torch.randint(*((40, 50) if step in RARE else (0, 40)), (40, 4), generator=draw)
            targets = (tokens[:, 0] + 2 * (step == WRONG)) % 5
            batch = tokens, targets[torch.randperm(40, generator=draw)] if step == BAD else targets
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            losses.append(loss.item())
            if step not in without:
                loss.backward()
                optimizer.step()
            if recorder is not None:
                recorder.step(batch, loss)

    if folder is None:
        steps(None)
        return losses, None
    with ak.FlightRecorder(model, optimizer, loss_fn, folder, window=32) as recorder:
        steps(recorder)
    return losses, recorder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FlightExplanation:
    losses, recorder = trained(folder=tmp_path_factory.mktemp("flight"))
    assert losses[BAD] > 10 * losses[BACK] > 100 * losses[BACK - 1]
    return ak.explain(recorder, step=BACK)


def test_what_did_it_is_found_beside_a_later_batch_that_is_bad_by_itself(found: FlightExplanation) -> None:
    """In the whole event, which the later one makes seventy times as high, nothing of it was to be seen."""
    assert (found.kind, found.blamed) == ("batch", (WRONG,)), found.verdict
    assert found.facts.event.apart == (BAD,)
    assert found.facts.event.highest in (BACK, BACK + 9)  # when the rare source comes once more
    said = f"Step {BAD} after it is an event of its own, whose batch is bad by itself: ask for that one, too."
    assert said in found.verdict
    assert "Its largest loss is that of step" not in found.verdict


def test_what_is_left_is_that_of_plain_torch_less_that_loss(found: FlightExplanation) -> None:
    event = found.facts.event
    path, other = trained()[0], trained(without=[WRONG])[0]
    places = [i for i in range(event.onset, event.end + 1) if i != BAD]
    level = event.usual + 3 * event.sigma
    excess = [sum(max(0.0, some[i] - level) for i in places) for some in (path, other)]
    peaks = [max(some[i] for i in places) - event.usual for some in (path, other)]
    (blamed,) = (c for c in found.culprits if c.step == WRONG)
    assert blamed.left == pytest.approx(max(excess[1] / excess[0], peaks[1] / peaks[0], 0.0), abs=1e-3)
    assert event.peak == pytest.approx(peaks[0], rel=1e-5)
    assert max(other[event.onset : event.end + 1]) > 10 * path[BACK], "the later one is there without it, too"


def test_a_saved_one_says_the_same(found: FlightExplanation, tmp_path: Path) -> None:
    found.save(tmp_path / "found.zarr")
    loaded = FlightExplanation.load(tmp_path / "found.zarr")
    assert (str(loaded), loaded.facts.event.apart) == (str(found), (BAD,))


def test_the_later_one_is_an_event_of_its_own(tmp_path: Path) -> None:
    _, recorder = trained(folder=tmp_path)
    later = ak.explain(recorder, step=BAD, treatments=False)
    assert (later.kind, later.blamed, later.facts.event.apart) == ("own batch", (BAD,), ())


@pytest.mark.parametrize("seed", [1, 4])
def test_sound_batches_are_no_events_of_their_own(seed: int, tmp_path: Path) -> None:
    """Half of a low event is what the harder ones of a run's batches have on any weights: two of them were said to be
    bad by themselves, and left out of what a weight decay had done."""
    draw = torch.Generator().manual_seed(seed)
    centres, batches = torch.randn(4, 16, generator=draw), []
    for _ in range(110):
        labels = torch.randint(4, (16,), generator=draw)
        batches.append((centres[labels] + 1.5 * torch.randn(16, 16, generator=draw), labels))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=40) as recorder:
        for step, batch in enumerate(batches):
            optimizer.param_groups[0]["weight_decay"] = 60.0 if step == 80 else 1e-2
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    found = ak.explain(recorder, step=82, treatments=False)
    assert (found.kind, found.hyperparameter, found.blamed) == ("hyperparameter", "weight_decay", ())
    assert found.facts.event.apart == ()
    assert "bad by" not in found.verdict


def test_a_value_that_is_apart_is_in_no_measure() -> None:
    values = [1.0, 1.1, 0.9] * 6 + [3.0, 2.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    whole = Event.of(values, 18)
    less = whole.less([20])
    assert (whole.highest, less.highest, whole.peak, less.peak) == (20, 18, 8.0, 2.0)
    assert (whole.onset, whole.usual, whole.sigma) == (less.onset, less.usual, less.sigma)
    calm = {18: 1.0, 19: 1.0, 20: 9.0, 21: 1.0}
    assert (whole.left(calm), less.left(calm)) == (1.0, 0.0)
    assert (whole.prevented(calm), less.prevented(calm)) == (False, True)
    assert (whole.height(calm), less.height(calm)) == (8.0, 0.0)
    assert less.left({18: 3.0, 19: 2.0, 20: 1.0}) == 1.0
    assert whole.less(()) is whole
