"""The README's Python is executed, on a small live run of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from .test_cli import call

README = Path(__file__).parent.parent / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_python_of_the_readme_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}  # whatever a block uses, one before it has introduced
    said = []
    with torch.random.fork_rng(devices=[]):
        for block in blocks():
            exec(compile(block, str(README), "exec"), names)
            said.append(capsys.readouterr().out)

    # the spike lies a hundred steps before the end of the run, and is found without being told where
    spike = next(text for block, text in zip(blocks(), said) if "print(ak.explain(recorder))" in block)
    assert len(names["recorder"].recent) < 100
    promised = re.search(r"```text\n(.*?) …\n```", README.read_text())
    assert promised
    assert spike.startswith(promised[1])
    assert "every loss is equal to the recorded one to the bit" in spike

    printed = "".join(said)
    assert re.search(
        r"The batch of step 224 itself is the spike.*\n.*The batch of step 48 itself is", printed, re.DOTALL
    )
    assert "Calibrated with exact reruns" in printed
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README.read_text())
    assert len(links) > 10
    assert not [link for link in links if not (README.parent / link).exists()]


def test_the_tables_of_the_readme_are_those_of_the_measurements() -> None:
    """A row of both begins with the same words, and says the same."""
    texts = [file.read_text(encoding="utf-8") for file in (README, README.parent / "docs" / "measurements.md")]
    readme, measured = (
        {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")} for text in texts
    )
    shared = {name for name in readme if name in measured} - {"| ---"}
    assert {"| MLP–GELU", "| ResNet with BatchNorm", "| Hessian products in rows, each"} <= shared
    assert len(shared) == 2 + 8 + 5  # two heads, the models, the work
    for name in shared:
        assert readme[name] == measured[name]


@pytest.mark.parametrize("study", ["quadratic", "cifar"])
def test_the_replications_that_the_readme_counts_are_those_of_the_tables(study: str) -> None:
    tables = (README.parent / "docs" / "results" / study / "tables.md").read_text(encoding="utf-8")
    counted = re.search(r"(\d+ of \d+) numbers replicate .* would miss ([\d.]+)\. .* a factor of ([\d.]+)\.", tables)
    assert counted
    count, missed, factor = counted.groups()
    said = rf"{count} (numbers replicate|do),[^(]* would miss {missed} \(half[^)]* would have caught [^)]*{factor}\)"
    assert re.search(said, README.read_text(encoding="utf-8"))


def test_the_doctor_says_what_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "def train_step" in b)
    (tmp_path / "readme_train.py").write_text(block)
    (tmp_path / "readme_told.py").write_text(block.replace("return dict(", "return dict(clip=0.1, "))
    monkeypatch.chdir(tmp_path)
    found = re.search(r"\$ aftershock doctor train:build\n(.*?)…", text, flags=re.DOTALL)
    assert found
    result = call("doctor", "readme_train:build")
    assert result.exit_code == 1
    assert " ".join(result.stdout.split()).startswith(" ".join(found[1].split()))
    result = call("doctor", "readme_told:build")
    assert result.exit_code == 0
    assert "5 steps of train_step are equal to the path to the bit" in " ".join(result.stdout.split())
