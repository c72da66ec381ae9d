"""Equal first effects: against the paper's construction written out, torch.optim by hand, and SciPy's root finder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import aftershock as ak
from aftershock.core.dynamics import Dynamics
from aftershock.core.graphs import GradientGraph
from aftershock.core.loss import LossFunction
from aftershock.errors import InvalidInput
from aftershock.theory.channels import channel_responses
from aftershock.theory.matching import match_first_step, persistence, residuals

from .cases import Case, make
from .test_changes import clip_and_step, gradients, probe_loss
from .test_operators import System

TOLERANCE = 5e-8


def first_step_by_hand(case: Case, path: ak.Path, probe: object, xi: torch.Tensor) -> float:
    """d_1 of a live run whose raw gradient at step 0 has ξ added."""
    losses, layout = [], path.point.loss.layout
    named = dict(zip(layout.names, [p.view(s) for p, s in zip(xi.split(layout.sizes), layout.shapes)]))
    for factor in (0.0, 1.0):
        twin = case.twin()
        torch.set_rng_state(path.steps[0].random.cpu)
        gradients(twin, path.steps[0].batch)
        for name, p in twin.model.named_parameters():
            p.grad += factor * named[name]
        clip_and_step(twin)
        losses.append(probe_loss(twin, probe, path.steps[0].random.cpu))
    return losses[1] - losses[0]


@pytest.mark.parametrize("name", ["tanh_mlp", "two_groups", "clipped"])
def test_the_papers_construction(name: str) -> None:
    system = System(name)
    case, path, probe, d = system.case, system.path, system.probe, system.layout.size
    change = path.replace(case.batches(5))
    natural = residuals(change)
    own = system.oracle(0)
    theta = own.split(own.x)[0]

    def raw(batch: object) -> torch.Tensor:
        return torch.cat([g.reshape(-1) for g in own.gradients(theta, batch=batch)])

    expected = torch.stack([raw(edit.batch) - raw(path.steps[0].batch) for edit in change.edits])
    torch.testing.assert_close(natural, expected)
    matched = match_first_step(path, natural, probe)

    a = system.dense_readouts()[0, :d] @ own.write_in(system.exact_oracle)[:d]
    mu = 0.25 * float(np.median((natural @ a).abs().numpy()))
    assert matched.target == pytest.approx(mu, rel=1e-9)
    assert matched.accepted.all()
    for i, r in enumerate(natural):
        sign = (-1) ** i
        b = sign * mu * a / (a @ a)
        z = r - a * (a @ r) / (a @ a)
        xi = b + 4 * b.norm() * z / z.norm()
        torch.testing.assert_close(matched.xi[i], float(matched.gamma[i]) * xi, rtol=1e-8, atol=1e-9 * float(xi.norm()))
        root = brentq(lambda g, xi=xi, s=sign: first_step_by_hand(case, path, probe, g * xi) - s * mu, 0, 2, rtol=1e-12)
        assert float(matched.gamma[i]) == pytest.approx(root, rel=1e-7)
        assert first_step_by_hand(case, path, probe, matched.xi[i]) == pytest.approx(sign * mu, rel=TOLERANCE)
    assert matched.cv < TOLERANCE
    kept = matched.xi.clone()
    matched.xi.zero_()  # a copy: the result stays as it is
    assert torch.equal(matched.xi, kept)


def test_later_responses_differ_and_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    first, probe, others = case.batch(), case.batch(), case.batches(6)
    paths = [case.point().follow([case.batch(), first, *case.batches(4)][1:]) for _ in range(2)]
    xis = residuals(paths[0].replace(others))
    calls: list[str] = []
    for owner, name in ((Dynamics, "advance"), (GradientGraph, "__init__"), (LossFunction, "gradient")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name, calls))
    once, again = (match_first_step(path, xis, probe) for path in paths)
    assert calls == ["gradient", "gradient"] * 2  # the control's and the probe's; no later step, no curvature
    assert torch.equal(once.xi, again.xi), "another future gave another match"
    response = paths[0].perturb(once.xi).response(probe, answers=("exact",))
    np.testing.assert_allclose(abs(response.exact.isel(scale=0, horizon=0)), once.target, rtol=TOLERANCE)
    peak = response.summary["peak"].isel(answer=0, scale=0)
    assert float(peak.std(ddof=0) / peak.mean()) > 0.02


def counted(function: Any, name: str, calls: list[str]) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*args, **options)

    return wrapper


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 4), target=st.floats(0.01, 0.5), size=st.floats(1e-3, 1e3))
def test_every_candidate_is_matched_or_named(seed: int, count: int, target: float, size: float) -> None:
    case = make("quadratic", seed=seed % 3)
    path, probe = case.path(2), case.batch()
    generator = torch.Generator().manual_seed(seed)
    xis = size * torch.randn(count, 8, generator=generator, dtype=torch.float64)
    matched = match_first_step(path, xis, probe, at=-1, target=target)
    mu = matched.target
    assert matched.xi.shape == (count, 8)
    for i, good in enumerate(matched.accepted.values):
        if good:
            assert not matched.data["reason"].values[i]
            response = path.perturb(matched.xi[i], at=1).response(probe, answers=("exact",)).exact
            assert float(response.squeeze()) == pytest.approx((-1) ** i * mu, rel=TOLERANCE)
            assert 0 < float(matched.gamma[i]) <= 64
        else:
            assert matched.data["reason"].values[i]


def test_candidates_that_cannot_be_matched_are_named() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(2), case.batch()
    xis = residuals(path.replace(case.batches(4)))
    far = match_first_step(path, xis, probe, target=1e6)
    assert not far.accepted.any()
    assert far.gamma.isnull().all()
    assert far.xi.isnan().all()
    assert all("not reached" in reason for reason in far.data["reason"].values)
    assert math.isnan(far.cv)
    strict = match_first_step(path, xis, probe, tolerance=1e-30)
    missed = ~strict.accepted.values
    assert missed.any()
    assert all("above 1e-30" in reason for reason in strict.data["reason"].values[missed])


def test_a_residual_along_the_functional_has_no_free_part() -> None:
    """z = 0: the candidate is b alone."""
    system = System("quadratic")
    d = system.layout.size
    a = system.dense_readouts()[0, :d] @ system.oracle(0).write_in(True)[:d]
    matched = match_first_step(system.path, 3 * a[None], system.probe)
    cosine = torch.nn.functional.cosine_similarity(matched.xi[0], a, dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-12)  # rounding leaves a z of 1e-16, which is not scaled up
    assert matched.target == pytest.approx(0.75 * float(a @ a))


def test_matching_refuses() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(2), case.batch()
    xis = residuals(path.replace(case.batches(2)))
    with pytest.raises(InvalidInput, match="no first response"):
        match_first_step(path, torch.zeros_like(xis), probe)
    with pytest.raises(InvalidInput, match="not finite"):
        match_first_step(path, xis * math.inf, probe)
    with pytest.raises(InvalidInput, match="coordinates"):
        match_first_step(path, xis[:, 1:], probe)
    with pytest.raises(InvalidInput, match="target"):
        match_first_step(path, xis, probe, target=0.0)
    with pytest.raises(InvalidInput, match="no state after it"):
        match_first_step(path, xis, ak.own_loss, at=1)
    with pytest.raises(InvalidInput, match="has no ξ"):
        residuals(path.skip(0))


# --- persistence


def persistence_by_hand(
    case: Case, path: ak.Path, other: object, probe: object, betas: tuple[float | None, float | None], moment: Any
) -> tuple[list[float], torch.Tensor]:
    """Response and first displacement of a live pair that goes on with other β from the state after step 0."""
    losses, second = [], []
    batch, random = path.steps[0].batch, path.steps[0].random.cpu
    for shocked in (False, True):
        twin, twin_shocked = case.twin(), case.twin()
        own = [group["betas"] for group in twin.optimizer.param_groups]
        for run in (twin, twin_shocked):
            for group, hyper in zip(run.optimizer.param_groups, path.steps[0].hypers):
                group["lr"] = hyper.lr
        for run, mixed in ((twin, False), (twin_shocked, True)):
            gradients(run, batch)
            if mixed:
                plain = [p.grad.clone() for p in run.model.parameters()]
                gradients(run, other)
                for p, g in zip(run.model.parameters(), plain):
                    p.grad = g + 0.25 * (p.grad - g)
            clip_and_step(run)
        gradients(twin, path.steps[1].batch)  # what the next step will see, for the moments to be matched
        for group, now in zip(twin.optimizer.param_groups, own):
            new = tuple(b if b is not None else old for b, old in zip(betas, now))
            for p in group["params"] if shocked else []:
                q = dict(zip(twin.model.parameters(), twin_shocked.model.parameters()))[p]
                moment(twin.optimizer.state[p], twin_shocked.optimizer.state[q], p.grad, now, new, group["eps"])
            group["betas"] = new
        losses.append([probe_loss(twin, probe, random)])
        for step in path.steps[1:]:
            gradients(twin, step.batch)
            for group, hyper in zip(twin.optimizer.param_groups, step.hypers):
                group["lr"] = hyper.lr
            clip_and_step(twin)
            losses[-1].append(probe_loss(twin, probe, random))
            if step.index == 1:
                second.append(torch.cat([p.detach().reshape(-1) for p in twin.model.parameters()]))
    return [b - a for a, b in zip(*losses)], second[1] - second[0]


def rescaled_m(mine: dict, other: dict, g: Any, own: tuple, new: tuple, eps: float) -> None:
    s = float(mine["step"]) + 1
    first = [beta / (1 - beta**s) for beta in (own[0], new[0])]
    mine["exp_avg"] += first[0] / first[1] * (other["exp_avg"] - mine["exp_avg"])


def solved_v(mine: dict, other: dict, g: torch.Tensor, own: tuple, new: tuple, eps: float) -> None:
    """Each coordinate's v by SciPy, so that 1/d' − 1/d is what it is at the path's own β2."""
    s = float(mine["step"]) + 1

    def inverse(v: float, g: float, beta: float) -> float:
        return 1 / (math.sqrt((beta * v + (1 - beta) * g * g) / (1 - beta**s)) + eps)

    flat, shocked, grads = mine["exp_avg_sq"].view(-1), other["exp_avg_sq"].view(-1), g.view(-1)
    for i in range(len(flat)):
        v, w, gi = float(flat[i]), float(shocked[i]), float(grads[i])
        wanted = inverse(w, gi, own[1]) - inverse(v, gi, own[1]) + inverse(v, gi, new[1])
        flat[i] = brentq(lambda x, g=gi, t=wanted: inverse(x, g, new[1]) - t, 0, 1e6, xtol=1e-16, rtol=1e-14)


