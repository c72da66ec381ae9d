"""Γ by its two paths, against the dense write-in and against reverse mode with one moment held fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import aftershock as ak
from aftershock.errors import HiddenState, InvalidInput
from aftershock.theory.write_paths import PATHS, split_write, write_paths

from .cases import CASES, make
from .oracles import StepOracle, reverse_jacobian

# reverse mode gives NaN through √v at v = 0 (untouched rows, dead units), and an oracle cannot run a checkpoint
REVERSIBLE = [n for n in CASES if n not in ("untouched_rows", "relu_cnn", "checkpointed", "unused_parameters")]


def dense_paths(oracle: StepOracle) -> torch.Tensor:
    """[path, d, d]: ∂θ'/∂g of the paper's step with the other moment held at the control's, by reverse mode."""
    theta, m, v = oracle.split(oracle.x)
    raw = oracle.raw(theta).detach()
    c = oracle.columns

    def moved(g_m: torch.Tensor, g_v: torch.Tensor) -> torch.Tensor:
        reach = [
            oracle.clip(g) * (1 - 2 * c["maximize"]) + (1 - c["decoupled"]) * c["weight_decay"] * theta
            for g in (g_m, g_v)
        ]
        m_hat = (c["beta1"] * m + (1 - c["beta1"]) * reach[0]) / (1 - c["beta1"] ** c["count"])
        v_hat = (c["beta2"] * v + (1 - c["beta2"]) * reach[1] ** 2) / (1 - c["beta2"] ** c["count"])
        return -c["lr"] * m_hat / (v_hat.sqrt() + c["eps"])

    return torch.stack([reverse_jacobian(lambda g: moved(g, raw), raw), reverse_jacobian(lambda g: moved(raw, g), raw)])


@pytest.mark.parametrize("name", REVERSIBLE)
def test_each_path_is_the_derivative_with_the_other_moment_fixed(name: str) -> None:
    case = make(name)
    path = case.path(2)
    layout, control = path.point.loss.layout, path.control(0)
    dense = dense_paths(StepOracle(path, 0, case.model, case.loss_fn))
    xi = torch.randn(layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = layout.compact(split_write(control.linear, layout.expand(xi)))
    expected = dense @ xi
    assert (expected.norm(dim=1) > 0).all()
    # closed form against reverse mode in float64: rounding of a few hundred operations
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["two_groups", "untouched_rows", "adam_coupled", "batch_norm"])
def test_dataset_adds_up(name: str) -> None:
    """Paths sum to the engine's tangent at h = 1, layers to paths, and norms are those of the dense write."""
    case = make(name)
    path = case.path(2)
    change, probe = path.replace(case.batches(3)), case.batch()
    data = write_paths(change, probe)
    tangent = change.response(probe, answers=("tangent",), horizon=1).tangent.isel(scale=0, horizon=0)
    assert abs(tangent).min() > 0
    np.testing.assert_allclose(data["response"].sum("channel"), tangent, rtol=1e-9)
    np.testing.assert_allclose(data["layer_response"].sum("layer"), data["response"], rtol=1e-9)
    np.testing.assert_allclose((data["layer_norm"] ** 2).sum("layer") ** 0.5, data["write_norm"], rtol=1e-12)
    dense = path.write_in(0).as_matrix()[: path.point.loss.layout.size]
    layout, control = path.point.loss.layout, path.control(0)
    for i, edit in enumerate(change.edits):
        shock = edit.shock(control)
        write = dense @ layout.compact(shock.xi)
        pieces = torch.stack([piece.norm() for piece in write.split(layout.sizes)])
        np.testing.assert_allclose(data["total_norm"][i], write.norm(), rtol=1e-9)
        np.testing.assert_allclose(data["layer_total_norm"][i], pieces, rtol=1e-8, atol=1e-15)
        exact = layout.compact(change.difference()[i].theta)
        np.testing.assert_allclose(data["linear_error"][i], (exact - write).norm() / exact.norm(), rtol=1e-8)
    # the law of cosines ties the alignment to the three norms
    squares = data["write_norm"] ** 2
    cosine = (data["total_norm"] ** 2 - squares.sum("channel")) / (2 * data["write_norm"].prod("channel"))
    np.testing.assert_allclose(data["alignment"], cosine, rtol=1e-7, atol=1e-9)
    assert data["layer"].values.tolist() == list(layout.names)
    assert data["channel"].values.tolist() == list(PATHS)


def test_without_a_probe_there_is_no_response() -> None:
    case = make("tanh_mlp")
    data = write_paths(case.path(1).zero(0))
    assert "response" not in data
    assert data["probe"].item() == "none"


def test_a_change_to_itself_writes_nothing_and_has_no_direction() -> None:
    path = make("tanh_mlp").path(2)
    data = write_paths(path.replace([path.steps[0].batch]))
    assert not data["write_norm"].values.any()
    assert np.isnan(data["alignment"][0])
    assert np.isnan(data["linear_error"][0])
    assert int(data["no_derivative"][0]) == 0


@pytest.mark.parametrize("kind", ["skip", "set", "reset"])
def test_changes_that_are_no_gradient_are_refused(kind: str) -> None:
    path = make("tanh_mlp").path(2)
    change = {"skip": path.skip(0), "set": path.set(0, lr=0.1), "reset": path.reset(0, "m")}[kind]
    with pytest.raises(InvalidInput, match="not a difference of gradients"):
        write_paths(change)


def test_moving_buffers_are_refused() -> None:
    case = make("batch_norm")
    change = case.path(2).replace([case.batch()])
    with pytest.raises(HiddenState, match="running"):
        write_paths(change, ak.Probe(batch=case.batch(), evaluating=True))


def test_own_loss_at_a_later_step() -> None:
    case = make("tanh_mlp")
    change = case.path(4).replace([case.batch()], at=1)
    tangent = change.response(ak.own_loss, answers=("tangent",), horizon=1).tangent.isel(scale=0, horizon=0)
    np.testing.assert_allclose(write_paths(change, ak.own_loss)["response"].sum("channel"), tangent, rtol=1e-9)


def test_own_loss_after_the_last_step_is_refused() -> None:
    case = make("tanh_mlp")
    with pytest.raises(InvalidInput, match="follow one more batch"):
        write_paths(case.path(1).zero(0), ak.own_loss)


def test_a_parameter_new_to_the_control_is_undefined() -> None:
    """A first gradient starts decay and step count: a jump at ξ = 0, so NaN, and the count says why."""
    case = make("unused_parameters")
    x = case.batch()[0]
    path = case.point().follow([(x, False), (x, True)])
    data = write_paths(path.replace([(x + 1, True), (x + 1, False)]), (x, True))
    assert data["no_derivative"].values.tolist() == [12, 0]
    assert np.isnan(data["write_norm"].values[0]).all()
    assert np.isnan(data["response"].values[0]).all()
    assert np.isfinite(data["response"].values[1]).all()


def test_no_derivative_where_only_v_is_zero() -> None:
    case = make("untouched_rows")
    embed = case.model.embed.weight
    case.optimizer.state[embed]["exp_avg"][4:] = 0.1  # v stays 0 there, as after a reset of v
    path = case.path(2)
    data = write_paths(path.replace([torch.randint(0, 4, (4, 6)), torch.randint(3, 6, (4, 6))]))
    assert int(data["no_derivative"][0]) == 0
    assert int(data["no_derivative"][1]) == 6
    assert np.isnan(float(data["total_norm"][1]))
