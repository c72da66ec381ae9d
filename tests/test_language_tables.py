"""The language stage's tables against small computations by hand, its findings on known causes, and its page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy import stats
from typer.testing import CliRunner

from aftershock.commands.cli import app
from aftershock.errors import InvalidFile
from aftershock.report.language_figures import language_drawings
from aftershock.report.language_files import language_files
from aftershock.report.study_page import write_study_page
from aftershock.studies.cells import Cell
from aftershock.studies.language import deviations
from aftershock.studies.language.candidates import Candidates
from aftershock.studies.language.conditions import conditions, described, size_label
from aftershock.studies.language.deviations import exponent_deviations, findings, validity
from aftershock.studies.language.finite_differences import select, step_curve
from aftershock.studies.language.measures import language_measures
from aftershock.studies.language.ranks import pooled_ranks
from aftershock.studies.paper import TABLES
from aftershock.studies.results import ResultStore, SystemResults, join_systems
from aftershock.studies.study import System
from aftershock.studies.tables import build, markdown, provenance, verdict, write
from aftershock.studies.verdicts import Measure, judge

from .language_results import (
    CHANGES,
    HORIZONS,
    SCALES,
    STEPS,
    joined,
    language_study,
    other_systems,
    paper_systems,
    system,
    unit,
)
from .test_report import Tags

LANGUAGE = [label for label in TABLES if "exp3" in label]


@pytest.fixture(scope="module")
def paper() -> list[Measure]:
    """What the paper's nine systems would say."""
    return list(language_measures(joined(paper_systems(noise=3e-4))))


@pytest.fixture(scope="module")
def other() -> dict[str, xr.Dataset]:
    return joined(other_systems(noise=3e-4))


@pytest.fixture(scope="module")
def cells(other: dict[str, xr.Dataset]) -> list[Cell]:
    return build("language", other)


def at(measures: list[Any], table: str, row: str, column: str = "value") -> Any:
    (found,) = [m for m in measures if (m.table, m.row, m.column) == (table, row, column)]
    return found


def about(data: xr.Dataset, subject: str) -> Any:
    (found,) = [one for one in findings(Candidates(data)) if one.subject == subject]
    return found


# --- finite differences


def test_the_smaller_step_of_the_most_consistent_pair_is_selected() -> None:
    answers = np.array([[4.0, 0.0], [2.0, 0.0], [1.1, 0.0], [1.0, 0.0], [0.5, 0.0], [5.0, 0.0]])  # by step, falling
    lost = np.array([[1.0, 0.0], [-1.0, 0.0]] * 3)  # neighbours never agree
    data = xr.DataArray(
        np.stack([answers, lost], axis=1), dims=("fd_step", "change", "horizon"), coords={"fd_step": STEPS}
    )
    for shuffled in (data, data.isel(fd_step=[3, 0, 5, 1, 4, 2])):
        found = select(shuffled)
        assert float(found["step"][0]) == STEPS[3]
        assert float(found["consistency"][0]) == pytest.approx(0.1 / 1.05)
        np.testing.assert_array_equal(found["derivative"][0], [1.0, 0.0])
        assert found["identifiable"].values.tolist() == [True, False]
        assert found["derivative"][1].isnull().all()


def test_the_error_by_step_is_truncation_on_the_right_and_noise_on_the_left() -> None:
    """‖a + τ ε² t + ν/ε n − a‖ / ‖a‖ of unit vectors t and n, recomputed from the same draws."""
    one = system("m", "d", 1000, seed=3, truncation=0.5, noise=1e-4)
    found = step_curve(joined([one])["language"]).isel(system=0)
    draws = np.random.default_rng(3)
    draws.standard_normal((CHANGES, HORIZONS))
    draws.random((CHANGES, HORIZONS))
    bent, rough = (unit(draws.standard_normal((CHANGES, HORIZONS))) for _ in range(2))
    steps = np.sort(STEPS)
    by_hand = [np.median(np.linalg.norm(0.5 * e**2 * bent + 1e-4 / e * rough, axis=1)) for e in steps]
    np.testing.assert_allclose(found["error"], by_hand, rtol=1e-9)
    assert float(found["rising"]) == pytest.approx(2, abs=0.02)
    assert float(found["falling"]) == pytest.approx(-1, abs=0.05)
    assert float(found["best_step"]) == steps[np.argmin(by_hand)]


# --- tables


def test_every_number_of_the_paper_has_a_cell_where_its_systems_were_run(paper: list[Measure]) -> None:
    wanted = {(label, *place) for label in LANGUAGE for place in TABLES[label].quotes()}
    assert len(wanted) == 145
    filled = [(m.table, m.row, m.column) for m in paper]
    assert len(filled) == len(set(filled))
    assert wanted <= set(filled)