@pytest.mark.parametrize("name", ["quadratic", "two_groups"])
def test_beta1_persistence_by_hand(name: str) -> None:
    case = make(name)
    path, other, probe = case.path(5, lr=[0.01, 0.03, 0.02, 0.01, 0.02]), case.batch(), case.batch()
    data = persistence(path.replace([other]), probe, beta1=[0.99, 0.5])
    assert list(data["beta"].values) == [0.5, 0.99]
    displacements = []
    for i, beta in enumerate((0.5, 0.99)):
        expected, moved = persistence_by_hand(case, path, other, probe, (beta, None), rescaled_m)
        displacements.append(moved)
        np.testing.assert_allclose(data["response"].values[i, 0], expected, rtol=1e-6, atol=1e-12)
        assert float(data["first_displacement"][i, 0]) == pytest.approx(float(moved.norm()), rel=1e-9)
    # the whole point: the same first displacement, in every coordinate
    torch.testing.assert_close(displacements[0], displacements[1], rtol=1e-8, atol=1e-14)
    total = np.abs(data["response"].values).sum(-1)
    np.testing.assert_allclose(data["total_abs_ratio"].values, total / total[:1])
    np.testing.assert_array_equal(data["peak_horizon"].values, np.abs(data["response"].values).argmax(-1) + 1)


