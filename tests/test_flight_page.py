"""flight.html as a reader opens it, and `aftershock explain` as a user types it."""

from __future__ import annotations

import base64
import gc
import importlib
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidFile
from aftershock.recorder.explanation import UNTRUSTED, FlightExplanation
from aftershock.recorder.other_runs import other_runs, untried_in_words, with_an_effect
from aftershock.recorder.triggers import AtStep
from aftershock.recorder.words import at_least
from aftershock.report.flight_figures import drawable, trial_figure
from aftershock.report.flight_page import write_flight_page
from aftershock.report.flight_steps import step_list
from aftershock.report.inside_figures import channel_figure, layer_figure

from .explained import with_facts
from .test_cli import call, failed
from .test_labelled import PROVENANCE
from .test_report import Tags, browser, outside, until, watched

__all__ = ["browser"]  # the fixture

WARM, CULPRIT, SPIKE = 400, 424, 427
BATCH = 64
SCRIPT = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 1)).double()
    return model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()


def other():
    return nn.Linear(5, 1).double(), build()[1]


def wider():
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 1)).double(), build()[1]


def broken():
    raise ValueError("no data here")


def nothing():
    return 3
"""


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 1)).double()


def train(directory: Path, *, bad: float = 5.0, rate: float = 1e-2, nan: bool = False) -> None:
    """A regression that is learned; two targets of one batch are far off, or the learning rate rises, or a batch holds
    what is not a number."""
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    recorder = ak.FlightRecorder(model, optimizer, squares, directory, window=24, triggers=[AtStep(SPIKE)])
    for step in range(SPIKE + 5):
        x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
        y = x.sum(1, keepdim=True).tanh()
        if step == CULPRIT:
            y[[3, 8]] += bad
        if nan and step == SPIKE:
            x[0] = math.nan
        if step == WARM:
            recorder.__enter__()
        optimizer.zero_grad()
        loss = squares(model, (x, y))
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 if step < CULPRIT else rate
        optimizer.step()
        if step >= WARM:
            recorder.step((x, y), loss)
    recorder.__exit__(None, None, None)


def explained(directory: Path, step: int | None = None, **options: Any) -> FlightExplanation:
    return ak.explain(directory, step, model=made(), loss_fn=squares, **options)


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "flight"
    train(directory)
    return directory


@pytest.fixture(scope="module")
def found(flight: Path) -> FlightExplanation:
    """As it was found, but with predictions that hold for the culprit, and shares of its examples."""
    data = explained(flight).data
    measured, predicted = (data[name].sel(change="skip", step=CULPRIT) for name in ("measured", "contribution"))
    shares = np.full((data.sizes["step"], BATCH), math.nan)
    shares[data["step"].values.tolist().index(CULPRIT)] = np.linspace(0, 1, BATCH)
    factor = float(measured / predicted.sum())
    data = data.assign(
        contribution=factor * data["contribution"], layer_contribution=factor * data["layer_contribution"]
    )
    return FlightExplanation(data.drop_vars("example_share").assign(example_share=(("step", "example"), shares)))


@pytest.fixture(scope="module")
def rate(tmp_path_factory: pytest.TempPathFactory) -> FlightExplanation:
    directory = tmp_path_factory.mktemp("rate") / "flight"
    train(directory, bad=0, rate=0.5)
    return explained(directory, SPIKE)  # the losses go on rising


@pytest.fixture(scope="module")
def opened(browser: Any, found: FlightExplanation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page; whatever it complains about or asks the network for fails the test."""
    file = tmp_path_factory.mktemp("page") / "flight.html"
    write_flight_page(found, file, title="<script>alert(1)</script>")
    with watched(browser, file) as page:
        yield page


def drawn(page: Any, name: str) -> list[dict[str, Any]]:
    """The traces of a picture as plotly computed them: name, x, y."""
    return page.evaluate(
        "(id) => document.getElementById(id).calcdata.map(c => ({name: c[0].trace.name, type: c[0].trace.type,"
        " x: c.map(p => p.x ?? p.p), y: c.map(p => p.y ?? p.s), lineWidth: c[0].trace.line?.width}))",
        f"plot-{name}",
    )