def test_the_papers_own_numbers_fit_our_definitions() -> None:
    """What the paper prints twice in different words fixes what its numbers are; to half a unit of the last digit."""
    ranking, text = (TABLES[label].quotes() for label in ("tab:app_exp3_ranking", "text:exp3_ranking"))
    names = [row for row in TABLES["tab:app_exp3_ranking"].rows if row != "Median"]
    iso, step = ([ranking[name, score].value for name in names] for score in ("ISO Tangent (FD)", "Exact 1-step"))
    said = {row: quote.value for (row, _), quote in text.items()}
    assert np.mean(iso) == pytest.approx(said["Pooled rank correlation, ISO-FD"], abs=1e-3)
    assert np.mean(step) == pytest.approx(said["Pooled rank correlation, exact one-step"], abs=1e-3)
    alone = said["Pooled rank correlation, exact one-step"] ** 2
    partial = said["Partial correlation of ISO-FD, one-step held fixed"]
    assert alone == pytest.approx(said["R² of one-step ranks"], abs=1e-3)
    assert alone + (1 - alone) * partial**2 == pytest.approx(said["R² of one-step and ISO-FD ranks"], abs=1e-3)
    assert sum(a > b for a, b in zip(iso, step)) == said["Systems where ISO-FD exceeds exact one-step"]
    signs = TABLES["tab:app_exp3_alpha"].quotes()["α = 1", "Sign acc."]
    recovered = TABLES["text:exp3_signs"].quotes()["Signs that ISO-FD recovers", "value"]
    assert recovered.value / recovered.high == pytest.approx(signs.value, abs=signs.half_unit)
    shares = TABLES["text:exp3_validity"].quotes()
    for scale, column in ((0.25, "Valid 0.25"), (1, "Valid 1")):
        sizes = [quote.value for (_, name), quote in TABLES["tab:app_exp3_scale"].quotes().items() if name == column]
        assert np.mean(sizes) == pytest.approx(shares[f"α = {scale:g}", "ISO Tangent (FD)"].value, abs=1e-3)


def test_errors_by_scale_are_medians_over_all_candidates(other: dict[str, xr.Dataset], cells: list[Cell]) -> None:
    data = other["language"]
    exact, tangent, semilinear = (data["response"].sel(answer=a).values for a in ("exact", "tangent", "semilinear"))
    table = "tab:app_exp3_alpha"
    for name, answer in (("exact tangent (ours)", tangent), ("semilinear (ours)", semilinear)):
        miss = np.linalg.norm(exact - answer, axis=-1) / np.linalg.norm(exact, axis=-1)  # [system, scale, change]
        flat = miss[:, 2].ravel()
        row = f"α = 0.25, {name}"
        assert at(cells, table, row, "NRMSE").ours == pytest.approx(np.median(flat))
        assert at(cells, table, row, "75 % NRMSE").ours == pytest.approx(np.quantile(flat, 0.75))
    cosine = np.einsum("scah,scah->sca", exact, tangent)[:, 4] / (
        np.linalg.norm(exact[:, 4], axis=-1) * np.linalg.norm(tangent[:, 4], axis=-1)
    )
    row = "α = 1, exact tangent (ours)"
    assert at(cells, table, row, "Cosine").ours == pytest.approx(np.median(cosine))
    peaks = [abs(a[:, 4]).max(-1) for a in (exact, tangent)]
    assert at(cells, table, row, "Rel. M").ours == pytest.approx(
        np.median(abs(peaks[0] - peaks[1]) / (peaks[0] + peaks[1]))
    )
    errors = abs(exact - tangent) / (abs(exact) + abs(tangent))
    shares = (np.median(errors, axis=-1) <= 0.2).mean(axis=(0, 2))
    assert shares[-1] == pytest.approx(4 / 8)
    for scale, share in zip(SCALES, shares):
        assert at(cells, "text:exp3_validity", f"α = {scale:g}", "Exact tangent (ours)").ours == pytest.approx(share)
    local = (np.linalg.norm(exact - tangent, axis=-1) / np.linalg.norm(exact, axis=-1))[:, :3]
    by_size = at(cells, "tab:app_exp3_scale", "SmolLM2-135M (0.13B), exact tangent (ours)", "Local NRMSE")
    assert by_size.ours == pytest.approx(np.median(local))
    by_domain = at(cells, "text:exp3_domains", "web, exact tangent (ours)", "Local NRMSE")
    assert by_domain.ours == pytest.approx(np.median(local[1]))


def test_a_wrong_extremum_and_an_unidentifiable_candidate_are_counted(other: dict[str, xr.Dataset]) -> None:
    data = other["language"].copy(deep=True)
    data["fd_derivative"][0, :, 0] *= -1  # another sign
    data["fd_derivative"][1, :, 1] *= xr.DataArray((-1.0) ** np.arange(6), dims="fd_step")  # neighbours disagree
    measures = list(language_measures({"language": data}))
    assert at(measures, "text:exp3_steps", "Identifiable candidates").values.sum() == 23
    signs = at(measures, "text:exp3_signs", "Signs that ISO-FD recovers").values
    assert (signs.sum(), len(signs)) == (22, 23)
    assert len(at(measures, "tab:app_exp3_alpha", "α = 1", "NRMSE").values) == 23
    assert len(at(measures, "tab:app_exp3_alpha", "α = 1, exact tangent (ours)", "NRMSE").values) == 24


