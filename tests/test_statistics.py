"""Aggregation and tests over systems, against loops, hand computations and SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from aftershock.errors import InvalidInput
from aftershock.results import statistics

drawn = settings(derandomize=True, deadline=None, max_examples=30)
seeds = st.integers(0, 2**16)


def draw(seed: int, **sizes: int) -> xr.DataArray:
    rng = np.random.default_rng(seed)
    coords = {"horizon": range(1, sizes["horizon"] + 1)} if "horizon" in sizes else {}
    return xr.DataArray(rng.normal(size=tuple(sizes.values())), coords, tuple(sizes))


def middle(values: list[float]) -> float:
    """The median by sorting: the middle one, or the mean of the two in the middle."""
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2


# --- aggregation


@drawn
@given(seeds, st.integers(1, 6), st.integers(1, 5), st.integers(1, 7))
def test_horizons_then_candidates_then_systems(seed: int, systems: int, changes: int, horizons: int) -> None:
    values = draw(seed, horizon=horizons, system=systems, answer=2, change=changes)
    found = statistics.aggregate(values)
    assert found["median"].dims == ("answer",)
    for j in range(2):
        per_system = [middle([middle(list(values.values[:, s, j, c])) for c in range(changes)]) for s in range(systems)]
        here = found.isel(answer=j)
        assert float(here["median"]) == pytest.approx(middle(per_system))
        assert int(here["systems"]) == systems
        low, high = np.percentile(per_system, [25, 75])
        assert [float(here[key]) for key in ("q25", "q75", "iqr")] == pytest.approx([low, high, high - low])


def test_the_order_matters_and_pooling_is_not_it() -> None:
    # one system has its candidates low, one high, one mixed: the median of medians is not the pooled median
    values = xr.DataArray([[0.0, 0.0, 9.0], [0.0, 9.0, 9.0], [0.0, 9.0, 9.0]], dims=("system", "change"))
    assert float(statistics.aggregate(values)["median"]) == 9.0
    values = xr.DataArray([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0], [9.0, 9.0, 9.0]], dims=("system", "change"))
    assert float(statistics.aggregate(values)["median"]) == 0.0
    assert float(values.median()) == 9.0


def test_even_counts_average_the_middle_two() -> None:
    values = xr.DataArray([[1.0, 2.0, 4.0, 9.0]], dims=("system", "change"))
    assert float(statistics.across_candidates(values)[0]) == 3.0  # torch.median would say 2


def test_what_is_undefined_is_left_out_and_counted(recwarn: pytest.WarningsRecorder) -> None:
    nan = math.nan
    values = xr.DataArray([[1.0, nan, 3.0], [nan, nan, nan], [5.0, 6.0, 7.0]], dims=("system", "change"))
    found = statistics.aggregate(values)
    assert float(found["median"]) == 4.0  # of 2 and 6
    assert (int(found["systems"]), int(found["undefined"])) == (2, 1)
    assert math.isnan(statistics.aggregate(values * nan)["median"])
    assert not list(recwarn)


def test_variances_are_population_variances() -> None:
    values = xr.DataArray([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0], dims="change")  # mean 5, Σ (x − 5)² = 32
    assert float(statistics.coefficient_of_variation(values, "change")) == pytest.approx(0.4)
    assert float(statistics.coefficient_of_variation(-values, "change")) == pytest.approx(0.4)
    assert math.isnan(statistics.coefficient_of_variation(values - 5, "change"))


def test_missing_and_empty_dimensions_are_named() -> None:
    values = draw(0, change=3)
    for call in (statistics.across_systems, statistics.aggregate):
        with pytest.raises(InvalidInput, match="no dimension 'system'"):
            call(values)
    with pytest.raises(InvalidInput, match="no dimension 'change'"):
        statistics.across_candidates(draw(0, system=3))
    with pytest.raises(InvalidInput, match="nothing along 'system'"):
        statistics.across_systems(draw(0, system=0))


# --- rankings


@drawn
@given(seeds, st.integers(3, 12))
def test_rank_correlation_inside_each_system(seed: int, changes: int) -> None:
    score, target = (draw(s, system=3, change=changes).round(1) for s in (seed, seed + 1))  # rounding makes ties
    score[0] *= 1e6  # one system may not lend its scale to another
    found = statistics.spearman(score, target)
    for i in range(3):
        ranks = [stats.rankdata(x.values[i]) for x in (score, target)]
        if min(np.ptp(r) for r in ranks) == 0:
            assert math.isnan(found["rho"][i])
        else:
            assert float(found["rho"][i]) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)


def test_rank_correlations_that_do_not_exist_say_why() -> None:
    nan = math.nan
    score = xr.DataArray([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [1.0, nan, 3.0]], dims=("system", "change"))
    target = xr.DataArray([[9.0, 7.0, 8.0]] * 3, dims=("system", "change"))
    found = statistics.spearman(score, target)
    assert float(found["rho"][0]) == pytest.approx(-0.5)
    assert np.isnan(found["rho"][1:]).all()
    assert found["reason"].values.tolist() == [
        "",
        "one side is the same for every candidate",
        "fewer than three candidates have both numbers",
    ]
    assert "same for every" in str(statistics.spearman(target, score)["reason"].values[1])
    with pytest.raises(InvalidInput, match="needs 3 candidates at least; got 2"):
        statistics.spearman(score.isel(change=[0, 1]), target.isel(change=[0, 1]))


# --- comparisons


def test_holm_by_hand() -> None:
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04; the last may not fall below 0.06
    np.testing.assert_allclose(statistics.holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(statistics.holm(np.array([0.6, 0.7])), [1.0, 1.0])
    np.testing.assert_allclose(statistics.holm(np.array([0.02])), [0.02])
    nan = math.nan
    np.testing.assert_allclose(statistics.holm(np.array([nan, 0.02, nan, 0.5])), [nan, 0.04, nan, 0.5])
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        statistics.holm(np.array([1.2]))


def test_holm_on_the_published_example_of_statsmodels() -> None:
    """p-values and their Holm adjustment by R's multtest, as in statsmodels' own tests."""
    p = [
        0.838541367553, 0.642193923795, 0.680845947633, 0.967833824309, 0.71626938238, 0.177096952723,
        5.23656777208e-05, 0.0202732688798, 0.00028140506198, 0.0149877310796,
    ]  # fmt: skip
    adjusted = [1, 1, 1, 1, 1, 1, 5.2365677720800005e-04, 1.4191288215860001e-01, 2.5326455578199999e-03]
    np.testing.assert_allclose(statistics.holm(np.array(p)), [*adjusted, 1.1990184863680001e-01], rtol=1e-12)


@drawn
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(p: list[float]) -> None:
    adjusted = statistics.holm(np.array(p))
    assert (adjusted >= np.array(p)).all()
    for level in (0.01, 0.05, 0.3):
        rejected, order = set(), sorted(range(len(p)), key=lambda i: p[i])
        for rank, i in enumerate(order):
            if p[i] * (len(p) - rank) > level:
                break
            rejected.add(i)
        assert {i for i in range(len(p)) if adjusted[i] <= level} == rejected


def signed_rank_p(gap: np.ndarray) -> float:
    """Two-sided exact p of the signed-rank sum, by all 2^n signs."""
    ranks = stats.rankdata(abs(gap))
    seen = ranks[gap > 0].sum()
    sums = np.array([np.dot(signs, ranks) for signs in itertools.product((0, 1), repeat=len(gap))])
    return min(1.0, 2 * min((sums <= seen).mean(), (sums >= seen).mean()))


@drawn
@given(seeds)
def test_comparisons_are_paired_by_system_and_corrected_together(seed: int) -> None:
    values = draw(seed, system=8, score=3).assign_coords(score=["norm", "iso", "frozen"])
    values[:, 1] += 1.0
    values += 5.0 * draw(seed + 1, system=8)  # what systems share cancels in pairs
    found = statistics.compare_scores(values, "iso")
    assert found["score"].values.tolist() == ["norm", "frozen"]
    gaps = [values.values[:, 1] - values.values[:, j] for j in (0, 2)]
    p = [signed_rank_p(gap) for gap in gaps]
    np.testing.assert_allclose(found["p"], p)
    np.testing.assert_allclose(found["difference"], [middle(list(gap)) for gap in gaps])
    low, high = sorted(p)
    expected = {low: min(1.0, 2 * low), high: min(1.0, max(2 * low, high))}
    np.testing.assert_allclose(found["p_holm"], [expected[x] for x in p])
    assert found["pairs"].values.tolist() == [8, 8]


def test_comparisons_that_cannot_be_made_say_why() -> None:
    values = draw(3, system=6, score=4).assign_coords(score=["iso", "same", "absent", "other"])
    values[:, 1] = values[:, 0]
    values[:, 2] = math.nan
    values[0, 3] = math.nan
    found = statistics.compare_scores(values, "iso", alternative="greater")
    assert found["reason"].values.tolist() == ["no pair differs", "no system has both numbers", ""]
    assert found["pairs"].values.tolist() == [6, 0, 5]
    truth = stats.wilcoxon(values.values[1:, 0], values.values[1:, 3], alternative="greater").pvalue
    np.testing.assert_allclose(found["p_holm"], [math.nan, math.nan, truth])  # one comparison: nothing to correct
    for bad, scores in (("exact", slice(None)), ("iso", [0])):
        with pytest.raises(InvalidInput, match="nothing to compare"):
            statistics.compare_scores(values.isel(score=scores), bad)


# --- intervals


def test_the_interval_of_a_median_is_its_bootstrap_distribution() -> None:
    values = draw(5, system=15, answer=2)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    found = statistics.median_interval(values, generator, level=0.9)
    assert not torch.equal(generator.get_state(), before)  # the randomness is the caller's
    again = statistics.median_interval(values, torch.Generator().manual_seed(0), level=0.9)
    xr.testing.assert_identical(found, again)
    rng = np.random.default_rng(1)
    for j in range(2):
        x = np.sort(values.values[:, j])
        medians = np.median(rng.choice(x, size=(40_000, 15)), axis=1)
        truth = np.quantile(medians, [0.05, 0.95])
        gaps = np.diff(x).max()  # the distribution lives on the data: neighbours are as close as draws can tell
        assert float(found["low"][j]) == pytest.approx(truth[0], abs=gaps)
        assert float(found["high"][j]) == pytest.approx(truth[1], abs=gaps)
        # and exactly: P(median ≤ x_(i)) = P(at least 8 of 15 draws fall on the lowest i)
        chance = stats.binom.sf(7, 15, np.arange(1, 16) / 15)
        assert float(found["low"][j]) == x[np.searchsorted(chance, 0.05)]
        assert float(found["high"][j]) == x[np.searchsorted(chance, 0.95)]
        assert float(found["median"][j]) == x[7]


def test_the_interval_covers_the_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    values = xr.DataArray(rng.exponential(size=(15, 60)), dims=("system", "answer"))
    found = statistics.median_interval(values, 3)
    covered = ((found["low"] <= math.log(2)) & (found["high"] >= math.log(2))).mean()
    assert 0.85 <= float(covered) <= 1.0  # 60 draws of about 0.95: three standard errors are 0.085


def test_intervals_that_do_not_exist_say_why() -> None:
    nan = math.nan
    values = xr.DataArray([[1.0, nan, 2.0], [nan, nan, 2.0], [nan, nan, 2.0]], dims=("system", "answer"))
    found = statistics.median_interval(values)
    np.testing.assert_allclose(found["median"], [1.0, nan, 2.0])
    np.testing.assert_allclose(found["low"], [nan, nan, 2.0])
    assert found["reason"].values.tolist() == ["fewer than two systems are defined"] * 2 + [""]
    assert found["systems"].values.tolist() == [1, 0, 3]
    with pytest.raises(InvalidInput, match="level"):
        statistics.median_interval(values, level=95)
