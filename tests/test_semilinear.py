"""The semilinear response: AdamW exact, the network linear. Exact for quadratics, tame where v is small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.state import JointState, Tangent, difference
from aftershock.core.sweeps import transit_, transit_semilinear_

from .cases import CASES, make

SCALES = [1e-3, 1.0]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("change", ["replace", "zero", "reset m", "reset v", "set"])
def test_exact_for_quadratic_losses(change: str, clip: float | None) -> None:
    """A quadratic's gradient is linear, so nothing is left to approximate, at any scale and horizon."""
    case = make("quadratic")
    path = case.point().follow(case.batches(8), clip=clip)
    changes = {
        "replace": path.replace(case.batches(3), 1),
        "zero": path.zero(1),
        "reset m": path.reset(1, "m"),
        "reset v": path.reset(1, "v"),
        "set": path.set(1, lr=0.1),
    }
    response = changes[change].response(case.batch(), scales=SCALES, answers=("exact", "semilinear", "tangent"))
    exact, found = response.exact.values, response.semilinear.values
    assert np.abs(exact).max() > 0
    np.testing.assert_allclose(found, exact, rtol=1e-7, atol=1e-12)
    assert np.abs(response.tangent.values - exact).max() > 1e-6, "the tangent is exact too: the test proves nothing"


def test_nothing_stays_nothing_under_clipping() -> None:
    """In float32 torch's norm by parameter and one over the whole gradient round apart; zero stays zero."""
    rounded_apart = 0
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(6)]
        point = ak.capture(model, optimizer, lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]))
        path = point.follow(batches, clip=0.05)
        for step in path.steps:
            state = path.trajectory.state(step.index)
            at = path.trajectory.linearize(step, state)
            rounded_apart += at.linear.clip.binds and float(at.graph.raw.norm()) != at.linear.clip.norm
            dx = Tangent(*(torch.zeros_like(state.theta)[None] for _ in range(3)))
            transit_semilinear_(at, dx)
            assert not any(part.any() for part in (dx.theta, dx.m, dx.v))
    assert rounded_apart


