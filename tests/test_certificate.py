"""Certificates: findings are data, thresholds decide them, and runs that leave the numbers break nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import xarray as xr

import aftershock as ak
from aftershock.core.responses import first_disagreement
from aftershock.report.figures import loss_figure
from aftershock.results.certificate import TRUST, Certificate, Finding, Trust, certify
from aftershock.results.fidelity import nrmse, sign_agreement, symmetric_error, trusted_horizon, validity_radius

from .cases import make

ANSWERS = ("exact", "semilinear", "tangent")
INF, NAN = math.inf, math.nan
pytestmark = pytest.mark.filterwarnings("error")  # NumPy's warnings of NaN and overflow are bugs here


def dataset(
    answers: dict[str, list[list[float]] | list[float]], noise: float = 1e-12, refused: str = "", **counts: int
) -> xr.Dataset:
    """A response's dataset from curves: one change where a curve is a list of numbers, else one per row."""
    curves = np.array([np.atleast_2d(np.array(rows, dtype=float)) for rows in answers.values()])
    _, changes, horizons = curves.shape
    found = {"zero_v": 0, "zero_v_touched": 0, "no_derivative": 0, "clip_switched": 0, **counts}
    return xr.Dataset(
        {
            "response": (("answer", "change", "scale", "horizon"), curves[:, :, None]),
            "control": ("horizon", np.ones(horizons)),
            "noise_floor": ("horizon", np.full(horizons, noise)),
            "clip_switched": (("change", "scale"), np.full((changes, 1), bool(found.pop("clip_switched")))),
            **{name: ("change", [value] * changes) for name, value in found.items()},
            "at": 4,
            "kind": "replace",
            "probe": "a fixed batch",
            "refused": refused,
        },
        coords={
            "answer": list(answers),
            "change": [f"c{i}" for i in range(changes)],
            "scale": [1.0],
            "horizon": list(range(1, horizons + 1)),
        },
        attrs={"dtype": "float64"},
    )


def by_subject(certificate: Certificate) -> dict[str, Finding]:
    return {finding.subject: finding for finding in certificate.findings}


# --- errors


def test_numbers_by_hand() -> None:
    errors = certify(dataset({"exact": [1.0, 2.0, -4.0], "tangent": [1.0, 1.0, 4.0]})).errors
    assert errors is not None
    at = errors.isel(answer=0, change=0, scale=0)
    np.testing.assert_allclose(at["symmetric_error"].values, [0, 1 / 3, 1])
    assert at["nrmse"].item() == pytest.approx(np.sqrt((1 + 64) / 21))
    assert at["sign_agreement"].item() == pytest.approx(2 / 3)
    assert at["trusted_horizon"].item() == 1
    assert errors["validity_radius"].item() == 0


def curve(*values: float) -> xr.DataArray:
    return xr.DataArray(list(values), dims="horizon", coords={"horizon": list(range(1, len(values) + 1))})


def test_errors_are_of_the_finite_horizons() -> None:
    exact, predicted = curve(3.0, 4.0, INF, INF), curve(3.0, 9.0, 8.0, INF)
    np.testing.assert_allclose(symmetric_error(exact, predicted), [0, 5 / 13, NAN, NAN])
    assert float(nrmse(exact, predicted)) == 1.0
    assert float(sign_agreement(exact, -predicted, xr.DataArray(0.0))) == 0.0
    assert int(trusted_horizon(symmetric_error(exact, predicted))) == 1
    # the median of 0 and 5/13 is within the bar, that of nothing is not
    error = xr.concat([symmetric_error(exact, predicted), curve(NAN, NAN, NAN, NAN)], "scale")
    assert float(validity_radius(error.assign_coords(scale=[0.5, 1.0]))) == 0.5


def test_a_missing_prediction_is_no_perfect_one() -> None:
    """NaN used to be summed as an error of zero."""
    assert math.isnan(nrmse(curve(3.0, 4.0), curve(3.0, NAN)))
    assert float(nrmse(curve(3.0, 4.0), curve(3.0, 5.0))) == pytest.approx(0.2)
    np.testing.assert_array_equal(symmetric_error(curve(1.0, 1.0, 1.0), curve(1.0, NAN, -INF)), [0, NAN, 1])


# --- levels


