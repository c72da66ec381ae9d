"""The error's parts against dense oracles and hand-held gates; the identity, the slopes, and every bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.adamw import Run
from aftershock.core.dynamics import Dynamics, Step
from aftershock.core.gates import Pattern, recording
from aftershock.core.operators import as_rows
from aftershock.core.state import JointState, Tangent, difference
from aftershock.errors import HiddenState, InvalidInput, UnfrozenGate
from aftershock.theory import envelopes
from aftershock.theory.envelopes import curvature_bound, error_bounds, operator_norm, write_in_bound
from aftershock.theory.remainder import PARTS, ROWS, decompose, joint
from aftershock.theory.switching import (
    SmoothExtension,
    activation_margin,
    joint_norm,
    margin_mass,
    pair_at,
    paired_steps,
    start_pair,
    telescoped_defects,
)

from .cases import make, mlp
from .oracles import StepOracle
from .test_baselines import counters

IDENTITY = 1e-14  # relative to the state deviation: rounding of a few additions
READABLE = ("relu_cnn", "tanh_mlp", "quadratic", "clipped", "two_groups", "adam_coupled", "dropout", "accumulated")


def recorded_step(dynamics: Dynamics, step: Step, state: JointState) -> tuple[JointState, Step, Pattern]:
    """f_s(x), equal to the bit, with the gates it chose."""
    pattern = Pattern()
    after, seen, _ = Dynamics(dynamics.loss.within(recording(pattern))).advance(step, state)
    return after, seen, pattern


def relu_run(
    seed: int = 0, steps: int = 4, sizes: tuple[int, ...] = (3, 6, 2), clip: float | None = None, lr: float = 3e-2
) -> tuple[ak.Path, nn.Module, Callable[[], Any]]:
    """A ReLU network with warm moments, and its path."""
    torch.manual_seed(seed)
    model = mlp(*sizes, activation=nn.ReLU).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(12, sizes[0]).double(), torch.randint(0, sizes[-1], (12,))

    for _ in range(5):
        optimizer.zero_grad()
        loss_fn(model, batch()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([batch() for _ in range(steps)], clip=clip)
    return path, model, batch


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def dense(path: ak.Path, state: Any) -> Tensor:
    return torch.cat([path.point.loss.layout.compact(t) for t in (state.theta, state.m, state.v)])


def rows_of(path: ak.Path, dx: Tangent) -> Tensor:
    return as_rows(path.point.loss.layout, dx)


def slope(scales: list[float], errors: Any) -> float:
    return float(np.polyfit(np.log(scales), np.log(np.asarray(errors)), 1)[0])


# --- the identity


@pytest.mark.parametrize("name", READABLE)
def test_the_parts_sum_to_the_error(name: str) -> None:
    case = make(name)
    path, probe = case.path(5), case.batch()
    data = decompose(path.replace([case.batch(), case.batch()]), index=1, probe=probe).data
    assert float(joint(data["state_error"]).min()) > 0
    assert float(data["identity_residual"].max()) < IDENTITY
    shares = sum(data[f"state_share_{part}"] for part in PARTS)
    # e is small against δx where the tangent is good: rounding of δx seen from e
    np.testing.assert_allclose(shares, 1.0, atol=1e-10)
    parts = sum(data[f"output_from_{part}"] for part in (*PARTS, "readout_smooth", "readout_switching"))
    assert float(abs(data["output_error"]).min()) > 0
    np.testing.assert_allclose(parts, data["output_error"], rtol=0, atol=1e-14)  # losses of order 1
    switching = joint(data["switching_defect"])
    assert (float(switching.max()) > 0) == (name == "relu_cnn")
    assert int(data["switched"].sum()) > 0 or name != "relu_cnn"


def test_responses_are_those_of_the_response() -> None:
    case = make("relu_cnn")
    path, probe = case.path(5), case.batch()
    change = path.replace([case.batch()])
    data = decompose(change, scale=0.5, probe=probe).data
    response = change.response(probe, scales=[0.5], answers=("exact", "tangent"))
    np.testing.assert_allclose(data["response"], response.exact.values[0, 0], atol=1e-15)
    np.testing.assert_allclose(data["predicted"], response.tangent.values[0, 0], rtol=1e-10)


def test_propagated_parts_are_the_dense_propagators() -> None:
    """Φ from reverse-mode Jacobians of the paper's equations, applied to defects made outside."""
    case = make("tanh_mlp")
    path = case.path(4)
    other = case.batch()
    change = path.replace([other])
    data = decompose(change).data
    oracles = [StepOracle(path, s, case.model, case.loss_fn) for s in range(4)]
    A = [oracle.transition(True) for oracle in oracles]
    x = oracles[0].x
    raw = oracles[0].raw(x[: path.point.loss.layout.size]).detach()
    shocked_raw = torch.cat([g.reshape(-1) for g in oracles[0].gradients(x[: len(raw)], batch=other)])
    shocked, control = oracles[0].update(x, shocked_raw), oracles[0].update(x, raw)
    write = shocked - control - oracles[0].write_in(True) @ (shocked_raw - raw)
    parts = {"write_in": write, "smooth": torch.zeros_like(write)}
    for s in (1, 2, 3):
        moved = shocked - control
        shocked, control = oracles[s].step_of(shocked).detach(), oracles[s].step_of(control).detach()
        born = shocked - control - A[s] @ moved
        parts = {"write_in": A[s] @ parts["write_in"], "smooth": A[s] @ parts["smooth"] + born}
        for name, part in parts.items():
            found = data[f"state_from_{name}"].sel(horizon=s + 1)
            blocks = part.reshape(3, -1).norm(dim=1)
            # a remainder is a difference of deviations: it keeps their rounding, 1e-16 / 1e-4
            np.testing.assert_allclose(found, blocks, rtol=1e-7)


