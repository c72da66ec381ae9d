"""The semilinear response: AdamW exact, the network linear. Exact for quadratics, tame where v is small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aftershock.core.state import difference
from aftershock.core.sweeps import transit_semilinear_

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
    transit_semilinear_(linearized, state, found)
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
