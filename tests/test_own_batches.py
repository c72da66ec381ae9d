"""Several bad batches in a row, as a broken file gives them: each is the spike, and they are told together."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidInput

WARM, STEPS, BAD = 300, 360, 344  # a step's number counts the updates before it
KINDS = 12
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def recorded(folder: Path, bad: Mapping[int, float], rate: float = 2e-3) -> tuple[ak.FlightRecorder, list[float]]:
    """A classifier; where a batch is bad its labels, or this share of them, are those of other classes."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, KINDS)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    centres = torch.randn(KINDS, 16, generator=generator).double()
    losses = []
    recorder = ak.FlightRecorder(model, optimizer, loss_fn, folder, window=40, triggers=())
    for step in range(STEPS):
        y = torch.randint(KINDS, (32,), generator=generator)
        x = centres[y] + 0.5 * torch.randn(32, 16, generator=generator).double()
        wrong = torch.arange(32) < 32 * bad.get(step, 0)
        batch = (x, torch.where(wrong, (y + 5) % KINDS, y))
        if step == WARM:
            recorder.__enter__()
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step >= WARM:
            recorder.step(batch, loss)
    recorder.__exit__(None, None, None)
    return recorder, losses


@pytest.mark.parametrize("explained", [BAD, BAD + 1])
def test_batches_that_are_bad_one_after_the_other_are_named_together(tmp_path: Path, explained: int) -> None:
    bad = {BAD: 1.0, BAD + 1: 1.0}
    recorder, losses = recorded(tmp_path, bad)
    assert min(losses[i] for i in bad) > 10 * max(losses[WARM:BAD])
    found = ak.explain(recorder, step=explained)
    assert (found.kind, found.blamed) == ("own batch", (BAD, BAD + 1))
    assert found.verdict.startswith(f"The batches of steps {BAD} and {BAD + 1} themselves are the spike")
    assert "There is no spike without them, and without any of 8 other steps it stays." in found.verdict
    assert f"the batches of steps {BAD}, {BAD + 1} left out together  prevents it" in str(found)
    assert f"the batch of step {explained} left out" not in str(found)
    assert found.report(tmp_path / "page.html").exists()
    _, clean = recorded(tmp_path / "clean", {})  # the truth: the same batches with their own labels
    assert max(clean[BAD:]) < 0.1 * losses[BAD]