def test_ranks_against_residuals_of_least_squares() -> None:
    draws = np.random.default_rng(0)
    target = draws.standard_normal((3, 8))
    control, score = target + draws.standard_normal((3, 8)), target + draws.standard_normal((3, 8))
    found = pooled_ranks(*(xr.DataArray(a, dims=("system", "change")) for a in (score, control, target)))
    x, z, y = (np.concatenate([stats.rankdata(row) for row in a]) for a in (score, control, target))
    assert found.score == pytest.approx(np.mean([stats.spearmanr(a, b)[0] for a, b in zip(score, target)]))

    def left(values: np.ndarray, *by: np.ndarray) -> np.ndarray:
        columns = np.stack([np.ones_like(values), *by], axis=1)
        return values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]

    assert found.partial == pytest.approx(np.corrcoef(left(x, z), left(y, z))[0, 1])
    spread = ((y - y.mean()) ** 2).sum()
    assert found.r_control == pytest.approx(1 - (left(y, z) ** 2).sum() / spread)
    assert found.r_both == pytest.approx(1 - (left(y, z, x) ** 2).sum() / spread)
    assert math.isnan(pooled_ranks(*(xr.DataArray(np.ones((2, 4)), dims=("system", "change")),) * 3).score)


def test_rankings_channels_signs_and_cost(cells: list[Cell], other: dict[str, xr.Dataset]) -> None:
    exact = other["language"]["response"].sel(answer="exact", scale=1.0).values
    peak = abs(exact).max(-1)
    rho = [stats.spearmanr(one, np.arange(CHANGES))[0] for one in peak]
    table = "tab:app_exp3_ranking"
    assert at(cells, table, "SmolLM2-135M, web", "Gradient norm").ours == pytest.approx(rho[1])
    assert at(cells, table, "Median", "Gradient norm").ours == pytest.approx(np.median(rho))
    assert at(cells, table, "Median", "Parameter write").ours == pytest.approx(-np.median(rho))
    step = [stats.spearmanr(a, abs(b[:, 0]))[0] for a, b in zip(peak, exact)]
    assert at(cells, table, "SmolLM2-135M, code", "Exact 1-step").ours == pytest.approx(step[2])
    extremes = np.take_along_axis(exact, abs(exact).argmax(-1)[..., None], -1)
    assert at(cells, "text:exp3_signs", "Positive extrema").ours == (extremes > 0).sum()
    hybrids = [
        at(cells, "text:exp3_hybrids", "SmolLM2-135M, web", c).ours for c in ("m without its v", "m and v together")
    ]
    assert hybrids == [40.0, 0.0108]
    one = at(cells, "text:exp3_hybrids", "SmolLM2-135M, web", "m without its v")
    assert (one.known, "of the first candidate" in one.note) == (False, True)
    assert at(cells, "text:exp3_cost", "All systems", "Seconds").ours == 3 * 28
    assert at(cells, "text:exp3_cost", "SmolLM2-135M (0.13B)", "Peak GPU memory, GiB (ours)").ours == 3


# --- what may be judged


def test_only_the_papers_own_systems_are_judged(paper: list[Measure], cells: list[Cell]) -> None:
    judged = [m for m in paper if not m.unjudged]
    assert {m.table for m in judged} >= {"tab:app_exp3_alpha", "text:exp3_validity", "tab:app_exp3_scale"}
    assert not any(m.unjudged == "other model" for m in paper)
    quoted = [cell for cell in cells if not cell.ours_only]
    assert len(quoted) > 40
    assert {(cell.table, cell.row, cell.column) for cell in quoted} == {
        (label, *place) for label in LANGUAGE for place in TABLES[label].quotes()
    }  # every number of the paper, ours beside it or not
    assert all(cell.agrees is None and cell.rule in ("other model", "not run") for cell in quoted)
    alone = at(cells, "tab:app_exp3_ranking", "410M, CodeParrot", "ISO Tangent (FD)")
    assert (alone.ours_text, alone.paper_text, alone.rule) == ("–", "0.857", "not run")
    assert "– / 0.857" in markdown(cells, {"study": "language"})
    assert "SmolLM2-135M, wikipedia" in quoted[0].note
    assert "not the paper's" in verdict(cells)
    assert f"{sum(cell.rule == 'not run' for cell in quoted)} (not run)" in verdict(cells)
    fresh = joined([system("pythia-410m", "wikitext-103", 405_334_016, "fresh"), *paper_systems()[:2]])
    assert all(m.unjudged == "other model" for m in language_measures(fresh) if m.row in ("0.41B", "α = 1"))
    two = [m for m in language_measures(joined(paper_systems()[:2])) if m.table == "tab:app_exp3_alpha"]
    assert all(m.unjudged == "other model" for m in two)  # seven of the nine are missing