def described(found: FlightExplanation, kept: dict[int, str | bytes]) -> FlightExplanation:
    images = [isinstance(one, bytes) for one in kept.values()]
    texts = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in kept.values()]
    given = {"described": list(kept), "description": texts, "description_is_image": images}
    rest = found.data.drop_vars(given)
    return FlightExplanation(rest.assign({name: ("described", one) for name, one in given.items()}))


def text_of(found: FlightExplanation, tmp_path: Path) -> str:
    return Tags.of(write_flight_page(found, tmp_path / "page.html")).text


PLOTS = ("course", "treatments", "trials", "emergence", "channels", "layers", "examples")


def test_the_page_shows_what_was_found(opened: Any, found: FlightExplanation) -> None:
    assert found.blamed == (CULPRIT,)
    assert opened.locator("p.verdict").text_content() == found.verdict
    for name in PLOTS:
        assert opened.locator(f"#plot-{name} svg.main-svg").first.is_visible()
    assert opened.locator("#plot-examples .barlayer .point path").count() == BATCH
    assert opened.locator("h1").text_content() == "<script>alert(1)</script>"
    # trust stands in the header, and what was announced comes in its order
    assert opened.locator("header .certificate li").count() == len(found.certificate.findings)
    assert [text.removesuffix("#") for text in opened.locator("h2").all_text_contents()] == [
        "How far to trust this",
        "The course of the run",
        "What would have prevented it",
        "Who did it, and the placebo",
        "Step by step",
        f"When step {CULPRIT} did harm",
        f"Where step {CULPRIT} waited",
        f"Inside the batch of step {CULPRIT}",
        "The instruments",
        "Every step, in numbers",
        "Where this comes from",
    ]


def test_the_course_is_the_recorded_run(opened: Any, found: FlightExplanation) -> None:
    loss, ring, norm, rate, size = drawn(opened, "course")
    for trace, name in ((loss, "loss"), (norm, "norm"), (rate, "lr"), (size, "update_size")):
        assert trace["x"] == found.data["place"].values.tolist()
        np.testing.assert_allclose(trace["y"], found.data[name].values, rtol=1e-6)
    assert (ring["x"], ring["y"]) == ([SPIKE], [found.facts.event.value])
    shapes = opened.evaluate("document.getElementById('plot-course').layout.shapes")
    first, last = found.facts.event.onset, found.facts.event.end
    event = [shape for shape in shapes if (shape["x0"], shape["x1"]) == (first - 0.5, last + 0.5)]
    assert len(event) == 4
    assert len([shape for shape in shapes if shape["x0"] == shape["x1"] == CULPRIT]) == 4


def test_suspects_and_placebos_are_what_was_measured(opened: Any, found: FlightExplanation) -> None:
    traces = {trace["name"]: trace for trace in drawn(opened, "trials")}
    roles = dict(zip(found.data["step"].values.tolist(), found.data["role"].values))
    left = dict(zip(found.data["step"].values.tolist(), found.data["left"].values))
    assert traces["without a blamed step"]["x"] == [CULPRIT]
    for name, role in (("without a placebo", "placebo"), ("without a suspect", "suspect")):
        steps = [step for step, its in roles.items() if its == role and step != CULPRIT]
        assert sorted(traces[name]["x"]) == steps
        np.testing.assert_allclose(traces[name]["y"], [min(left[step], 2) for step in traces[name]["x"]])
    measured = dict(zip(traces["measured"]["x"], traces["measured"]["y"]))
    assert measured == pytest.approx({c.step: c.measured for c in found.culprits if c.role})
    assert set(traces["predicted"]["x"]) == set(roles)


def click_on(page: Any, step: int) -> None:
    """In the column of a step, under the bars of the trials, where no bar is."""
    page.locator("#plot-trials").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """(step) => {
        const plot = document.getElementById('plot-trials'), {xaxis, yaxis2} = plot._fullLayout;
        const box = plot.getBoundingClientRect();
        return [box.left + xaxis._offset + xaxis.c2p(step), box.top + yaxis2._offset + yaxis2._length - 8];
    }""",
        step,
    )
    page.mouse.move(x, y)
    until(page, f"document.getElementById('plot-trials')._hoverdata?.[0].x === {step}")
    page.mouse.click(x, y)


