"""Figures show the numbers they are given; the page is whole, safe, offline, and works in a real browser."""

from __future__ import annotations

import base64
import contextlib
import gzip
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import xarray as xr

import aftershock as ak
from aftershock.core.responses import ANSWERS
from aftershock.errors import InvalidInput
from aftershock.recorder.forecast import Forecast
from aftershock.report import figures, looks, shell
from aftershock.report.response_page import write_response_page
from aftershock.results.certificate import Certificate, Finding, Level

HORIZONS = 6
BASIC = {"scatter", "bar", "hline", "vline", "hrect", "vrect", "annotation"}  # drawn by plotly's basic bundle
CURVES = {
    "plain": [0.1, 0.2, 0.5, 0.4, 0.2, -0.1],
    "<b>lowers</b>": [-0.01, -0.02, -0.03, -0.02, -0.01, -0.01],
    "<script>alert(1)</script>": [0.05, 0.04, 0.03, 0.02, 0.01, 0.01],
    "first & last": [0.2, 0.1, 0.05, 0.01, 0.01, 0.3],
}


def made(
    curves: dict[str, list[float]] = CURVES,
    scales: tuple[float, ...] = (1.0,),
    **factors: float,
) -> ak.Response:
    """A response whose exact curves are given, times the scale, and whose other answers are multiples of them."""
    answers = factors or {"exact": 1.0, "semilinear": 1.1, "tangent": 3.0}
    exact = np.array(list(curves.values()))[:, None, :] * np.array(scales)[None, :, None]
    # an approximation's relative error grows with the scale, as a linearization's does
    grown = [exact * (1 + (factor - 1) * np.abs(np.array(scales))[None, :, None]) for factor in answers.values()]
    count, horizons = len(curves), exact.shape[-1]
    zeros = np.zeros(count, dtype=int)
    data = xr.Dataset(
        {
            "response": (("answer", "change", "scale", "horizon"), np.stack(grown)),
            "control": ("horizon", np.linspace(2.0, 1.0, horizons)),
            "noise_floor": ("horizon", np.full(horizons, 1e-9)),
            "clip_switched": (("change", "scale"), np.zeros((count, len(scales)), dtype=bool)),
            "zero_v": ("change", zeros),
            "zero_v_touched": ("change", zeros),
            "no_derivative": ("change", zeros),
            "xi_norm": ("change", zeros.astype(float)),
            "at": 3,
            "kind": "replace",
            "probe": "a <i>fixed</i> batch",
            "refused": "",
        },
        coords={
            "answer": list(answers),
            "change": list(curves),
            "scale": list(scales),
            "horizon": list(range(1, horizons + 1)),
        },
        attrs={"dtype": "float64", "note": "<b>bold</b>"},
    )
    return ak.Response(data)


def traces(figure: Any, dash: str, mode: str = "lines") -> list[Any]:
    return [t for t in figure.data if t.line.dash == dash and t.mode.startswith(mode) and t.x[0] is not None]


# --- figures


def test_every_method_is_drawn_in_its_dash_and_every_change_in_its_colour() -> None:
    response = made()
    figure = response.plot()
    assert set(looks.DASHES) == set(ANSWERS)
    for answer, dash in looks.DASHES.items():
        drawn = traces(figure, dash)
        assert len(drawn) == len(CURVES)
        assert len({t.line.color for t in drawn}) == len(CURVES)
        wanted = response.data["response"].sel({"answer": answer, "scale": 1.0, "change": response.order})
        np.testing.assert_array_equal(np.array([t.y for t in drawn]), wanted.values)
    assert figure.layout.xaxis.title.text == "states after the change (h)"
    assert figure.layout.yaxis.title.text == "change of the probe's loss"
    assert [shape.y0 for shape in figure.layout.shapes] == [0]


def test_changes_are_ordered_by_exact_peak_and_their_peaks_are_ringed() -> None:
    figure = figures.response_figure(made())
    rings = [t for t in figure.data if t.mode.startswith("markers")]
    assert [(t.x[0], t.y[0]) for t in rings] == [(3, 0.5), (6, 0.3), (1, 0.05), (3, -0.03)]
    named = figure.layout.annotations[0]
    assert (named.text, named.x, named.y) == ("+0.5 at h = 3", 3, 0.5)


