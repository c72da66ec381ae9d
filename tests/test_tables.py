"""The paper's tables: every number has its cell, every cell its rule, and the values are those worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from aftershock.errors import InvalidInput
from aftershock.studies import tables
from aftershock.studies.cells import Cell, cell_of
from aftershock.studies.cifar import measures as cifar_measures
from aftershock.studies.measures import SHARE_OF_HORIZONS
from aftershock.studies.paper import TABLES
from aftershock.studies.quotes import Quote
from aftershock.studies.replication import (
    CALIBRATION,
    COUNT,
    LOWER,
    MEDIAN,
    MISSED_SPARSE,
    RANGE,
    UPPER,
    quantile_law,
    replications,
)
from aftershock.studies.tables import build
from aftershock.studies.verdicts import RULES, Measure, judge, spread

from .study_results import CHANGES, SETTINGS, WOBBLE, bump, made, slopes, study_of


@pytest.fixture(scope="module")
def quadratic() -> list[Cell]:
    return build("quadratic", made("quadratic"))


@pytest.fixture(scope="module")
def cifar() -> list[Cell]:
    return build("cifar", made("cifar"))


def at(cells: list[Cell], table: str, row: str, column: str) -> Cell:
    (found,) = [c for c in cells if (c.table, c.row, c.column) == (table, row, column)]
    return found


# --- the paper's numbers


def test_a_number_is_read_as_the_paper_prints_it() -> None:
    assert Quote.of("0.0117") == Quote("0.0117", "value", 0.0117, half_unit=0.5e-4)
    assert Quote.of("1.10e-12").half_unit == pytest.approx(0.5e-14)
    assert Quote.of("-0.062").value == -0.062
    own = Quote.of("0.092 [0.064, 0.114]")
    assert (own.value, own.low, own.high) == (0.092, 0.064, 0.114)
    assert (Quote.of("15 of 16").value, Quote.of("15 of 16").high) == (15, 16)
    assert (Quote.of("3.5 to 4").low, Quote.of("3.5 to 4").high) == (3.5, 4)
    assert Quote.of("> 0.99998").kind == "bound"
    assert Quote.of("about 2.0").half_unit == pytest.approx(0.05)
    assert Quote.of("--").value is None
    assert [Quote.of(word).value for word in ("yes", "no")] == [1, 0]


def test_every_number_of_the_paper_has_a_cell_and_no_cell_is_there_twice(
    quadratic: list[Cell], cifar: list[Cell]
) -> None:
    others = {label: table for label, table in TABLES.items() if "exp3" not in label}  # of the language models
    wanted = {(label, *place) for label, table in others.items() for place in table.quotes()}
    assert len(wanted) == 443
    filled = [(c.table, c.row, c.column) for c in quadratic + cifar]
    assert len(filled) == len(set(filled))
    assert wanted <= set(filled)
    assert {(c.table, c.row, c.column) for c in quadratic + cifar if not c.ours_only} == wanted


def test_ours_stand_beside_the_papers_and_are_not_judged(quadratic: list[Cell], cifar: list[Cell]) -> None:
    for cells in (quadratic, cifar):
        ours = [c for c in cells if c.ours_only]
        assert ours
        assert all(c.agrees is None and c.paper is None and c.rule == "" for c in ours)
    assert at(cifar, "tab:app_exp2_ranking", "Endpoint-exact (ours)", "MLP–GELU").ours == pytest.approx(1)
    sampled = at(quadratic, "tab:app_exp2_present_scores", "Quadratic, standard; matched", "Sampled future (ours)")
    assert sampled.ours == pytest.approx(1)


# --- values by hand


def test_errors_by_scale(quadratic: list[Cell], cifar: list[Cell]) -> None:
    middle, (low, high) = np.median(slopes(6)), np.quantile(slopes(6), [0.25, 0.75])
    one = at(quadratic, "tab:app_exp1_fidelity", "Standard, α = 1/8", "NRMSE")
    assert [one.ours, one.iqr_low, one.iqr_high] == pytest.approx([middle / 8, low / 8, high / 8])
    assert one.systems == 6
    whole = at(cifar, "tab:app_exp2_fidelity", "CNN–ReLU, α = 1", "Rel. M err.")
    assert whole.ours == pytest.approx(np.median(slopes(6) / (2 + slopes(6))))  # symmetric
    total = at(cifar, "tab:app_exp2_fidelity", "CNN–ReLU, α = 1", "Rel. ARE err.")
    assert total.ours == pytest.approx(whole.ours)
    ours = at(cifar, "tab:app_exp2_fidelity", "MLP–GELU, α = 1", "NRMSE, Semilinear (ours)")
    assert ours.ours == pytest.approx(0.001)


def test_a_wrong_sign_at_the_peak_is_counted_and_one_elsewhere_is_not() -> None:
    results = made("quadratic")
    flipped = results["standard"]["predicted"].copy()
    flipped[:, 0, 0] *= -1  # one candidate of five
    flipped[:, 0, 1, :, -1] *= -1  # another, at the last horizon only
    cells = build("quadratic", {"standard": results["standard"].assign(predicted=flipped)})
    row = "Standard, α = 1/2"
    assert at(cells, "tab:app_exp1_fidelity", row, "Sign acc.").ours == pytest.approx(4 / 5)
    right = at(cells, "tab:app_exp1_fidelity", row, SHARE_OF_HORIZONS)
    assert (right.ours, right.ours_only) == (1, True)  # the median candidate is right throughout


def test_networks_weigh_the_same_together_where_systems_are_missing() -> None:
    results = made("cifar")
    few = build("cifar", results | {"cnn": results["cnn"].isel(system=[0, 2, 3, 5])})
    assert at(few, "text:exp1_neural", "Positive extrema", "value").ours_text == "16 of 24"
    assert at(few, "text:exp1_neural", "Pooled local NRMSE", "value").systems == 8
    assert at(few, "text:exp1_neural_by_network", "Validity radius", "MLP–GELU").systems == 6
    assert at(few, "tab:app_exp2_fidelity", "CNN–ReLU, α = 1", "NRMSE").replications[0].missed == MISSED_SPARSE


def test_numbers_of_the_text(quadratic: list[Cell], cifar: list[Cell]) -> None:
    text = "text:exp1_controlled"
    local = np.median(slopes(6)) * np.median([1 / 32, 1 / 16, 1 / 8, 1 / 4])
    assert at(quadratic, text, "Pooled local NRMSE", "value").ours == pytest.approx(local)
    # symmetric error s α / (2 + s α) ≤ 0.2 up to s α = 0.5: at every scale
    assert at(quadratic, text, "Validity radius", "value").ours == 1
    assert at(quadratic, text, "Error exponent, largest over horizons", "value").ours == pytest.approx(2)
    assert at(quadratic, text, "Smallest readout cosine, standard", "value").ours == pytest.approx(0.914)
    assert at(quadratic, text, "Percentile in the readout null, rotating", "value").ours == 100
    assert at(quadratic, "text:exp1_long", "Parameter deviations act earliest", "value").agrees
    assert at(cifar, "text:exp1_neural", "Positive extrema", "value").ours_text == "24 of 36"
    by_network = "text:exp1_neural_by_network"
    assert at(cifar, by_network, "Systems with a negative conditional v", "MLP–GELU").ours == 6
    assert at(cifar, by_network, "M, β1 = 0.99 over 0.5", "CNN–ReLU").ours == pytest.approx(5)
    assert at(cifar, by_network, "h* at β1 = 0.99", "CNN–ReLU").ours == 7
    gates = at(cifar, "text:exp1_neural_cnn", "Switched gates at h = 8, α = 1", "CNN–ReLU")
    assert gates.ours == pytest.approx(1e-4)
    assert at(cifar, "text:exp1_neural_cnn", "Switched gates grow with the scale", "CNN–ReLU").ours_text == "yes"
    assert "12 negative, 33.3%" in at(cifar, "text:exp1_neural", "Positive extrema", "value").note
    assert at(
        cifar, "text:exp1_neural_mlp", "Error exponent, smallest over horizons", "MLP–GELU"
    ).ours == pytest.approx(2)


def test_what_the_error_is_made_of(cifar: list[Cell]) -> None:
    table = "text:exp1_neural_by_network"
    for network, switching in (("CNN–ReLU", 0.3), ("MLP–GELU", 0.0)):
        for whole in ("response", "state"):
            share = at(cifar, table, f"Switched gates' share of the {whole}'s error, h = 8 (ours)", network)
            assert share.ours == pytest.approx(switching)
        write_in = at(cifar, table, "The write-in's share of the response's error, h = 12 (ours)", network)
        assert write_in.ours == pytest.approx(0.2)


def test_how_long_a_memory_lasts(quadratic: list[Cell]) -> None:
    table, horizons = "text:exp1_long", np.arange(1, 129)
    for row, peak in (("θ alone (ours)", 8), ("m, β1 = 0.99 (ours)", 39)):
        curve = bump(128, peak)
        assert at(quadratic, table, row, "Standard: h*").ours == peak
        delay, late = (curve * horizons).sum() / curve.sum(), curve[32:].sum() / curve.sum()
        assert at(quadratic, table, row, "Standard: mean delay").ours == pytest.approx(delay)
        assert at(quadratic, table, row, "Anisotropic: ARE beyond h = 32").ours == pytest.approx(late)
    # of the made-up channels m is larger than θ and v wherever they peak, and v peaks last
    for row in ("Momentum dominates intermediate delays", "Second-moment effects persist longest"):
        assert at(quadratic, table, row, "value").agrees
    said = {row.row: row.ours_text for row in quadratic if row.table == "text:exp1_controlled"}
    assert said["m alone has the largest of the three responses"] == "yes"
    assert said["The extremum moves later as β1 increases"] == "yes"
    assert said["The extremum moves later as β2 increases"] == "no"  # the made-up one stays where it is
    for name, peak in (("θ", 2), ("m", 6), ("v", 9)):
        assert at(quadratic, "text:exp1_controlled", f"{name} alone peaks near", "value").ours == peak


def test_rankings_and_their_tests(quadratic: list[Cell], cifar: list[Cell]) -> None:
    matched = "tab:app_exp1_matched_ablation"
    assert at(quadratic, matched, "Full ISO", "Standard").ours == pytest.approx(1)
    assert at(quadratic, matched, "Gradient norm", "Standard").ours == pytest.approx(-1)
    assert at(quadratic, matched, "Frozen dynamics", "Standard").ours == pytest.approx(0.9)
    tied = at(quadratic, matched, "Exact one-step", "Rotating-readout")
    assert math.isnan(tied.ours)
    assert (tied.agrees, tied.rule, tied.counted) == (True, "tied in both", False)
    # six systems, all of one sign: the smallest two-sided p is 2/64, and Holm makes it 0.3; nothing could be found
    test = at(cifar, "text:exp1_neural_tests", "Curvature", "CNN–ReLU")
    assert (test.ours_text, test.agrees, test.rule) == ("no", None, "weaker test")
    many = build("cifar", made("cifar", systems=16))
    assert at(many, "text:exp1_neural_tests", "Curvature", "CNN–ReLU").ours_text == "yes"
    assert "not known why" in at(many, "tab:app_exp2_present_scores", "MLP–GELU; natural", "Frozen ISO").note
    assert at(many, "text:exp1_neural_by_network", "p of Full ISO against shuffled readouts", "CNN–ReLU").agrees


def test_matching_channels_and_futures(quadratic: list[Cell], cifar: list[Cell]) -> None:
    sizes = 1.0 + np.arange(CHANGES)
    matching = "tab:app_exp1_matching"
    assert at(quadratic, matching, "CV of future M", "Standard").ours == pytest.approx(np.std(sizes) / np.mean(sizes))
    assert at(quadratic, matching, "M / |d1|", "Standard").ours == pytest.approx(np.median(sizes) / 0.5)
    assert at(quadratic, matching, "Parameter gain", "Standard").ours == pytest.approx(7.5)
    channel = at(quadratic, "tab:app_exp1_state_interventions", "010", "Anisotropic: h*")
    assert (channel.ours, channel.known) == (6, False)
    nothing = at(quadratic, "tab:app_exp1_state_interventions", "000", "Standard: M")
    assert (nothing.agrees, nothing.counted) == (True, False)
    relative = at(cifar, "tab:app_exp2_channels", "001", "CNN–ReLU: ARE")
    h = np.arange(1, 13)
    shapes = [np.maximum(1 - 0.05 * abs(h - peak), 0.1).sum() for peak in (9, 4)]
    assert relative.ours == pytest.approx(0.05 * shapes[0] / shapes[1])
    swept = at(quadratic, "tab:app_exp1_persistence", "v, β2 = 0.999", "Standard: M")
    assert (swept.ours, swept.known) == (3, False)
    # M = 1 … 5, A = M times the curve's sum, P+ = 1 … 4 and 0: each varies by 2 between candidates, A by its square
    within = WOBBLE**2
    for table, column, wanted in (
        ("tab:app_exp2_predictability_primary", "Π(M)", 2 / (2 + within)),
        ("tab:app_exp2_secondary_metrics", "Π(A)", 2 / (2 + within / shapes[1] ** 2)),
        ("tab:app_exp2_secondary_metrics", "Π(P+)", 2 / (2 + within * 4 / 5)),
    ):
        assert at(cifar, table, "CNN–ReLU; matched", column).ours == pytest.approx(wanted, rel=1e-9)
    part = at(cifar, "tab:app_exp2_variance_components", "MLP–GELU", "Within futures")
    assert part.ours == pytest.approx(within)
    frozen = at(cifar, "tab:app_exp2_present_scores", "MLP–GELU; natural", "Frozen ISO")
    assert (frozen.ours, frozen.agrees) == (pytest.approx(-1), False)
    assert frozen.note.endswith("6 systems beside the paper's 16 are too few to ask why")


def test_a_variable_that_was_not_made_leaves_its_cells_out() -> None:
    whole = made("cifar")
    part = {s: whole[s][["score", "magnitude"]] for s in SETTINGS["cifar"]}
    cells = build("cifar", part)
    ranked = {"text:exp1_neural", "text:exp1_neural_mlp", "tab:app_exp2_ranking", "text:exp1_neural_tests"}
    assert {c.table for c in cells} == ranked
    assert build("quadratic", {}) == build("language", {}) == []
    with pytest.raises(InvalidInput, match="no tables for the study 'vision'"):
        build("vision", {})


# --- rules


def measure(values: list[float], **options: object) -> Measure:
    return Measure("t", "r", "c", np.array(values), **{"systems": len(values), **options})  # type: ignore[arg-type]


NINE = [float(i) for i in range(1, 10)]  # quartiles 3 and 7; hardly a resampled median is 1 or 9
FOUR = [1.0, 2.0, 3.0, 10.0]  # quartiles 1.75 and 4.75; resampled medians reach 6.5


@pytest.mark.parametrize(
    ("values", "options", "text", "verdict"),
    [
        (NINE, {}, "3.0", (True, "iqr")),
        (NINE, {}, "0.96", (False, "iqr or bootstrap")),
        (NINE, {}, "3", (True, "iqr")),
        (NINE, {}, "0.96 [0.10, 9.90]", (False, "iqr or bootstrap")),  # their own quartiles do not help
        (FOUR, {}, "6.0", (True, "bootstrap")),
        (FOUR, {}, "11.0", (False, "iqr or bootstrap")),
        (NINE, {}, "9.1 to 9.9", (False, "range")),
        (NINE, {}, "6.0 to 9.0", (True, "range")),
        ([1.0] * 5, {}, "1.000", (True, "iqr")),
        ([1.0] * 5, {}, "0.958", (False, "iqr or bootstrap")),
        ([0.9999] * 5, {}, "1.000", (True, "iqr")),  # equal at the paper's rounding
        (NINE[:3], {}, "2.0", (None, "too few systems")),
        ([math.nan] * 5, {}, "0.5", (False, "undefined")),
        ([math.nan] * 5, {}, "--", (True, "tied in both")),
        (NINE, {}, "--", (False, "tied in both")),
        (NINE, {}, "> 4.9", (True, "bound")),
        (NINE, {}, "> 5.1", (False, "bound")),
        (NINE, {}, "about 5.0", (True, "rounds to the paper's value")),
        (NINE, {}, "about 5.1", (False, "rounds to the paper's value")),
        ([3e-12] * 5, {"kind": "rounding", "at_rounding": 1e-10}, "1.10e-12", (True, "order of magnitude")),
        ([3e-14] * 5, {"kind": "rounding", "at_rounding": 1e-10}, "1.10e-12", (True, "both at rounding")),
        ([3e-8] * 5, {"kind": "rounding", "at_rounding": 1e-10}, "1.10e-12", (False, "order of magnitude")),
        ([0.0] * 5, {"kind": "rounding", "at_rounding": 1e-10}, "1.10e-12", (True, "both at rounding")),
        ([2e-17], {"kind": "maximum", "systems": 9, "at_rounding": 1e-14}, "9.33e-17", (True, "order of magnitude")),
        ([0.04], {"kind": "p", "systems": 9}, "0.0019", (True, "same side of 0.05")),
        ([0.06], {"kind": "p", "systems": 9}, "0.0019", (False, "same side of 0.05")),
        ([1.0], {"kind": "statement", "systems": 9}, "yes", (True, "same statement")),
        ([0.0], {"kind": "statement", "systems": 9}, "yes", (False, "same statement")),
        ([0.0] * 5, {"kind": "definition"}, "0", (True, "by definition")),
        ([0.1] * 5, {"kind": "definition"}, "0", (False, "by definition")),
    ],
)
def test_each_kind_of_number_has_its_rule(
    values: list[float], options: dict[str, object], text: str, verdict: tuple[bool | None, str]
) -> None:
    found = judge(measure(values, **options), Quote.of(text), np.random.default_rng(0))
    assert found == verdict
    assert found[1] in RULES


@pytest.mark.parametrize("successes", range(17))
def test_a_count_agrees_where_a_binomial_of_the_papers_share_makes_it_likely(successes: int) -> None:
    share = 13 / 16
    chance = [math.comb(16, k) * share**k * (1 - share) ** (16 - k) for k in range(17)]
    below, above = sum(chance[: successes + 1]), sum(chance[successes:])
    outcomes = measure([1.0] * successes + [0.0] * (16 - successes), kind="count")
    agrees, rule = judge(outcomes, Quote.of("13 of 16"), np.random.default_rng(0))
    assert rule == "binomial"
    assert agrees == (below >= 0.025 and above > 0.025)
    assert spread(outcomes).middle == successes


# --- replication


def drawn(systems: int, seed: int, factor: float = 1.0) -> np.ndarray:
    """Made-up systems, skewed as magnitudes are."""
    return factor * np.exp(0.5 * np.random.default_rng(seed).standard_normal(systems))


def quote_of(values: np.ndarray, quartiles: bool = False) -> Quote:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    ends = (low, high) if quartiles else (None, None)
    return Quote("made up", "value", middle, *ends, systems=len(values))


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_law_of_a_resampled_quantile_is_that_of_every_resample(count: int, quantile: float) -> None:
    values = np.array([1.0, 2.0, 2.0, 7.0])
    every = np.quantile(np.array(list(itertools.product(values, repeat=count))), quantile, axis=1)
    found = quantile_law(values, count, quantile)
    assert found.chances.sum() == pytest.approx(1)
    for x in np.unique(every):
        assert found.at_most(x + 1e-9) == pytest.approx((every <= x + 1e-9).mean())
        assert found.below(x - 1e-9) == pytest.approx((every < x - 1e-9).mean())
    assert found.quantile(0.5) == pytest.approx(np.sort(every)[math.ceil(len(every) / 2) - 1])


def test_the_interval_is_that_of_every_pair_of_resamples() -> None:
    values = np.array([1.0, 1.5, 4.0, 4.5, 9.0])
    mine = np.median(np.array(list(itertools.product(values, repeat=5))), axis=1)
    theirs = np.median(np.array(list(itertools.product(values, repeat=3))), axis=1)
    every = np.sort((theirs[:, None] - mine).ravel())
    wanted = [every[math.ceil(level * len(every)) - 1] for level in (0.025, 0.975)]
    (found,) = replications(values, replace(Quote.of("4.00"), systems=3))
    assert [found.low, found.high] == pytest.approx([wanted[0] - 0.005, wanted[1] + 0.005])


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, (0.92, 0.98)), (1.3, (0.25, 0.5)), (1.5, (0.0, 0.15))])
def test_nineteen_of_twenty_perfect_replications_are_accepted_and_wrong_ones_are_caught(
    factor: float, accepted: tuple[float, float]
) -> None:
    """Independent draws of one distribution as the paper's 32 systems and our 160: 400 know a share of 0.95 to 0.01."""
    found = [replications(drawn(160, k), quote_of(drawn(32, 10_000 + k, factor)))[0] for k in range(400)]
    share = np.mean([one.holds for one in found])
    assert accepted[0] <= share <= accepted[1]
    caught = np.median([one.catches for one in found])
    assert 1.4 < caught < 1.7  # between 1.3, which mostly passes, and what passes in less than one case of five


