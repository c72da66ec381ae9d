"""The batched quadratic program against autograd, torch's AdamW and the engine, which shares none of its algebra."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from benchmarks import persistence
from torch import nn

import aftershock as ak
from aftershock import theory
from aftershock.studies.measures import NAMES
from aftershock.studies.paper import TABLES
from aftershock.studies.quadratic.family import (
    DIMENSION,
    HYPER,
    LINEAR_SPREAD,
    Process,
    Quadratic,
    mean_loss,
    start_state,
)
from aftershock.studies.quadratic.frozen import frozen_memory
from aftershock.studies.quadratic.recipe import mechanism, memory, prospects, quadratic_study
from aftershock.studies.quadratic.rows import rows_of, step_
from aftershock.studies.quadratic.scene import BURN_IN, CANDIDATES, HORIZON, Scene
from aftershock.studies.study import System, systems_of

SYSTEM = System("quadratic", 11, 1)  # κ = 4
LAST_PLACES = 1e-14  # responses are differences of losses of order one, which round by the rows that go together


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene.of(SYSTEM)


class Vector(nn.Module):
    def __init__(self, theta: torch.Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta.clone())


def loss_fn(model: Vector, batch: Quadratic) -> torch.Tensor:
    """The definition, without any of the study's own products."""
    theta, rank = model.theta, batch.factor.shape[1]
    return (
        theta @ (batch.diagonal * theta) / 2 + ((theta @ batch.factor) ** 2).sum() / (2 * rank) + batch.linear @ theta
    )


@pytest.fixture(scope="module")
def path(scene: Scene) -> ak.Path:
    """The same system trained by torch.optim.AdamW, captured and followed by the engine."""
    start = start_state(SYSTEM.generator("start"))
    model = Vector(start.theta[0])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=HYPER.lr, betas=(HYPER.beta1, HYPER.beta2), eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
    )  # fmt: skip
    for batch in scene.seen[:BURN_IN]:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    point = ak.capture(model, optimizer, loss_fn)
    return point.follow([mean_loss(scene.references), *scene.future])


@pytest.fixture(scope="module")
def change(path: ak.Path, scene: Scene) -> ak.Change:
    return path.replace(scene.seen[-CANDIDATES:][:3], 0)


@pytest.fixture(scope="module")
def found(scene: Scene) -> dict:
    return mechanism(scene)