def test_an_approximation_that_runs_away_does_not_flatten_the_truth() -> None:
    figure = figures.response_figure(made(exact=1.0, semilinear=4.0))
    low, high = figure.layout.yaxis.range
    assert 0.5 <= high < 1.0
    assert -1.0 < low <= -0.1
    assert "leaves the frame" in figure.layout.annotations[-1].text
    wild = figures.response_figure(made(exact=1.0, semilinear=1000.0))
    assert 0.5 <= wild.layout.yaxis.range[1] < 1.0
    assert wild.layout.annotations[-1].text.startswith("semilinear: off the scale, not drawn")
    assert max(abs(y) for t in wild.data for y in t.y if y is not None) < 10
    calm = figures.response_figure(made(exact=1.0, semilinear=1.1))
    assert calm.layout.yaxis.range[1] > 0.55
    assert not [note for note in calm.layout.annotations if "frame" in note.text]


def test_a_peak_that_rounding_could_make_has_no_number() -> None:
    response = made({"only": [1e-9, -2e-9]}, exact=1.0)
    assert "rounding" in response.verdict
    assert figures.response_figure(response).layout.annotations[0].text == "within rounding at h = 2"
    still = figures.response_figure(made({"only": [0.0, 0.0]}, exact=1.0))
    assert not still.layout.annotations
    assert not [t for t in still.data if t.mode == "markers"]


def test_of_many_changes_the_eight_strongest_are_shown_and_the_rest_is_counted() -> None:
    curves = {f"change {i}": [0.01 * (i + 1), 0.0] for i in range(11)}
    figure = figures.response_figure(made(curves))
    shown = [t.name for t in traces(figure, "solid")]
    assert shown == [f"change {i}" for i in range(10, 2, -1)]
    assert figure.layout.annotations[-1].text.startswith("3 more changes")
    asked = figures.response_figure(made(curves), changes=["change 0", "change 4"])
    assert [t.name for t in traces(asked, "solid")] == ["change 0", "change 4"]


def test_a_scale_can_be_chosen() -> None:
    figure = figures.response_figure(made(scales=(0.5, 1.0)), scale=0.5, changes=["plain"])
    np.testing.assert_allclose(traces(figure, "solid")[0].y, np.array(CURVES["plain"]) / 2)


def test_one_horizon_and_one_change_is_a_picture_too() -> None:
    figure = figures.response_figure(made({"only": [0.3]}, exact=1.0))
    assert [tuple(t.y) for t in traces(figure, "solid")] == [(0.3,)]
    assert tuple(figures.loss_figure(made({"only": [0.3]}, exact=1.0)).data[1].y) == (2.3,)


def test_what_cannot_be_drawn_is_named() -> None:
    with pytest.raises(InvalidInput, match="no change 'nobody'; choose from plain"):
        figures.response_figure(made(), changes=["nobody"])
    with pytest.raises(InvalidInput, match=r"scale 0\.3 was not run; choose from 1"):
        figures.response_figure(made(), scale=0.3)
    with pytest.raises(InvalidInput, match="more than one answer"):
        figures.error_figure(made(exact=1.0))
    with pytest.raises(InvalidInput, match="one scale was run"):
        figures.scale_figure(made())


def test_the_loss_is_shown_without_and_with_the_strongest_change() -> None:
    control, changed = figures.loss_figure(made()).data
    np.testing.assert_allclose(control.y, np.linspace(2, 1, HORIZONS))
    np.testing.assert_allclose(changed.y, np.linspace(2, 1, HORIZONS) + CURVES["plain"])
    assert changed.name == "with plain"
    assert "not verified" in figures.loss_figure(made(semilinear=1.0)).data[1].name


def test_errors_are_drawn_against_the_bar_of_trust() -> None:
    figure = figures.error_figure(made({"only": [0.1, -0.2]}))
    by_name = {t.name: t.y for t in figure.data}
    np.testing.assert_allclose(by_name["semilinear"], 0.1 / 2.1)
    np.testing.assert_allclose(by_name["tangent"], 2.0 / 4.0)
    assert [shape.y0 for shape in figure.layout.shapes] == [0.2]


def test_the_error_of_several_changes_is_their_median() -> None:
    figure = figures.error_figure(made())
    assert len([t for t in figure.data if t.line.width == 1]) == 2 * len(CURVES)
    bold = {t.legendgroup: t for t in figure.data if t.showlegend is not False}
    assert set(bold) == {"semilinear", "tangent"}
    np.testing.assert_allclose(bold["tangent"].y, 0.5)


def test_the_error_grows_with_the_scale_on_logarithmic_axes() -> None:
    figure = figures.scale_figure(made({"only": [0.1, -0.2]}, scales=(1.0, 0.1, 0.01)))
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    tangent = next(t for t in figure.data if t.name == "tangent")
    np.testing.assert_allclose(tangent.x, [0.01, 0.1, 1.0])
    np.testing.assert_allclose(tangent.y, [0.02, 0.2, 2.0])