def test_write_in_remainder_has_the_papers_blocks() -> None:
    """r_B = (r_θ, 0, (1−β2) ξ²): eq. writein_remainder."""
    path, _, batch = relu_run()
    change, scale = path.replace([batch()]), 0.5
    control, shock, shocked = start_pair(change, scale, 0)
    rest = rows_of(path, difference(shocked, control.after)) - rows_of(path, path.write_in(0).mv(shock.xi) * scale)
    xi = path.point.loss.layout.compact(shock.xi) * scale
    data = decompose(change, scale=scale).data["write_in_remainder"]
    _, m, v = rest.split(len(xi))
    beta2 = path.steps[0].hypers[0].beta2
    assert float(data.sel(channel="m")) < 1e-16
    torch.testing.assert_close(v, (1 - beta2) * xi**2, rtol=0, atol=1e-17)
    torch.testing.assert_close(float(data.sel(channel="v")), float(((1 - beta2) * xi**2).norm()), rtol=1e-9, atol=0)
    assert not m.abs().max() > 1e-16


# --- smooth and switching apart


def held_by_hand(model: nn.Module, path: ak.Path, at: int) -> Callable[[nn.Module, Any], Tensor]:
    """The two-layer ReLU network with the control's mask at step `at`, written out."""
    weights = path.point.loss.layout.by_name(path.trajectory.state(at).theta)
    x = path.steps[at].batch[0]
    mask = (x @ weights["0.weight"].mT + weights["0.bias"] > 0).double()
    return lambda m, b: F.cross_entropy(m[2](mask * m[0](b[0])), b[1])


def test_smooth_extension_is_the_network_with_the_controls_mask() -> None:
    path, model, batch = relu_run()
    change = path.replace([batch()])
    *_, shocked = start_pair(change, 1.0, 0)
    switched = 0
    for pair in paired_steps(change, shocked, 4):
        at = pair.step.index
        held = StepOracle(path, at, model, held_by_hand(model, path, at))
        plain = StepOracle(path, at, model, loss_fn)
        x = dense(path, pair.shocked)
        torch.testing.assert_close(dense(path, pair.smooth_after), held.step_of(x), rtol=1e-9, atol=1e-12)
        defect = plain.step_of(x) - held.step_of(x)
        torch.testing.assert_close(rows_of(path, pair.switching_defect), defect, rtol=1e-6, atol=1e-13)
        switched += sum(int(s.sum()) for s in pair.switches)
    assert switched > 0


