"""flight.html as a reader opens it, and `aftershock explain` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder.triggers import AtStep
from aftershock.report.flight_page import flight_text, write_flight_page

from .test_cli import call, failed
from .test_report import Tags, browser, watched

__all__ = ["browser"]  # the fixture

WARM, CULPRIT, SPIKE = 60, 84, 87
SCRIPT = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 1)).double()
    return model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()


def other():
    return nn.Linear(5, 1).double(), build()[1]


def broken():
    raise ValueError("no data here")


def nothing():
    return 3
"""


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 1)).double()


def train(directory: Path) -> None:
    """A regression that is learned; two targets of one batch are far off."""
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    recorder = ak.FlightRecorder(model, optimizer, squares, directory, window=24, triggers=[AtStep(SPIKE)])
    for step in range(SPIKE + 2):
        x = torch.randn(16, 5, generator=generator, dtype=torch.float64)
        y = x.sum(1, keepdim=True).tanh()
        if step == CULPRIT:
            y[[3, 8]] += 40
        if step == WARM:
            recorder.__enter__()
        optimizer.zero_grad()
        loss = squares(model, (x, y))
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 if step < CULPRIT - 4 else 1.2e-2
        optimizer.step()
        if step >= WARM:
            recorder.step((x, y), loss)
    recorder.__exit__(None, None, None)


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "flight"
    train(directory)
    return directory


@pytest.fixture(scope="module")
def found(flight: Path) -> Any:
    return ak.explain(flight, model=made(), loss_fn=squares)


@pytest.fixture
def opened(browser: Any, found: Any, tmp_path: Path) -> Iterator[Any]:
    """The page; whatever it complains about or asks the network for fails the test."""
    file = write_flight_page(found, tmp_path / "flight.html", title="<script>alert(1)</script>")
    with watched(browser, file) as page:
        yield page


PLOTS = ("loss", "contribution", "emergence", "channels", "layers", "examples")


def test_the_page_shows_what_was_found(opened: Any, found: Any) -> None:
    assert found.culprits[0].step == CULPRIT
    assert opened.locator("p.verdict").text_content() == found.verdict
    for name in PLOTS:
        assert opened.locator(f"#plot-{name} svg.main-svg").first.is_visible()
    bars = opened.locator("#plot-contribution .barlayer .point path")
    assert bars.count() == found.data.sizes["step"]
    assert opened.locator("#plot-examples .barlayer .point path").count() == 16
    assert opened.locator(".certificate li").count() == len(found.certificate.findings)
    assert opened.locator(".certificate li.ok").count() >= 2
    assert opened.locator("h1").text_content() == "<script>alert(1)</script>"


def test_the_certificate_is_coloured_by_its_levels(found: Any, tmp_path: Path) -> None:
    def colours(one: Any) -> list[str | None]:
        return [
            attrs["class"] for tag, attrs in Tags.of(write_flight_page(one, tmp_path / "p.html")).tags if tag == "li"
        ]

    levels = [finding.level for finding in found.certificate.findings]
    assert levels[:2] == ["ok", "ok"]
    assert levels[-1] == "note"
    assert colours(found) == levels
    # the words stay the same; the number decides
    inexact = replace(found, data=found.data.assign(replay_deviation=1e-6))
    assert str(inexact.certificate) == str(found.certificate)
    assert colours(inexact) == ["care", *levels[1:]]


def test_the_menu_changes_what_steps_are_compared_with(opened: Any, found: Any) -> None:
    def drawn() -> list[float]:
        data = opened.evaluate("document.getElementById('plot-contribution').data")
        shown = [trace for trace in data if trace["visible"] and trace["type"] == "bar"]
        assert len(shown) == 1
        return opened.evaluate(
            "[...document.getElementById('plot-contribution').calcdata].filter(c => c[0].trace.visible === true "
            "&& c[0].trace.type === 'bar')[0].map(p => p.s)"
        )

    totals = found.data["contribution"].sum("channel")
    np.testing.assert_allclose(drawn(), totals.sel({"change": "replace"}).values, rtol=1e-12)
    for entry, change in [("no step", "skip"), ("zero gradient", "zero")]:
        opened.locator("#plot-contribution .updatemenu-header").click()
        opened.locator("#plot-contribution .updatemenu-dropdown-button", has_text=entry).click()
        np.testing.assert_allclose(drawn(), totals.sel({"change": change}).values, rtol=1e-12)


def test_the_table_sorts(opened: Any, found: Any) -> None:
    rows = opened.locator("table.sortable tbody tr")
    assert rows.count() == min(30, found.data.sizes["step"])
    assert rows.first.locator("td").first.text_content() == str(CULPRIT)
    opened.locator("table.sortable th button", has_text="delay").click()
    delays = [int(t) for t in opened.locator("table.sortable tbody td:nth-child(2)").all_text_contents()]
    assert delays == sorted(delays, reverse=True)
    opened.locator("table.sortable th button", has_text="measured").click()
    first = rows.first.locator("td").first.text_content()
    assert first == str(CULPRIT)


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    opened.wait_for_timeout(300)
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_page_without_proof_says_so(flight: Path, tmp_path: Path) -> None:
    found = ak.explain(flight, model=made(), loss_fn=squares, verify=0, references=0)
    text = Tags.of(write_flight_page(found, tmp_path / "page.html")).text
    assert "the order is predicted, not proved" in text
    assert "The examples were not ranked" in text
    assert "When it arrived" not in text


# --- aftershock explain


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "its_training.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_explain_prints_and_writes(flight: Path, found: Any, project: Path) -> None:
    result = call("explain", flight, "--build", "its_training:build", "--skip-list", "skip.json")
    assert result.exit_code == 0, result.stderr
    assert flight_text(found) in result.stdout
    assert found.verdict in Tags.of(project / "flight.html").text
    assert json.loads((project / "skip.json").read_text()) == found.skip == [CULPRIT - WARM]
    text = flight_text(found)
    assert "example 8" in text
    assert "skipped" in text


def test_explain_takes_one_window_and_a_step(flight: Path, project: Path) -> None:
    words = ["explain", flight / f"step-{SPIKE:06d}", "--build", "its_training:build", "--step", SPIKE - 1]
    result = call(*words, "--top", 1, "--window", 8, "--out", project)
    assert result.exit_code == 0, result.stderr
    assert f"of step {SPIKE - 1}" in result.stdout
    assert (project / "flight.html").is_file()


def test_bad_input_is_one_line(flight: Path, project: Path) -> None:
    def said(*words: object, place: Path = flight, build: str = "its_training:build") -> str:
        return failed(call("explain", place, "--build", build, *words))

    assert "there is no flight at" in said(place=project / "none")
    assert "nothing was recorded there" in said(place=project)
    assert "step 9999 was not recorded" in said("--step", 9999)
    assert "no module 'nowhere'" in said(build="nowhere:build")
    assert "has no function 'absent'" in said(build="its_training:absent")
    assert "write module:function" in said(build="its_training")
    assert "ValueError: no data here" in said(build="its_training:broken")
    assert "it returned int" in said(build="its_training:nothing")
    assert "was saved from another model" in said(build="its_training:other")


def test_a_page_that_cannot_be_written_is_named(flight: Path, project: Path) -> None:
    (project / "file").write_text("")
    result = call("explain", flight, "--build", "its_training:build", "--top", 0, "--out", "file/page.html")
    assert result.exit_code == 1
    assert "cannot write file/page.html" in result.stderr