# --- the page as a file


class Tags(HTMLParser):
    """Tags, and the text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    @classmethod
    def of(cls, page: Path) -> Tags:
        parser = cls()
        parser.feed(page.read_text(encoding="utf-8"))
        return parser


def test_the_page_tells_everything_in_order_and_escapes_it(tmp_path: Path) -> None:
    response = made()
    told = ["A <i>short</i> story.", "two\n  lines"]
    page = write_response_page(response, tmp_path / "new" / "r.html", title="A & <B>", story=told)
    assert list(page.parent.iterdir()) == [page]
    found = Tags.of(page)
    certificate = str(response.certificate).splitlines()
    wanted = ["A & <B>", response.verdict, *told, "Response by horizon", "largest increase", *CURVES, *certificate]
    places = [found.text.index(text) for text in [*wanted[:6], certificate[0], "<b>bold</b>"]]
    assert places == sorted(places)
    assert all(text in found.text for text in wanted)
    assert not [tag for tag, _ in found.tags if tag in ("i", "b", "link", "img", "iframe")]
    assert not [attrs for _, attrs in found.tags if "src" in attrs or not (attrs.get("href") or "#").startswith("#")]
    assert sum(tag == "pre" for tag, _ in found.tags) == 1


def test_the_page_can_be_read_without_eyes(tmp_path: Path) -> None:
    found = Tags.of(write_response_page(made(scales=(0.5, 1.0)), tmp_path / "r.html")).tags
    drawings = [attrs for tag, attrs in found if tag == "div" and attrs.get("role") == "img"]
    assert len(drawings) == 4
    assert all(len(attrs["aria-label"] or "") > 40 for attrs in drawings)
    headings = [tag for tag, _ in found if tag in ("h1", "h2")]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    assert headings.count("h2") == 5
    tables, captions = (sum(tag == name for tag, _ in found) for name in ("table", "caption"))
    assert tables == captions == 2


@pytest.mark.parametrize("rest", ["", "Without any of 8 other steps it stays at 0.7. The event is the spike of 0.7."])
def test_the_first_sentence_of_a_verdict_is_large_and_no_word_is_lost(rest: str) -> None:
    first = "Step 3 did it: lr changed from 0.01 to 0.1, i.e. by <10>."
    parser = Tags()
    parser.feed(html := shell.opening("The spike", f"{first} {rest}".strip()))
    assert parser.text == f"The spike\n{first} {rest}".strip()
    assert f"<p class='verdict'>{escape(first)}{' <span' if rest else '</p>'}" in html
    assert html.count(f"<span class='rest'>{rest}</span>") == bool(rest)


def test_a_page_carries_its_library_or_shares_it(tmp_path: Path) -> None:
    figure = shell.plot(figures.response_figure(made()), "response", "a caption", "words")
    alone = shell.write_page(tmp_path / "alone.html", "t", [shell.section("One", figure)])
    library = tmp_path / "lib" / "plotly.js"
    pages = [
        shell.write_page(tmp_path / name / "page.html", "t", [shell.section("One", figure)], library=library)
        for name in ("a", "b c")
    ]
    packed = next(text for text in alone.read_text().split("<script") if 'id="library"' in text)
    carried = gzip.decompress(base64.b64decode(packed.split(">")[1].split("<")[0]))
    assert carried == shell.asset(shell.LIBRARY).encode()
    assert packed.split(">")[1].split("<")[0] in library.read_text()
    assert b"plotly.js (basic - minified) v4.1.1" in carried[:200]
    assert alone.stat().st_size < 0.7e6
    assert library.stat().st_size < 0.6e6
    for page in pages:
        sources = [attrs["src"] for _, attrs in Tags.of(page).tags if "src" in attrs]
        assert sources == ["../lib/plotly.js"]
        assert page.stat().st_size < 0.1e6
    assert "Copyright (c)" in shell.asset("plotly-LICENSE.txt")


def test_only_what_the_library_draws_is_drawn() -> None:
    source = "".join(file.read_text() for file in Path(figures.__file__).parent.glob("*.py"))
    assert set(re.findall(r"\bfigure\.add_([a-z]+)\(", source)) <= BASIC
    assert not re.search(r"\bgo\.(?!Figure\b)", source)


def test_a_page_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write_response_page(made(), tmp_path / "r.html", title="first")
    before = page.read_bytes()

    def full(self: Path, text: str, encoding: str) -> int:
        with open(self, "w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_response_page(made(), page, title="second")
    assert page.read_bytes() == before
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("factors", "level"),
    [
        ({"exact": 1.0}, "ok"),
        ({"exact": 1.0, "semilinear": 1.05}, "ok"),
        ({"exact": 1.0, "semilinear": 1.35}, "care"),
        ({"exact": 1.0, "tangent": -1.0}, "bad"),
        ({"tangent": 1.0}, "bad"),
    ],
)
def test_the_certificate_has_the_colour_of_its_level(factors: dict[str, float], level: str, tmp_path: Path) -> None:
    response = made(**factors)
    findings = response.certificate.findings
    assert findings[0].level == level
    items = [attrs["class"] for tag, attrs in Tags.of(response.report(tmp_path / "r.html")).tags if tag == "li"]
    assert items == [finding.level for finding in findings]


def test_no_word_of_a_sentence_changes_its_colour() -> None:
    words = "Do not trust it: use it with care & trust it."
    for level in get_args(Level):
        page = shell.findings(Certificate((Finding(level, "x", "x", 1.0, 2.0, words),)))
        assert page.count("<li") == page.count(f"<li class='{level}'>") == 1
        assert f".certificate .{level} " in shell.asset("page.css") or level == "note"
        assert escape(words) in page


def test_the_table_has_signs_and_the_order_that_it_claims(tmp_path: Path) -> None:
    page = made(exact=1.0).report(tmp_path / "r.html").read_text()
    assert "Changes by the size of their exact peak at scale 1, largest first." in page
    body = page[page.index("<table class='sortable'>") : page.index("</table>")]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("<tr class=")[1:]]
    peaks = [float(row[2]) for row in rows]
    assert peaks == [0.5, 0.3, 0.05, -0.03]
    lowers = rows[3]
    assert lowers[0] == "&lt;b&gt;lowers&lt;/b&gt;"
    # peak, horizon, delayed, largest increase and decrease, total
    assert lowers[2:] == ["-0.03", "3", "yes", "0", "-0.03", "0.1"]
    assert rows[0][5:7] == ["+0.5", "-0.1"]


def test_the_page_says_what_was_asked(tmp_path: Path) -> None:
    text = Tags.of(made().report(tmp_path / "r.html")).text
    assert "a <i>fixed</i> batch" in text
    assert re.search(r"kind\s*replace", text)


def test_importing_aftershock_loads_neither_plots_nor_labels() -> None:
    code = (
        "import sys, aftershock, aftershock.commands.cli; "
        "print([m for m in ('plotly', 'xarray', 'zarr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_notebook_shows_words_and_no_markup_of_the_user() -> None:
    response = made({"<b>one</b>": [0.1, 0.2]})
    for shown in (
        response,
        response.certificate,
        Forecast(xr.Dataset({"largest_increase": math.inf, "peak_horizon": 1})),
    ):
        html = shown._repr_html_()
        assert html == f"<pre>{escape(str(shown))}</pre>"
        assert "<b>" not in html


# --- the page in a browser

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if program is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield started
        started.close()


@contextlib.contextmanager
def watched(browser: Any, file: Path, *beside: Path, **options: Any) -> Iterator[Any]:
    """A page as a reader opens it; whatever it complains about, or asks for but itself and `beside`, fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    trouble: list[str] = []
    asked = [each.as_uri() for each in (file, *beside)]
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: trouble.append(request.url) if request.url not in asked else None)
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    yield page
    page.close()
    assert trouble == []


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page as a reader opens it; whatever it complains about or asks the network for fails a test."""
    response, file = made(scales=(0.5, 1.0)), tmp_path_factory.mktemp("page") / "r.html"
    write_response_page(response, file, story=["<script>alert(2)</script>"])
    with watched(browser, file) as page:
        yield page


def until(page: Any, condition: str) -> None:
    """Wait for it; the page's own policy forbids playwright's way, which evaluates text in the page."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {condition}")


