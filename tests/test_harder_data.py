"""Bad batches where the data changed before them, and a loader that is stuck: what is the batch's, what the others'."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak

HARDER, BAD, STEPS = 140, 156, 176
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def drawn(seed: int, noise: float) -> list[Batch]:
    """Four classes; from one step on the inputs are noisier, as a curriculum has them."""
    draw = torch.Generator().manual_seed(seed)
    weights, found = torch.randn(10, 4, generator=draw), []
    for step in range(STEPS):
        x = torch.randn(32, 10, generator=draw)
        more = (noise if step >= HARDER else 0.1) * torch.randn(32, 10, generator=draw)
        found.append((x + more, (x @ weights).argmax(1)))
    return found


def run(batches: Sequence[Batch], rate: float = 5e-3, folder: Path | None = None) -> tuple[list[float], Any]:
    """The losses of a plain loop, and the recorder where there is a folder."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=rate), list[float]()
    recorder = None if folder is None else ak.FlightRecorder(net, optimizer, loss_fn, folder, triggers=())
    with recorder or nullcontext():
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_fn(net, batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if recorder is not None:
                recorder.step(batch, loss)
    return losses, recorder


@pytest.mark.parametrize("seed", [0, 1])
def test_a_bad_batch_among_harder_ones_is_the_spike(tmp_path: Path, seed: int) -> None:
    """Without it the harder ones stay, whose losses add up to half of the event and more: nobody was blamed."""
    batches = drawn(seed, 0.6)
    clean, _ = run(batches)
    batches[BAD] = (batches[BAD][0], (batches[BAD][1] + 1) % 4)
    losses, recorder = run(batches, folder=tmp_path)
    assert losses[BAD] > 2.5 * max(clean[HARDER:])  # the truth: with its own labels no other is so high
    assert statistics.median(clean[HARDER:]) > 2 * statistics.median(clean[HARDER - 50 : HARDER])
    found = ak.explain(recorder, step=BAD, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", (BAD,)), found.verdict
    assert "it is this batch" in found.verdict


def test_of_data_that_changed_before_it_is_not_said_that_they_change_at_the_explained_step(tmp_path: Path) -> None:
    """The value right before it happens to be usual, so that the event begins with it."""
    losses, recorder = run(drawn(1, 0.9), folder=tmp_path)
    asked, before = HARDER + 22, statistics.median(losses[HARDER - 50 : HARDER])
    assert statistics.median(losses[HARDER:asked]) > 3 * before
    assert losses[asked] > 2 * losses[asked - 1]
    found = ak.explain(recorder, step=asked, verify=0, placebos=0, treatments=False)
    assert found.kind == "shift"
    assert found.verdict.startswith(f"The data changed by step {asked} (most values before it are high, too): its loss")


def test_all_batches_of_a_loader_that_is_stuck_are_the_spike(tmp_path: Path) -> None:
    """The last of them is lower than what the weights that it has spoilt give to others."""
    batches, stuck = drawn(1, 0.1), range(HARDER, HARDER + 10)
    wrong = torch.randint(4, (32,), generator=torch.Generator().manual_seed(7))
    for step in stuck:
        batches[step] = (batches[HARDER][0], wrong)
    losses, recorder = run(batches, 2e-2, tmp_path)
    assert losses[stuck[-1]] < losses[stuck[-1] + 2]
    found = ak.explain(recorder, step=HARDER, verify=2, treatments=False)
    assert (found.kind, found.blamed) == ("own batch", tuple(stuck)), found.verdict