def test_a_bad_batch_that_is_lower_because_its_like_was_trained_on_is_named_with_the_first(tmp_path: Path) -> None:
    bad = (BAD, BAD + 6, BAD + 12)
    recorder, losses = recorded(tmp_path, dict.fromkeys(bad, 1.0), rate=2e-2)
    assert losses[bad[2]] < 0.25 * losses[BAD]
    _, others = recorded(tmp_path / "last", {bad[2]: 1.0}, rate=2e-2)  # the last alone: it is as bad as the first
    assert others[bad[2]] > 0.8 * losses[BAD]
    found = ak.explain(recorder, step=BAD, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", bad)


def test_a_bad_batch_that_is_far_lower_and_still_far_from_ordinary_is_named_with_the_others(tmp_path: Path) -> None:
    """With two in five of its labels wrong it is a quarter as high as the first: a quarter of the event was left, and
    nobody was blamed."""
    bad = {BAD: 1.0, BAD + 1: 1.0, BAD + 2: 0.4}
    recorder, losses = recorded(tmp_path, bad, rate=2e-2)
    assert 0.5 * losses[BAD] > losses[BAD + 2] > 100 * max(losses[WARM:BAD])
    found = ak.explain(recorder, step=BAD, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", tuple(bad))


def test_a_bad_shard_that_ends_is_no_shift_of_the_data(tmp_path: Path) -> None:
    bad = range(BAD, BAD + 6)
    recorder, losses = recorded(tmp_path, dict.fromkeys(bad, 1.0))
    assert max(losses[BAD + 6 :]) < 0.5 * min(losses[i] for i in bad)  # what follows is not like it
    found = ak.explain(recorder, step=BAD, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", tuple(bad))
    assert "The data changed" not in found.verdict


def test_the_last_of_a_bad_shard_is_compared_with_batches_before_it(tmp_path: Path) -> None:
    """Most of the eight batches right before it are as bad, so that they are high on any weights."""
    bad = range(BAD - 6, BAD + 1)
    recorder, losses = recorded(tmp_path, dict.fromkeys(bad, 1.0))
    assert max(losses[BAD + 1 :]) < 0.1 * losses[BAD]  # the weights are sound
    found = ak.explain(recorder, step=BAD, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", tuple(bad))
    assert "the weights are bad" not in found.verdict


def test_of_a_bad_batch_on_bad_weights_it_is_not_said_that_it_is_sound(tmp_path: Path) -> None:
    recorder, losses = recorded(tmp_path, dict.fromkeys(range(BAD - 6, BAD + 1), 1.0), rate=2e-2)
    assert min(losses[BAD + 1 : BAD + 4]) > 100 * statistics.median(losses[WARM : BAD - 6])  # the weights are bad, too
    found = ak.explain(recorder, step=BAD, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("unknown", ())
    assert "the weights are bad, and on earlier weights it has" in found.verdict


def test_of_data_that_change_slowly_it_is_not_said_that_they_change_at_the_explained_step(tmp_path: Path) -> None:
    recorder, losses = recorded(tmp_path, {step: (step - BAD + 1) / 8 for step in range(BAD, STEPS)})
    assert losses[BAD + 4] > losses[BAD + 2] > 10 * max(losses[WARM:BAD])  # it is there before the explained step
    found = ak.explain(recorder, step=BAD + 4, verify=2, treatments=False)
    assert found.kind == "shift"
    assert "placebo" not in str(found.certificate)  # no step was run without
    onset = found.facts.event.onset
    assert BAD <= onset <= BAD + 2
    assert found.verdict.startswith(
        f"The data changed by step {BAD + 4} (the loss is high from step {onset} on): its loss is {losses[BAD + 4]:.3g}"
    )
    assert "the data changed here" not in found.verdict


def test_one_bad_batch_is_named_alone(tmp_path: Path) -> None:
    recorder, _ = recorded(tmp_path, {BAD: 1.0})
    found = ak.explain(recorder, step=BAD)
    assert (found.kind, found.blamed) == ("own batch", (BAD,))


EVERY, WRONG = 8, 117  # a second source comes every so often; this one of its batches has wrong labels


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[ak.FlightRecorder, list[float]]:
    return with_a_harder_source(tmp_path_factory.mktemp("flight"), EVERY)


def with_a_harder_source(folder: Path, every: int, **options: int) -> tuple[ak.FlightRecorder, list[float]]:
    """A classifier of two sources, of which the one that comes every so often is never learnt as well as the other."""
    generator = torch.Generator().manual_seed(81)
    centres, losses = torch.randn(2, 4, 10, generator=generator), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, folder, triggers=(), **options) as recorder:
        for step in range(150):
            hard = int(step % every == WRONG % every)
            y, x = torch.randint(4, (32,), generator=generator), torch.zeros(32, 20)
            noise = 0.6 * torch.randn(32, 10, generator=generator)
            x[:, 10 * hard : 10 * hard + 10] = (0.7 if hard else 1.5) * centres[hard, y] + noise
            batch = (x, (y + 1) % 4 if step == WRONG else y)
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            recorder.step(batch, loss)
    return recorder, losses


def test_a_batch_of_a_harder_source_that_is_as_high_as_others_of_it_is_not_bad(
    two_sources: tuple[ak.FlightRecorder, list[float]], tmp_path: Path
) -> None:
    recorder, losses = two_sources
    asked = WRONG + EVERY
    sound = losses[61:WRONG:EVERY]
    assert min(sound) > 20 * statistics.median(losses[61:WRONG]), "the source is always high"
    assert losses[asked] < max(sound), "and this batch is as others of it"
    found = ak.explain(recorder, step=asked, treatments=False)
    assert (found.kind, found.blamed) == ("source", ()), found.verdict
    assert "A harder source of data keeps coming back: no batch is to blame" in found.verdict
    with pytest.raises(InvalidInput, match=r"no batch is to blame \(source\), so no skip list is written"):
        found.save_skip_list(tmp_path / "skip.json")


def test_a_bad_batch_of_a_harder_source_is_named(two_sources: tuple[ak.FlightRecorder, list[float]]) -> None:
    found = ak.explain(two_sources[0], step=WRONG, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", (WRONG,)), found.verdict


def likelihood(model: nn.Module, batch: Batch) -> Tensor:
    """−log of a normal density, whose spread is learnt: the scale of this loss grows as it shrinks."""
    mean, log_spread = model(batch[0]).chunk(2, dim=1)
    return (0.5 * ((batch[1] - mean) / log_spread.exp()).square() + log_spread).sum(1).mean()


def test_of_a_kind_that_came_once_before_and_was_as_high_it_is_said_that_the_kind_may_be(tmp_path: Path) -> None:
    """Every 30 steps: a window of 40 holds one of them before the explained one, which is fewer than make a kind."""
    recorder, losses = with_a_harder_source(tmp_path, 30, window=40)
    sound, before = WRONG - 30, WRONG - 60
    assert min(losses[before], losses[sound]) > 100 * statistics.median(losses[before + 1 : sound])
    found = ak.explain(recorder, step=sound, verify=2, treatments=False)
    assert found.kind == "own batch"
    said = f"the earlier batch whose inputs are most like its own had {losses[before]:.3g} when it came"
    assert f"it is this batch, or all of a kind that is rare here: {said}, so that it is on no" in found.verdict
    assert found.skip == []
    with pytest.raises(InvalidInput, match=rf"the batch of step {sound} may be a sound one of a rare kind, so no skip"):
        found.save_skip_list(tmp_path / "skip.json")
    wrong = ak.explain(recorder, step=WRONG, verify=2, treatments=False)
    assert (wrong.blamed, wrong.skip) == ((WRONG,), [WRONG])
    assert ": it is this batch. " in wrong.verdict


def test_bad_targets_of_a_likelihood_are_bad_by_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, bad = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 6)), 190
    optimizer, weights = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.randn(8, 3)
    losses, first = [], math.nan
    with ak.FlightRecorder(model, optimizer, likelihood, tmp_path) as recorder:
        inputs = torch.randn(210, 32, 8)
        targets = torch.tanh(inputs @ weights) + 0.05 * torch.randn(210, 32, 3)
        targets[bad] *= -20
        for step, batch in enumerate(zip(inputs, targets)):
            loss = likelihood(model, batch)
            if step == bad - 64:
                first = float(likelihood(model, (inputs[bad], targets[bad])).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            recorder.step(batch, loss)
    assert 100 < first < 0.5 * losses[bad], "far from ordinary on earlier weights, and less than half of it"
    found = ak.explain(recorder, step=bad, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", (bad,)), found.verdict


def test_on_the_first_weights_of_a_run_every_batch_is_high_and_none_is_bad(tmp_path: Path) -> None:
    """Independent batches, the losses of which have just come down when step 17 has a high one, as some do later."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 16, generator=generator)
    generator.manual_seed(0)
    torch.manual_seed(0)
    sizes = (16, 40, 40, 40, 40)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(40, 8))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95)), []
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, triggers=()) as recorder:
        for _ in range(34):
            y = torch.randint(8, (24,), generator=generator)
            batch = (centres[y] + 1.2 * torch.randn(24, 16, generator=generator), y)
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            recorder.step(batch, loss)
    assert min(losses[:13]) > 1.1 > max(losses[14:17]), "only the last weights before it are not high for all"
    assert losses[17] > 1.4
    assert sum(loss > 1 for loss in losses[18:]) == 3
    found = ak.explain(recorder, step=17, treatments=False)
    assert found.kind != "own batch", found.verdict
    assert not found.blamed, found.verdict
    assert "The batch of step 17 beside others: its loss is 1.46 (usual 0.638)" in found.verdict
    assert "nobody can tell whether it is bad by itself" in found.verdict


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("rate", [3e-3, 1e-2])
def test_of_wrong_labels_in_a_run_that_becomes_sure_nothing_false_is_said(
    tmp_path: Path, rate: float, shift: bool
) -> None:
    """Their loss grows with the run, so that they have less than half of it on earlier weights, as sound batches may on
    weights that are bad for them."""
    generator = torch.Generator().manual_seed(71)
    centres, bad, losses = torch.randn(6, 20, generator=generator), 30, []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    batches = []
    for step in range(bad + 20):
        y = torch.randint(6, (24,), generator=generator)
        wrong = step >= bad if shift else step == bad
        batches.append((centres[y] + torch.randn(24, 20, generator=generator), (y + 3) % 6 if wrong else y))
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, triggers=()) as recorder:
        for step, batch in enumerate(batches):
            if step == bad // 2:
                half_way = float(loss_fn(model, batches[bad]).detach())
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            recorder.step(batch, loss)
    assert 1.5 * losses[bad // 2] < half_way < 0.6 * losses[bad]
    found = ak.explain(recorder, step=bad, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("unknown", ())
    if shift:
        assert "the data changed here, or the weights are bad for all that was not just trained on" in found.verdict
    else:
        assert "so that nobody can tell whether it is bad by itself" in found.verdict


def test_batches_of_its_kind_that_were_wrong_make_no_harder_source(tmp_path: Path) -> None:
    """A rare source, mislabelled at three of its steps: when it is sound again, what the model has learnt is wrong. The
    wrong ones, six times as high, are most like it; "a harder source, and nothing to skip" was said, because another
    bad batch soon after it hides what they did."""
    wrong, back = (63, 77, 91), 111
    rare = {*range(21, 92, 7), back, back + 9}
    torch.manual_seed(33)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    losses = []
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=64, clip=1.0) as recorder:
        for step in range(130):
            draw = torch.Generator().manual_seed(step + 777 * 33)
            tokens = torch.randint(*((40, 50) if step in rare else (0, 40)), (40, 4), generator=draw)
            targets = (tokens[:, 0] + 2 * (step in wrong)) % 5
            batch = tokens, targets[torch.randperm(40, generator=draw)] if step == back + 4 else targets
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.step(batch, loss, norm=norm)
            losses.append(loss.item())
    assert min(losses[step] for step in wrong) > 5 * losses[back] > 50 * statistics.median(losses[92:back])
    found = ak.explain(recorder, step=back, treatments=False)
    assert found.kind != "source", found.verdict
    assert "no batch is to blame" not in found.verdict
    assert found.kind == "group"
    assert set(found.blamed) < set(wrong), "the wrong ones, as far as they did it"


def test_a_bad_batch_of_an_epoch_before_is_bad_by_itself_again(tmp_path: Path) -> None:
    """The weights in between were trained on it, so that it is far lower there than it is now."""
    torch.manual_seed(0)
    generator, epoch, bad = torch.Generator().manual_seed(1), 60, 10
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    centres, batches = torch.randn(6, 16, generator=generator), []
    for i in range(epoch):
        y = torch.randint(6, (8,), generator=generator)
        x = centres[y] + torch.randn(8, 16, generator=generator)
        batches.append((6 * x, (y + 2) % 6) if i == bad else (x, y))
    losses = []
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, triggers=()) as recorder:
        for batch in [*batches, *batches]:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
            losses.append(float(loss.detach()))
    again = epoch + bad
    assert losses[again] > 10 * statistics.median(losses[epoch:again])
    found = ak.explain(recorder, step=again)
    assert (found.kind, found.blamed) == ("own batch", (again,)), found.verdict