def test_the_papers_own_spread_widens_the_interval_and_its_quartiles_are_numbers_of_their_own() -> None:
    ours, theirs = drawn(160, 0), drawn(32, 1)
    plain = replications(ours, quote_of(theirs))
    (own, lower, upper) = replications(ours, quote_of(theirs, quartiles=True))
    assert [one.number for one in (own, lower, upper)] == [MEDIAN, LOWER, UPPER]
    wide = Quote("made up", "value", float(np.median(theirs)), 0.2, 5.0, systems=32)
    spreads = [one.high - one.low for one in (plain[0], own, replications(ours, wide)[0])]
    assert spreads[2] > 2 * max(spreads[:2])
    assert (own.holds, lower.holds, upper.holds) == (True, True, True)
    wrong = Quote("made up", "value", float(np.median(theirs)), float(np.quantile(theirs, 0.25)) / 2, 1.4, systems=32)
    assert not replications(ours, wrong)[1].holds
    assert plain[0].missed < replications(drawn(32, 0), quote_of(theirs))[0].missed
    few = Quote("made up", "value", float(np.median(theirs)), systems=8)
    assert replications(ours, few)[0].catches > plain[0].catches


def test_what_does_not_vary_is_not_counted_unless_the_paper_has_another_number() -> None:
    (same,) = replications(np.array([1.0] * 9 + [0.9]), Quote.of("1.000"))
    assert (same.holds, same.counted) == (True, False)
    (still,) = replications(np.array([1.0] * 130 + [0.9] * 62), Quote.of("1.000"))  # a lower quartile of 0.9
    assert (still.holds, still.counted) == (True, False)
    # the paper prints the most there is: nothing above it could be caught, so that it says nothing where it holds
    wavering = np.array([1.0] * 40 + [0.95] * 50)
    (full,) = replications(wavering, Quote.of("1.000"))
    assert (full.holds, full.counted) == (True, False)
    (less,) = replications(wavering - 0.1, Quote.of("1.000"))
    assert (less.holds, less.counted) == (False, True)
    (other,) = replications(np.ones(10), Quote.of("0.938"))
    assert (other.holds, other.counted) == (False, True)
    (zero,) = replications(np.random.default_rng(0).standard_normal(32), Quote.of("0.02"))
    assert math.isnan(zero.catches)
    assert 0.3 < zero.catches_difference < 2  # two errors of 1.25/√32, added, times 1.96 + 0.84