@pytest.mark.parametrize("name", ["tanh_mlp", "quadratic", "clipped", "accumulated", "dropout"])
def test_smooth_remainder_falls_quadratically(name: str) -> None:
    """Slope 2.00 in α at every step of a smooth system: the judge of A, which the identity is not."""
    case = make(name)
    change = case.path(3).replace([case.batch()])
    scales = [2.0**-k for k in range(7, 11)]
    found = [decompose(change, scale=scale).data for scale in scales]
    for step in range(2):
        remainders = [float(joint(data["smooth_remainder"])[step]) for data in found]
        assert abs(slope(scales, remainders) - 2) < 0.03
    assert abs(slope(scales, [float(joint(data["write_in_remainder"])) for data in found]) - 2) < 0.03
    assert all(not data["switching_defect"].values.any() for data in found)


def test_smooth_remainder_falls_quadratically_while_gates_switch() -> None:
    """Along a fixed direction on which gates switch, f̃ is smooth and f is not."""
    path, _, _ = relu_run(seed=3)
    layout, step, control = path.point.loss.layout, path.steps[1], path.trajectory.state(1)
    pair = pair_at(path.replace([path.steps[2].batch]), 1)
    direction = torch.randn(layout.size, generator=torch.Generator().manual_seed(1)).double()
    dx = Tangent(layout.expand(direction), layout.zeros(), layout.zeros())
    linear = rows_of(path, path.transition(1).mv(dx))
    scales, smooth, plain = [2.0**-k for k in range(4, 10)], [], []
    for scale in scales:
        moved = envelopes.moved(control, dx, scale)
        after, _, pattern = recorded_step(path.trajectory.dynamics, step, moved)
        if scale == scales[2]:
            assert any(bool(s.any()) for s in pair.extension.pattern.switches(pattern))
        straight = dense(path, pair.control_after) + scale * linear
        smooth.append(float((dense(path, pair.extension(moved)) - straight).norm()))
        plain.append(float((dense(path, after) - straight).norm()))
    assert abs(slope(scales[2:], smooth[2:]) - 2) < 0.03
    assert plain[0] > 1.1 * smooth[0]


@pytest.mark.parametrize("margin", [1.001, 0.999])
def test_clipping_is_held_on_the_controls_side(margin: float) -> None:
    """The threshold lies just above the control's norm, or just below it: f̃ stays on its side, with slope 2."""
    free, _, _ = relu_run(seed=1)
    path = free.point.follow([step.batch for step in free.steps], clip=margin * free.steps[0].clip.norm)
    step, control, layout = path.steps[0], path.trajectory.state(0), path.point.loss.layout
    assert step.clip.binds == (margin < 1)
    after, _, pattern = recorded_step(path.trajectory.dynamics, step, control)
    extension, crossed = SmoothExtension(path.trajectory.dynamics, step, pattern), 0
    for sign in (1.0, -1.0):  # one of the two crosses the threshold
        dx = Tangent(sign * path.control(0).raw, layout.zeros(), layout.zeros())
        linear = rows_of(path, path.transition(0).mv(dx))
        scales, errors = [2.0**-k for k in range(6, 11)], []
        for scale in scales:
            moved = envelopes.moved(control, dx, scale)
            crossed += recorded_step(path.trajectory.dynamics, step, moved)[1].clip.binds != step.clip.binds
            gone = dense(path, extension(moved)) - dense(path, after)
            errors.append(float((gone - scale * linear).norm()))
        assert abs(slope(scales, errors) - 2) < 0.03
    assert crossed > 1