def test_models_and_texts_go_by_the_papers_names_however_they_are_written() -> None:
    names = ("EleutherAI/pythia-1.4b", "Pythia-1.4B", "pythia-1.4b")
    found = conditions(
        joined([system(n, f"wikitext-103{i * '-raw'}", 1_414_647_808) for i, n in enumerate(names)])["language"]
    )
    assert {(c.name, c.size, c.from_paper) for c in found} == {("1.4B, WikiText-103", "1.4B", True)}
    sizes = [size_label(n) for n in (405_334_016, 1_011_781_632, 1_414_647_808, 2_400_000, 70_000, 900)]
    assert sizes == ["0.41B", "1.0B", "1.4B", "2M", "70k", "900"]
    (deduped,) = conditions(joined([system("pythia-1.4b-deduped", "wikitext2", 1_414_647_808)])["language"])
    assert (deduped.name, deduped.from_paper) == ("pythia-1.4b-deduped, wikitext2", False)


def test_pooled_candidates_are_counted_where_the_paper_pools_them() -> None:
    """Nine systems of eight candidates: a row of three systems has 24, and that is enough for a verdict."""
    cells = build("language", joined(paper_systems(noise=3e-4)))
    quoted = [cell for cell in cells if not cell.ours_only]
    unjudged = [cell for cell in quoted if cell.unjudged]
    assert len(quoted) == 145
    by_scale = at(cells, "tab:app_exp3_alpha", "α = 0.25", "NRMSE")
    assert by_scale.replications[0].number == "median"
    # 24 candidates at three scales are no 72 numbers, and what one row counts another must not count again
    rules = {(cell.row, cell.column): cell.rule for cell in unjudged}
    pooled = {place for place, rule in rules.items() if rule == "pooled scales"}
    assert pooled == {(size, c) for size in ("0.41B", "1.0B", "1.4B") for c in ("Local NRMSE", "Cosine")} | {
        (domain, "Local NRMSE") for domain in ("CodeParrot", "OpenWebText", "WikiText-103")
    }
    twice = {row for (row, column), rule in rules.items() if rule == "complement" and column == "value"}
    assert twice == {"Negative extrema", "Systems where exact one-step exceeds ISO-FD"}
    assert rules["CodeParrot", "Negative extrema"] == "complement"
    rest = set(rules.values()) - {"pooled scales", "complement"}
    assert rest <= {"one number", "run time", "too few systems"}
    assert len(quoted) - len(unjudged) == 76
    share = at(cells, "text:exp3_validity", "α = 0.0625", "ISO Tangent (FD)")
    ours, theirs = share.ours, 67 / 72
    assert share.replications[0].number == "count"
    assert np.mean([share.replications[0].low, share.replications[0].high]) == pytest.approx(ours - theirs)
    upper = at(cells, "tab:app_exp3_alpha", "α = 0.25", "75 % NRMSE")
    assert upper.replications[0].number == "upper quartile"
    assert upper.ours == pytest.approx(np.quantile(upper.values, 0.75))
    alone = at(cells, "text:exp3_exponents", "1B, CodeParrot", "ISO Tangent (FD)")
    assert (len(alone.values), alone.rule != "too few systems") == (8, True)
    full = at(cells, "tab:app_exp3_alpha", "α = 0.0625", "Sign acc.")
    assert (full.paper_text, full.saturated, full.counted) == ("1.000", True, False)


@pytest.mark.parametrize(("right", "agrees"), [(72, True), (65, True), (45, False)])
def test_a_share_is_judged_by_fishers_test(right: int, agrees: bool) -> None:
    quote = TABLES["text:exp3_validity"].quotes()["α = 0.0625", "ISO Tangent (FD)"]  # 0.931, 67 of 72
    values = np.arange(72) < right
    found = judge(Measure("t", "r", "c", values, 9, "share"), quote, np.random.default_rng(0))
    assert found == (agrees, "fisher")
    p = stats.fisher_exact([[right, 72 - right], [67, 5]])[1]
    assert (p >= 0.05) == agrees


# --- noise or real


