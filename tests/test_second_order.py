"""The one-step expansion: its error falls with the third power of the scale, its parts equal outside oracles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import aftershock as ak
from aftershock.core.clipping import Clip
from aftershock.errors import HiddenState, InvalidInput
from aftershock.theory.second_order import clip_curvature, d2theta_dg2, second_order, write_curvature

from .cases import CASES, make
from .oracles import StepOracle

ROUGH = ("unused_parameters",)  # its control skips a parameter: tested on its own below


def slope(x: list[float], y: np.ndarray) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@pytest.mark.parametrize("name", [n for n in CASES if n not in ROUGH])
def test_error_falls_with_the_third_power(name: str) -> None:
    """Clipping that binds, coupled decay, maximize, groups, tied weights, dropout, accumulation included."""
    case = make(name)
    path = case.path(2)
    # the norm over four changes: in a single one the third-order terms may happen to cancel
    probe, others = case.batch(), case.batches(4)
    # large enough that α³ stays far above rounding (1e-16 of a loss of 1), small enough to be asymptotic
    scales = [2.0**-k for k in np.arange(8, 10.1, 0.5)]
    data = second_order(path.replace(others), probe, scales=scales)
    error = np.linalg.norm(data["exact"] - data["predicted"], axis=0)
    assert error.min() > 1e-15, "rounding: the slope would say nothing"
    assert 2.95 < slope(scales, error) < 3.05, (slope(scales, error), error)
    first = np.linalg.norm(data["exact"] - data["linear"] * data["scale"], axis=0)
    assert (error < 0.2 * first).all(), "without its second order the expansion is as good: the test proves nothing"


def theta_after(oracle: StepOracle, xi: torch.Tensor) -> torch.Tensor:
    raw = oracle.raw(oracle.split(oracle.x)[0]).detach()
    return oracle.split(oracle.update(oracle.x, raw + xi).detach())[0]


@pytest.mark.parametrize("name", ["quadratic", "adam_coupled", "maximize", "two_groups", "clipped", "accumulated"])
def test_write_curvature_against_central_differences(name: str) -> None:
    """𝒬[ξ,ξ] against (θ(h) − 2θ(0) + θ(−h))/h² of the paper's step, extrapolated once."""
    case = make(name)
    path = case.path(2)
    layout, control = path.point.loss.layout, path.control(0)
    oracle = StepOracle(path, 0, case.model, case.loss_fn)
    raw = layout.compact(control.raw)
    noise = torch.randn(layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    xi = noise * raw.norm() / noise.norm()

    def difference(h: float) -> torch.Tensor:
        return (theta_after(oracle, h * xi) - 2 * theta_after(oracle, 0 * xi) + theta_after(oracle, -h * xi)) / h**2

    h = 2e-3
    expected = (4 * difference(h / 2) - difference(h)) / 3
    found = layout.compact(write_curvature(control, layout.expand(xi)))
    # truncation h⁴ f⁽⁶⁾ and rounding 1e-16 |θ| / h²: a few parts in a million of the largest entry
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_chi_is_the_papers_formula() -> None:
    """4 a1 a2 g q_mv + 4 a2² g² q_vv + 2 a2 V, written out from the appendix."""
    case = make("quadratic")
    path = case.path(2)
    layout, control, hyper = path.point.loss.layout, path.control(0), path.steps[0].hypers[0]
    count = path.trajectory.state(0).counts[0] + 1
    rho1, rho2 = 1 - hyper.beta1**count, 1 - hyper.beta2**count
    a1, a2, eta, eps = 1 - hyper.beta1, 1 - hyper.beta2, hyper.lr, hyper.eps
    g, m, v = (layout.compact(t) for t in (control.raw, control.after.m, control.after.v))
    m_hat, s = m / rho1, (v / rho2).sqrt()
    d = s + eps
    q_mv = eta / (2 * rho1 * rho2 * s * d**2)
    q_vv = -eta * m_hat * (3 * s + eps) / (4 * rho2**2 * s**3 * d**3)
    big_v = eta * m_hat / (2 * rho2 * s * d**2)
    expected = 4 * a1 * a2 * g * q_mv + 4 * a2**2 * g**2 * q_vv + 2 * a2 * big_v
    assert expected.abs().min() > 0
    torch.testing.assert_close(layout.compact(d2theta_dg2(control)), expected, rtol=1e-10, atol=0)


def test_clip_curvature_against_autograd() -> None:
    generator = torch.Generator().manual_seed(3)
    raw, xi = (torch.randn(7, dtype=torch.float64, generator=generator) for _ in range(2))

    def clipped(alpha: torch.Tensor) -> torch.Tensor:
        g = raw + alpha * xi
        return g * torch.clamp(0.3 / (g.norm() + 1e-6), max=1.0)

    zero = torch.zeros((), dtype=torch.float64)
    expected = torch.func.jacfwd(torch.func.jacfwd(clipped))(zero)
    clip = Clip(float(raw.norm()), 0.3 / (float(raw.norm()) + 1e-6))
    torch.testing.assert_close(clip_curvature(clip, raw, xi), expected, rtol=1e-12, atol=1e-14)
    assert clip_curvature(Clip(float(raw.norm()), 1.0), raw, xi) is None


@pytest.mark.parametrize("name", ["tanh_mlp", "clipped", "transformer"])
def test_terms_against_dense_hessian_and_gradient(name: str) -> None:
    """linear, curvature and write_in from the dense Γ, H_F and ∇F of reverse mode."""
    case = make(name)
    path = case.path(2)
    change, probe = path.replace(case.batches(2)), case.batch()
    data = second_order(change, probe)
    layout, control = path.point.loss.layout, path.control(0)
    oracle = StepOracle(path, 0, case.model, case.loss_fn)
    gamma = oracle.write_in(True)[: layout.size]
    oracle.step = replace(oracle.step, batch=probe)
    theta = layout.compact(control.after.theta).requires_grad_()
    gradient = oracle.raw(theta, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(x, theta, retain_graph=True)[0] for x in gradient])
    gradient = gradient.detach()
    for i, edit in enumerate(change.edits):
        xi = layout.compact(edit.shock(control).xi)
        p, bend = gamma @ xi, layout.compact(write_curvature(control, layout.expand(xi)))
        np.testing.assert_allclose(data["linear"][i], float(gradient @ p), rtol=1e-9)
        np.testing.assert_allclose(data["curvature"][i], float(p @ hessian @ p), rtol=1e-8)
        np.testing.assert_allclose(data["write_in"][i], float(gradient @ bend), rtol=1e-8)
    np.testing.assert_allclose(data["quadratic"], data["curvature"] + data["write_in"])