def test_a_step_that_is_clicked_opens(opened: Any, found: FlightExplanation) -> None:
    placebo = next(c for c in found.culprits if c.role == "placebo")
    assert [one.get_attribute("id") for one in opened.locator("details[open]").all()] == [f"step-{CULPRIT}"]
    for culprit, word in ((found.culprits[0], "blamed"), (placebo, "placebo")):
        click_on(opened, culprit.step)
        entry = opened.locator(f"#step-{culprit.step}")
        until(opened, f"document.activeElement.parentElement?.id === 'step-{culprit.step}'")
        assert entry.evaluate("entry => entry.open")
        summary = entry.locator("summary").text_content()
        assert summary == f"Step {culprit.step}, {word}: without it {culprit.left:.0%} of the event is left"
        value = found.facts.event.value
        cells = entry.locator("tbody tr").nth(1).locator("td").all_text_contents()
        assert cells == [f"{value - culprit.measured:.4g}", f"{culprit.left:.0%}"]
        entry.locator("summary").press("Enter")
        until(opened, f"!document.getElementById('step-{culprit.step}').open")
    other = next(c.step for c in found.culprits if not c.role)
    opened.locator(f"table.sortable a[href='#step-{other}']").press("Enter")  # one among those that are folded up
    until(opened, f"document.getElementById('step-{other}').open")
    assert opened.locator(f"#step-{other}").get_by_text("It was not run again without.").is_visible()


def test_the_steps_are_there_without_a_script(found: FlightExplanation, tmp_path: Path) -> None:
    image = b"\x89PNG\r\n\x1a\n and so on"
    seen = described(found, {CULPRIT: "two <b>rows</b>\nof it", CULPRIT - 1: image})
    file = write_flight_page(seen, tmp_path / "page.html")
    page = Tags.of(file)
    assert [attrs["id"] for tag, attrs in page.tags if tag == "details" and attrs["class"] == "step"] == [
        f"step-{c.step}" for c in found.culprits if c.role
    ] + [f"step-{c.step}" for c in found.culprits if not c.role]
    assert "two <b>rows</b>\nof it" in page.text
    (source,) = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == image
    best = found.culprits[0]
    inside = file.read_text().split(f"id='step-{CULPRIT}'")[1].split("</details>")[0]
    for name in ("theta", "m", "v"):
        assert f"{best.channels[name]:+.3g}" in inside
    assert f"example {best.examples[0][0]}" in inside
    lefts = sorted(c.left for c in found.culprits if c.role == "placebo")
    assert f"({lefts[0]:.0%} to {lefts[-1]:.0%})" in inside
    assert f"So it added {best.measured:+.3g}. Predicted to add {best.predicted:+.3g}" in inside


def test_the_figure_shows_what_the_headline_says(found: FlightExplanation, tmp_path: Path) -> None:
    def left(one: FlightExplanation) -> dict[str, dict[int, float]]:
        figure = trial_figure(one, one.culprits, [])
        return {trace.name: dict(zip(trace.x, trace.y)) for trace in figure.data}

    told = "it is high on other weights too"
    own = with_facts(found, kind="own batch", blamed=(SPIKE,), own_left=0.02, gone=0.2, data_said=told)
    assert own.verdict.startswith(f"The batch of step {SPIKE} itself is the spike")
    assert left(own)["without a blamed step"] == {SPIKE: 0.02}
    assert other_runs(own)[0].word == "prevents it"
    text = text_of(own, tmp_path)
    assert "None of those that were tried prevents it" not in text
    assert "Without it 2% of the event is left." in text
    pair = (CULPRIT, CULPRIT + 1)
    more = {"group": pair, "group_left": 0.1, "group_placebos": 8, "group_placebos_change": 0}
    group = with_facts(found, kind="group", blamed=pair, **more)
    assert group.verdict.startswith(f"Steps {CULPRIT} and {CULPRIT + 1} did it together: without them 10%")
    assert left(group)["without all that are blamed"] == dict.fromkeys(pair, 0.1)
    assert f"without steps {CULPRIT}, {CULPRIT + 1} together" in text_of(group, tmp_path)
    given = with_facts(group, group_replaced=True)  # other batches, and none left out
    assert left(given)["other batches at all that are blamed"] == dict.fromkeys(pair, 0.1)
    text = text_of(given, tmp_path)
    assert f"batches like their own in place of those of steps {CULPRIT}, {CULPRIT + 1}" in text
    assert f"without steps {CULPRIT}, {CULPRIT + 1} together" not in text
    nobody = text_of(with_facts(found, kind="unknown", blamed=()), tmp_path)
    assert "Who did it" not in nobody
    assert "Was it a batch?" in nobody