def close(ours, theirs, tolerance: float = 1e-8) -> None:
    """Relative to the largest number: both sides difference losses of order one, which costs 1e-16 of each."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < tolerance


def test_the_family_is_the_papers() -> None:
    draws = Process(4.0).innovation(torch.Generator().manual_seed(0), 200)
    assert 0.05 <= float(draws.diagonal.min()) <= 0.051
    assert 0.999 <= float(draws.diagonal.max()) <= 1.0
    assert float(draws.factor.std()) == pytest.approx(DIMENSION**-0.5, rel=0.01)
    assert float(draws.linear.std()) == pytest.approx(LINEAR_SPREAD, rel=0.01)


def test_batches_are_correlated_by_085_and_keep_their_spread() -> None:
    batches = Process(1.0).sequence(torch.Generator().manual_seed(0), 60)
    linear = torch.stack([b.linear for b in batches])
    factor = torch.stack([b.factor for b in batches]).flatten(1)
    for x, spread in ((linear, LINEAR_SPREAD), (factor, DIMENSION**-0.5)):
        assert float(x[-1].std()) == pytest.approx(spread, rel=0.1)
        assert float((x[:-1] * x[1:]).sum() / (x[:-1] ** 2).sum()) == pytest.approx(0.85, abs=0.02)


def test_gradient_product_and_value_are_the_losss(scene: Scene) -> None:
    batch = scene.seen[0]
    theta = torch.randn(3, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for row, value, gradient in zip(theta, batch.value(theta), batch.gradient(theta)):
        model = Vector(row)
        loss = loss_fn(model, batch)
        (truth,) = torch.autograd.grad(loss, [model.theta], create_graph=True)
        close(value, loss.detach(), 1e-13)
        close(gradient, truth.detach(), 1e-13)
        (product,) = torch.autograd.grad(truth @ theta[0], [model.theta])
        close(batch.products(theta[:1])[0], product, 1e-13)


def test_the_control_is_torchs_own_training(scene: Scene, path: ak.Path) -> None:
    close(scene.state.theta[0], path.trajectory.state(0).theta[:DIMENSION], 1e-13)
    for h in (1, 2, HORIZON):
        close(scene.path[h - 1].theta[0], path.trajectory.state(h).theta[:DIMENSION], 1e-12)


@pytest.mark.parametrize("setting", ["standard", "anisotropic"])
def test_responses_are_the_engines(found: dict, scene: Scene, change: ak.Change, setting: str) -> None:
    probe = getattr(scene, setting).loss
    theirs = change.response(probe, scales=[0.125, 1.0], answers=("exact", "tangent")).data["response"]
    ours = found[setting].sel(scale=[0.125, 1.0]).isel(change=slice(0, 3))
    predicted = ours["predicted"]
    close(ours["exact"].values, theirs.sel({"answer": "exact"}).values, 1e-7)
    close(predicted.sel({"answer": "tangent"}).values, theirs.sel({"answer": "tangent"}).values, 1e-7)
    # endpoint-exact is one of the scores: at full scale, where the exact difference is
    endpoint = theory.scores(change, probe)["endpoint_response"]
    close(predicted.sel({"answer": "endpoint", "scale": 1.0}).values, endpoint.values, 1e-7)


def test_scores_are_the_engines(found: dict, scene: Scene, change: ak.Change) -> None:
    table = theory.scores(change, scene.standard.loss)
    ours = found["standard"]["score"].sel(family="natural").isel(change=slice(0, 3))
    for name in ours["score_method"].values:
        close(ours.sel(score_method=name).values, table[name].values, 1e-7)
    close(found["standard"]["readout_cosine"].values, table["readout_cosine"].values, 1e-9)


def test_the_identity_holds_to_rounding_and_would_not_by_chance(scene: Scene, found: dict) -> None:
    deviation = float((scene.after(scene.xi).theta - scene.control.theta).abs().max())
    assert 0 < float(found["standard"]["identity_residual"]) < 1e-12 * deviation


def test_matched_candidates_have_equal_first_steps_and_unequal_futures(found: dict) -> None:
    for setting in ("standard", "anisotropic", "rotating"):
        data = found[setting]
        first = abs(data["first_step"].sel(family="matched"))
        assert bool(data["accepted"].all())
        assert float(first.std() / first.mean()) < 1e-9
        magnitude = data["magnitude"].sel(family="matched")
        assert float(magnitude.std() / magnitude.mean()) > 0.01


def test_matched_candidates_are_the_engines(found: dict, scene: Scene, path: ak.Path) -> None:
    matched = theory.match_first_step(path, scene.xi, scene.standard.loss)
    close(scene.matched(scene.standard).xi, matched.xi, 1e-6)


def test_channels_and_persistence_are_the_engines(scene: Scene, change: ak.Change) -> None:
    data = memory(scene)["standard"]
    theirs = theory.channel_responses(change, scene.standard.loss, answers=("exact",))["response"]
    for bits, name in (("100", "theta"), ("010", "m"), ("001", "v"), ("110", "theta+m"), ("111", "theta+m+v")):
        mine = data["channel_exact"].sel(channel=bits).isel(channel_change=slice(0, 3)).values
        close(mine, theirs.sel(channel=name).squeeze().transpose("change", "horizon").values, 1e-6)
    for channel, name, betas in (("m", "beta1", [0.5, 0.99]), ("v", "beta2", [0.9, 0.999])):
        swept = theory.persistence(change, scene.standard.loss, scale=0.25, **{name: betas})["response"]
        mine = data[f"persistence_{channel}"].sel({f"decay_{channel}": betas}).isel(persistence_change=slice(0, 3))
        close(mine.values, swept.transpose("beta", "change", "horizon").values, 1e-5)
    short, long = data["channel_exact"], data["channel_long"]
    assert (short.values == long.isel(long_horizon=slice(0, HORIZON)).values).all()
    assert long.sizes["long_horizon"] == 128
    swept = data["persistence_long_v"]
    assert (data["persistence_v"].values == swept.isel(long_horizon=slice(0, HORIZON)).values).all()
    assert swept.sizes["long_horizon"] == 128


def test_the_frozen_memory_is_the_engines(scene: Scene, path: ak.Path) -> None:
    ours = frozen_memory(scene, scene.standard)
    moved = scene.after(scene.xi[:1]).theta - scene.control.theta
    felt = abs(scene.standard.gradient(scene.control.theta) * moved)[0]
    theirs = theory.FrozenMemory.of(path, 1, int(felt.argmax()))
    for name, value in theirs.coefficients.items():
        assert value != 0
        assert getattr(ours, name) == pytest.approx(value, rel=1e-7)


def test_present_scores_are_the_engines(scene: Scene, path: ak.Path) -> None:
    ours = prospects(scene, 2)["standard"]["present_score"].sel(family="natural").isel(change=slice(0, 3))
    point, control, candidates = path.point, mean_loss(scene.references), scene.seen[-CANDIDATES:][:3]
    arguments = (point, control, candidates, scene.standard.loss)
    frozen = theory.present_frozen(*arguments, horizon=HORIZON)
    close(ours.sel(present_method="present_frozen").values, frozen["score"].values, 1e-7)
    surrogate = theory.reference_surrogate(*arguments, horizon=HORIZON)
    close(ours.sel(present_method="reference_surrogate").values, surrogate["score"].values, 1e-7)


def test_futures_share_the_past_and_differ_afterwards(scene: Scene) -> None:
    response = prospects(scene, 3)["standard"]["future_response"].sel(family="natural")
    first, last = response.isel(horizon=0), response.isel(horizon=-1)
    assert (first.isel(future=0).values == first.isel(future=1).values).all()
    assert not (last.isel(future=0).values == last.isel(future=1).values).any()


def test_every_way_of_matching_v_does_what_its_name_says(scene: Scene) -> None:
    """The first displacement η m̂ (1/d − 1/d'), by torch's own step from θ with v and with v + Δv."""
    change = scene.after(0.25 * scene.xi).v - scene.control.v
    gradient = scene.future[0].gradient(scene.control.theta)

    def moved(dv: torch.Tensor, decay: float) -> torch.Tensor:
        ends = []
        for added in (dv, torch.zeros_like(dv)):
            start = rows_of(scene.control, len(dv))
            start.v.add_(added).clamp_(min=0)
            ends.append(step_(start, gradient.expand(len(dv), -1).clone(), replace(HYPER, beta2=decay)).theta)
        return ends[0] - ends[1]

    wanted = moved(change, HYPER.beta2)
    for name, dv in persistence.rescaled(scene, 1e-4 * change, 0.9):
        small = moved(dv, 0.9) / 1e-4
        exact = moved(1e-4 * change, HYPER.beta2) / 1e-4
        if name.startswith("coordinate"):
            close(small, exact, 1e-3)
        elif name.startswith("norm"):
            close(small.norm(dim=1), exact.norm(dim=1), 1e-3)
        else:
            assert torch.equal(dv, 1e-4 * change)
    found = dict(persistence.rescaled(scene, change, 0.9))
    close(moved(found["norm, exactly"], 0.9).norm(dim=1), wanted.norm(dim=1))
    factors = found["norm, exactly"] / change
    assert float((factors - factors[:, :1]).abs().max()) < 1e-12  # one for each candidate


def test_the_search_over_readings_begins_with_the_studys_own(scene: Scene) -> None:
    swept = persistence.swept_v(scene)
    own = swept.sel(deviation="0.25 of the shock", match=persistence.EXACTLY)
    for name, data in memory(scene).items():
        here = own.sel(probe=NAMES[name])
        np.testing.assert_allclose(here, data["persistence_v"], rtol=0, atol=LAST_PLACES)
        own_channels = persistence.channels(scene).sel(probe=NAMES[name])
        np.testing.assert_allclose(own_channels, data["channel_exact"], rtol=0, atol=LAST_PLACES)
    same = swept.sel(decay=HYPER.beta2)  # where no β changes, every rule is the identity
    unscaled = same.sel(match=["none"]).values.repeat(5, same.dims.index("match"))
    np.testing.assert_allclose(same, unscaled, rtol=1e-6, atol=LAST_PLACES)


def test_ratios_to_the_papers_table_are_geometric_means() -> None:
    quotes, key = TABLES[persistence.SWEEPS].quotes(), "m, β1 = {:g}".format
    decays, probes = [0.5, 0.9], ["Standard", "Anisotropic"]
    found = xr.Dataset(
        {
            name: (
                ("probe", "decay", "change", "system"),
                np.array([[[[factor * quotes[key(d), f"{p}: {word}"].value]] for d in decays] for p in probes]),
            )
            for word, name, factor in (("M", "peak", 2.0), ("ARE", "total_abs", 0.5), ("h*", "peak_horizon", 3.0))
        },
        {"probe": probes, "decay": decays},
    )
    assert persistence.ratios(found, persistence.SWEEPS, key, "decay") == pytest.approx((1, np.log(2), 3))


def test_a_piece_depends_on_its_system_alone() -> None:
    study = quadratic_study(seed=3, quick=True)
    one, again = (study.run(study.systems[2], "memory")["standard"] for _ in range(2))
    other = study.run(study.systems[3], "memory")["standard"]
    assert one.identical(again)
    assert not one.equals(other)


def test_systems_and_streams_are_independent_draws() -> None:
    systems = systems_of("quadratic", 2026, 8)
    assert len({s.name for s in systems}) == 32
    assert len({s.entropy(stream) for s in systems for stream in ("sequence", "probe", "futures")}) == 96