@pytest.mark.parametrize(
    ("exact", "tangent", "level", "quantity", "value", "threshold", "phrase"),
    [
        ([1.0, 2.0], [1.0, 2.05], "ok", "nrmse", 0.05 / 5**0.5, 0.2, "trust it."),
        ([1.0, 2.0], [1.0, 1.3], "care", "nrmse", 0.7 / 5**0.5, 0.2, "use it with care"),
        ([1.0, 2.0], [-1.0, -2.0], "bad", "nrmse", 2.0, 0.5, "do not trust it"),
        ([9.0] * 4 + [0.1], [9.0] * 4 + [-0.1], "care", "sign_agreement", 0.8, 0.9, "use it with care"),
        ([9.0, 0.1], [9.0, -0.1], "bad", "sign_agreement", 0.5, 0.75, "do not trust it"),
    ],
)
def test_a_prediction_is_judged_by_its_error_and_its_signs(
    exact: list[float], tangent: list[float], level: str, quantity: str, value: float, threshold: float, phrase: str
) -> None:
    certificate = certify(dataset({"exact": exact, "tangent": tangent}))
    found = by_subject(certificate)["tangent"]
    assert (found.level, found.quantity, found.threshold) == (level, quantity, threshold)
    assert found.value == pytest.approx(value)
    assert phrase in found.sentence
    assert level != "ok" or "do not" not in str(certificate)
    assert certificate.level == level


def test_other_thresholds_give_another_verdict() -> None:
    data = dataset({"exact": [1.0, 2.0], "tangent": [1.0, 1.3]})
    assert by_subject(certify(data, Trust(nrmse=0.4)))["tangent"].level == "ok"
    strict = by_subject(certify(data, Trust(nrmse=0.1, careful_nrmse=0.3, symmetric_error=0.3)))["tangent"]
    assert (strict.level, strict.threshold) == ("bad", 0.3)
    assert "within 30 % up to horizon 2 of 2" in strict.sentence
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRUST.nrmse = 1.0  # type: ignore[misc]


def test_the_changes_that_fail_are_named() -> None:
    data = dataset({"exact": [[1.0, 2.0]] * 7, "tangent": [[1.0, 2.0]] + [[-1.0, -2.0]] * 6})
    sentence = by_subject(certify(data))["tangent"].sentence
    assert "do not trust it for c1, c2, c3, c4 and 2 more." in sentence
    assert "(worst of 7: 2)" in sentence


def test_what_was_not_run_is_not_proved() -> None:
    first = certify(dataset({"tangent": [1.0, 2.0]})).findings[0]
    assert (first.level, "Not verified" in first.sentence) == ("bad", True)
    alone = certify(dataset({"exact": [1.0, 2.0]}, refused="its buffers move"))
    assert [(f.subject, f.level) for f in alone.findings] == [("exact", "ok"), ("refused", "note"), ("noise", "note")]
    assert "Only the exact response is given: its buffers move." in str(alone)


@pytest.mark.parametrize(
    ("counts", "subject", "phrase"),
    [
        ({"zero_v": 7, "zero_v_touched": 3}, "v = 0", "touches 3 of them"),
        ({"no_derivative": 2}, "v = 0", "no derivative exists"),
        ({"clip_switched": 1}, "clipping", "Clipping switched on or off in 1 of 1"),
    ],
)
def test_what_spoils_a_linear_answer_matters_only_where_there_is_one(
    counts: dict[str, int], subject: str, phrase: str
) -> None:
    found = by_subject(certify(dataset({"exact": [1.0], "tangent": [1.0]}, **counts)))[subject]
    assert (found.level, phrase in found.sentence) == ("care", True)
    assert found.value is not None
    assert found.value > 0
    assert by_subject(certify(dataset({"exact": [1.0]}, **counts)))[subject].level == "note"


def test_coordinates_without_a_gradient_that_nothing_touches_are_a_note() -> None:
    found = by_subject(certify(dataset({"exact": [1.0], "tangent": [1.0]}, zero_v=7)))["v = 0"]
    assert (found.level, "no change touches them" in found.sentence) == ("note", True)


def test_words_are_the_sentences_in_order() -> None:
    findings = tuple(Finding(level, "x", "", None, None, f"It is {level}.") for level in ("ok", "bad", "care"))  # type: ignore[arg-type]
    assert str(Certificate(findings)) == "It is ok.\nIt is bad.\nIt is care."
    assert Certificate(findings).level == "bad"
    assert Certificate(findings[::2]).level == "care"
    assert Certificate(()).level == "note"


# --- noise


def test_noise_is_compared_with_the_exact_response_and_not_with_predictions() -> None:
    """A prediction that ran away used to make any noise look small."""
    data = dataset({"exact": [1e-9, 2e-9], "tangent": [1e9, 2e9]}, noise=1e-9)
    found = by_subject(certify(data))["noise"]
    assert (found.level, found.threshold) == ("bad", 5.0)
    assert found.value == pytest.approx(2.0)
    assert "no exact response rises clearly above it: do not trust any sign" in found.sentence
    clear = by_subject(certify(dataset({"exact": [1e-9, 2e-6], "tangent": [0.0, 0.0]}, noise=1e-9)))["noise"]
    assert clear.level == "note"
    assert "by 1e-09, measured, 2.0e+03 times below the largest exact response." in clear.sentence


