"""A loss that draws random numbers may be high because of what it drew, and neither batch nor weights are bad."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidInput

STEPS, SPIKE = 90, 80
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """One noise level for the whole batch, as a diffusion model's: the low ones weigh much."""
    level = 0.005 + torch.rand(())
    noise = torch.randn_like(batch[1])
    return F.mse_loss(model(batch[0]) + 0.1 * noise, batch[1]) / level


def seeds() -> list[int]:
    """Those whose levels are ordinary, but for one at the step of the spike."""
    levels = {seed: float(torch.rand((), generator=torch.Generator().manual_seed(seed))) for seed in range(1000)}
    ordinary = iter([seed for seed, level in levels.items() if 0.5 < level < 0.9])
    low = next(seed for seed, level in levels.items() if level < 0.005)
    return [low if step == SPIKE else next(ordinary) for step in range(STEPS)]


@pytest.mark.parametrize("parts", [1, 2])
def test_what_was_drawn_is_neither_batch_nor_weights(tmp_path: Path, parts: int) -> None:
    generator, drawn = torch.Generator().manual_seed(0), seeds()
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches, losses, before = [], [], {}
    for _ in range(STEPS):
        x = torch.randn(16, 4, generator=generator).double()
        batches.append((x, x[:, :2] + 0.3 * torch.randn(16, 2, generator=generator).double()))
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=40, after=6) as recorder:
        for step, (x, y) in enumerate(batches):
            before[step] = copy.deepcopy(model)
            optimizer.zero_grad()
            micro, told = list(zip(x.chunk(parts), y.chunk(parts))), []
            for i, one in enumerate(micro, start=1):
                torch.manual_seed(drawn[step])
                recorder.before_forward()
                told.append(loss_fn(model, one) / parts)
                told[-1].backward()
                if i < parts:
                    recorder.micro(one, told[-1])
            optimizer.step()
            recorder.step(micro[-1], told[-1])
            losses.append(sum(loss.item() for loss in told))
    assert losses[SPIKE] > 20 * max(losses[20:SPIKE])

    def with_draw(seed: int) -> float:
        torch.manual_seed(seed)
        return loss_fn(before[SPIKE], batches[SPIKE]).item()

    other = statistics.median(with_draw(drawn[step]) for step in range(SPIKE - 8, SPIKE))
    assert other < 2 * max(losses[20:SPIKE])  # the batch is sound on the same weights
    found = ak.explain(recorder, step=SPIKE, treatments=False)
    assert (found.kind, found.blamed, found.skip) == ("draw", (), [])
    assert found.verdict.startswith(f"The random numbers that were drawn at step {SPIKE} are the spike")
    if parts == 1:
        assert f"of 8 earlier steps, it has {other:.3g} (median)" in found.verdict
    with pytest.raises(InvalidInput, match="no batch is to blame"):
        found.save_skip_list(tmp_path / "skip.json")


def some_examples(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over a third of the examples, as a masked language model's is over a part of the tokens."""
    seen = (torch.rand(len(batch[0])) < 0.35).double()
    return (seen * (model(batch[0]) - batch[1]).square().mean(1)).sum() / seen.sum()


def test_a_bad_example_that_most_draws_hide_is_not_laid_to_the_draw(tmp_path: Path) -> None:
    generator, bad, losses = torch.Generator().manual_seed(0), 3, []
    shown = {s: float(torch.rand(16, generator=torch.Generator().manual_seed(s))[bad]) < 0.35 for s in range(2 * STEPS)}
    drawn = next(seed for seed in range(STEPS, 2 * STEPS) if shown[seed])
    assert sum(shown[seed] for seed in range(SPIKE - 8, SPIKE)) < 4
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(16, 4, generator=generator).double() for _ in range(STEPS)]
    with ak.FlightRecorder(model, optimizer, some_examples, tmp_path, window=40, triggers=()) as recorder:
        for step, x in enumerate(batches):
            y = x[:, :2].clone()
            y[bad] += 100.0 * (step == SPIKE)
            if step == SPIKE:  # the truth: other batches are ordinary with the same draw
                torch.manual_seed(drawn)
                others = some_examples(model, (batches[SPIKE - 1], batches[SPIKE - 1][:, :2])).item()
            torch.manual_seed(drawn if step == SPIKE else step)
            optimizer.zero_grad()
            recorder.before_forward()
            loss = some_examples(model, (x, y))
            loss.backward()
            optimizer.step()
            recorder.step((x, y), loss)
            losses.append(loss.item())
    assert losses[SPIKE] > 100 * max(*losses[20:SPIKE], others)
    found = ak.explain(recorder, step=SPIKE, treatments=False)
    assert (found.kind, found.blamed) == ("unknown", ())
    assert "no batch is to blame" not in found.verdict.lower()
    assert "so that nobody can tell whether it is bad by itself" in found.verdict


def rooted(model: nn.Module, batch: Batch) -> Tensor:
    """NaN where the drawn number is too small for the batch."""
    return F.mse_loss(model(batch[0]), batch[1]) * torch.sqrt(torch.rand(()) + batch[0][0, 0])


@pytest.mark.parametrize("everyone", [False, True])
def test_what_is_not_finite_because_of_a_draw_is_not_laid_to_the_batch(tmp_path: Path, everyone: bool) -> None:
    """A draw of 0.2 where the others are 0.5 at least; other batches are finite with it, or they are not either."""
    generator = torch.Generator().manual_seed(0)
    levels = {seed: float(torch.rand((), generator=torch.Generator().manual_seed(seed))) for seed in range(200)}
    ordinary, low = (seed for seed, x in levels.items() if x > 0.5), (seed for seed, x in levels.items() if x < 0.2)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ak.FlightRecorder(model, optimizer, rooted, tmp_path) as recorder:
        for step in range(20):
            x = torch.randn(16, 4, generator=generator)
            x[0, 0] = -0.3 if everyone or step == 19 else 0.0
            batch, before, seed = (x, x[:, :2]), copy.deepcopy(model), next(low if step == 19 else ordinary)
            torch.manual_seed(seed)
            optimizer.zero_grad()
            recorder.before_forward()
            loss = rooted(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
            assert loss.isfinite() == (step < 19)
    torch.manual_seed(next(ordinary))
    assert rooted(before, batch).isfinite()
    found = ak.explain(recorder, step=19)
    assert (found.kind, found.skip) == ("not a number", [])
    said = "It is what was drawn at random: on the same weights the batch is finite with the random numbers of 8 of 8"
    beside = f"with its own {0 if everyone else 8} of 8 other batches are finite there"
    assert f"{said} other steps; {beside}" in found.verdict
