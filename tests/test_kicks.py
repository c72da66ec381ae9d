"""Adjoint scores with kicks, and their midpoint readout, against a forward recursion written from the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import aftershock as ak
from aftershock.api.contributions import EDITS
from aftershock.core import curves, kicks
from aftershock.core.adamw import Hyper, Run
from aftershock.core.contributions import BentReadout, Layers, contributions
from aftershock.core.linear_step import displacement, displacement_by_v, sensitivities
from aftershock.core.scores import AtOnce, adjoint, mean_write, midpoint_slopes, pool_scores

from .cases import CASES, Case, make
from .oracles import KickOracle

CPU = torch.device("cpu")


def straight(slope: Tensor) -> BentReadout:
    """A readout without curvature."""
    return BentReadout(slope[None], torch.zeros(0, dtype=torch.float64))


def oracle(case: Case, path: ak.Path) -> KickOracle:
    return KickOracle(path, case.model, case.loss_fn)


def predicted(truth: KickOracle, at: int, pool: list, slopes: dict[int, Tensor]) -> Tensor:
    """Responses by batch and state: the write exact at every coordinate, and kicks.

    A batch that uses other parameters than the control's has kicks where it is stiff and is linear elsewhere.
    """
    dx, lag = map(torch.stack, zip(*(truth.written(at, batch) for batch in pool)))
    stiff = truth.is_stiff(at, dx[:, 2]) | ~lag.any(1, keepdim=True)
    return truth.responses(at, dx, stiff, lag, slopes)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_the_forward_recursion(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kicks everywhere to the digit; read off curves within what a curve may be wrong by."""
    case = make(name)
    path = case.path(6)
    pool, probe = case.batches(4), case.batch()
    watch, truth = path.watch(at, probe), oracle(case, path)
    control, swept = path.control(at), adjoint(watch, watch.slope, watch.range, CPU)
    curved = pool_scores(control, swept, path.trajectory, pool, AtOnce(3))
    monkeypatch.setattr(curves, "ALLOWED", -1.0)  # no curve is good enough
    kicked = pool_scores(control, swept, path.trajectory, pool, AtOnce(3))
    slopes = {at + h: watch.slope(h) for h in watch.range}
    expected = predicted(truth, at, pool, slopes)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(kicked.response, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))
    assert curved.stiff < 0.7 * kicked.stiff or name == "unused_parameters"
    assert float((curved.response - expected).norm()) < 0.07 * float(expected.norm())
    errors = (curved.response - expected).norm(dim=1) / expected.norm(dim=1)
    assert float((errors - curved.curve_error).abs().min()) < 1e-7  # of one of the batches
    sizes = path.replace(pool, at).response(probe, answers=("tangent",), horizon=1).data["xi_norm"].values
    np.testing.assert_allclose(curved.xi_norm, sizes, rtol=1e-6)


def edited(truth: KickOracle, at: int, change: str) -> tuple[Tensor, Tensor]:
    """The exact difference that a change makes, and by how many steps the counts are then behind."""
    o = truth.steps[at]
    theta, m, v = o.split(o.x)
    raw = o.raw(theta).detach()
    end = {
        "zero": lambda: o.update(o.x, 0 * raw),
        "skip": lambda: o.x,
        "reset m": lambda: o.update(torch.cat([theta, 0 * m, v]), raw),
        "reset v": lambda: o.update(torch.cat([theta, m, 0 * v]), raw),
    }[change]()
    return end.view(3, -1) - truth.after[at], o.columns["present"] * (change == "skip")