def test_ranges_and_counts_replicate_too() -> None:
    values = drawn(64, 0)
    near, far = (replications(values, Quote.of(text))[0] for text in ("1.2 to 1.5", "2.9 to 3.5"))
    assert (near.number, near.holds, far.holds) == (RANGE, True, False)
    outcomes = np.array([1.0] * 30 + [0.0] * 18)
    likely, not_likely = (replications(outcomes, Quote.of(text))[0] for text in ("9 of 16", "16 of 16"))
    assert (likely.number, likely.holds, not_likely.holds) == (COUNT, True, False)


@pytest.mark.parametrize(("ours", "trials", "theirs", "total"), [(30, 48, 9, 16), (67, 72, 70, 72), (5, 9, 4, 9)])
def test_how_often_equal_counts_miss_is_counted_table_by_table(ours: int, trials: int, theirs: int, total: int) -> None:
    outcomes = np.array([1.0] * ours + [0.0] * (trials - ours))
    (found,) = replications(outcomes, Quote.of(f"{theirs} of {total}"))
    both = ours + theirs
    miss = 0.0
    for k in range(max(0, both - total), min(both, trials) + 1):
        p = stats.fisher_exact([[k, trials - k], [both - k, total - both + k]])[1]
        chance = math.comb(trials, k) * math.comb(total, both - k) / math.comb(trials + total, both)
        miss += chance * (p < 0.05)
        if k == ours:
            assert found.holds == (p >= 0.05)
    assert found.missed == pytest.approx(miss)
    assert found.missed < 0.05


