"""Repeated futures: Π_H by hand, branch rankings by SciPy, scores against dense matrices and against the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import spearmanr
from torch import Tensor
from torch.utils.data import DataLoader

import aftershock as ak
from aftershock.errors import InvalidInput
from aftershock.results.statistics import spearman
from aftershock.theory.futures import (
    present_frozen,
    prospective_ratio,
    prospective_structure,
    reference_surrogate,
    repeated_futures,
    sampled_future,
)
from aftershock.theory.samplers import FittedProcess, fit_process, sample_futures

from .cases import Quadratic, make

D, R, KAPPA, PERSISTENCE = 24, 3, 4.0, 0.85
Quad = tuple[Tensor, Tensor, Tensor]


def innovation(generator: torch.Generator) -> Quad:
    """A batch of the paper's quadratic family."""
    d = 0.05 + (0.25 * KAPPA - 0.05) * torch.rand(D, generator=generator).double()
    u, q = torch.randn(D, R, generator=generator).double() / D**0.5, torch.randn(D, generator=generator).double()
    return d, u, 0.05 * q


def batches_from(generator: torch.Generator, count: int, start: Quad | None, rho: float) -> list[Quad]:
    """The paper's correlated sequence, or an independent one with ρ = 0."""
    out, now = [], start
    for _ in range(count):
        new, root = innovation(generator), (1 - rho**2) ** 0.5
        now = new if now is None else (rho * now[0] + (1 - rho) * new[0], *(
            rho * a + root * b for a, b in zip(now[1:], new[1:])
        ))  # fmt: skip
        out.append(now)
    return out


class System:
    """A warm quadratic run with references, candidates, a probe, and a source of true futures."""

    def __init__(self, seed: int, rho: float, candidates: int = 8, burn: int = 30) -> None:
        self.generator, self.rho = torch.Generator().manual_seed(seed), rho
        self.seen = batches_from(self.generator, burn + 4 + candidates, None, rho)
        model = Quadratic(D).double()
        model.theta.data = 0.1 * torch.randn(D, generator=self.generator).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        for batch in self.seen[:burn]:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        self.point = ak.capture(model, optimizer, lambda m, b: m(b))
        self.references, self.candidates = self.seen[burn : burn + 4], self.seen[burn + 4 :]
        self.control = ak.accumulate(self.references)
        d, u, q = innovation(self.generator)
        self.probe = (d, u, 0.4 * q)

    def futures(self, count: int, length: int) -> list[list[Quad]]:
        return [batches_from(self.generator, length, self.seen[-1], self.rho) for _ in range(count)]

    def repeated(self, count: int, horizon: int, **options: object) -> xr.Dataset:
        futures = self.futures(count, horizon - 1)
        return repeated_futures(self.point, self.control, self.candidates, futures, self.probe, **options)


def table(values: object) -> xr.DataArray:
    return xr.DataArray(np.asarray(values, dtype=float), dims=("change", "future"))


# --- Π_H and rankings, by hand


def test_prospective_ratio_by_hand() -> None:
    """μ = (2, 6): between 4. Var_k = (1, 9): within 5. Π = 4/9."""
    assert float(prospective_ratio(table([[1, 3], [3, 9]]))) == pytest.approx(4 / 9, rel=1e-15)
    assert float(prospective_ratio(table([[1, 1], [2, 2], [5, 5]]))) == 1.0
    assert float(prospective_ratio(table([[1, 3], [3, 1]]))) == 0.0
    assert np.isnan(prospective_ratio(table([[2, 2], [2, 2]])))


def test_structure_against_numpy_and_scipy() -> None:
    values = np.random.default_rng(0).normal(size=(6, 5, 4))  # change, future, horizon
    response = xr.DataArray(values, dims=("change", "future", "horizon"), coords={"horizon": range(1, 5)})
    for by, of in (
        ("peak", np.abs(values).max(-1)),
        ("max_increase", np.maximum(values, 0).max(-1)),
        ("total_abs", np.abs(values).sum(-1)),
    ):
        found, mean = prospective_structure(response, by), of.mean(1)
        between, within = np.var(mean), np.mean(np.var(of, axis=1))
        np.testing.assert_allclose(found["mean"], mean)
        np.testing.assert_allclose([found["between"], found["within"]], [between, within])
        np.testing.assert_allclose(found["prospective_ratio"], between / (between + within))
        branches = [spearmanr(of[:, k], mean).statistic for k in range(5)]
        np.testing.assert_allclose(found["branch_correlation"], np.median(branches))
        assert found["summary"].item() == by