def test_a_clip_that_switches_is_a_switching_defect() -> None:
    path, _, batch = relu_run(seed=2)
    other = batch()
    sides = []
    for factor in np.linspace(0.9, 1.1, 15):
        clipped = path.point.follow([s.batch for s in path.steps], clip=float(factor * path.steps[1].clip.norm))
        data = decompose(clipped.replace([other]), horizon=2).data
        sides.append(bool(data["clip_switched"][0]))
        if sides[-1]:
            assert float(joint(data["switching_defect"])[0]) > 0
            assert float(data["identity_residual"].max()) < IDENTITY
            with pytest.raises(UnfrozenGate, match="clipping switched"):
                telescoped_defects(pair_at(clipped.replace([other]), 1))
            assert activation_margin(clipped.replace([other]), 1)["reason"].item() == "clipping switched"
    assert any(sides)
    assert not all(sides)


def test_single_switches_telescope_to_the_defect() -> None:
    path, _, batch = relu_run(seed=0, lr=0.1)
    pair = pair_at(path.replace([batch()]), 3)
    places, defects = telescoped_defects(pair)
    assert len(places) == sum(int(s.sum()) for s in pair.switches) > 1
    total = sum(rows_of(path, defect) for defect in defects)
    expected = rows_of(path, pair.switching_defect)
    assert expected.norm() > 0
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-15)
    assert all(joint_norm(defect) > 0 for defect in defects)


# --- bounds

hyper = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.1),
        "beta1": st.floats(0.0, 0.95),
        "beta2": st.floats(0.5, 0.999),
        "eps": st.sampled_from([1e-8, 1e-4, 1e-2]),
        "count": st.integers(1, 30),
    }
)
draws = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@draws
@given(hyper, st.integers(0, 10**6))
def test_curvature_bound_encloses_the_second_derivative(h: dict, seed: int) -> None:
    """|ψ''| by automatic differentiation of the paper's ψ on a fine grid: never above the bound, close below it."""
    count = h["count"]
    run = Run(slice(0, 8), True, h["lr"], h["beta1"], h["beta2"], h["eps"], 1 - h["beta1"] ** count,
              1 - h["beta2"] ** count, 1.0, 0.0, 1.0)  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    m, g, u = (torch.randn(8, generator=generator).double() for _ in range(3))
    v = torch.rand(8, generator=generator).double() + 1e-2

    def psi(x: Tensor) -> Tensor:
        m_hat = (h["beta1"] * m + (1 - h["beta1"]) * x) / run.bias1
        v_hat = (h["beta2"] * v + (1 - h["beta2"]) * x * x) / run.bias2
        return -h["lr"] * m_hat / (v_hat.sqrt() + h["eps"])

    def curvature(at: Tensor) -> Tensor:
        x = at.detach().requires_grad_()
        first = torch.autograd.grad(psi(x).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), x)[0].abs()

    bound = curvature_bound(run, m, v, g, g + u)
    for tau in torch.linspace(0, 1, 23).tolist():
        assert (bound >= curvature(g + tau * u)).all()
    # on a single point nothing is lost: the closed form itself
    torch.testing.assert_close(curvature_bound(run, m, v, g, g, pieces=1), curvature(g), rtol=1e-7, atol=1e-9 * h["lr"])