def test_without_the_exact_response_noise_is_compared_with_nothing() -> None:
    """A prediction is no evidence of how large a response is."""
    for size in (1e9, 1e-12):
        found = by_subject(certify(dataset({"tangent": [size]}, noise=1e-9)))["noise"]
        assert (found.level, found.value) == ("note", None)
        assert "moves the probe by 1e-09, measured; no exact response was run" in found.sentence


def test_changes_that_cannot_be_told_from_noise_are_named() -> None:
    data = dataset({"exact": [[1e-9, 2e-9], [1.0, 2.0]]}, noise=1e-9)
    found = by_subject(certify(data))["noise"]
    assert (found.level, "c0 cannot be told from it" in found.sentence) == ("care", True)
    response = ak.Response(data)
    assert response.summary["peak_sign"].values.ravel().tolist() == [0, 1]
    assert response.noise.values.tolist() == [[[[True, True]], [[False, False]]]]
    assert "±2e-09" in response.table()
    assert "~~  (noise)" in response.table()


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_a_response_of_nothing(noise: float) -> None:
    """0 = 0 is right, and has no sign that rounding could hide."""
    certificate = certify(dataset({"exact": [0.0, 0.0], "tangent": [0.0, 0.0]}, noise=noise))
    found = by_subject(certificate)
    assert (found["tangent"].level, found["tangent"].value) == ("ok", 0.0)
    assert "trust it. It is exactly 0, and so is the exact response." in found["tangent"].sentence
    assert (found["noise"].level, found["noise"].value) == ("note", None)
    assert "no change has any response" in found["noise"].sentence
    assert "nan" not in str(certificate)


def test_a_response_of_nothing_beside_others_is_left_out() -> None:
    rows = {"exact": [[0.0, 0.0], [1.0, 2.0]], "tangent": [[0.0, 0.0], [1.0, 2.1]]}
    beside, alone = (certify(dataset({k: v[i:] for k, v in rows.items()}, noise=1e-9)) for i in (0, 1))
    assert beside.level == "ok"
    for subject in ("tangent", "noise"):
        assert by_subject(beside)[subject].level in ("ok", "note")
        assert by_subject(beside)[subject].value == by_subject(alone)[subject].value
        assert by_subject(beside)[subject].sentence == by_subject(alone)[subject].sentence


def test_a_prediction_of_something_where_nothing_happens_is_wrong() -> None:
    """Beside a right one, and alone; and a response of something that is predicted as nothing."""
    for other in ([], [[1.0, 2.0]]):
        found = by_subject(certify(dataset({"exact": [[0.0, 0.0], *other], "tangent": [[0.0, 1.0], *other]})))
        assert found["tangent"].level == "bad"
        assert ("for c0" in found["tangent"].sentence) == bool(other)
        assert found["noise"].level == ("care" if other else "bad"), "rounding may have swallowed it"
    missed = by_subject(certify(dataset({"exact": [1.0, 2.0], "tangent": [0.0, 0.0]})))["tangent"]
    assert (missed.level, missed.value) == ("bad", 1.0)


def test_the_controls_own_batch_beside_another() -> None:
    case = make("tanh_mlp")
    batches, probe = case.batches(4), case.batch()
    response = case.point().follow(batches).replace([batches[0], case.batch()]).response(probe, answers=ANSWERS)
    assert not response.exact.isel(change=0).values.any()
    assert "do not trust" not in str(response.certificate.findings[0])
    assert "replace 0" not in str(response.certificate)


# --- runs that leave the finite numbers


def test_a_diverged_run_is_named_with_its_horizon() -> None:
    rows = {"exact": [[1.0, 2.0, 3.0, 4.0], [1.0, 5.0, INF, INF], [INF] * 4], "tangent": [[1.0, 2.0, 3.0, 4.0]] * 3}
    certificate = certify(dataset(rows))
    first = certificate.findings[0]
    assert (first.level, first.subject, first.quantity, first.value) == ("bad", "divergence", "diverged_at", 1.0)
    assert "2 of 3 exact runs left the finite numbers: 'c2' at horizon 1, 'c1' at horizon 3 (of 4)." in first.sentence
    errors = certificate.errors
    assert errors is not None
    tangent = errors.sel({"answer": "tangent"}).isel(scale=0)
    np.testing.assert_allclose(tangent["nrmse"].values, [0.0, 3 / 26**0.5, NAN])
    np.testing.assert_array_equal(tangent["trusted_horizon"].values, [4, 1, 0])
    np.testing.assert_array_equal(np.isnan(tangent["symmetric_error"]).sum("horizon"), [0, 2, 4])
    verdict = by_subject(certificate)["tangent"]
    assert "do not trust it for c1, c2." in verdict.sentence
    assert "Only horizons at which the exact run is finite were compared." in verdict.sentence
    assert by_subject(certificate)["noise"].value == pytest.approx(5e12)


