"""Proofs are made along the path, not at its first batch alone, and where a rerun disagrees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import HiddenState, WrongHessian

from .cases import make

STEPS = 9


class Branching(nn.Module):
    """Batches with a flag go through a branch with a detached factor, so that its second derivative is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        h = self.a(x)
        return self.b(h * (8 * h).exp().detach() if branch else torch.tanh(h))


def branching_path(at: int | None, lr: float = 3e-2) -> tuple[ak.Path, Any]:
    """A path in which step `at` alone takes the branch."""
    torch.manual_seed(0)
    model = Branching().double()
    draw = torch.Generator().manual_seed(1)

    def batch(branch: bool = False) -> tuple[Tensor, Tensor, bool]:
        x = torch.randn(12, 4, generator=draw, dtype=torch.float64)
        return x, torch.randint(0, 3, (12,), generator=draw), branch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    point = ak.capture(model, optimizer, lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1]))
    return point.follow([batch(step == at) for step in range(STEPS)]), batch()


@pytest.mark.parametrize("at", [STEPS // 2, STEPS - 1])
def test_a_branch_of_a_later_batch_is_found_and_named(at: int) -> None:
    path, probe = branching_path(at)
    assert path.point.check(path.steps[0].batch).error < 1e-4  # the first batch alone is honest
    for ask in (
        lambda: path.skip(0).response(probe),
        lambda: path.rank([probe], probe),
        lambda: path.explain(probe, verify=1),
        path.check,
    ):
        with pytest.raises(WrongHessian, match=f"at step {at} of the path"):
            ask()
    exact = path.skip(0).response(probe, answers=("exact",))
    assert np.isfinite(exact.exact.values).all()


def test_a_step_between_is_found_where_the_exact_run_and_its_prediction_part() -> None:
    """Step 3 of 9 is none of those that are proved beforehand; without the branch semilinear is off by 0.15."""
    path, probe = branching_path(3)
    assert path.check().steps == (0, 4, 8)
    push = torch.full((path.point.loss.layout.size,), 0.2, dtype=torch.float64)
    with pytest.raises(WrongHessian, match="at step 3 of the path"):
        path.perturb(push).response(probe)
    honest, probe = branching_path(None)
    assert honest.perturb(push).response(probe).data["answer"].size == 3


def test_few_steps_are_proved_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    real, asked = ak.TrainingPoint._lifted, []
    monkeypatch.setattr(ak.TrainingPoint, "_lifted", lambda self, m: (asked.append(self), real(self, m))[1])
    for steps, proofs in ((1, 1), (2, 2), (3, 3), (12, 3)):
        asked.clear()
        path = case.path(steps)
        path.check()
        path.check()
        assert len(asked) == proofs
        assert len(path.check().steps) == proofs


def test_a_failed_proof_stays_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = branching_path(STEPS - 1)
    with pytest.raises(WrongHessian):
        path.check()
    monkeypatch.setattr(ak.TrainingPoint, "_lifted", lambda *_: pytest.fail("it was checked again"))
    with pytest.raises(WrongHessian, match=f"at step {STEPS - 1} of the path"):
        path.check()


class LateStatistics(nn.Module):
    """Normalizes by the batch for some steps, and by running statistics from then on; these move on, or stand."""

    def __init__(self, first: int, frozen: bool) -> None:
        super().__init__()
        self.a, self.b, self.first, self.frozen = nn.Linear(4, 5), nn.Linear(5, 3), first, frozen
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.a(x)
        late = step >= self.first
        before = self.mean.clone()
        if not (late and self.frozen):
            self.mean.copy_(0.9 * before + 0.1 * h.detach().mean(0))
        return self.b(torch.tanh(h - (before if late else h.mean(0))))


@pytest.mark.parametrize("frozen", [False, True])
def test_running_statistics_that_are_used_late_are_found(frozen: bool) -> None:
    torch.manual_seed(0)
    model = LateStatistics(5, frozen).double()
    point = ak.capture(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1])
    )
    data = [(torch.randn(6, 4).double(), torch.randint(0, 3, (6,)), step) for step in range(STEPS)]
    path, early = point.follow(data), point.follow(data[:4])
    assert path.check().hidden == ("mean",)
    assert early.check().hidden == ()
    found = path.skip(0).response(data[0])
    assert found.data["answer"].values.tolist() == ["exact"]
    assert "mean" in str(found.certificate)
    with pytest.raises(HiddenState, match="mean"):
        path.explain(data[0])
    # a probe that reads the statistics late is refused on a path whose own losses do not
    assert early.check().hidden == ()
    with pytest.raises(HiddenState, match="mean"):
        early.skip(0).response((*data[0][:2], 9), answers=("exact", "tangent"))