# --- the whole


def test_the_share_counts_each_number_once_and_leaves_out_what_says_nothing(quadratic: list[Cell]) -> None:
    found = tables.agreement(quadratic)
    counted = [c for c in quadratic if c.counted]
    assert found["judged"] == sum(c.known for c in counted)
    assert found["protocol_not_known"]["judged"] == sum(not c.known for c in counted)
    assert found["by_definition"] == 6 + 2 + 2  # the channel 000, tied one-step scores
    saturated = sum(c.saturated for c in quadratic)
    assert saturated == sum(found[key]["saturated"] for key in ("replication", "replication_protocol_not_known")) > 0
    assert found["judged"] + found["protocol_not_known"]["judged"] + found["by_definition"] + saturated == 237
    assert found["agree"] == sum(bool(c.agrees) for c in counted if c.known)
    numbers = [one for c in quadratic if c.known for one in c.replications if one.counted]
    replicated = found["replication"]
    assert replicated["judged"] == len(numbers) > found["judged"] / 2
    assert replicated["agree"] == sum(one.holds for one in numbers)
    shares = {one.missed for one in numbers if one.number not in (COUNT, RANGE)}
    assert shares == {MISSED_SPARSE}  # of medians of six systems beside the paper's 32
    assert replicated["expected_misses"] == pytest.approx(sum(one.missed for one in numbers))
    assert sum(len(c.replications) == 3 for c in quadratic) == 6 + 8  # the paper prints their quartiles
    words = tables.verdict(quadratic)
    assert words.startswith(f"{replicated['agree']} of {len(numbers)} numbers replicate")
    assert f"{found['agree']} of {found['judged']} agree" in words
    few = build("quadratic", made("quadratic", systems=3))
    assert tables.agreement(few)["judged"] == 0
    assert "too few systems" in tables.verdict(few)