def test_an_unknown_cause_is_said_in_whole_sentences(found: FlightExplanation) -> None:
    data = found.data.copy(deep=True)
    data["left"].loc[{"step": CULPRIT}] = 0.9
    data["role"].loc[{"step": [c.step for c in found.culprits if c.role == "suspect" and c.step != CULPRIT]}] = ""
    one = FlightExplanation(data.isel(treatment=slice(0)))
    said = with_facts(one, kind="unknown", blamed=(), highest=SPIKE + 1, after=3).verdict
    assert f"is not known: without step {CULPRIT}, the most suspected, 90% of it stays. Its largest loss is" in said
    assert "  " not in said
    data["lucky"].loc[{"step": CULPRIT}] = True  # in a second run
    said = with_facts(FlightExplanation(data), kind="unknown", blamed=()).verdict
    assert f" Without step {CULPRIT} half of it was gone in one run, and not in a second one, which began a" in said


def test_a_run_that_went_away_flattens_no_bar(found: FlightExplanation) -> None:
    data = found.data.copy(deep=True)
    other = next(c.step for c in found.culprits if c.role == "placebo")
    data["measured"].loc[{"step": other, "change": "skip"}] = -1e9
    gone = FlightExplanation(data)
    figure = trial_figure(gone, gone.culprits, drawable(gone, gone.culprits))
    low, high = figure.layout.yaxis2.range
    assert found.culprits[0].measured < high < 3 * found.culprits[0].measured
    assert low == -high
    data["measured"].loc[{"step": other, "change": "skip"}] = -math.inf
    gone = FlightExplanation(data)
    assert step_list(gone, gone.culprits)[0].count("Without it the run diverges.") == 1


def test_the_run_without_the_culprit_is_drawn_strongest(opened: Any, found: FlightExplanation) -> None:
    traces = {trace["name"]: trace for trace in drawn(opened, "treatments")}
    chosen = traces[f"the batch of step {CULPRIT} left out"]
    assert chosen["lineWidth"] == max(trace["lineWidth"] for trace in traces.values())
    best = found.culprits[0]
    assert chosen["y"][chosen["x"].index(SPIKE)] == pytest.approx(found.facts.event.value - best.measured)
    first = opened.locator("table.runs tbody tr").first
    assert first.locator("td").all_text_contents()[:2] == [
        f"the batch of step {CULPRIT} left out",
        "prevents it",
    ]
    runs = other_runs(found)
    telling, idle = with_an_effect(runs)
    assert (len(runs), len(telling) + len(idle)) == (1 + found.data.sizes["treatment"],) * 2
    assert len(idle) > 1  # told in one line, here as in the terminal
    rows = opened.locator("table.runs tbody tr")
    assert rows.count() == len(telling) + 2
    assert rows.last.text_content() == f"{untried_in_words(found)}."  # somebody is blamed, and runs are spared
    together = rows.nth(len(telling))
    least = min(float(found.data["treatment_left"].sel(treatment=run.name)) for run in idle)
    said = f"{len(idle)} others leave ≥ {at_least(least)} each"  # each run ended once half of the event was there
    assert together.locator("summary").text_content() == said
    assert f"\n  {said}\n" in str(found)
    assert str(found).split("\n\n")[2].count("\n") == rows.count() + 1  # below them, what ≥ means
    together.locator("summary").click()
    assert together.get_by_text(idle[-1].name).is_visible()


def test_the_cost_of_a_treatment_is_against_the_run_as_it_was(rate: FlightExplanation) -> None:
    held = next(run for run in other_runs(rate) if run.chosen)
    assert held.name.startswith("lr held at its former value")
    assert held.prevents
    assert rate.data["place"].values.tolist()[-4:] == [SPIKE + 1, SPIKE + 2, SPIKE + 3, SPIKE + 4]
    assert max(held.values) <= rate.facts.event.usual + 5 * rate.facts.event.sigma  # held to the end of the event
    assert held.after == pytest.approx(sum(held.values[-4:]) / 4)
    cost = held.after - float(rate.data["loss"][-4:].mean())
    html = rate._repr_html_()
    assert f"{held.after:.4g}</td><td class='number'>{cost:+.3g}<" in html
    assert rate.verdict in html