def test_each_cause_of_a_deviation_is_found() -> None:
    smooth = system("a", "smooth", 1000)
    differences = system("a", "differences", 1000, truncation=0.5, noise=0.02)  # no step is good
    noisy = system("a", "noisy", 1000, seed=2)
    tremor = 2e-5 * np.random.default_rng(5).standard_normal(noisy["response"].shape[1:])
    noisy["response"][0] += tremor
    noisy["noise_floor"][:] = 2e-5  # of responses of 3e-4 and errors of 1e-5 at the smallest scale
    bent = system("a", "bent", 1000, seed=4)
    bent["response"][0] = bent["response"][2] * (1 + 0.5 * bent["scale"] ** -0.5)  # saturates: |d| ∝ √α
    bent["fd_derivative"][:] = bent["response"][2, -1]
    systems = [smooth, differences, noisy, bent]
    found = {d.name: d for d in exponent_deviations(Candidates(joined(systems)["language"]))}
    causes = {name: d.cause for name, d in found.items()}
    assert causes == {
        "a, smooth": "none", "a, differences": "finite differences", "a, noisy": "not clear of noise",
        "a, bent": "real",
    }  # fmt: skip
    assert found["a, bent"].tangent == pytest.approx(0.5, abs=1e-6)
    assert found["a, smooth"].tangent == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize(
    ("fd", "tangent", "noise", "cause"),
    [
        (1.69, 2.57, 0.03, "opposite sides"),
        (1.5, 1.4, 0.03, "real"),
        (2.5, 2.4, 0.03, "real"),
        (0.69, 0.73, 0.478, "not clear of noise"),  # less than half of the error, and within what the noise is known to
        (1.5, 1.9, 0.03, "finite differences"),
        (1.9, 2.36, 0.03, "exact tangent only"),
        (2.05, 2.07, 0.03, "none"),
        # an error that is mostly noise says nothing, whatever its exponent
        (2.05, 2.07, 1.18, "not clear of noise"),
        (1.5, 1.9, 0.3, "not clear of noise"),
        (1.9, 2.36, 0.3, "not clear of noise"),
        (1.69, 2.57, 0.3, "not clear of noise"),
        (math.nan, 2.0, 0.3, "undefined"),
    ],
)
def test_a_cause_is_told_only_where_the_error_is_clear_of_noise(
    fd: float, tangent: float, noise: float, cause: str
) -> None:
    assert deviations._cause(fd, tangent, noise) == cause


def saturated(one: xr.Dataset, noise: float = 0.0) -> xr.Dataset:
    """A response that the tangent misses by its own size times α, at every scale, and semilinear by α³ / 1000."""
    one["response"].loc[{"answer": "exact"}] = 2 * one["response"].sel(answer="tangent")
    one["response"].loc[{"answer": "semilinear"}] = one["response"].sel(answer="exact") * (1 + 1e-3 * one["scale"] ** 2)
    one["fd_derivative"][:] = one["response"].sel(answer="tangent", scale=1.0, drop=True)
    one["noise_floor"][:] = noise
    return one


def trembling(one: xr.Dataset) -> xr.Dataset:
    """A smooth response under noise of its error's size at the smallest scale."""
    one["response"][0] += 2e-5 * np.random.default_rng(5).standard_normal(one["response"].shape[1:])
    one["noise_floor"][:] = 2e-5
    return one


@pytest.fixture(scope="module")
def both() -> dict[str, xr.Dataset]:
    """Of one model, a deviation of float32 that is gone in float64, one that stays, and one of which nobody knows."""
    smol = ("SmolLM2-135M", 134_515_008, "quantized")

    def one(domain: str, dtype: str, seed: int) -> xr.Dataset:
        return system(smol[0], domain, *smol[1:], seed=seed, dtype=dtype)

    return joined([
        trembling(one("code", "float32", 2)), one("code", "float64", 2),
        saturated(one("web", "float32", 4), 5e-5), saturated(one("web", "float64", 4), 1e-12),
        trembling(one("books", "float32", 6)),
    ])  # fmt: skip


def test_float64_tells_float_noise_from_what_is_real(both: dict[str, xr.Dataset]) -> None:
    found = {d.name: d for d in exponent_deviations(Candidates(both["language"]))}
    assert {name: d.cause for name, d in found.items()} == {
        "SmolLM2-135M, code": "float noise", "SmolLM2-135M, web": "real", "SmolLM2-135M, books": "not clear of noise",
    }  # fmt: skip
    code, web = (found[f"SmolLM2-135M, {text}"].finer for text in ("code", "web"))
    assert code is not None
    assert web is not None
    assert (code.dtype, code.near) == ("float64", CHANGES)
    assert code.tangent == pytest.approx(2, abs=1e-6)
    assert (web.tangent, web.near) == (pytest.approx(1, abs=1e-6), 0)
    assert web.semilinear == pytest.approx(2e-3 / 16**2, rel=1e-6)
    noise, real = (about(both["language"], f"exponents: {cause}").sentence for cause in ("float noise", "real"))
    assert "1 of 3 models and texts" in noise
    assert "2.00 and 2.00 in float64" in noise
    assert found["SmolLM2-135M, web"].noise > 0.2  # float32 alone would not have known
    assert "not in semilinear, whose error is 0.000781% of the tangent's, so it lies in AdamW's arithmetic" in real
    assert "one was noise and another is real" in about(both["language"], "paper").sentence
    assert "16 candidates that were run in float64" in about(both["language"], "steps").sentence


def test_an_exponent_of_two_under_noise_is_no_good_news() -> None:
    noisy = system("a", "noisy", 1000)
    noisy["noise_floor"][:] = 2e-5  # of errors of 1e-5 at the smallest scale, whose exponent is 2 all the same
    told = about(joined([noisy])["language"], "exponents: not clear of noise")
    assert told.level == "care"
    assert "say nothing, near 2 or not" in told.sentence
    assert "2.00 and 2.00" in told.sentence