def test_a_verdict_that_knows_no_factor_has_caught_none() -> None:
    """A factor that half of the verdicts catch: of three, one of which may be zero, it is the larger of two."""
    sizes = [cell_of(measure(list(drawn(32, k))), replace(Quote.of("1.0"), systems=32)) for k in range(2)]
    caught = sorted(cell.replications[0].catches for cell in sizes)
    zero = cell_of(measure(list(np.random.default_rng(0).standard_normal(32))), Quote.of("0.02"))
    assert math.isnan(zero.replications[0].catches)
    assert caught[1] > caught[0]
    assert tables.agreement([*sizes, zero])["replication"]["typical_factor_caught"] == caught[1]


def test_a_number_that_is_undefined_is_not_asked_for_its_median() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("number", "share", "count", "upper quartile"):
            cell = cell_of(measure([math.nan], kind=kind), Quote.of("0.5"))
            assert (math.isnan(cell.ours), cell.ours_text) == (True, "--")


def test_tests_of_more_systems_show_all_of_them_and_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar_measures, "DRAWS", 3)
    ranked = {"cnn": made("cifar", systems=18)["cnn"][["score", "magnitude"]]}
    found = at(build("cifar", ranked), "text:exp1_neural_tests", "Curvature", "CNN–ReLU")
    assert (found.ours_text, found.agrees) == ("yes (yes in 100% of draws of 16)", True)
    draws = np.array([1.0] * 60 + [0.0] * 41)
    test = Measure("text:exp1_neural_tests", "r", "c", draws, 48, "statement", whole=1.0, drawn=16)
    cell = cell_of(test, Quote.of("no"))
    assert (cell.ours_text, cell.agrees, cell.rule) == ("yes (yes in 59% of draws of 16)", None, "either way")
    assert tables.mark(cell) == "?"
    p = Measure("text:exp1_neural_by_network", "r", "c", draws / 10, 48, "p", whole=1e-6, drawn=16)
    assert cell_of(p, Quote.of("0.002")).ours_text == "1.00e-06 (p < 0.05 in 41% of draws of 16)"
    known = cell_of(measure(NINE), Quote.of("5.0"))
    assert "Not judged: 1 (either way)." in tables.verdict([cell, known])