def test_beta2_persistence_by_hand() -> None:
    case = make("quadratic", seed=1)
    path, probe = case.path(5), case.batch()
    # a replacement close to the control's batch, so that every coordinate can be matched
    other = tuple(x + 0.1 * y for x, y in zip(path.steps[0].batch, case.batch()))
    betas = (0.99, 0.9999)
    data = persistence(path.replace([other]), probe, beta2=betas)
    assert not data["unmatched"].any()
    displacements = []
    for i, beta in enumerate(betas):
        expected, moved = persistence_by_hand(case, path, other, probe, (None, beta), solved_v)
        displacements.append(moved)
        assert max(map(abs, expected)) > 1e-8
        np.testing.assert_allclose(data["response"].values[i, 0], expected, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(displacements[0], displacements[1], rtol=1e-6, atol=1e-13)
    np.testing.assert_allclose(*data["first_displacement"].values[:, 0], rtol=1e-9)


@pytest.mark.parametrize(("name", "channel"), [("beta1", "m"), ("beta2", "v")])
def test_the_paths_own_beta_is_the_isolated_channel(name: str, channel: str) -> None:
    case = make("tanh_mlp")
    path, probe = case.path(5), case.batch()
    change = path.replace(case.batches(2), at=1)
    own = getattr(path.steps[0].hypers[0], name)
    found = persistence(change, probe, **{name: [own]})["response"].isel(beta=0).values
    hybrid = channel_responses(change, probe, answers=("exact",), scale=0.25)["response"].sel(channel=channel)
    np.testing.assert_allclose(found, hybrid.values[0], rtol=1e-7, atol=1e-13)


def test_unmatched_coordinates_are_counted() -> None:
    """v shocked to zero under a β2 whose own g² alone exceeds what the displacement needs: no v ≥ 0 gives it."""
    case = make("quadratic")
    path, probe = case.path(4), case.batch()
    data = persistence(path.reset(0, "v"), probe, beta2=[0.5, 0.999], scale=1.0)
    assert int(data["unmatched"].sel(beta=0.5).sum()) > 0
    assert int(data["unmatched"].sel(beta=0.999).sum()) == 0
    assert np.isfinite(data["response"]).all()


def test_persistence_refuses() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(3), case.batch()
    change = path.replace([case.batch()])
    for options in ({}, {"beta1": [0.5], "beta2": [0.9]}):
        with pytest.raises(InvalidInput, match="takes beta1"):
            persistence(change, probe, **options)
    for bad in ([], [0.0], [1.0], [0.5, 0.5], [math.nan]):
        with pytest.raises(InvalidInput, match="between 0 and 1"):
            persistence(change, probe, beta1=bad)
    with pytest.raises(InvalidInput, match="two horizons"):
        persistence(change, probe, beta1=[0.5], horizon=1)
    with pytest.raises(InvalidInput, match="no scale"):
        persistence(path.skip(0), probe, beta1=[0.5])
    assert replace(path.steps[0]) == path.steps[0]  # the path's own steps are as they were