def test_structure_keeps_other_dimensions() -> None:
    values = np.random.default_rng(1).normal(size=(2, 4, 3, 5))
    response = xr.DataArray(values, dims=("system", "change", "future", "horizon"), coords={"horizon": range(1, 6)})
    both = prospective_structure(response)
    for i in range(2):
        xr.testing.assert_allclose(both.isel(system=i), prospective_structure(response.isel(system=i)))


def test_constant_scores_have_no_rank_correlation() -> None:
    target = xr.DataArray([1.0, 2.0, 4.0, 3.0], dims="change")
    tied = xr.DataArray([1.0, 1.0 + 1e-13, 1.0 - 1e-13, 1.0], dims="change")  # matched to rounding
    assert np.isnan(spearman(tied, target)["rho"])
    assert np.isnan(spearman(target, 0 * target)["rho"])
    assert np.isnan(spearman(target.where(target > 2), target)["rho"])  # two are left
    assert float(spearman(target**3, target)["rho"]) == 1.0
    assert float(spearman(-target, target)["rho"]) == -1.0


def test_too_few_to_rank_is_named() -> None:
    two = xr.DataArray([1.0, 2.0], dims="change")
    with pytest.raises(InvalidInput, match="needs 3 candidates at least; got 2"):
        spearman(two, two)
    response = xr.DataArray(np.ones((2, 3, 2)), dims=("change", "future", "horizon"), coords={"horizon": [1, 2]})
    with pytest.raises(InvalidInput, match="needs 3 of change; got 2"):
        prospective_structure(response)
    with pytest.raises(InvalidInput, match="needs 2 of future; got 1"):
        prospective_structure(xr.concat([response, response], "change").isel(future=[0]))
    with pytest.raises(InvalidInput, match="'loudest' is not a summary"):
        prospective_structure(response, "loudest")


# --- repeated futures


def test_each_branch_is_an_exact_pair_on_its_own_path() -> None:
    case = make("tanh_mlp")
    point, control, candidates = case.point(), case.batch(), case.batches(3)
    futures, probe = [case.batches(3) for _ in range(2)], case.batch()
    found = repeated_futures(point, control, candidates, futures, probe, answers=("exact", "tangent"), clip=0.2)
    assert dict(found["response"].sizes) == {"answer": 2, "change": 3, "future": 2, "horizon": 4}
    for k, future in enumerate(futures):
        alone = point.follow([control, *future], clip=0.2).replace(candidates).response(probe)
        for answer in ("exact", "tangent"):
            expected = getattr(alone, answer).isel(scale=0)
            # another number of rows at once: sums of another order
            np.testing.assert_allclose(found["response"].sel({"answer": answer, "future": k}), expected, rtol=1e-11)
        np.testing.assert_array_equal(found["control"].sel(future=k), alone.data["control"])
    np.testing.assert_allclose(found["mean_response"], found["response"].values.mean(2))
    assert abs(found["response"].isel(future=0) - found["response"].isel(future=1)).max() > 0
    # the first state comes before any future batch
    first = found["response"].sel(horizon=1)
    np.testing.assert_array_equal(first.isel(future=0), first.isel(future=1))