def test_the_scale_of_a_diverged_run_is_said_where_there_are_several() -> None:
    small = dataset({"exact": [1.0, 2.0], "semilinear": [1.0, 2.0]}).assign_coords(scale=[0.5])
    large = dataset({"exact": [1.0, INF], "semilinear": [1.0, 2.0]})
    data = xr.concat([small, large], "scale", data_vars="minimal", coords="minimal", compat="override")
    data["clip_switched"] = xr.concat([small["clip_switched"], large["clip_switched"]], "scale")
    sentence = certify(data).findings[0].sentence
    assert "1 of 2 exact runs left the finite numbers: 'c0' at scale 1 at horizon 2 (of 2)." in sentence


def test_a_run_that_diverges_at_once_has_nothing_to_compare() -> None:
    certificate = certify(dataset({"exact": [INF, INF], "semilinear": [1.0, INF]}))
    found = by_subject(certificate)
    assert found["divergence"].sentence.startswith("The exact run left the finite numbers: 'c0' at horizon 1")
    assert "cannot be measured" in found["semilinear"].sentence
    assert (found["noise"].level, found["noise"].value) == ("note", None)


@pytest.mark.parametrize("away", [INF, -INF, NAN, 1e200])
def test_a_prediction_that_runs_away_is_infinitely_wrong(away: float) -> None:
    certificate = certify(dataset({"exact": [1.0, 2.0, 3.0], "semilinear": [1.0, 2.0, away]}))
    found = by_subject(certificate)["semilinear"]
    assert (found.level, found.value) == ("bad", INF)
    assert "Its error (NRMSE) is infinite" in found.sentence
    assert "up to horizon 2 of 3" in found.sentence
    assert "divergence" not in by_subject(certificate)


def test_a_diverged_response_prints_draws_and_reports(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rows = {"exact": [[0.1, 0.2, 0.3], [1.0, INF, INF]], "semilinear": [[0.1, 0.2, 0.3], [1.0, 9.0, NAN]]}
    response = ak.Response(dataset(rows))
    assert response.order == ["c1", "c0"]
    assert "'c1' at step 4 makes the run diverge: 2 states after it the loss is not finite" in response.verdict
    assert "█∞∞" in response.table()
    assert "+inf" in response.table()
    figure = response.plot()
    drawn = [trace for trace in figure.data if trace.name == "c1" and trace.line.dash == "solid"]
    assert tuple(drawn[0].y) == (1.0, None, None)
    assert figure.layout.annotations[0].text == "diverges at h = 2"
    assert figure.layout.yaxis.range[1] < 1.0  # the change that stays is not flattened
    assert "no longer finite: c1 at h = 2" in figure.layout.annotations[-1].text
    changed = loss_figure(response).data[1]
    assert tuple(changed.y) == (2.0, None, None)
    assert changed.fill == "none"
    page = response.report(tmp_path / "r.html").read_text()
    assert 'data-value="Infinity"' in page
    assert "<li class='bad'><strong>beware</strong><span>1 of 2 exact runs left the finite numbers" in page
    response.save(tmp_path / "r.zarr")
    xr.testing.assert_identical(ak.load_response(tmp_path / "r.zarr").data, response.data)


def test_only_a_diverged_change() -> None:
    response = ak.Response(dataset({"exact": [INF, INF], "tangent": [1.0, NAN]}))
    assert str(response)
    assert response.plot().layout.yaxis.range[0] < 0 < response.plot().layout.yaxis.range[1]


def test_a_prediction_leaves_the_exact_response_where_the_bars_say() -> None:
    exact = torch.tensor([[1.0, 1.0, 1.0]])
    predicted = torch.tensor([[1.0, 2.0, 3.0]])  # symmetric errors 0, 1/3, 1/2; in sum √(5/3) of the response
    nothing = torch.zeros(3)
    assert first_disagreement(exact, predicted, nothing, gross=TRUST.careful_nrmse, parted=TRUST.symmetric_error) == 2
    assert first_disagreement(exact, predicted, nothing, gross=TRUST.careful_nrmse, parted=0.4) == 3
    assert first_disagreement(exact, predicted, nothing, gross=1.5, parted=0.2) is None