@pytest.mark.parametrize(
    ("exponent", "coarse", "finer", "cause"),
    [
        (2.0, "none", "none", "none"),
        (2.0, "not clear of noise", "none", "none"),  # nothing deviated
        (1.0, "not clear of noise", "none", "float noise"),
        (1.0, "opposite sides", "none", "float noise"),
        (math.nan, "undefined", "none", "none"),
        (1.0, "not clear of noise", "real", "real"),
        (2.0, "none", "finite differences", "finite differences"),
        (1.0, "real", "undefined", "real"),
    ],
)
def test_float64_decides_where_it_was_run(exponent: float, coarse: Any, finer: Any, cause: str) -> None:
    one = deviations.Deviation("a, b", "float32", exponent, exponent, 0.5, 0.5, 0, 8, coarse)
    assert deviations._decided(one, replace(one, dtype="float64", cause=finer)).cause == cause


def test_a_model_and_text_is_pooled_once_and_in_float32(both: dict[str, xr.Dataset]) -> None:
    data = both["language"]
    alone = {"language": data.isel(system=(data["dtype"] == "float32").values)}
    whole = {(c.table, c.row, c.column): c.values for c in build("language", both) if c.systems}
    pooled = {(c.table, c.row, c.column): c.values for c in build("language", alone) if c.systems}
    assert {place: whole[place] for place in pooled} == pooled
    # what float64 adds are rows of its own in the one table that asks what is noise
    more = whole.keys() - pooled.keys()
    assert {(table, row) for table, row, _ in more} == {
        ("text:exp3_exponents", f"SmolLM2-135M, {text}, float64") for text in ("code", "web")
    }
    own = whole["text:exp3_exponents", "SmolLM2-135M, code, float64", "Exact tangent (ours)"]
    np.testing.assert_allclose(own, 2, atol=1e-6)
    finest = {"language": data.isel(system=(data["dtype"] == "float64").values)}
    assert at(build("language", finest), "text:exp3_signs", "Positive extrema").ours_text.endswith("of 16")
    another = data.copy(deep=True)
    another["text_digest"] = another["text_digest"].astype(object)
    another["text_digest"][1] = "another text of that name"
    assert [one.finer for one in exponent_deviations(Candidates(another))][:2] == [None, None]
    said = described(Candidates(data).conditions)
    assert "on books, code, web in float32 and on code, web in float64" in said.replace(
        "code, web, books", "books, code, web"
    )
    assert "count a model and a text once, in float32" in said
    assert "once" not in described(Candidates(alone["language"]).conditions)


def test_float64_is_never_taken_for_the_papers_own_run() -> None:
    lifted = joined(
        [*paper_systems(noise=3e-4), system("EleutherAI/pythia-1b", "codeparrot", 1_011_781_632, dtype="float64")]
    )
    rows = {m.row: m for m in language_measures(lifted) if m.table == "text:exp3_exponents"}
    assert rows["1B, CodeParrot, float64"].unjudged == "other model"
    share = at(list(language_measures(lifted)), "text:exp3_validity", "α = 1", "ISO Tangent (FD)")
    assert (len(share.values), share.unjudged) == (72, "")


def test_the_page_shows_float64_beside_float32(both: dict[str, xr.Dataset], tmp_path: Path) -> None:
    drawings = {d.name: d for d in language_drawings(both)}
    steps = drawings["fd-steps"]
    assert list(steps.frames) == ["SmolLM2-135M, code", "SmolLM2-135M, web", "SmolLM2-135M, books"]
    curve = step_curve(both["language"])["error"]
    shown = [steps.frames["SmolLM2-135M, code"]["y"][-k] for k in (1, 2)]
    np.testing.assert_allclose(shown, curve.isel(system=[0, 1]), rtol=1e-3)
    assert steps.frames["SmolLM2-135M, books"]["y"][-2] == []
    assert "SmolLM2-135M, web, float64" in drawings["fd-exponents"].figure.data[0].y
    assert "SmolLM2-135M, web, float64" in drawings["lm-scales"].frames
    assert len(drawings["lm-ranking"].frames["Exact 1-step"]["y"][0]) == 3
    page = write_study_page(language_study(), both, build("language", both), tmp_path / "report.html")
    text = Tags.of(page).text
    for words in ("count a model and a text once", "it is not in semilinear", "median error in float64"):
        assert words in text or words in page.read_text()


def test_results_that_do_not_say_their_dtype_are_refused(other: dict[str, xr.Dataset]) -> None:
    with pytest.raises(InvalidFile, match=r"do not say each system's dtype.*run it again in another folder"):
        conditions(other["language"].drop_vars("dtype"))


