"""Three mislabelled batches of a rare kind of data that raise the loss only together, in a real run; plain torch says
what is left without them."""

from __future__ import annotations

import copy
from itertools import combinations
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import aftershock as ak

BAD, SPIKE, LAST = (62, 66, 70), 90, 94
Batch = tuple[torch.Tensor, torch.Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[Batch]:
    """Every fourth is of the rare kind; none after the bad ones, until that which spikes."""
    draws = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 16, generator=draws)

    def draw(rare: bool, wrong: bool = False) -> Batch:
        labels = torch.randint(4, (32,), generator=draws)
        inputs = torch.zeros(32, 2, 16)
        inputs[:, int(rare)] = centres[labels] + 0.7 * torch.randn(32, 16, generator=draws)
        return inputs.flatten(1), (labels + 2) % 4 if wrong else labels

    return [draw(t == SPIKE or (t % 4 == 2 and t <= BAD[-1]), t in BAD) for t in range(LAST + 1)]


def losses_without(some: list[Batch], out: tuple[int, ...], model: nn.Module) -> dict[int, float]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.06)
    found = {}
    for t, batch in enumerate(some):
        if t not in out:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            found[t] = loss.item()
    return found


def test_three_that_act_together_are_blamed_together(tmp_path: Path) -> None:
    some = batches()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.06)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path / "flight", window=48) as recorder:
        for batch in some:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    whole = losses_without(some, (), start)[SPIKE]
    left = {out: losses_without(some, out, start)[SPIKE] / whole for size in (1, 3) for out in combinations(BAD, size)}
    assert min(left[(step,)] for step in BAD) > 0.5
    assert left[BAD] < 0.1
    found = ak.explain(recorder, step=SPIKE, treatments=False)
    assert (found.kind, found.blamed) == ("group", BAD), found.verdict
    assert found.verdict.startswith("Steps 62, 66 and 70 did it together: without them ")