@pytest.mark.parametrize("name", CASES)
def test_contributions_are_the_forward_recursion(name: str) -> None:
    """Of all changes at all steps, channel by channel: what waits in θ, what m does alone, and what v adds.

    What counts do is read off a parabola: after five steps it is off by 3e-5 of a step.
    """
    case = make(name)
    path = case.path(5)
    watch, truth = path.watch(0, case.batch()), oracle(case, path)
    slope = watch.slope(4)  # an outcome before the end of the path
    layers = Layers.of(path.point.loss.layout)
    by_layer = contributions(path.trajectory, 4, straight(slope), lambda step: EDITS, CPU, layers)
    whole = contributions(path.trajectory, 4, straight(slope), lambda step: EDITS, CPU)
    for change in EDITS:
        torch.testing.assert_close(by_layer[change].sum(2), whole[change][..., 0], rtol=1e-9, atol=1e-14)
        close = float(whole[change].abs().max()) * (1e-4 if change == "skip" else 1e-9)
        for at in range(4):
            dx, lag = edited(truth, at, change)
            starts = dx * torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]])[:, :, None]
            kicked, bent = torch.ones_like(dx[2], dtype=torch.bool), truth.is_bent(at, dx[2])
            found = -truth.responses(at, starts, kicked, lag, {4: slope}, bent)[:, 0]
            every, theta, m, nothing = found.tolist()
            parts = torch.tensor([theta, m - nothing, every - theta - m + nothing], dtype=torch.float64)
            torch.testing.assert_close(whole[change][at, :, 0], parts, rtol=1e-8, atol=close)
            assert float(whole[change][at].sum()) == pytest.approx(every, rel=1e-8, abs=close)
            exact = -truth.responses(at, starts[:1], kicked, lag, {4: slope})
            assert abs(every - float(exact)) <= 0.035 * abs(parts[2]) + 0.005 * abs(every) + close