def test_systems_stand_by_size_and_values_under_their_names_in_whatever_order_they_were_run(tmp_path: Path) -> None:
    """The gradient norms rise with the candidate, so that each ρ is that of its system's exact peaks with 0 … 7."""
    machine = {"machine": "x86_64", "processor": "made-up CPU", "gpu": None, "torch": "0"}
    systems, wanted = [], {}
    for i in (5, 0, 8, 3, 1, 7, 4, 2, 6):
        one = paper_systems(noise=3e-4)[i]
        name = System(f"{one['model'].item()}-{one['domain'].item()}", 7, 0)
        systems.append((name, one))
        peaks = abs(one["response"].sel(answer="exact", scale=1.0)).max("horizon")
        wanted[name.name] = stats.spearmanr(peaks, np.arange(CHANGES))[0]
    study = replace(language_study(), systems=tuple(name for name, _ in systems))
    kept = {name.name: SystemResults({"language": one}, (machine,)) for name, one in systems}
    results = join_systems(study, kept)
    found = Candidates(results["language"])
    assert [one.name for one in exponent_deviations(found)] == [
        f"{size}, {text}" for size in ("410M", "1B", "1.4B") for text in ("CodeParrot", "OpenWebText", "WikiText-103")
    ]
    write(build("language", results), tmp_path, results, study)
    stored = json.loads((tmp_path / "values.json").read_text())
    rows = {(cell["row"], cell["column"]): cell["values"] for cell in stored["cells"] if "ranking" in cell["table"]}
    assert len({*wanted.values()}) > 3
    assert dict(zip(stored["systems"], rows["Median", "Gradient norm"])) == pytest.approx(wanted, rel=1e-4)
    listed = described(found.conditions)
    assert listed.index("410M") < listed.index("1B") < listed.index("1.4B")
    assert listed in (tmp_path / "tables.md").read_text()
    said = {one.subject: one.sentence for one in findings(found)}
    assert " 0.0%" not in " ".join(said.values()), "small noise has digits"


def test_a_rise_of_three_candidates_is_chance(other: dict[str, xr.Dataset]) -> None:
    sign, fisher = deviations.paper_rise()
    assert sign == 2 * 0.5**3  # three of three, two-sided
    assert fisher == pytest.approx(stats.fisher_exact([[67, 5], [70, 2]])[1])
    assert min(sign, fisher) > 0.05
    data = other["language"].copy(deep=True)
    data["response"].loc[{"answer": "exact", "scale": 0.0625, "change": [0]}] *= 0.5  # three of 24 become invalid
    found = validity(Candidates(data))
    assert found.chance == (0.25, 0.25)
    assert found.cause == "chance"
    said = {one.subject: one.sentence for one in findings(Candidates(data))}
    assert "p = 0.25" in said["validity"]
    assert "67 to 70 of 72" in said["the paper's validity"]


# --- lost in noise


def test_scales_that_drown_are_blank_and_the_rest_is_not(other: dict[str, xr.Dataset]) -> None:
    """Noise of twice a fifth of the typical response at α = 0.125 drowns it and α = 0.0625; α = 1 stands clear."""
    data = other["language"].copy(deep=True)
    exact = data["response"].sel(answer="exact")
    data["noise_floor"][:] = float(abs(exact.sel(scale=0.125)).median()) / 5 * 2
    cells = build("language", {"language": data})
    table = "tab:app_exp3_alpha"
    for row in ("α = 0.0625", "α = 0.125, exact tangent (ours)"):
        for column in ("NRMSE", "75 % NRMSE", "Cosine", "Rel. M", "Sign acc."):
            assert at(cells, table, row, column).ours_text == "lost in noise"
    whole = build("language", other)
    assert at(cells, table, "α = 1", "NRMSE").ours == at(whole, table, "α = 1", "NRMSE").ours
    floor, size = data["noise_floor"].values[:, None, None], abs(exact.values)  # [system, scale, change, horizon]
    share = np.median(np.median(floor / size, axis=-1)[:, 0])
    assert at(cells, table, "α = 0.0625", "Float noise over the response (ours)").ours == pytest.approx(share)
    lost = ((size[:, 0] < 5 * floor[:, 0]).mean(-1) > 0.5).sum()
    assert at(cells, table, "α = 0.0625", "Candidates lost in noise (ours)").ours == lost > 12
    assert at(cells, "text:exp3_validity", "α = 0.0625", "ISO Tangent (FD)").rule == "lost in noise"
    assert at(cells, "text:exp3_exponents", "Overall median", "ISO Tangent (FD)").ours_text == "lost in noise"
    said = {one.subject: one for one in findings(Candidates(data))}
    assert said["noise"].level == "care"
    assert f"{lost} at α = 0.0625" in said["noise"].sentence
    assert "lost in noise, lost in noise," in said["validity"].sentence