def test_exact_is_the_engines_exact_pair() -> None:
    case = make("clipped")
    change, probe = case.path(2).replace(case.batches(2)), case.batch()
    scales = [0.25, 1.0]
    data = second_order(change, probe, scales=scales)
    pair = change.response(probe, scales=scales, answers=("exact", "tangent"), horizon=1)
    np.testing.assert_allclose(data["exact"], pair.exact.isel(horizon=0), rtol=1e-12)
    np.testing.assert_allclose(data["linear"] * data["scale"], pair.tangent.isel(horizon=0), rtol=1e-10)


def test_a_later_step_and_its_own_loss() -> None:
    case = make("tanh_mlp")
    path = case.path(4)
    data = second_order(path.replace([case.batch()], at=2), ak.own_loss, scales=[2.0**-k for k in range(6, 10)])
    error = abs(data["exact"] - data["predicted"]).values[0]
    assert 2.95 < slope(data["scale"].values, error) < 3.05
    with pytest.raises(InvalidInput, match="follow one more batch"):
        second_order(path.zero(3), ak.own_loss)


def test_untouched_coordinates_have_no_second_derivative() -> None:
    """At v̂ = 0 the step −c g/(k|g| + ε) bends as |g|: the write-in term is NaN, the others stand."""
    case = make("untouched_rows")
    path = case.path(2)
    data = second_order(path.replace([torch.randint(0, 4, (4, 6)), torch.randint(3, 6, (4, 6))]), case.batch())
    assert data["no_second_derivative"].values.tolist() == [0, 6]
    assert data["no_derivative"].values.tolist() == [0, 0]
    assert np.isfinite(data["quadratic"][0])
    assert np.isnan(data["write_in"][1])
    assert np.isnan(data["predicted"][1]).all()
    assert np.isfinite(data["curvature"][1])
    assert np.isfinite(data["exact"][1]).all()


def test_a_parameter_new_to_the_control_is_undefined() -> None:
    case = make("unused_parameters")
    x = case.batch()[0]
    path = case.point().follow([(x, False), (x, True)])
    data = second_order(path.replace([(x + 1, True)]), (x, True))
    assert int(data["no_derivative"][0]) == 12
    assert np.isnan(data["linear"][0])


def test_clipping_that_switches_is_said() -> None:
    case = make("tanh_mlp")
    batches = case.batches(2)
    path = case.point().follow(batches, clip=1.5 * case.point().follow(batches[:1]).steps[0].clip.norm)
    data = second_order(path.perturb(path.point.loss.layout.compact(path.control(0).raw)), batches[1], scales=[0.1, 1])
    assert data["clip_switched"].values.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda case, path: second_order(path.skip(0), case.batch()), InvalidInput, "not a difference of gradients"),
        (lambda case, path: second_order(path.zero(0), None), InvalidInput, "a probe is needed"),
        (lambda case, path: second_order(path.zero(0), case.batch(), scales=[]), InvalidInput, "scales"),
        (lambda case, path: second_order(path.zero(0), case.batch(), scales=[float("nan")]), InvalidInput, "scales"),
        (lambda case, path: second_order(path.zero(0), case.batch(), scales=[0.0]), InvalidInput, "nonzero numbers"),
        (
            lambda case, path: second_order(path.zero(0), ak.Probe(batch=case.batch(), evaluating=True)),
            InvalidInput,
            "eval mode",
        ),
    ],
)
def test_bad_input_is_named(build: object, error: type[Exception], words: str) -> None:
    case = make("tanh_mlp")
    with pytest.raises(error, match=words):
        build(case, case.path(2))  # type: ignore[operator]


def test_hidden_state_is_refused() -> None:
    """A probe that reads running statistics depends on more than (θ, m, v)."""
    case = make("batch_norm")
    path, x = case.path(2), case.batch()
    with pytest.raises(HiddenState, match="running"):
        second_order(path.zero(0), lambda model: model[1].running_mean.sum() + model(x[0]).square().mean())