def test_absurd_predictions_are_counted_not_drawn(found: FlightExplanation, tmp_path: Path) -> None:
    data = found.data.copy(deep=True)
    far, farther = [c.step for c in found.culprits if not c.role][:2]
    data["contribution"].loc[{"step": far}] = 2.5 * found.facts.event.peak / data.sizes["channel"]
    data["contribution"].loc[{"step": farther}] = 1e6
    absurd = FlightExplanation(data)
    text = text_of(absurd, tmp_path)
    assert "off the scale, and not drawn: 2." in text
    assert text.count("off scale") == 2
    assert text.count("Its prediction is off the scale.") == 2
    assert f"{2.5 * found.facts.event.peak:+.3g}" not in text
    assert "e+06" not in text
    assert "1000000" not in (tmp_path / "page.html").read_text().split("plot-trials", 1)[1]
    written: list[tuple[str, float, int]] = []
    absurd.to_tensorboard(SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar)))
    assert not {far, farther} & {step for _, _, step in written}


def test_no_predicted_size_is_shown_where_none_is_to_be_trusted(found: FlightExplanation, tmp_path: Path) -> None:
    wrong = FlightExplanation(found.data.assign(contribution=3 * found.data["contribution"]))
    assert next(one for one in wrong.certificate.findings if one.subject == "prediction").level == "bad"
    shown = text_of(wrong, tmp_path)
    for text in (shown, str(wrong)):
        assert text.count(UNTRUSTED) == 1
    assert "predicted" in str(found)
    assert "predicted" not in str(wrong).split("Earlier steps and the loss")[1]
    assert "Predicted to add" in text_of(found, tmp_path)
    assert "Predicted to add" not in shown
    assert "predicted +" not in shown
    assert "Its layers (predicted)" not in shown
    assert drawable(wrong, wrong.culprits) == []


def test_parts_of_a_step_that_was_not_run_without_are_not_shown(found: FlightExplanation, tmp_path: Path) -> None:
    page = write_flight_page(found, tmp_path / "page.html").read_text()
    for culprit in found.culprits:
        inside = page.split(f"id='step-{culprit.step}'")[1].split("</details>")[0]
        close = bool(culprit.role) and abs(culprit.predicted - culprit.measured) <= 0.5 * abs(culprit.measured)
        assert ("Its layers (predicted)" in inside) == ("Where it waited (predicted)" in inside) == close


def test_parts_that_are_off_the_scale_are_not_drawn(found: FlightExplanation) -> None:
    data = found.data.copy(deep=True)
    far = 3 * found.facts.event.peak
    data["contribution"].loc[{"step": CULPRIT, "channel": "m"}] += far
    data["contribution"].loc[{"step": CULPRIT, "channel": "v"}] -= far
    data["layer_contribution"].loc[{"step": CULPRIT, "layer": data["layer"].values[0]}] = far
    one = FlightExplanation(data)
    culprit = one.culprits[0]
    theta, m, v = channel_figure(one, culprit).data[0].x[::-1]
    assert (theta, m, v) == (culprit.channels["theta"], None, None)
    assert sum(value is None for value in layer_figure(one, CULPRIT).data[0].x) == 1


def test_a_sharpness_that_is_not_known_is_said(found: FlightExplanation, tmp_path: Path) -> None:
    assert math.isfinite(found.facts.instruments.sharpness)
    text = text_of(with_facts(found, sharpness=math.nan), tmp_path)
    assert "Learning rate × sharpness is not known: the numbers on the way to it are not finite." in text
    nothing = with_facts(found, sharpness=math.nan, sharpness_bar=math.nan)
    assert "sharpness" not in text_of(nothing, tmp_path)  # it was not looked at


def test_parts_of_a_wrong_prediction_are_not_shown(found: FlightExplanation, tmp_path: Path) -> None:
    wrong = FlightExplanation(found.data.assign(contribution=3 * found.data["contribution"]))
    text = text_of(wrong, tmp_path)
    assert "its prediction was wrong, and the parts of it would be too." in text
    assert "Where step" in text
    assert "plot-layers" not in (tmp_path / "page.html").read_text()
    fast = text_of(with_facts(found, growth=1e9, growth_steps=8), tmp_path)
    assert "Predictions are not drawn" in fast
    assert "in θ" not in fast
    assert "plot-channels" not in (tmp_path / "page.html").read_text()