@st.composite
def runs(draw: st.DrawFn) -> tuple[ak.Change, Any]:
    """A small dense system of either kind, a change and a probe."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    sizes = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), 2)
    activation = draw(st.sampled_from([nn.ReLU, nn.Tanh]))
    model = mlp(*sizes, activation=activation).double()
    options = {"lr": draw(st.floats(1e-4, 0.05)), "weight_decay": draw(st.sampled_from([0.0, 0.3]))}
    optimizer = torch.optim.AdamW(model.parameters(), eps=draw(st.sampled_from([1e-6, 1e-3])), **options)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(6, sizes[0]).double(), torch.randint(0, 2, (6,))

    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model, batch()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([batch() for _ in range(3)])
    return path.replace([batch()]), batch()


@settings(draws, max_examples=20)
@given(runs(), st.sampled_from([0.05, 0.3, 1.0]))
def test_every_bound_holds(run: tuple[ak.Change, Any], scale: float) -> None:
    change, probe = run
    write = write_in_bound(change, scale=scale)
    assert float(write["remainder"]) <= float(write["coordinate_bound"]) + 1e-16
    assert float(write["coordinate_bound"]) <= float(write["bound"])
    assert float(write["joint_remainder"]) <= float(write["joint_bound"])
    bounds = error_bounds(change, scale=scale, probe=probe)
    slack = 1 + 1e-9
    for name in ("state_bound", "envelope", "quadratic_envelope"):
        assert (bounds["state_error"] <= slack * bounds[name] + 1e-15).all(), name
    assert (abs(bounds["output_error"]) <= slack * bounds["output_bound"] + 1e-15).all()
    assert bounds["norms_by"].item() == "exact"
    for at in (1, 2):
        margin = activation_margin(change, at, scale=scale)
        assert not margin["reason"].item()
        assert float(margin["switching_defect"]) <= slack * float(margin["bound"]) + 1e-15


def test_bounds_are_the_papers_recursions() -> None:
    """The envelopes and the theorem's bound, written out from their constants and dense propagators."""
    path, model, batch = relu_run(seed=0, lr=0.1)
    change = path.replace([batch()])
    bounds, parts = error_bounds(change), decompose(change).data
    A = [StepOracle(path, s, model, loss_fn).transition(True) for s in (1, 2, 3)]
    first, dx, hat = (joint(parts[n]).values for n in ("write_in_remainder", "deviation", "tangent"))
    defect, L, C = joint(parts["switching_defect"]).values, bounds["smooth_constant"], bounds["switching_constant"]
    assert defect.max() > 0
    plain, quadratic, theorem = [float(first)], [float(first)], [float(first)]
    propagated = [torch.eye(len(A[0])).double()]
    for i in range(3):
        norm = float(torch.linalg.svdvals(A[i])[0])
        plain.append(norm * plain[-1] + float(L[i]) / 2 * (hat[i] + plain[-1]) ** 2 + defect[i])
        quadratic.append(norm * quadratic[-1] + float(L[i] / 2 + C[i]) * (hat[i] + quadratic[-1]) ** 2)
        propagated = [A[i] @ phi for phi in propagated] + [torch.eye(len(A[0])).double()]
        norms = [float(torch.linalg.svdvals(phi)[0]) for phi in propagated]
        born = [float(first)] + [float(L[j]) / 2 * dx[j] ** 2 + defect[j] for j in range(i + 1)]
        theorem.append(sum(n * b for n, b in zip(norms, born)))
    np.testing.assert_allclose(bounds["envelope"], plain, rtol=1e-6)
    np.testing.assert_allclose(bounds["quadratic_envelope"], quadratic, rtol=1e-6)
    np.testing.assert_allclose(bounds["state_bound"], theorem, rtol=1e-6)
    # where a part is born nothing has propagated it yet
    born = int((defect > 0).argmax())
    arrived = joint(parts["state_from_switching"]).values
    assert arrived[born] == 0
    assert arrived[born + 1] == pytest.approx(defect[born], rel=1e-12)
    assert joint(parts["state_from_smooth"]).values[1] == pytest.approx(float(joint(parts["smooth_remainder"])[0]))


def test_margins_count_gates_that_switch() -> None:
    path, _, batch = relu_run(seed=0, lr=0.1)
    margin = activation_margin(path.replace([batch()]), 3)
    assert int(margin["switched"]) > 1
    assert int(margin["strip"]) >= int(margin["switched"])
    assert 0 < float(margin["switching_defect"]) <= float(margin["bound"])


