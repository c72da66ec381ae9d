"""A study's page is whole, safe and offline, works in a real browser, and its figures are files too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aftershock.report import study_data
from aftershock.report.language_figures import language_drawings
from aftershock.report.looks import log_ticks
from aftershock.report.study_figures import drawings
from aftershock.report.study_files import write_figures
from aftershock.report.study_page import kind_of, write_study_page
from aftershock.studies.carried import bring_in
from aftershock.studies.cells import Cell
from aftershock.studies.paper import TABLES
from aftershock.studies.replication import replications
from aftershock.studies.results import load_results
from aftershock.studies.tables import build, verdict

from .study_results import CHANGES, FUTURES, made, slopes, study_of
from .test_report import Tags, browser, watched  # noqa: F401  (a fixture)

STORED = Path(__file__).parent.parent / "docs" / "results"
EVERYWHERE = {
    "overview", "curves", "scales", "sources", "exponents", "ranking", "channels", "persistence", "ratios", "present",
    "frozen-0", "frozen-1",
}  # fmt: skip
NETWORKS = {"switches", "parts"}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return made("cifar")


@pytest.fixture(scope="module")
def cells(results: dict[str, Any]) -> list[Cell]:
    return build("cifar", results)


@pytest.fixture(scope="module")
def file(results: dict[str, Any], cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study_page(study_of("cifar"), results, cells, tmp_path_factory.mktemp("page") / "report.html")


# --- what the figures show


def test_the_errors_drawn_are_those_of_the_results(results: dict[str, Any]) -> None:
    found = study_data.error_by_scale(results["mlp"])
    scales = found["scale"].values
    np.testing.assert_allclose(found["error"].sel({"answer": "tangent"}), np.median(slopes(6)) * scales**2)
    np.testing.assert_allclose(found["slope"].sel({"answer": ["tangent", "semilinear"]}), [2, 1])
    by_horizon = study_data.error_by_horizon(results["mlp"]).sel({"answer": "tangent", "scale": 1.0})
    np.testing.assert_allclose((by_horizon**2).mean() ** 0.5, np.median(slopes(6)))
    np.testing.assert_allclose(study_data.exponents_by_horizon(results["cnn"])["median"], 2)


def test_a_cloud_has_every_candidate_and_its_rank_correlation(results: dict[str, Any]) -> None:
    cloud = study_data.clouds(results["cnn"], "natural", systems=2)["gradient_norm"]
    assert len(cloud.score) == len(cloud.magnitude) == 2 * CHANGES
    assert cloud.rho == pytest.approx(-1)
    assert cloud.magnitude[2] == pytest.approx(1)  # the median candidate of its system


def test_every_choice_fills_every_trace(results: dict[str, Any]) -> None:
    found = {drawing.name: drawing for drawing in drawings(results)}
    assert set(found) == EVERYWHERE | NETWORKS
    assert {drawing.name for drawing in drawings(made("quadratic"))} == EVERYWHERE
    for drawing in found.values():
        assert bool(drawing.choices) == bool(drawing.frames)
        for key, frame in drawing.frames.items():
            assert key.count("|") == len(drawing.choices) - 1
            assert {len(values) for values in frame.values()} == {len(drawing.figure.data)}
    curves = found["curves"].frames["MLP–GELU|mlp-7-0|candidate 2|α = 0.25"]["y"]
    exact = results["mlp"]["exact"].sel({"system": "mlp-7-0", "change": 2, "scale": 0.25})
    np.testing.assert_allclose(curves[0], exact, rtol=1e-3)
    np.testing.assert_allclose(curves[1], exact * 1.075, rtol=1e-3)


def test_the_overview_is_one_shock_of_one_run(results: dict[str, Any]) -> None:
    (drawing,) = [drawing for drawing in drawings(results) if drawing.name == "overview"]
    frame, one = drawing.frames["CNN–ReLU"], results["cnn"].isel(system=0)
    assert "cnn-7-0, candidate 0" in drawing.caption  # all three are as large: the first
    alone = one["channel_exact"].sel(channel=["100", "010", "001"], channel_change=0)
    np.testing.assert_allclose(frame["y"][:3], alone, rtol=1e-3)
    np.testing.assert_allclose(frame["y"][3], one["exact"].sel(change=0, scale=1.0), rtol=1e-3)
    assert (frame["x"][5], frame["y"][5]) == ([4], [1.0])  # the peak
    gaps = [i for i, y in enumerate(frame["y"][6]) if y is None]
    assert gaps == [13 * k + 12 for k in range(FUTURES)]
    np.testing.assert_allclose(frame["y"][6][:12], one["future_response"].sel(family="natural", change=0)[0], rtol=1e-3)


def test_parts_of_the_error_are_shares_of_their_sizes(results: dict[str, Any]) -> None:
    (drawing,) = [drawing for drawing in drawings(results) if drawing.name == "parts"]
    for network, expected in (("CNN–ReLU", [0.2, 0.5, 0.3]), ("MLP–GELU", [0.2, 0.8, 0.0])):
        for share, wanted in zip(drawing.frames[network]["y"], expected):
            np.testing.assert_allclose(share, wanted, rtol=1e-3)


# --- the page as a file


def test_the_page_tells_the_verdict_every_cell_and_every_reason(file: Path, cells: list[Cell]) -> None:
    found = Tags.of(file)
    assert verdict(cells) in found.text
    assert "made-up CPU" in found.text
    assert "<b>made up</b>" in found.text
    kinds = [attrs.get("class") for tag, attrs in found.tags if tag == "td"]
    for kind in ("agrees", "differs", "ours", "none"):
        assert kinds.count(kind) == sum(kind_of(cell) == kind for cell in cells)
    wrong = [cell for cell in cells if cell.holds is False]
    assert sum(tag == "li" and attrs.get("class") in ("bad", "care") for tag, attrs in found.tags) == len(wrong)
    assert not [attrs for _, attrs in found.tags if "src" in attrs or not (attrs.get("href") or "#").startswith("#")]
    tables = [attrs for tag, attrs in found.tags if tag == "table"]
    assert sum(tag == "caption" for tag, _ in found.tags) == len(tables)


def test_a_page_with_its_library_stays_small(file: Path) -> None:
    assert file.stat().st_size < 1.5e6


# --- the page in a browser


@pytest.fixture(scope="module")
def opened(browser: Any, file: Path) -> Iterator[Any]:  # noqa: F811
    with watched(browser, file) as page:
        yield page


def shown(page: Any, name: str, trace: int) -> list[float]:
    return page.evaluate(f"Array.from(document.getElementById('plot-{name}').data[{trace}].y)")


def choose(page: Any, name: str, choice: str, option: str) -> None:
    page.locator(f".chooser:has(#plot-{name}) select[name='{choice}']").select_option(option)


def test_every_figure_is_drawn_and_every_choice_can_be_made(opened: Any, results: dict[str, Any]) -> None:
    for name in EVERYWHERE | NETWORKS:
        assert opened.locator(f"#plot-{name} svg.main-svg").first.is_visible()
    choose(opened, "curves", "setting", "CNN–ReLU")
    systems = opened.locator(".chooser:has(#plot-curves) select[name='system'] option").all_text_contents()
    assert systems == [f"cnn-7-{i}" for i in range(2)]
    choose(opened, "curves", "system", "cnn-7-1")
    choose(opened, "curves", "candidate", "candidate 3")
    choose(opened, "curves", "scale", "α = 0.25")
    at = {"system": "cnn-7-1", "change": 3, "scale": 0.25}
    exact = results["cnn"]["exact"].sel(at).values
    np.testing.assert_allclose(shown(opened, "curves", 0), exact, rtol=1e-3)
    np.testing.assert_allclose(shown(opened, "curves", 1), exact * (1 + slopes(6)[1] / 4), rtol=1e-3)
    choose(opened, "ranking", "score", "Gradient norm")
    assert "median ρ = −1.000" in opened.locator("#plot-ranking .legendtext").all_text_contents()
    choose(opened, "present", "candidates", "CNN–ReLU; matched")
    bars = opened.evaluate("document.getElementById('plot-present').data[0].error_x.array.length")
    assert bars == len(shown(opened, "present", 0)) == 5  # the tied one-step score is left out


def test_an_entry_opens_to_its_rule_with_mouse_and_keyboard(opened: Any) -> None:
    entry = opened.locator("td.differs details").first
    assert not entry.locator("p").is_visible()
    entry.locator("summary").click()
    assert "Does not replicate" in entry.locator("p").inner_text()
    entry.locator("summary").press("Enter")
    assert not entry.locator("p").is_visible()


def test_the_page_is_as_wide_as_its_screen(opened: Any) -> None:
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    drawn = "document.querySelector('#plot-curves svg.main-svg').getBoundingClientRect().width"
    box = "document.querySelector('#plot-frozen-0 .subplot.{}').getBoundingClientRect()"
    poles_below = f"{box.format('x2y2')}.top > {box.format('x3y3')}.bottom"
    assert opened.evaluate(fits)
    assert not opened.evaluate(poles_below)
    assert opened.evaluate(drawn) > 800
    opened.set_viewport_size({"width": 400, "height": 800})
    opened.reload()
    opened.wait_for_selector("html[data-drawn]", state="attached")
    assert opened.evaluate(fits)
    assert 300 < opened.evaluate(drawn) <= 400
    assert opened.evaluate(poles_below)


def test_every_table_of_the_language_study_is_as_wide_as_the_page(browser: Any) -> None:  # noqa: F811
    page = STORED / "language" / "report.html"
    with watched(browser, page, STORED / "plotly.js") as opened:
        opened.set_viewport_size({"width": 1200, "height": 900})
        cut = "[...document.querySelectorAll('.wide')].filter((t) => t.scrollWidth > t.clientWidth).length"
        assert opened.locator(".wide").count() > 5
        assert opened.evaluate(cut) == 0


def test_axes_begin_at_the_first_state_and_name_every_tick(opened: Any) -> None:
    """The made-up channels have 32 states and more, which plotly would begin at 0."""
    begins = opened.evaluate("document.getElementById('plot-channels').layout.xaxis.range[0]")
    assert 0.5 <= begins < 1
    assert log_ticks([0.03, 0.4])["ticktext"] == ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]
    assert log_ticks([2e-5, None, 3e-5])["ticktext"][:3] == [f"{d}10<sup>−5</sup>" for d in ("", "2·", "5·")]
    wide = log_ticks([1e-6, 1.0])
    assert wide["tickvals"] == pytest.approx([10.0**p for p in range(-6, 1)])
    assert wide["ticktext"][-3:] == ["0.01", "0.1", "1"]


def test_on_paper_nothing_is_cut(opened: Any) -> None:
    opened.emulate_media(media="print")
    opened.set_viewport_size({"width": 690, "height": 1000})
    wide = "[...document.querySelectorAll('table.paper')].filter((t) => t.scrollWidth > 690).map((t) => t.id)"
    assert opened.evaluate(wide) == []
    assert opened.evaluate("getComputedStyle(document.querySelector('select')).borderTopWidth") == "0px"
    assert opened.pdf()[:4] == b"%PDF"


# --- figures as files


def test_every_figure_is_a_picture_and_a_page(results: dict[str, Any], tmp_path: Path) -> None:
    files = write_figures({"cnn": results["cnn"]}, tmp_path / "figures")
    names = {path.stem for path in files}
    assert {"responses", "error-by-scale", "channels", "ranking", "prospective-structure", "switched-gates"} <= names
    assert {"overview", "error-sources"} <= names
    assert len(files) == 2 * len(names)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(path.name for path in files)
    for path in files:
        head = path.read_bytes()[:8]
        assert head == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else head.startswith(b"%PDF")
    header = (tmp_path / "figures" / "channels.png").read_bytes()
    width = int.from_bytes(header[16:20], "big")
    assert width == 200 * 4  # four inches at 200 dots
    assert not re.search(rb"/CreationDate", (tmp_path / "figures" / "channels.pdf").read_bytes())


# --- what the repository carries

QUOTES = {label: table.quotes() for label, table in TABLES.items()}
KEPT = sorted(path.parent for path in STORED.glob("*/systems"))  # studies whose systems are small enough to be kept


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_kept_systems_make_the_tables_and_figures_beside_them(folder: Path, tmp_path: Path) -> None:
    """What fails here is mended by `aftershock gather docs/results/X docs/results/X/systems --library …`."""
    assert bring_in([folder / "systems"], tmp_path)
    study, results = load_results(tmp_path)
    cells = build(study.name, results)
    stored = json.loads((folder / "tables.json").read_text(encoding="utf-8"))["cells"]
    places = [(cell["table"], cell["row"], cell["column"], cell["rule"], cell["note"]) for cell in stored]
    assert places == [(cell.table, cell.row, cell.column, cell.rule, cell.note) for cell in cells]
    for cell, there in zip(cells, stored):
        number = math.nan if there["ours"] is None else there["ours"]
        assert number == pytest.approx(cell.ours, rel=1e-3, nan_ok=True), there
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert escape(verdict(cells)) in page
    drawn = [*drawings(results), *language_drawings(results)]
    assert drawn
    assert page.count('class="plot"') == len(drawn)
    assert [one.name for one in drawn if escape(one.caption) not in page] == []


def place(cell: dict[str, Any]) -> tuple[str, str, str]:
    return cell["table"], cell["row"], cell["column"]


def kept_values(study: str, name: str) -> dict[tuple[str, str, str], np.ndarray]:
    cells = json.loads((STORED / study / f"{name}.json").read_text())["cells"]
    return {place(cell): np.array(cell["values"], dtype=float) for cell in cells}


@pytest.mark.parametrize("study", ["quadratic", "cifar"])
def test_the_verdicts_in_the_repository_are_those_of_its_values(study: str) -> None:
    stored, numbers = json.loads((STORED / study / "tables.json").read_text()), kept_values(study, "values")
    judged = [cell for cell in stored["cells"] if cell["replications"]]
    assert len(judged) > 100
    for cell in judged:
        found = replications(numbers[place(cell)], QUOTES[cell["table"]][cell["row"], cell["column"]])
        wanted = [(one["number"], one["holds"], one["saturated"]) for one in cell["replications"]]
        assert [(one.number, one.holds, one.saturated) for one in found] == wanted, cell
    known = stored["agreement"]["replication"]
    said = f"{known['agree']} of {known['judged']} numbers replicate"
    assert said in (STORED / study / "tables.md").read_text(encoding="utf-8")
    assert said in (STORED / study / "report.html").read_text(encoding="utf-8")


def test_the_text_counts_the_replications_of_all_four_root_seeds() -> None:
    stored = json.loads((STORED / "cifar" / "tables.json").read_text())["cells"]
    three, fourth = kept_values("cifar", "values"), kept_values("cifar", "values-2038")
    found = []
    for cell in stored:
        if cell["replications"] and cell["known"] and place(cell) in fourth:
            own = np.concatenate([three[place(cell)], fourth[place(cell)]])
            found += replications(own, QUOTES[cell["table"]][cell["row"], cell["column"]])
    counted = [one for one in found if one.counted]
    count, missed = f"{sum(one.holds for one in counted)} of {len(counted)}", sum(one.missed for one in counted)
    texts = [(STORED.parent / name).read_text(encoding="utf-8") for name in ("results.md", "../README.md")]
    said = f"64 systems of each network, {count} replicate, where a perfect replication would miss {missed:.1f}"
    assert said in texts[0]
    assert f"64 systems of each, {count}." in texts[1]


def test_the_results_in_the_repository_stay_small() -> None:
    folder = STORED
    kept = [file for file in folder.rglob("*") if file.is_file() and not {"results.zarr", "figures"} & set(file.parts)]
    assert {"tables.json", "report.html"} <= {file.name for file in kept}
    assert sum(file.stat().st_size for file in kept) < 3e6
    for page in (file for file in kept if file.name == "report.html"):
        assert [attrs["src"] for _, attrs in Tags.of(page).tags if "src" in attrs] == ["../plotly.js"]