def rows_of(page: Path, table: str) -> list[list[str]]:
    """The cells of the body of the first table of this class."""
    body = page.read_text().split(f"<table class='{table}'", 1)[1].split("<tbody>", 1)[1].split("</tbody>", 1)[0]
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in body.split("<tr")[1:]]


def test_the_table_shows_parts_of_right_predictions_alone(found: FlightExplanation, tmp_path: Path) -> None:
    page = write_flight_page(found, tmp_path / "page.html")
    rows = rows_of(page, "sortable")
    told = {int(re.sub("<.*?>", "", cells[0])): cells[-3:] for cells in rows}
    close = {c.step: abs(c.predicted - c.measured) <= 0.5 * abs(c.measured) for c in found.culprits if c.step in told}
    assert close[CULPRIT]
    assert not all(close.values())
    assert all(all(cells) if close[step] else not any(cells) for step, cells in told.items())
    data = found.data.copy(deep=True)
    data["contribution"].loc[{"step": CULPRIT, "channel": "m"}] += 1e9
    data["contribution"].loc[{"step": CULPRIT, "channel": "v"}] -= 1e9
    rows = rows_of(write_flight_page(FlightExplanation(data), tmp_path / "page.html"), "sortable")
    assert next(cells for cells in rows if f">{CULPRIT}<" in cells[0])[-2:] == ["off scale", "off scale"]
    assert "e+09" not in page.read_text().split("plot-channels", 1)[0]


def test_the_update_is_told_by_layer(found: FlightExplanation, tmp_path: Path) -> None:
    rows = rows_of(write_flight_page(found, tmp_path / "page.html"), "by-layer")
    sizes, step = found.data["layer_update_size"], found.facts.event.onset - 1
    assert [cells[0] for cells in rows] == sorted(
        ["0", "2"], key=lambda name: -float(sizes.sel(place=step, layer=name))
    )
    for name, usual, at in rows:
        assert at == f"{float(sizes.sel(place=step, layer=name)):.3g}"
        assert usual == f"{float(sizes.sel(layer=name, place=slice(None, step - 1)).median()):.3g}"


def test_the_certificate_is_coloured_by_its_levels(found: FlightExplanation, tmp_path: Path) -> None:
    def colours(one: FlightExplanation) -> list[str | None]:
        page = Tags.of(write_flight_page(one, tmp_path / "p.html"))
        return [attrs["class"] for tag, attrs in page.tags if tag == "li"]

    levels = [finding.level for finding in found.certificate.findings]
    assert levels[0] == "ok"
    assert colours(found) == levels
    # the words stay the same; the number decides
    inexact = FlightExplanation(found.data.assign(replay_deviation=1e-6))
    assert str(inexact.certificate) == str(found.certificate)
    assert colours(inexact) == ["care", *levels[1:]]


def test_the_table_sorts(opened: Any, found: FlightExplanation) -> None:
    rows = opened.locator("table.sortable tbody tr")
    assert rows.count() == min(30, found.data.sizes["step"])
    shown = [int(text) for text in opened.locator("table.sortable tbody td:nth-child(1)").all_text_contents()]
    assert shown == [c.step for c in found.culprits]
    opened.locator("table.sortable th button", has_text="delay").click()
    delays = [int(t) for t in opened.locator("table.sortable tbody td:nth-child(2)").all_text_contents()]
    assert delays == sorted(delays, reverse=True)
    opened.locator("table.sortable th button", has_text="measured").click()
    assert rows.first.locator("td").first.text_content() == str(CULPRIT)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    opened.wait_for_timeout(300)
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert outside(opened) == []  # nor does a legend, an axis title or a note leave its picture


def test_a_page_without_proof_says_so(flight: Path, tmp_path: Path) -> None:
    text = text_of(explained(flight, verify=0, references=0), tmp_path)
    assert "Nothing was run again without a step" in text
    assert "these are predictions, not proofs" in text
    assert "When step" not in text