def test_candidates_may_be_made_on_the_path() -> None:
    case = make("tanh_mlp")
    point, control, future = case.point(), case.batch(), case.batches(2)
    xi = torch.randn(3, point.loss.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = repeated_futures(point, control, lambda path: path.perturb(xi), [future, future], case.batch())
    assert found.sizes["change"] == 3
    assert not found["response"].var("future").values.any()


def test_futures_of_different_lengths_are_refused() -> None:
    case = make("tanh_mlp")
    for futures in ([case.batches(2), case.batches(3)], []):
        with pytest.raises(InvalidInput, match="lists of one length"):
            repeated_futures(case.point(), case.batch(), case.batches(3), futures, case.batch())


def test_structure_of_quadratics_with_independent_and_correlated_batches() -> None:
    """Π by the formula on exact reruns made here; one future for all gives Π = 1."""
    for rho in (0.0, PERSISTENCE):
        system = System(3, rho)
        data = system.repeated(6, 6)
        exact = data["response"].sel({"answer": "exact"})
        found = prospective_structure(exact)
        peaks = np.abs(exact.transpose("change", "future", "horizon").values).max(-1)
        between, within = peaks.mean(1).var(), peaks.var(1).mean()
        assert within > 0
        np.testing.assert_allclose(found["prospective_ratio"], between / (between + within))
        assert 0 < float(found["prospective_ratio"]) < 1
        same = exact.isel(future=[0] * 4)
        assert float(prospective_structure(same)["prospective_ratio"]) == pytest.approx(1.0)
        assert float(prospective_structure(same)["branch_correlation"]) == pytest.approx(1.0)


# --- present-time scores


@pytest.mark.parametrize("clip", [None, 0.1])
def test_present_frozen_is_a_matrix_power(clip: float | None) -> None:
    """c̄ᵀ Ā^{h−1} B ξ with dense matrices of the engine's operators, which are tested elsewhere."""
    case = make("two_groups")
    references, candidates, probe, horizon = case.batches(3), case.batches(4), case.batch(), 5
    control = ak.accumulate(references)
    found = present_frozen(case.point(), control, candidates, probe, horizon=horizon, clip=clip)
    path = case.point().follow([control, control], clip=clip)
    layout, write, frozen = path.point.loss.layout, path.write_in(0).as_matrix(), path.transition(1).as_matrix()
    slope = layout.compact(path.response_operator(probe, horizon=1).readouts[0])
    readout = torch.cat([slope, torch.zeros(2 * layout.size, dtype=torch.float64)])
    raws = [case.point().follow([b]).control(0).raw for b in (*references, *candidates)]
    xi = layout.compact(torch.stack(raws[3:]) - torch.stack(raws[:3]).mean(0))
    rows = [readout @ torch.linalg.matrix_power(frozen, h) @ write @ xi.mT for h in range(horizon)]
    expected = torch.stack(rows, dim=1)
    np.testing.assert_allclose(found["response"], expected, rtol=1e-8, atol=1e-12 * float(expected.abs().max()))
    np.testing.assert_allclose(found["score"], expected.abs().max(1).values, rtol=1e-8)
    one = present_frozen(case.point(), control, candidates, probe, horizon=1, clip=clip)
    np.testing.assert_allclose(one["score"], expected[:, 0].abs(), rtol=1e-8)


def test_reference_surrogate_rolls_out_the_references() -> None:
    case = make("tanh_mlp")
    references, candidates, probe = case.batches(2), case.batches(3), case.batch()
    control = ak.accumulate(references)
    found = reference_surrogate(case.point(), control, candidates, probe, horizon=4, references=references)
    path = case.point().follow([control, references[0], references[1], references[0]])
    expected = path.replace(candidates).response(probe, answers=("tangent",)).tangent.isel(scale=0)
    np.testing.assert_array_equal(found["response"].isel(future=0), expected)
    np.testing.assert_allclose(found["score"], abs(expected).max("horizon"))
    mean = reference_surrogate(case.point(), control, candidates, probe, horizon=3, by="total_abs")
    path = case.point().follow([control] * 3)
    expected = path.replace(candidates).response(probe, answers=("tangent",)).tangent.isel(scale=0)
    np.testing.assert_allclose(mean["score"], abs(expected).sum("horizon"))


def test_sampled_future_is_the_mean_summary_over_its_futures() -> None:
    case = make("tanh_mlp")
    control, candidates, past, probe = case.batch(), case.batches(3), case.batches(5), case.batch()
    generator = torch.Generator().manual_seed(7)
    found = sampled_future(
        case.point(), control, candidates, past, probe, horizon=3, samples=4, answer="exact", generator=generator
    )
    futures = sample_futures(past, 4, 2, torch.Generator().manual_seed(7))
    by_hand = [
        case.point().follow([control, *future]).replace(candidates).response(probe, answers=("exact",)).exact
        for future in futures
    ]
    peaks = np.stack([np.abs(response.isel(scale=0).values).max(1) for response in by_hand])
    assert peaks.var(0).max() > 0
    np.testing.assert_allclose(found["score"], peaks.mean(0), rtol=1e-12)


def test_sampled_future_beats_the_reference_surrogate_on_correlated_batches() -> None:
    """Rank correlation with the conditional mean over 32 futures, medians over systems.

    The references lie before the candidates and say little of the future; the fitted process starts from
    the last batch. Semilinear responses are exact for quadratics (tests/test_semilinear.py), so μ is exact.
    """
    sampled, surrogate = [], []
    for seed in range(3):
        system, horizon = System(seed, PERSISTENCE), 10
        mean = prospective_structure(system.repeated(32, horizon, answers=("semilinear",))["response"])["mean"]
        arguments = (system.point, system.control, system.candidates)
        process = fit_process(system.seen)
        ours = sampled_future(*arguments, process, system.probe, horizon=horizon, samples=6)
        papers = reference_surrogate(*arguments, system.probe, horizon=horizon)
        sampled.append(float(spearman(ours["score"], mean.isel({"answer": 0}))["rho"]))
        surrogate.append(float(spearman(papers["score"], mean.isel({"answer": 0}))["rho"]))
    assert np.median(sampled) > 0.9, sampled
    assert np.median(sampled) > np.median(surrogate) + 0.05, (sampled, surrogate)


# --- samplers


def test_a_loader_is_read_on_and_begun_again() -> None:
    data = torch.arange(5.0)
    loader = DataLoader(data, batch_size=1)
    futures = sample_futures(loader, 2, 4)
    assert [[float(b) for b in future] for future in futures] == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_past_batches_are_drawn_with_the_generator() -> None:
    past = [torch.tensor(float(i)) for i in range(6)]

    def draw(seed: int) -> list[list[float]]:
        generator = torch.Generator().manual_seed(seed)
        return [[float(b) for b in future] for future in sample_futures(past, 40, 30, generator)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    counts = np.bincount(np.array(draw(0), dtype=int).ravel(), minlength=6)
    assert (abs(counts - 200) < 5 * np.sqrt(1200 * 5 / 36)).all(), counts  # five standard deviations of a fair draw
    assert sample_futures(past, 2, 0) == [[], []]
    assert sample_futures(lambda length, generator: past, 2, 3) == [past[:3]] * 2  # more than was asked for


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda: iter([torch.zeros(1)] * 5), "ended after 5 of 8 batches"),
        (lambda: DataLoader([], batch_size=1), "ended after 0 of 8"),
        (list, "the list of past batches is empty"),
        (lambda: lambda length, generator: [torch.zeros(1)] * 3, "returned 3 batches for a future of 4"),
    ],
)
def test_samplers_that_run_short_are_named(sampler: Callable, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        sample_futures(sampler(), 2, 4)


def test_no_futures_and_no_horizon_are_named() -> None:
    with pytest.raises(InvalidInput, match="at least one future"):
        sample_futures([torch.zeros(1)], 0, 4)
    case = make("tanh_mlp")
    for score in (present_frozen, reference_surrogate):
        with pytest.raises(InvalidInput, match="from 1; got 0"):
            score(case.point(), case.batch(), case.batches(3), case.batch(), horizon=0)
    with pytest.raises(InvalidInput, match="from 1; got 0"):
        sampled_future(case.point(), case.batch(), case.batches(3), case.batches(3), case.batch(), horizon=0)


def ar1(phi: float, sigma: float, mean: Tensor, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = mean + sigma / (1 - phi**2) ** 0.5 * torch.randn(mean.shape, generator=generator).double()
    out = []
    for _ in range(count):
        out.append(x)
        x = mean + phi * (x - mean) + sigma * torch.randn(mean.shape, generator=generator).double()
    return out


def test_fitted_process_recovers_the_one_that_made_the_batches() -> None:
    """φ and σ of each tensor by itself, to the standard error of 400 steps of 50 elements, and a bias of (1+3φ)/T."""
    means = [torch.linspace(-1, 1, 50).double(), torch.full((5, 10), 3.0).double()]
    fast, slow = ar1(0.3, 0.5, means[0], 400, 0), ar1(0.9, 0.1, means[1], 400, 1)
    process = fit_process([{"a": a, "b": b} for a, b in zip(fast, slow)])
    np.testing.assert_allclose(process.persistence, [0.3, 0.9], atol=0.015)
    np.testing.assert_allclose(process.innovation, [0.5, 0.1], rtol=0.02)
    # σ/(1−φ)/√T around the true mean
    assert float((process.mean[0] - means[0]).std()) < 2 * 0.5 / 0.7 / 20
    forecast = process.forecast(3)
    expected = process.mean[1] + process.persistence[1] ** 3 * (slow[-1] - process.mean[1])
    torch.testing.assert_close(forecast[-1]["b"], expected)
    sampled = [process(1, torch.Generator().manual_seed(seed))[0]["a"] for seed in range(200)]
    torch.testing.assert_close(
        torch.stack(sampled).mean(0), process.forecast(1)[0]["a"], rtol=0, atol=5 * 0.5 / 200**0.5
    )
    assert float(torch.stack(sampled).std(0).mean()) == pytest.approx(0.5, rel=0.05)


def test_fitted_process_of_constant_and_of_trending_batches_stays_finite() -> None:
    still = fit_process([torch.ones(3)] * 5)
    assert still.persistence == (0.0,)
    torch.testing.assert_close(still(2, torch.Generator())[1], torch.ones(3))
    trend = fit_process([torch.full((3,), 2.0**i) for i in range(6)])
    assert trend.persistence[0] <= 1 - 1 / 6
    assert isinstance(trend, FittedProcess)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([torch.zeros(2)] * 2, "at least 3 batches"),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(3)], "batch 2 has another shape"),
        ([(torch.zeros(2), torch.zeros(2, dtype=torch.long))] * 3, "floating-point tensors"),
        ([ak.accumulate([torch.zeros(2)])] * 3, "floating-point tensors"),
    ],
)
def test_what_no_process_fits_is_named(batches: list, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        fit_process(batches)
