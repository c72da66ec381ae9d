"""Hessian products that are no numbers: told by name, at whichever step of a path they come, never taken for zero."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.api.contributions import Calibrated
from aftershock.api.reruns import relative_error
from aftershock.core.adamw import Hyper, Run
from aftershock.core.linear_step import displacement, step_size
from aftershock.core.responses import first_disagreement, first_lost
from aftershock.errors import WrongHessian
from aftershock.results.calibration import shared_offset

from .cases import classes

STEPS, LOST = 9, 2  # the check looks at steps 0, 4 and 8; the empty inputs come between


class Lengths(nn.Module):
    """The norm of a hidden state: of empty inputs its gradient is zero, and its second derivative no number."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return self.out(hidden.tanh()) + hidden.norm(dim=-1, keepdim=True) * torch.tensor([0.1, 0.2, 0.3]).to(x)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def run() -> tuple[ak.Path, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, draw = Lengths(), classes((4,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        loss_fn(model, draw()).backward()
        optimizer.step()
    batches = [draw() for _ in range(STEPS)]
    batches[LOST][0][0] = 0.0
    return ak.capture(model, optimizer, loss_fn).follow(batches), [draw() for _ in range(4)]


def test_a_check_of_it_fails(run: tuple[ak.Path, list[tuple[Tensor, Tensor]]]) -> None:
    path, _ = run
    with pytest.raises(WrongHessian, match="not a number where the gradient is one"):
        path.point.check(path.steps[LOST].batch)


@pytest.mark.parametrize(
    "ask",
    [
        lambda path, pool: path.replace(pool[1], at=0).response(pool[0]),
        lambda path, pool: path.skip(at=1).response(pool[0], answers=("semilinear",)),
        lambda path, pool: path.skip(at=1).response(pool[0], answers=("tangent",)),
        lambda path, pool: path.rank(pool, pool[0], verify=0),
        lambda path, pool: path.rank(pool, pool[0], by="response"),
        lambda path, pool: path.rank_examples(pool, pool[0], verify=1),
        lambda path, pool: path.explain(pool[0], verify=0),
    ],
    ids=["response", "semilinear", "tangent", "rank", "rank at the end", "rank_examples", "explain"],
)  # fmt: skip
def test_a_step_that_nobody_checked_is_named(
    run: tuple[ak.Path, list[tuple[Tensor, Tensor]]], ask: Callable[[ak.Path, list[tuple[Tensor, Tensor]]], object]
) -> None:
    path, pool = run
    assert LOST not in path.check().steps
    with pytest.raises(WrongHessian, match=f"at step {LOST} of the path a Hessian product is not a number"):
        ask(path, pool)


def test_what_does_not_pass_it_is_answered(run: tuple[ak.Path, list[tuple[Tensor, Tensor]]]) -> None:
    path, pool = run
    assert path.replace(pool[1], at=0).response(pool[0], answers=("exact",)).exact.notnull().all()
    assert path.replace(pool[1], at=LOST).response(pool[0]).semilinear.notnull().all()
    assert path.replace(pool[1], at=0).response(pool[0], horizon=LOST).tangent.notnull().all()
    assert path.rank(pool, pool[0], at=LOST).data["response"].notnull().all()


@pytest.mark.parametrize("eps", [0.0, 1e-50, 1e-8])
def test_nothing_over_nothing_does_not_move_and_no_other_nan_is_hidden(eps: float) -> None:
    run = Run.at(Hyper(1e-2, 0.9, 0.99, eps, 0.0, decoupled=True), 7)
    m, v, dm, dv = (torch.zeros(4) for _ in range(4))
    m[2:], v[2:], dm[1], dm[2], dv[3] = 1.0, 1.0, math.nan, math.nan, math.nan
    assert displacement(run, m, v, dm, dv).isnan().tolist() == [False, eps == 1e-8, True, True]
    assert displacement(run, m, v, dm, dv)[0] == step_size(run, m, v)[0] == 0


def test_a_prediction_that_is_no_number_is_infinitely_wrong() -> None:
    nan = math.nan
    exact, predicted = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1.0, nan, nan]])
    assert first_lost(predicted) == 2
    assert first_lost(exact) is None
    assert first_disagreement(exact, predicted, torch.zeros(3), gross=0.5, parted=0.2) == 2
    none = torch.tensor([[nan, 1.0, 1.0]])  # nothing was measured there
    assert first_disagreement(none, predicted, torch.zeros(3), gross=0.5, parted=0.2) == 2
    assert relative_error(predicted[0], exact[0]) == math.inf
    assert relative_error(predicted[0, :1], exact[0, :1]) == 0
    offset, _ = shared_offset(predicted.numpy(), 2 * exact.numpy())
    assert offset.tolist() == [1.0, 0.0, 0.0]


def test_calibration_of_contributions_knows_what_was_not_predicted() -> None:
    nan = math.nan
    readings = {"straight": torch.tensor([[nan, nan, nan], [0.1, 0.1, 0.1], [0.2, 0.2, 0.2]])}
    found = Calibrated.by(readings, torch.tensor([0.5, 0.3, 0.6]))
    assert found.factor == pytest.approx(1.0)
    assert found.held_out_error == math.inf
    assert math.isnan(Calibrated.by(readings, torch.tensor([nan, 0.3, nan])).held_out_error)
    nothing = {"straight": torch.full((3, 3), nan)}
    assert math.isnan(Calibrated.by(nothing, torch.tensor([0.5, 0.3, 0.6])).held_out_error)


def test_steps_without_a_prediction_are_told(run: tuple[ak.Path, list[tuple[Tensor, Tensor]]]) -> None:
    path, pool = run
    found = path.explain(pool[0], outcome=LOST, verify=2)
    data = found.data.copy(deep=True)
    data["contribution"][0] = math.nan
    told = type(found)(data)
    assert told.certificate.level == "bad"
    assert "1 steps have no prediction" in str(told.certificate)
    measured = [line.split()[0] for line in str(told).splitlines()[2:4]]
    assert sorted(measured) == ["0", "1"]  # one with its rerun alone