def test_a_learning_rate_has_a_page_without_culprits(rate: FlightExplanation, browser: Any, tmp_path: Path) -> None:
    assert rate.kind == "hyperparameter"
    with watched(browser, rate.report(tmp_path / "rate.html")) as page:
        names = {trace["name"] for trace in drawn(page, "trials")}
        assert "without a blamed step" not in names
        assert page.locator("#plot-emergence").count() == 0
        chosen = page.locator("table.runs tr.chosen td").first.text_content()
        assert chosen.startswith("lr held at its former value")
        assert f"lr changed from 0.01 to 0.5 at step {CULPRIT}" in page.locator(".instruments").text_content().lower()


def test_calm_and_broken_runs_have_pages(flight: Path, browser: Any, tmp_path: Path) -> None:
    train(tmp_path / "nan", nan=True)
    nan, calm = explained(tmp_path / "nan"), explained(flight, CULPRIT - 4)
    assert (nan.kind, calm.kind) == ("not a number", "no spike")
    for found, title in ((nan, f"What is not a number at step {SPIKE}"), (calm, f"The loss at step {CULPRIT - 4}")):
        with watched(browser, found.report(tmp_path / "page.html")) as page:
            assert page.locator("h1").text_content() == title
            assert page.locator("p.verdict").text_content() == found.verdict
            assert page.locator("#plot-course svg.main-svg").first.is_visible()
            assert page.locator("#plot-trials, #plot-treatments").count() == 0
            assert found.verdict in found._repr_html_()


def test_an_explanation_is_saved_and_says_the_same(flight: Path, found: FlightExplanation, tmp_path: Path) -> None:
    calm = explained(flight, WARM + 12)
    assert calm.kind == "no spike"
    odd = described(with_facts(found, own_left=math.inf, group_left=-math.inf, settings=()), {SPIKE: "ünï"})
    for i, each in enumerate((found, calm, odd)):
        each.save(tmp_path / f"{i}.zarr")
        loaded = FlightExplanation.load(tmp_path / f"{i}.zarr")
        assert str(loaded) == str(each)
        xr.testing.assert_identical(loaded.data, each.data)
        assert repr(loaded.facts) == repr(each.facts)
        assert loaded.descriptions == each.descriptions
        pages = [one.report(tmp_path / "page.html").read_text() for one in (each, loaded)]
        assert pages[0] == pages[1]
    for name in ("role", "usual", "treatment_held"):
        FlightExplanation(found.data.drop_vars(name)).save(tmp_path / "other.zarr")
        with pytest.raises(InvalidFile, match=f"not a saved explanation of a flight of this version.*no '{name}'"):
            FlightExplanation.load(tmp_path / "other.zarr")
    for given in ({"after_ends": "at noon", "after": 0}, {"kind": "a miracle"}):
        with_facts(found, **given).save(tmp_path / "other.zarr")
        with pytest.raises(InvalidFile, match="damaged or not a saved explanation of a flight"):
            FlightExplanation.load(tmp_path / "other.zarr")


def test_everything_that_an_explanation_holds_is_wanted_in_its_file(found: FlightExplanation) -> None:
    assert set(found.data.data_vars) <= set(FlightExplanation.wanted)
    assert set(FlightExplanation.wanted) <= set(found.data.variables)
    assert set(found.data.attrs) == PROVENANCE


