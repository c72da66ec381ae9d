"""The command line: what it writes, what it says, and how it fails; the demo from end to end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr
from typer.testing import CliRunner

import aftershock as ak
from aftershock.commands import demo
from aftershock.commands.cli import app
from aftershock.errors import InvalidInput
from aftershock.recorder.forecast import Forecast

from .test_report import Tags, made


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def failed(result: Any) -> str:
    """The one message of a command that failed as it should."""
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("aftershock: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"aftershock {ak.__version__}\n")


def test_a_saved_response_becomes_the_same_page(tmp_path: Path) -> None:
    response = made()
    response.save(tmp_path / "r.zarr")
    result = call("report", tmp_path / "r.zarr", "--out", tmp_path / "page.html")
    assert result.exit_code == 0
    assert str(tmp_path / "page.html") in result.stdout
    direct = response.report(tmp_path / "direct.html")
    assert Tags.of(tmp_path / "page.html").text == Tags.of(direct).text


def test_a_folder_receives_report_html(tmp_path: Path) -> None:
    made().save(tmp_path / "r.zarr")
    assert call("report", tmp_path / "r.zarr", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "report.html").is_file()


def test_results_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    assert f"no saved response at {tmp_path / 'none'}" in failed(call("report", tmp_path / "none"))
    other = tmp_path / "notes.txt"
    other.write_text("not a response")
    assert f"{other} is damaged or not a saved response" in failed(call("report", other))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made().save(tmp_path / "r.zarr")
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder is needed")
    page = blocked / "page.html"
    assert f"cannot write {page}: " in failed(call("report", tmp_path / "r.zarr", "--out", page))

    def trained_for_nothing(*_: Any) -> None:
        raise AssertionError("the folder is checked before the training")

    monkeypatch.setattr(demo, "train", trained_for_nothing)
    assert f"cannot write to {blocked}: " in failed(call("demo", "--out", blocked))
    if Path("/proc/self").is_dir():  # a folder that even root cannot write to
        assert "cannot write to /proc/self: " in failed(call("demo", "--out", "/proc/self"))


def test_an_error_of_aftershock_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(out: Path, seed: int) -> None:
        raise ak.AftershockError(f"refused with seed {seed}; do this instead")

    monkeypatch.setattr(demo, "run", refuse)
    assert failed(call("demo", "--seed", 7)) == "aftershock: refused with seed 7; do this instead\n"


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, int]] = []
    monkeypatch.setattr(demo, "run", lambda out, seed: calls.append((out, seed)))
    assert call("demo").exit_code == 0
    assert call("demo", "--out", "there", "--seed", 3).exit_code == 0
    assert calls == [(Path("aftershock-demo"), 0), (Path("there"), 3)]


# --- the demo itself


def test_the_demo_tells_what_it_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator_before = torch.random.get_rng_state()
    flown = demo.run(tmp_path, quick=True)
    assert torch.equal(torch.random.get_rng_state(), generator_before)

    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    joined = re.sub(r"\s+", " ", printed)
    assert flown.main.verdict in joined
    assert len(printed.splitlines()) < 40  # short: the pages say the rest
    assert "equal to the recorded one to the bit" in printed
    assert "Asked before step 80, the recorder's forecast for this batch was " in joined
    assert flown.main.verdict in Tags.of(tmp_path / "flight.html").text
    assert str(tmp_path / "flight.html") in re.sub(r"\s", "", printed)
    assert flown.main.skip == []  # in the quick one nobody is blamed
    assert not (tmp_path / "skip.json").exists()
    assert "Nobody is blamed, so that there is no list of batches to skip." in joined

    monkeypatch.setattr(demo, "FULL", demo.QUICK)
    (command,) = re.findall(r"aftershock (explain .*:build)$", printed, flags=re.MULTILINE)
    again = call(*command.split(), "--out", tmp_path / "again.html", "--verify", demo.QUICK.verify)
    assert again.stdout.startswith(flown.main.verdict)


def test_the_demo_is_drawn_from_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    first = demo.run(tmp_path / "a", seed=5, quick=True)
    torch.manual_seed(2)  # what the caller drew before does not matter
    again = demo.run(tmp_path / "b", seed=5, quick=True)
    other = demo.run(tmp_path / "c", seed=6, quick=True)
    contributions = [flown.main.data["contribution"].values for flown in (first, again, other)]
    np.testing.assert_array_equal(contributions[0], contributions[1])
    assert not np.array_equal(contributions[0], contributions[2])


def test_the_demos_bad_batch_is_misread_and_nothing_else(tmp_path: Path) -> None:
    text = demo.Text.of_python(0)
    batches = list(text.recorded(demo.QUICK))
    digits = set("0123456789")
    shown = [{text.letters[code] for code in batch.flatten().tolist()} for batch in batches]
    dates = [step for step, letters in enumerate(shown) if letters <= digits | {"-", "\n"}]
    assert dates == sorted({*demo.QUICK.rare, demo.QUICK.bad, demo.QUICK.back})
    good = batches[demo.QUICK.back]
    back = text.misread(text.misread(good))  # five and five are ten
    assert torch.equal(back, good)
    assert not torch.equal(text.misread(good), good)


@pytest.mark.parametrize(("bad", "told"), [(0.5, "A second run skips it: there"), (0.05, "no reason to skip it")])
def test_a_harmful_forecast_is_listened_to(bad: float, told: str) -> None:
    class Replayed:
        losses: ClassVar[list[float]] = [1.25]
        taken: ClassVar[list[Any]] = []

        def update(self, batch: Any) -> None:
            self.taken.append(batch)

    size = demo.QUICK
    forecasts = tuple(Forecast(xr.Dataset({"largest_increase": x, "peak_horizon": h})) for x, h in ((0.1, 2), (bad, 3)))
    flown = demo.Flown([], Replayed(), forecasts)  # type: ignore[arg-type]
    text = demo.spared(flown, list(range(size.stop)), size, [3.5] * size.stop)  # type: ignore[arg-type]
    assert told in text
    if bad > 0.3:
        assert Replayed.taken == list(range(size.bad + 1, size.back + 1))
        assert "is 1.25, not 3.5" in text


def test_the_seed_of_an_explanation_reaches_its_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def explain(*given: Any, **options: Any) -> None:
        asked.append(options["generator"])
        raise InvalidInput("no flight")

    monkeypatch.setattr("aftershock.recorder.explain.explain", explain)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\ndef build():\n    m = torch.nn.Linear(1, 1)\n"
        "    return m, torch.optim.AdamW(m.parameters()), lambda m, b: m(b).sum()\n"
    )
    for words in ((), ("--seed", 7)):
        failed(call("explain", tmp_path, "--build", f"{script}:build", *words))
    assert asked == [0, 7]