def test_steps_that_agree_with_each_other_and_not_with_the_derivative_are_a_secant(
    other: dict[str, xr.Dataset],
) -> None:
    data = other["language"].copy(deep=True)
    data["fd_derivative"][:] = 0.7 * data["response"].sel(answer="tangent", scale=1.0) + 1e-9
    steps = about(data, "steps")
    assert steps.level == "care"
    assert steps.value == pytest.approx(0.3, abs=1e-3)
    assert "secant" in steps.sentence
    assert "24 of 24 candidates" in steps.sentence
    assert "secant" not in about(other["language"], "steps").sentence
    # a rule that sees a seventh of the error does not say how good its step is, however small the error
    near = other["language"].copy(deep=True)
    slope = near["response"].sel(answer="tangent", scale=1.0)
    turned = np.random.default_rng(0).standard_normal(HORIZONS)
    size = (slope**2).sum("horizon") ** 0.5
    shares = 0.04 * xr.DataArray(1 + np.arange(6) / 7, {"fd_step": STEPS}, "fd_step")  # neighbours differ by a seventh
    near["fd_derivative"] = (slope + shares * size * xr.DataArray(unit(turned), dims="horizon")).transpose(
        *near["fd_derivative"].dims
    )
    hidden = about(near, "steps")
    assert 0.03 < hidden.value < 0.1  # below the bar, so that it would be called good
    assert (hidden.level, "secant" in hidden.sentence) == ("care", True)


def test_a_validity_that_rises_only_with_finite_differences_is_their_error(other: dict[str, xr.Dataset]) -> None:
    assert validity(Candidates(other["language"])).cause == "none"
    data = other["language"].copy(deep=True)
    data["response"].loc[{"answer": "exact", "scale": 0.0625}] *= 0.5  # wrong at the smallest scale with any derivative
    assert validity(Candidates(data)).cause == "real"
    data["response"].loc[{"answer": "tangent", "scale": 0.0625}] *= 0.5
    assert validity(Candidates(data)).cause == "finite differences"


# --- the page


def test_the_page_says_which_models_and_draws_every_figure(
    other: dict[str, xr.Dataset], cells: list[Cell], tmp_path: Path
) -> None:
    file = write_study_page(language_study(), other, cells, tmp_path / "report.html")
    found = Tags.of(file)
    for words in ("SmolLM2-135M (0.13B;", "instruction-tuned", "shown and not judged", "Noise of finite diff"):
        assert words in found.text
    drawn = {attrs.get("id") for tag, attrs in found.tags if tag == "div"}
    drawings = list(language_drawings(other))
    assert {f"plot-{drawing.name}" for drawing in drawings} <= drawn
    for drawing in drawings:
        for key, frame in drawing.frames.items():
            assert key.count("|") == len(drawing.choices) - 1
            assert {len(values) for values in frame.values()} == {len(drawing.figure.data)}
    steps = next(d for d in drawings if d.name == "fd-steps").frames["SmolLM2-135M, code"]["y"][-1]
    np.testing.assert_allclose(steps, step_curve(other["language"])["error"].isel(system=2), rtol=1e-3)
    assert "The paper's language study, on other models" in found.text
    caption = next(d for d in drawings if d.name == "fd-exponents").caption
    assert "with semilinear too" in caption  # it misses O(α²), the gradient's bending
    text = markdown(cells, provenance(language_study(), other))
    assert "median over all candidates of the systems that a row names" in text
    assert "Each entry is our median over systems" not in text
    assert "SmolLM2-135M" in text.split("##")[0]
    assert list(language_drawings({})) == list(language_files({})) == []


def test_the_papers_own_systems_are_a_reproduction_and_fresh_weights_are_named_in_their_rows(tmp_path: Path) -> None:
    own = joined(paper_systems(noise=3e-4))
    page = write_study_page(language_study(), own, build("language", own), tmp_path / "paper.html")
    assert "The paper's language study, reproduced" in Tags.of(page).text
    fresh = joined([system("pythia-410m", "wikipedia", 405_334_016, "fresh", noise=3e-4)])
    rows = {cell.row: cell for cell in build("language", fresh) if cell.table == "tab:app_exp3_scale"}
    assert rows["0.41B, fresh weights"].ours_only
    assert (rows["0.41B"].ours_text, rows["0.41B"].rule) == ("–", "not run")
    ranked = {cell.row for cell in build("language", fresh) if cell.table == "tab:app_exp3_ranking"}
    assert "410M, wikipedia, fresh weights" in ranked


def test_the_figures_are_files(other: dict[str, xr.Dataset]) -> None:
    names = {name for name, figure in language_files(other) if figure.axes}
    assert names == {"finite-difference-steps", "responses", "error-by-scale", "channels", "validity", "ranking"}


def test_a_folder_of_results_becomes_a_page(tmp_path: Path) -> None:
    study = replace(language_study(), systems=(System("SmolLM2-135M-web", 7, 0),))
    machine = {"machine": "x86_64", "processor": "made-up CPU", "gpu": None, "torch": "0"}
    store = ResultStore(tmp_path, study)
    store.prepare()
    store.save(study.systems[0].name, SystemResults({"language": other_systems()[1]}, (machine,)))
    said = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert said.exit_code == 0, said.output
    assert "SmolLM2-135M (0.13B" in Tags.of(tmp_path / "page.html").text