# --- aftershock explain


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "its_training.py").write_text(SCRIPT)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "random.py").write_text("from beside import build\n")  # named like another module
    (tmp_path / "code" / "beside.py").write_text(SCRIPT)
    (tmp_path / "code" / "fails.py").write_text("raise ValueError('no data here')\n\n\ndef build(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # what a command adds to it goes with the test
    return tmp_path


def test_explain_prints_and_writes(flight: Path, found: FlightExplanation, project: Path) -> None:
    result = call("explain", flight, "--build", "its_training:build", "--skip-list", "skip.json")
    assert result.exit_code == 0, result.stderr
    verdict = explained(flight).verdict
    assert result.stdout.startswith(f"{verdict}\n\nHow far to trust this:\n")
    assert "\n\nWhat would have prevented it" in result.stdout
    name = f"flight-step{SPIKE}.html"
    assert f"wrote {name}: the same with its charts, and every step\n" in result.stdout
    assert verdict in Tags.of(project / name).text
    assert (
        f"wrote {name} over the page that was there: the same"
        in call("explain", flight, "--build", "its_training:build", "--verify", 0).stdout
    )
    (project / name).write_text("another run's page")
    again = found.report()
    assert (again.name, (project / name).read_text()) == (f"flight-step{SPIKE}-2.html", "another run's page")
    assert json.loads((project / "skip.json").read_text()) == found.skip == [CULPRIT - WARM]


def test_explain_takes_one_window_a_file_and_less_proof(flight: Path, project: Path) -> None:
    words = ["explain", flight / f"step-{SPIKE:06d}", "--build", "code/random.py:build", "--step", SPIKE]
    result = call(*words, "--verify", 1, "--placebos", 2, "--no-treatments", "--window", 22, "--out", project)
    assert result.exit_code == 0, result.stderr
    assert f"of step {SPIKE}" in result.stdout
    assert result.stdout.count(" suspect ") == 1
    assert result.stdout.count(" placebo ") == 2
    assert "learning rate" not in result.stdout  # no treatment but the batch left out
    assert (project / f"flight-step{SPIKE}.html").is_file()
    assert random.Random(0).random() > 0  # the file hides no other module of its name


TEACHER = """
import torch
from torch import nn

teacher = nn.Linear(3, 1).requires_grad_(False)
nn.init.constant_(teacher.weight, 0.5)


def loss_fn(model, batch):
    return (model(batch) - teacher(batch)).square().mean()


def build():
    model = nn.Linear(3, 1)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loss_fn": loss_fn,
        "constant": [teacher],
        "describe": lambda batch: f"a batch of {len(batch)} rows",
    }


def bare():
    return build()["model"], loss_fn
"""


def test_a_command_knows_constants_and_descriptions(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "taught.py").write_text(TEACHER)
    monkeypatch.syspath_prepend(project)
    made = importlib.import_module("taught").build()
    model, optimizer, loss_fn = (made[name] for name in ("model", "optimizer", "loss_fn"))
    with ak.FlightRecorder(
        model, optimizer, loss_fn, "taught_flight", window=12, after=0, triggers=(), constant=made["constant"]
    ) as recorder:
        for step in range(12):
            batch = torch.randn(4, 3) * (50 if step == 11 else 1)
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    del recorder
    gc.collect()  # a recorder that is alive would tell its constants
    few = ["--step", 11, "--verify", 1, "--placebos", 2, "--no-treatments"]
    result = call("explain", "taught_flight", "--build", "taught:build", *few)
    assert result.exit_code == 0, result.stderr
    assert "a batch of 4 rows" in (project / "taught_flight-step11.html").read_text()
    bare = failed(call("explain", "taught_flight", "--build", "taught:bare", *few))
    assert "in the dict that build() returns" in bare


def test_bad_input_is_one_line(flight: Path, project: Path) -> None:
    def said(*words: object, place: Path = flight, build: str = "its_training:build") -> str:
        return failed(call("explain", place, "--build", build, *words))

    assert "there is no flight at" in said(place=project / "none")
    assert "nothing was recorded there" in said(place=project)
    assert "step 9999 was not recorded" in said("--step", 9999)
    assert "no module 'nowhere'" in said(build="nowhere:build")
    assert "has no function 'absent'" in said(build="its_training:absent")
    assert "write module:function or path/to/file.py:function" in said(build="its_training")
    assert "there is no file code/none.py" in said(build="code/none.py:build")
    assert "running code/fails.py failed: ValueError: no data here" in said(build="code/fails.py:build")
    assert "ValueError: no data here" in said(build="its_training:broken")
    assert "it returned int" in said(build="its_training:nothing")
    what_to_do = "; give the model with the sizes that it had there (model=; for a command, what build() returns)"
    assert f"was saved from another model: parameter '0.bias' is only in one of them{what_to_do}" in said(
        build="its_training:other"
    )
    told = said(build="its_training:wider")
    assert f"parameter '0.weight' is (12, 5) in the file and (16, 5) in the model{what_to_do}" in told


def test_a_page_that_cannot_be_written_is_named(flight: Path, project: Path) -> None:
    (project / "file").write_text("")
    result = call(
        "explain", flight, "--build", "its_training:build", "--verify", 0, "--no-treatments", "--out", "file/page.html"
    )
    assert result.exit_code == 1
    assert "cannot write file/page.html" in result.stderr