def test_a_file_says_nothing_could_be_judged_and_where_its_numbers_come_from() -> None:
    few = build("quadratic", made("quadratic", systems=3))
    text = tables.markdown(few, {"study": "quadratic"})
    assert "Nothing could be judged." in text
    assert "all 16 are shown." in text
    told = text.replace(CALIBRATION, "")
    assert not any(f" {count} " in told for count in (48, 192))  # what other runs found is no part of this one's tables
    assert "Nowhere: every number that could be judged agrees." in tables.markdown(
        [cell_of(replace(measure(NINE), table="tab:app_exp1_fidelity"), Quote.of("5.0"))], {"study": "quadratic"}
    )


def test_a_number_has_a_minus_and_an_exponent_what_programs_read() -> None:
    cell = cell_of(measure([-0.25, -0.5, -0.125, -0.3, -2e-5]), Quote.of("-0.2 [-0.5, 2e-5]"))
    assert cell.ours_text == "−0.2500 [−0.3000, −0.1250]"
    assert cell.paper_text == "−0.2 [−0.5, 2e-5]"
    assert cell_of(measure([-2e-5] * 5), None).ours_text.startswith("−2.00e-05 [")


def test_a_card_begins_with_what_differs_and_ends_with_why() -> None:
    ours = measure(list(np.linspace(0.7, 1.1, 32)), note="a note")  # quartiles 0.8 and 1.0
    quartile = cell_of(ours, replace(Quote.of("0.905 [0.600, 1.000]"), systems=32))
    assert [one.holds for one in quartile.replications] == [True, False, True]
    assert quartile.note.startswith("the lower quartile is 0.8000, the paper's 0.6000: ours less the paper's is ")
    assert "times the paper's" not in quartile.note
    assert quartile.note.endswith("; a note; not known why")
    known = cell_of(replace(ours, reason="shared batches"), replace(Quote.of("0.300"), systems=32))
    assert known.note.startswith("ours is 3.00 times the paper's; the median, ours less the paper's, is between")
    assert known.note.endswith("; a note; shared batches")
    assert cell_of(replace(ours, reason="shared batches"), Quote.of("0.900")).note == "a note"
    count = cell_of(measure([1.0] * 30 + [0.0] * 2, kind="count"), replace(Quote.of("3 of 32"), systems=32))
    assert count.note.startswith("the share, ours less the paper's, is between")