def outside(page: Any) -> list[str]:
    """Legends, titles and notes that leave their figure."""
    return page.evaluate("""() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
        const frame = plot.getBoundingClientRect();
        return [...plot.querySelectorAll('.legend, .g-xtitle, .g-ytitle, .annotation-text')].filter(part => {
            const box = part.getBoundingClientRect();
            return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
                || box.bottom > frame.bottom + 1);
        }).map(part => plot.id + ': ' + part.textContent);
    })""")


def column(page: Any, number: int) -> list[str]:
    return page.locator(f"table.sortable tbody td:nth-child({number})").all_text_contents()


def test_the_figures_are_drawn(opened: Any) -> None:
    for name in ("response", "loss", "error", "scales"):
        assert opened.locator(f"#plot-{name} svg.main-svg").first.is_visible()
    lines = opened.locator("#plot-response .scatterlayer path.js-line")
    assert lines.count() == len(ANSWERS) * len(CURVES)
    assert all("L" in (lines.nth(i).get_attribute("d") or "") for i in range(3))
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_label_with_markup_is_shown_as_text(opened: Any) -> None:
    label = "<script>alert(1)</script>"
    legend = opened.locator("#plot-response .legendtext").all_text_contents()
    assert {label, "<b>lowers</b>", "first & last"} <= set(legend)
    assert label in column(opened, 1)
    assert opened.get_by_text("<script>alert(2)</script>", exact=True).is_visible()