def test_margin_mass_is_the_steepest_line() -> None:
    margins, weights = [0.3, 0.1, 0.1, 0.7], [1.0, 0.5, 0.25, 0.2]  # steepest at the first
    grid = np.linspace(1e-3, 1, 100_001)
    mass = np.array([sum(w for a, w in zip(margins, weights) if a <= u + 1e-12) for u in grid])
    assert margin_mass(margins, weights) == pytest.approx((mass / grid).max(), rel=1e-3)
    assert margin_mass([], []) == 0
    assert margin_mass([0.0], [1.0]) == float("inf")


def test_pooled_switches_have_no_margin_and_say_so() -> None:
    case = make("relu_cnn")
    margin = activation_margin(case.path(5).replace([case.batch()]), 4)
    assert "max_pool2d in '(model)' switched" in margin["reason"].item()
    assert np.isnan(float(margin["switching_constant"]))


def test_norms_are_exact_where_small_and_estimates_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    path, other = case.path(3), case.batch()
    dense_norm = float(torch.linalg.svdvals(StepOracle(path, 1, case.model, case.loss_fn).transition(True))[0])
    exact, how = operator_norm(path.transition(1))
    assert (exact, how) == (pytest.approx(dense_norm, rel=1e-9), "exact")
    small = error_bounds(path.replace([other]))
    monkeypatch.setattr(envelopes, "DENSE", 0)
    estimate, how = operator_norm(path.transition(1))
    assert how == "estimate"
    assert 0.9 * exact <= estimate <= exact * (1 + 1e-9)
    bounds = error_bounds(path.replace([other]))
    assert "estimate" in bounds["norms_by"].item()
    assert "estimate" in bounds["smooth_constant_by"].item()
    assert (bounds["smooth_constant"] <= small["smooth_constant"]).all()
    assert (bounds["state_error"] <= bounds["state_bound"]).all()


def test_write_in_bound_says_where_it_is_undefined() -> None:
    case = make("clipped")
    assert "clipping binds" in write_in_bound(case.path(2).replace([case.batch()]))["reason"].item()
    case = make("tanh_mlp")
    skip = write_in_bound(case.path(2).skip(0))
    assert skip["reason"].item() == "a skip has no ξ"
    assert np.isnan(float(skip["kappa"]))
    case = make("unused_parameters")
    path = case.point().follow([(torch.randn(5, 3).double(), False), (torch.randn(5, 3).double(), False)])
    other = (torch.randn(5, 3).double(), True)
    assert "one side only" in write_in_bound(path.replace([other]))["reason"].item()
    case = make("untouched_rows")  # v = 0 and a shock that touches it: ψ has no second derivative there
    bound = write_in_bound(case.path(2).replace([torch.randint(4, 6, (4, 6))]))
    assert float(bound["kappa"]) == float("inf")


# --- words and refusals


def test_decomposition_reads_well() -> None:
    case = make("relu_cnn")
    text = str(decompose(case.path(4).replace([case.batch()])))
    assert text.splitlines()[0].startswith("Error of the tangent for 'replace' at step 0, scale 1")
    assert "switching" in text.splitlines()[1]
    assert len(text.splitlines()) == 2 + 4 + 1
    assert "has no ξ" in str(decompose(case.path(3).skip(0)))
    assert str(decompose(case.path(1).zero(0)))  # one horizon, no step after it


def test_a_change_to_itself_has_no_error_and_no_shares() -> None:
    case = make("tanh_mlp")
    path = case.path(3)
    data = decompose(path.replace([path.steps[0].batch])).data
    assert not data["state_error"].values.any()
    assert np.isnan(data["state_share_smooth"]).all()


