"""Exact rows that one recorded pass computes: the answers of rows alone, the control among them.

Where there is no GPU a stand-in runs the recorded program again in the recording's own place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.core import planning, playback
from aftershock.core.playback import Played
from aftershock.core.probe import Reader
from aftershock.core.randomness import RandomState
from aftershock.core.rollout import Rows, rollout
from aftershock.core.structure import flatten

WIDTH, STEPS = 6, 5
Batch = tuple[Tensor, Tensor]


class Rerun:
    """A recording whose graph is the program itself."""

    nbytes = 0

    def __init__(self, work: Any, theta: Tensor, batch: Any) -> None:
        self.work, self.theta, self.passes = work, theta, 0
        leaves, self.structure = flatten(batch)
        self.own = [x.clone() for x in leaves]

    def faithful(self, *_: object) -> bool:
        return True

    def run(
        self, theta: Tensor, buffers: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomState
    ) -> RandomState:
        return self.play(theta, buffers, inputs, random).random

    def play(
        self, theta: Tensor, buffers: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomState
    ) -> Played:
        self.passes += 1
        if theta.data_ptr() != self.theta.data_ptr():
            self.theta.copy_(theta)
        for place, given in zip(self.own, inputs):
            place.copy_(given)
        work = self.work
        parameters, program = work.make(self.theta, self.structure.unflatten(self.own))
        (self.result, grads, norm), after, drawn = work.loss.call(
            parameters, buffers, random, program, derivative=work.derivative, evaluating=work.evaluating
        )
        present = tuple(grad is not None for grad in grads)
        flat = work.loss.layout.join(grads) if grads else None
        return Played(self.result, flat, present, norm, after, drawn)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LARGE", 0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(playback, "Recording", Rerun)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, WIDTH, generator=generator).double(), torch.randint(3, (4,), generator=generator)
    return x.to(DEVICE), y.to(DEVICE)


def point(*, rows: bool, dropout: float = 0.0) -> ak.TrainingPoint:
    """A trained network, on which rows are computed together or alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(4):
        optimizer.zero_grad()
        loss_fn(model, batch(seed)).backward()
        optimizer.step()
    found = ak.capture(model, optimizer, loss_fn)
    found.loss.sharing.wanted = found.loss.player.wanted = rows
    return found


def paths(**options: Any) -> tuple[ak.Path, ak.Path]:
    """The same path twice, the first with rows in one pass."""
    torch.manual_seed(1)
    made = point(rows=True, **options), point(rows=False, **options)
    clip = 0.5
    first, second = (each.follow([batch(seed) for seed in range(10, 10 + STEPS)], clip=clip) for each in made)
    return first, second


def passes(path: ak.Path, kind: str) -> int:
    """How often the recording was played."""
    known = path.trajectory.dynamics.loss.player._looked
    return sum(getattr(recording, "passes", 1) for shape, recording in known if shape.kind == kind and recording)


@pytest.mark.parametrize("count", [3, 8, 20])
def test_rows_in_one_pass_answer_as_rows_alone(count: int) -> None:
    played, alone = paths()
    pool = [batch(seed) for seed in range(30, 30 + count - 1)] + [batch(10)]  # the last one changes nothing
    found, truth = (path.replace(pool).response(batch(99), answers=["exact"]) for path in (played, alone))
    player = played.trajectory.dynamics.loss.player
    assert player.rows is not None
    assert len(player.rows) == {3: 4, 8: 9, 20: 11}[count]
    assert passes(played, "gradients")
    assert passes(played, "values")
    np.testing.assert_allclose(found.exact, truth.exact, rtol=1e-9, atol=1e-13)  # float64, sums in another order
    assert not found.exact.isel(change=-1).any(), "a change of nothing is nothing"
    assert not player.occupied


def test_scales_and_a_probe_of_each_steps_own_loss() -> None:
    played, alone = paths()
    pool, scales = [batch(seed) for seed in range(30, 34)], [0.5, 1.0]
    for probe in (ak.own_loss, batch(99)):
        found, truth = (path.replace(pool).response(probe, scales=scales) for path in (played, alone))
        np.testing.assert_allclose(found.data["response"], truth.data["response"], rtol=1e-8, atol=1e-12)
        assert (found.data["clip_switched"] == truth.data["clip_switched"]).all()
    assert passes(played, "gradients")


def test_a_row_that_is_not_finite_takes_no_other_with_it() -> None:
    played, alone = paths()
    pool = [batch(seed) for seed in range(30, 36)]
    found = []
    for path in (played, alone):
        change, watch = path.replace(pool), path.watch(0, batch(99), None)
        change.response(batch(99), answers=["exact"])  # what is recorded is recorded
        starts = [change._endpoint(edit, 1.0) for edit in change.edits]
        starts[2].theta[0] = torch.nan
        reader = Reader(path.trajectory, watch.probe)
        moments = rollout(path.trajectory, 1, Rows(starts, owned=True), STEPS)
        found.append(torch.stack([reader.exact(moment) for moment in moments]))
    assert passes(played, "gradients")
    assert found[0][:, 2].isinf().all()
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-13)


def test_dropout_has_one_mask_for_all_rows() -> None:
    played, alone = paths(dropout=0.5)
    pool = [batch(seed) for seed in range(30, 36)]
    found, truth = (path.replace(pool).response(batch(99), answers=["exact"]) for path in (played, alone))
    np.testing.assert_allclose(found.exact, truth.exact, rtol=1e-9, atol=1e-13)


def test_the_place_has_one_tenant() -> None:
    played, _ = paths()
    change = played.replace([batch(seed) for seed in range(30, 36)])
    change.response(batch(99), answers=["exact"])
    player = played.trajectory.dynamics.loss.player

    class Tenant:
        pass

    tenant = Tenant()
    assert player.takes(7)
    player.lease(tenant)
    assert player.occupied
    assert not player.takes(7)
    del tenant
    assert player.takes(7)