class Heads(nn.Module):
    """One of two linear models, by the batch: the other one's step counts stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2) for _ in range(2)])

    def forward(self, batch: tuple[Tensor, Tensor, int]) -> Tensor:
        return (self.heads[batch[2]](batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("trained", [0, 2, 9])
@pytest.mark.parametrize("change", ["skip", "another head"])
def test_step_counts_are_part_of_a_row(change: str, trained: int) -> None:
    """Other counts are other bias corrections at every later step; on a quadratic nothing else is left to miss."""
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def draw(head: int) -> tuple[Tensor, Tensor, int]:
        return torch.randn(6, 4).double(), torch.randn(6, 2).double(), head

    for i in range(trained):
        optimizer.zero_grad()
        model(draw(i % 2)).backward()
        optimizer.step()
    optimizer.zero_grad()
    point = ak.capture(model, optimizer, lambda m, batch: m(batch), unused="skip")
    path = point.follow([draw(i % 2) for i in range(9)])
    changed = path.skip(1) if change == "skip" else path.replace([draw(0), draw(1)], 1)
    response = changed.response(ak.accumulate([draw(0), draw(1)]), answers=("exact", "semilinear"))
    exact, found = response.exact.values, response.semilinear.values
    assert np.abs(exact).max() > 1e-3
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-10 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["tanh_mlp", "adam_coupled", "maximize", "two_groups", "clipped"])
def test_one_linear_step_with_other_counts(name: str) -> None:
    """f'(x) − f(x) + Df'(x) δx, f' torch's own step with other counts; its derivative by central differences."""
    case = make(name)
    path = case.path(3)
    dynamics, step, state = path.trajectory.dynamics, path.steps[1], path.trajectory.state(1)
    at = dynamics.linearize(step, state)
    (dx,) = path.skip(0).difference()
    lag = (1,) + (0,) * (len(state.counts) - 2) + (-1,)  # the first is behind, the last ahead
    late = replace(state, counts=tuple(now - behind for now, behind in zip(state.counts, lag)))

    def stepped(scale: float) -> JointState:
        moved = replace(late, **{c: getattr(state, c) + scale * getattr(dx, c) for c in ("theta", "m", "v")})
        raw = at.graph.raw + scale * at.graph.products(dx.theta[None])[0]
        return dynamics.apply(step, moved, raw, at.graph.present)[0]

    control = dynamics.apply(step, state, at.graph.raw, at.graph.present)[0]
    exact = difference(stepped(1.0), control)
    shift, slope = difference(stepped(0.0), control), difference(stepped(1e-4), stepped(-1e-4)) * 0.5e4
    assert shift.theta.norm() > 1e-3 * slope.theta.norm() > 0
    found, alone, semilinear = dx[None].clone(), dx[None].clone(), dx[None].clone()
    transit_(at, found, [lag])
    transit_(at, alone, [lag], shifted=[False])
    transit_semilinear_(at, semilinear, [lag])
    for channel in ("theta", "m", "v"):
        a, b = getattr(shift, channel), getattr(slope, channel)
        size = float(b.abs().max())
        torch.testing.assert_close(getattr(found, channel)[0], a + b, rtol=1e-5, atol=1e-6 * size)
        torch.testing.assert_close(getattr(alone, channel)[0], b, rtol=1e-5, atol=1e-6 * size)
        torch.testing.assert_close(getattr(semilinear, channel)[0], getattr(exact, channel), rtol=1e-7, atol=1e-11)


def test_a_skip_forward_and_by_the_adjoint() -> None:
    """What a step adds by the adjoint, whose counts are its own, is minus the tangent of skipping it."""
    case = make("tanh_mlp")
    case.optimizer.param_groups[0]["lr"] = 1e-4  # little feedback
    for _ in range(300):  # one gradient is little of v, so that its root hardly bends
        case.optimizer.zero_grad()
        case.loss_fn(case.model, case.batch()).backward()
        case.optimizer.step()
    for held in case.optimizer.state.values():
        held["step"].fill_(5.0)  # and yet counts matter
    path, probe = case.path(8), case.batch()
    adjoint = -path.explain(probe, change="skip", verify=0).data["contribution"].sum("channel").values
    forward = [path.skip(at).response(probe, answers=("tangent",)).tangent.values[0, 0, -1] for at in range(8)]
    np.testing.assert_allclose(forward, adjoint, rtol=0.01, atol=0.005 * np.abs(adjoint).max())


@pytest.mark.parametrize("name", CASES)
def test_one_step_against_torchs_own(name: str) -> None:
    """f(x + δx) − f(x) with the gradient g + H δθ, by torch's step on both sides."""
    case = make(name)
    path = case.path(3)
    dynamics, step, state = path.trajectory.dynamics, path.steps[1], path.trajectory.state(1)
    linearized = dynamics.linearize(step, state)
    (dx,) = path.replace([case.batch()], 0).difference()
    raw, present = linearized.graph.raw, linearized.graph.present
    moved = replace(state, theta=state.theta + dx.theta, m=state.m + dx.m, v=state.v + dx.v)
    shocked, _ = dynamics.apply(step, moved, raw + linearized.graph.products(dx.theta[None])[0], present)
    expected = difference(shocked, dynamics.apply(step, state, raw, present)[0])
    found = dx[None].clone()
    transit_semilinear_(linearized, found)
    for channel in ("theta", "m", "v"):
        a, b = getattr(found, channel)[0], getattr(expected, channel)
        assert b.norm() > 0
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-11 * float(b.abs().max()) + 1e-16)


def test_new_tokens_early_in_training() -> None:
    """Rows with v = 0 make the linear answers explode; the semilinear one stays close to the truth."""
    case = make("untouched_rows")
    for group in case.optimizer.param_groups:
        group["eps"] = 1e-8
    path = case.path(6)
    change = path.replace([torch.randint(3, 6, (4, 6))])
    probe = torch.randint(2, 6, (4, 6))  # it sees the new rows
    response = change.response(probe, answers=("exact", "semilinear", "tangent"))
    error = response.certificate.errors["nrmse"].isel(change=0, scale=0)
    assert float(error.sel({"answer": "tangent"})) > 10
    assert float(error.sel({"answer": "semilinear"})) < 0.2
    assert "Semilinear at scale 1: trust it" in str(response)
