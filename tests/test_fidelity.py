"""Errors of a prediction, against hand computations and SciPy's regression."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from scipy import stats

from aftershock.errors import InvalidInput
from aftershock.results import fidelity

from .test_statistics import draw, drawn, seeds


def test_errors_are_per_candidate_and_undefined_without_a_response() -> None:
    exact = xr.DataArray([[3.0, 4.0], [0.3, 0.4]], dims=("change", "horizon"))
    predicted = xr.DataArray([[3.0, 4.0], [0.0, 0.0]], dims=("change", "horizon"))
    np.testing.assert_allclose(fidelity.nrmse(exact, predicted), [0.0, 1.0])
    assert fidelity.nrmse(exact * 0, predicted).isnull().all()


def test_errors_are_symmetric() -> None:
    # 1 against 3 is a half, not two
    assert float(fidelity.symmetric_error(xr.DataArray(1.0), xr.DataArray(3.0))) == pytest.approx(0.5)


def test_the_validity_radius_is_the_largest_scale_with_a_median_error_of_a_fifth_at_most() -> None:
    error = xr.DataArray(
        [[[0.1, 0.1, 0.9], [0.1, 0.21, 0.9], [0.2, 0.0, 0.2]], [[0.3, 0.3, 0.0]] * 3],
        {"scale": [0.25, 0.5, 1.0]},
        ("change", "scale", "horizon"),
    )
    np.testing.assert_allclose(fidelity.validity_radius(error), [1.0, 0.0])


@drawn
@given(seeds)
def test_exponents_are_scipys_regression(seed: int) -> None:
    scales = np.array([1.0, 0.0625, 0.5, 0.125, 0.25])
    exact = draw(seed, system=2, scale=5, horizon=3).assign_coords(scale=scales)
    predicted = draw(seed + 1, system=2, scale=5, horizon=3).assign_coords(scale=scales)
    found = fidelity.error_exponents(exact, predicted, limit=0.25)
    assert int(found["scales"]) == 3
    local = scales <= 0.25
    for s, h in itertools.product(range(2), range(3)):
        error = abs(exact - predicted).values[s, local, h]
        truth = stats.linregress(np.log(scales[local]), np.log(error))
        here = found.isel(system=s, horizon=h)
        assert float(here["exponent"]) == pytest.approx(truth.slope, rel=1e-9)
        assert float(here["intercept"]) == pytest.approx(truth.intercept, rel=1e-9)
        assert float(here["r_squared"]) == pytest.approx(truth.rvalue**2, abs=1e-9)
    assert list(found["horizon"].values) == [1, 2, 3]


def test_a_quadratic_remainder_has_exponent_two_where_the_scale_is_small() -> None:
    scales = xr.DataArray([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1.0], dims="scale")
    scales = scales.assign_coords(scale=scales)
    tangent = xr.DataArray([1.0, -2.0], {"horizon": [1, 2]}, "horizon") * scales
    exact = tangent + xr.DataArray([3.0, 0.5], {"horizon": [1, 2]}, "horizon") * scales**2
    exact = exact.where(exact["scale"] < 1, 100.0)  # outside the limit anything may happen
    found = fidelity.error_exponents(exact, tangent, 0.25)
    np.testing.assert_allclose(found["exponent"], 2.0)
    np.testing.assert_allclose(np.exp(found["intercept"]), [3.0, 0.5])
    np.testing.assert_allclose(found["r_squared"], 1.0)
    assert (found["reason"] == "").all()


def test_exponents_of_errors_without_a_logarithm_are_undefined() -> None:
    scales = [0.1, 0.2, 0.4]
    error = xr.DataArray(
        [[0.01, 0.04, 0.16], [0.01, 0.0, 0.16], [0.01, math.nan, 0.16], [0.5, 0.5, 0.5]],
        {"scale": scales},
        ("horizon", "scale"),
    )
    found = fidelity.error_exponents(error, error * 0, 1.0)
    np.testing.assert_allclose(found["exponent"], [2.0, math.nan, math.nan, 0.0], atol=1e-12)
    np.testing.assert_allclose(found["r_squared"], [1.0, math.nan, math.nan, math.nan])
    assert [bool(reason) for reason in found["reason"].values] == [False, True, True, False]
    assert "exactly zero" in str(found["reason"].values[1])
    with pytest.raises(InvalidInput, match="two scales"):
        fidelity.error_exponents(error, error * 0, 0.1)
    with pytest.raises(InvalidInput, match="'scale'"):
        fidelity.error_exponents(error.isel(scale=0), error.isel(scale=0), 0.1)


def test_signs_are_compared_each_at_its_own_peak() -> None:
    exact = xr.DataArray(
        [[[1.0, -3.0, 2.0], [1.0, -3.0, 2.0], [0.0, 0.0, 0.0], [2.0, -2.0, 1.0]]],
        {"horizon": [1, 2, 3]},
        ("system", "change", "horizon"),
    )
    predicted = exact.copy(
        data=[[[-1.0, 0.1, 0.2], [1.0, -0.1, 0.2], [1.0, 0.0, 0.0], [0.1, 5.0, 0.1]]],
    )
    # candidate 0: both negative, at horizons 2 and 1, though no single horizon agrees in size; 1: opposite; 2 has no
    # sign; 3: the tie goes to the earliest horizon, positive, as predicted
    assert float(fidelity.extremum_sign_accuracy(exact, predicted)[0]) == pytest.approx(2 / 3)
    assert math.isnan(fidelity.extremum_sign_accuracy(exact * 0, predicted)[0])
    holed = predicted.where(predicted["horizon"] < 3, math.nan)
    assert math.isnan(fidelity.extremum_sign_accuracy(exact, holed)[0])
    scaled = xr.concat([exact, -exact], xr.DataArray([0.5, 1.0], dims="scale", name="scale"))
    np.testing.assert_allclose(fidelity.extremum_sign_accuracy(scaled, predicted)[:, 0], [2 / 3, 1 / 3])