def test_verdicts_that_would_catch_nothing_are_json_too() -> None:
    """Four systems beside a number of the paper's eight: no factor would be caught in four cases of five."""
    few = cell_of(measure([0.51, 0.31, 1.04, 0.40]), replace(Quote.of("0.1"), systems=8))
    assert few.replications[0].catches == math.inf
    assert tables.agreement([few])["replication"]["typical_factor_caught"] is None
    assert "caught" not in tables.verdict([few])


def test_the_files_hold_every_cell(quadratic: list[Cell], tmp_path: Path) -> None:
    tables.write(quadratic, tmp_path, made("quadratic"), study_of("quadratic"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tables.json", "tables.md", "values.json"]

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    page = json.loads((tmp_path / "tables.json").read_text(), parse_constant=refuse)
    assert len(page["cells"]) == len(quadratic)
    wanted = {"table", "row", "column", "ours", "iqr_low", "iqr_high", "paper", "agrees", "rule", "known", "note"}
    assert all(wanted <= set(cell) for cell in page["cells"])
    assert page["agreement"]["judged"] == tables.agreement(quadratic)["judged"]
    assert page["machine"]["seed"] == 7
    tied = next(c for c in page["cells"] if c["rule"] == "tied in both")
    assert tied["ours"] is None
    assert tied["paper"] is None
    stored = json.loads((tmp_path / "values.json").read_text(), parse_constant=refuse)
    values = stored["cells"]
    assert not re.search(r"\d\.0[,\]]", (tmp_path / "values.json").read_text())  # whole numbers are short
    assert stored["systems"] == [str(name) for name in made("quadratic")["standard"]["system"].values]
    assert [len(one["values"]) for one in values] == [len(c.values) for c in quadratic]
    np.testing.assert_allclose(values[0]["values"], slopes(6) / 32, rtol=1e-5)  # NRMSE of the standard probe, α = 1/32
    text = (tmp_path / "tables.md").read_text()
    assert all(f"({label}" in text for label in {c.table for c in quadratic})
    for row in [line for line in text.splitlines() if line.startswith("| CV of")]:
        assert len(row.replace("\\|", "").split("|")) == 5  # |d1| does not break the row: name, two probes, two ends
    wrong = [c for c in quadratic if c.holds is False]
    assert sum(line.startswith("- ") and ", the paper's " in line for line in text.splitlines()) == len(wrong)
    judged = {c.table for c in quadratic if any(one.counted for one in c.replications)}
    assert text.count("a perfect replication would miss") == 1 + len(judged)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    quadratic: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.write(quadratic, tmp_path, made("quadratic"), study_of("quadratic"))
    before = (tmp_path / "tables.json").read_bytes()

    def full(self: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        tables.write(quadratic[:1], tmp_path, made("quadratic"), study_of("quadratic"))
    assert (tmp_path / "tables.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_the_same_results_give_the_same_verdicts() -> None:
    sizes = xr.DataArray(np.linspace(1, 2, 6), dims="system")
    results = {s: d[["exact", "predicted"]] for s, d in made("cifar").items()}
    noisy = {s: d.assign(exact=d["exact"] * sizes) for s, d in results.items()}
    assert repr(build("cifar", noisy)) == repr(build("cifar", noisy))