def test_clicking_a_head_sorts_by_number_and_by_name(opened: Any) -> None:
    heads = opened.locator("table.sortable thead th")
    names = [text.strip() for text in heads.all_text_contents()]
    peak = names.index("peak") + 1
    before = column(opened, peak)
    heads.nth(peak - 1).click()
    falling = [float(text) for text in column(opened, peak)]
    assert falling == sorted(map(float, before), reverse=True)
    assert heads.nth(peak - 1).get_attribute("aria-sort") == "descending"
    heads.nth(peak - 1).click()
    assert [float(text) for text in column(opened, peak)] == falling[::-1]
    opened.get_by_role("button", name="change", exact=True).press("Enter")
    assert column(opened, 1)[-1] == "plain"
    assert heads.nth(peak - 1).get_attribute("aria-sort") is None


def test_a_dark_screen_has_dark_figures_and_paper_stays_white(browser: Any, tmp_path: Path) -> None:
    file = write_response_page(made(), tmp_path / "r.html")
    line = "document.querySelector('#plot-response .xaxislayer-above text').style.fill"
    paper = "getComputedStyle(document.body).backgroundColor"

    def light(colour: str) -> float:
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765

    with watched(browser, file, color_scheme="dark") as page:
        assert light(page.evaluate(paper)) < 0.15
        assert light(page.evaluate(line)) > 0.8
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert light(page.evaluate(line)) < 0.2
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        page.emulate_media(media="screen", color_scheme="light")
        until(page, f"{line}.includes('36, 41, 47')")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"


def test_on_a_small_screen_the_key_is_under_the_figure(opened: Any) -> None:
    boxes = "['.legend', '.xtitle'].map(s => document.querySelector('#plot-response ' + s).getBoundingClientRect().y)"
    key, axis = opened.evaluate(boxes)
    assert key < axis
    opened.set_viewport_size({"width": 390, "height": 800})
    until(opened, f"(([key, axis]) => key > axis)({boxes})")
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    assert outside(opened) == []
    opened.set_viewport_size({"width": 1280, "height": 900})
    until(opened, f"(([key, axis]) => key < axis)({boxes})")


def test_every_section_has_an_anchor_and_the_contents_lead_to_it(tmp_path: Path) -> None:
    tags = Tags.of(write_response_page(made(), tmp_path / "r.html")).tags
    anchors = [attrs["id"] for tag, attrs in tags if tag == "section"]
    links = [attrs["href"] for tag, attrs in tags if tag == "a" and attrs.get("class") != "anchor"]
    assert links == [f"#{anchor}" for anchor in anchors]
    assert len(set(anchors)) == len(anchors) == 5
    assert anchors[1] == "the-loss-with-and-without-it"


def test_pages_that_share_a_library_are_drawn(browser: Any, tmp_path: Path) -> None:
    figure = shell.plot(figures.response_figure(made()), "response", "a caption", "words")
    library, file = tmp_path / "plotly.js", tmp_path / "deeper" / "page.html"
    shell.write_page(file, "t", [shell.section("One", figure)], library=library)
    with watched(browser, file, library) as page:
        assert page.locator("#plot-response svg.main-svg").first.is_visible()


def test_figures_fit_on_paper_and_come_back(opened: Any) -> None:
    width = "document.querySelector('#plot-response svg.main-svg').getBoundingClientRect().width"
    screen = opened.evaluate(width)
    assert screen > 800
    opened.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    until(opened, f"{width} < 690")
    opened.evaluate("window.dispatchEvent(new Event('afterprint'))")
    until(opened, f"{width} === {screen}")