def test_the_error_of_a_skip_is_that_of_its_tangent() -> None:
    """With the skip's own step counts, and its parts still add up."""
    case = make("tanh_mlp")
    change, probe = case.path(5).skip(1), case.batch()
    data, response = decompose(change, probe=probe).data, change.response(probe)
    assert float(data["identity_residual"].max()) < 1e-12
    error = (response.exact - response.tangent).values[0, 0]
    assert abs(error).max() > 1e-6
    np.testing.assert_allclose(data["output_error"].values, error, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("keep", ["states", "checkpoints"])
def test_what_a_decomposition_costs(keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per step three gradients (both sides with their gates, and f̃), and a graph with five products, whose gradient
    takes the control on where its states are not kept."""
    case = make("tanh_mlp")
    path, counts = case.path(7, keep=keep), []
    change = path.skip(1)
    path.check()
    path.control(1)
    for horizon in (2, 6):  # one step and five
        with monkeypatch.context() as patched:
            count = counters(patched)
            decompose(change, horizon=horizon)
        counts.append(count)
    assert counts[0]["products"] > 0
    assert {name: counts[1][name] - counts[0][name] for name in count} == {
        "products": 4 * len(ROWS), "gradient": 4 * 3, "__init__": 4, "value": 0,
    }  # fmt: skip


def test_changes_without_xi_start_exactly() -> None:
    case = make("tanh_mlp")
    data = decompose(case.path(4).reset(0, "m"), probe=ak.own_loss).data
    assert not data["write_in_remainder"].values.any()
    assert data.sizes["horizon"] == 3  # a step's own loss needs a step after the state
    assert float(data["identity_residual"].max()) < IDENTITY


def test_bad_input_is_refused_by_name() -> None:
    case = make("tanh_mlp")
    path = case.path(3)
    change = path.replace([case.batch()])
    for words, call in {
        "index 1": lambda: decompose(change, index=1),
        "scales must": lambda: decompose(change, scale=0.0),
        "leave the scale": lambda: decompose(path.skip(0), scale=0.5),
        "horizon 9": lambda: decompose(change, horizon=9),
        "step 0 is not": lambda: activation_margin(change, 0),
    }.items():
        with pytest.raises(InvalidInput, match=words):
            call()
    case = make("batch_norm")
    from aftershock.core.probe import Probe

    with pytest.raises(HiddenState, match="training mode"):
        decompose(case.path(3).replace([case.batch()]), probe=Probe(batch=case.batch(), evaluating=True))


def test_an_operation_that_changes_when_watched_is_caught() -> None:
    """F.l1_loss hands its arguments on without its weight: the recorded loss would be another one."""
    torch.manual_seed(0)
    model = mlp(3, 4, 1).double()
    weight = torch.rand(5, 1).double()

    def weighted(m: nn.Module, b: Tensor) -> Tensor:
        return F.l1_loss(m(b), torch.zeros(5, 1).double(), weight=weight)

    path = ak.capture(model, torch.optim.AdamW(model.parameters()), weighted).follow(
        [torch.randn(5, 3).double() for _ in range(3)]
    )
    with pytest.raises(UnfrozenGate, match="while its gates are recorded"):
        decompose(path.replace([torch.randn(5, 3).double()]))


def test_gates_that_cannot_be_held_are_named_before_any_number() -> None:
    case = make("checkpointed")
    case.model.b = nn.Sequential(nn.ReLU(), case.model.b)
    case.optimizer = torch.optim.AdamW(case.model.parameters())
    with pytest.raises(UnfrozenGate, match=r"relu in 'b\.0' is inside activation checkpointing"):
        decompose(case.path(3).replace([case.batch()]))


def test_a_decomposition_refuses_horizons_as_a_response_does() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(3), case.batch()
    change = path.replace([case.batch()], 1)
    for horizon in (0, 3, 1.5):
        said = []
        for work in (change.response, lambda probe, horizon: decompose(change, probe=probe, horizon=horizon)):
            with pytest.raises(InvalidInput) as refused:
                work(probe, horizon=horizon)
            said.append(str(refused.value))
        assert said[0] == said[1]
    with pytest.raises(InvalidInput, match=r"horizon 3 is past the end: .* can be followed for 2$"):
        decompose(change, horizon=3)