@pytest.mark.parametrize("name", ["tanh_mlp", "two_groups", "unused_parameters"])
def test_pairs_in_small_groups_and_slopes_kept_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How pairs are cut into groups, and where the sweep's slopes are kept, changes no number."""
    case = make(name)
    path = case.path(5)
    slope = straight(path.watch(0, case.batch()).slope(4))
    layers = Layers.of(path.point.loss.layout)
    whole = contributions(path.trajectory, 4, slope, lambda step: EDITS, CPU, layers)
    monkeypatch.setattr(kicks, "IN_CACHE", 5)
    cut = contributions(path.trajectory, 4, slope, lambda step: EDITS, torch.device("cpu", 0), layers)
    for change, found in whole.items():
        torch.testing.assert_close(cut[change], found, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_displacement_in_two_parts(eps: float) -> None:
    """What v adds to what m does alone, where v is zero too."""
    run = Run.at(Hyper(1e-2, 0.9, 0.99, eps, 0.0, decoupled=True), 7)
    m, dm = torch.randn(2, 100, dtype=torch.float64)
    v, dv = torch.rand(2, 100, dtype=torch.float64)
    m[:10], v[:20], dm[:5], dv[10:15] = 0, 0, 0, 0
    alone, added = sensitivities(run, m, v)[0] * dm, displacement_by_v(run, m, v, dm, dv)
    torch.testing.assert_close(
        alone + added, displacement(run, m, v, dm, dv), rtol=1e-9, atol=1e-15 * float(alone.abs().max())
    )


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_displacements_of_several_changes_are_those_of_the_update_itself(eps: float) -> None:
    """Where a coordinate never had a gradient, too, whose first one moves it by a whole step where ε is nothing."""
    run = Run.at(Hyper(1e-2, 0.9, 0.99, eps, 0.0, decoupled=True), 7)
    m, v = torch.randn(20, dtype=torch.float64), torch.rand(20, dtype=torch.float64)
    m[:10], v[:10] = 0, 0
    g = torch.randn(3, 20, dtype=torch.float64)
    g[:, :5] = 0
    dm, dv = 0.1 * g, 0.01 * g.square()

    def update(m: Tensor, v: Tensor) -> Tensor:
        found = -1e-2 * (m / (1 - 0.9**7)) / ((v / (1 - 0.99**7)).sqrt() + eps)
        return torch.where((m == 0) & (v == 0), 0.0, found)

    found = displacement(run, m, v, dm, dv)
    torch.testing.assert_close(found, update(m + dm, v + dv) - update(m, v), rtol=1e-12, atol=1e-17)
    assert (found[:, 5:10].abs() > 4e-3).all()


@pytest.mark.parametrize("share", [1e-3, 0.3, 1.0, 3.0, 1e3, 1e6])
def test_a_bent_kick_is_near_the_exact_one(share: float) -> None:
    """Within 3.5 % for every ε, of which √v̂ is a share, where the slope alone is off by up to 30 %."""
    truth = oracle(case := make("tanh_mlp"), case.path(2))
    d = len(truth.after[1][2])
    x = torch.cat([torch.linspace(-0.4, -1e-3, d - d // 4), torch.linspace(1e-3, 0.1, d // 4)]).double()
    m, v, lag = torch.ones(d).double(), torch.full((d,), 1e-3).double(), torch.zeros(d)
    columns = truth.steps[1].columns
    columns["eps"] = (v / (1 - columns["beta2"] ** columns["count"])).sqrt() / share
    exact = truth.q(1, m, v * (1 + x), lag) - truth.q(1, m, v, lag)
    torch.testing.assert_close(truth.bent(1, m, v, v * x, lag), exact, rtol=0.036, atol=0)


def test_a_skip_of_the_first_step_ever() -> None:
    """Moments that do not exist yet, counts that start at zero, and a parameter that appears later."""
    case = make("unused_parameters")
    a, b = case.model.a, case.model.b
    case.optimizer = torch.optim.AdamW([a.weight, b.weight, b.bias, a.bias], lr=1e-2, eps=1e-4)
    path = case.point(unused="skip").follow(case.batches(4))
    assert path.steps[0].present == (True, False, False, True)
    assert path.steps[1].present == (True,) * 4
    watch, truth = path.watch(0, case.batch()), oracle(case, path)
    found = contributions(path.trajectory, 4, straight(watch.slope(4)), lambda step: EDITS, CPU)["skip"]
    for at in range(4):
        dx, lag = edited(truth, at, "skip")
        kicked, bent = torch.ones_like(dx[2], dtype=torch.bool), truth.is_bent(at, dx[2])
        expected = -truth.responses(at, dx[None], kicked, lag, {4: watch.slope(4)}, bent)
        assert float(found[at].sum()) == pytest.approx(float(expected), rel=2e-3)  # the parabola of the second step


# --- midpoint


def test_the_probe_is_read_half_way_along_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a quadratic the shared row is an exact run from the mean write, and its midpoint slope has no error."""
    case = make("quadratic")
    path = case.path(5)
    pool, probe = case.batches(3), case.batch()
    watch, truth = path.watch(1, probe), oracle(case, path)
    mean = torch.stack([truth.written(1, batch)[0] for batch in pool]).mean(0)
    x, d, u, q = (truth.after[1] + mean).reshape(-1), *probe
    slopes = {}
    for time in range(2, 6):
        middle = (x.view(3, -1)[0] + truth.after[time - 1][0]) / 2
        slopes[time] = d * middle + u @ (u.mT @ middle) / u.shape[1] + q
        x = truth.steps[time].step_of(x).detach() if time < 5 else x
    found = midpoint_slopes(watch, mean_write(path.control(1), pool), watch.range)
    for time, slope in slopes.items():
        torch.testing.assert_close(truth.layout.compact(found[time - 1]), slope, rtol=1e-9, atol=1e-12)
        assert (slope - truth.layout.compact(watch.slope(time - 1))).norm() > 1e-4 * slope.norm()
    padded = {time: truth.layout.expand(slope) for time, slope in slopes.items()}
    expected = predicted(truth, 1, pool, padded)
    monkeypatch.setattr(curves, "ALLOWED", -1.0)  # kicks everywhere
    ranking = path.rank(pool, probe, at=1, verify=0).data.sel(change=[f"batch {i}" for i in range(3)])
    np.testing.assert_allclose(ranking["predicted"].values, expected, rtol=1e-8, atol=1e-12)


def test_the_midpoint_of_one_candidate_leaves_no_curvature_of_the_probe() -> None:
    """F(θ+d) − F(θ) = ⟨∇F(θ + d/2), d⟩ for a quadratic: with the exact displacement nothing is left over."""
    case = make("quadratic")
    path = case.path(4)
    batch, probe = case.batch(), case.batch()
    watch = path.watch(0, probe)
    found = midpoint_slopes(watch, mean_write(path.control(0), [batch]), watch.range)
    exact = path.replace([batch]).response(probe, answers=("exact",)).exact.values[0, 0]
    other = case.point().follow([batch, *(step.batch for step in path.steps[1:])])
    for h in watch.range:
        moved = other.trajectory.state(h).theta - path.trajectory.state(h).theta
        assert float(found[h] @ moved) == pytest.approx(exact[h - 1], rel=1e-9, abs=1e-14)
        assert float(watch.slope(h) @ moved) != pytest.approx(exact[h - 1], rel=1e-4)
