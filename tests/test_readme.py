"""The README's Python is executed, on a small live run of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from .cases import make
from .test_cli import call

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks, "the README has no Python"
    case = make("tanh_mlp")
    monkeypatch.chdir(tmp_path)

    def train_step(batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        loss = case.loss_fn(case.model, batch)
        case.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        case.optimizer.step()
        return loss, norm

    names = {
        "model": case.model,
        "optimizer": case.optimizer,
        "loss_fn": case.loss_fn,
        "usual": case.batch(),
        "future": case.batches(23),
        "suspect": case.batch(),
        "held_out": case.batch(),
        "pool": case.batches(6),
        "batches": case.batches(12),
        "train_step": train_step,
    }
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "Exact" in printed or "exact" in printed
    assert "Calibrated with exact reruns" in printed
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert "How far to trust this" in printed
    assert "equal to the recorded one to the bit" in printed
    assert isinstance(json.loads((tmp_path / "skip.json").read_text()), list)


def test_the_doctor_says_what_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "def build" in b)
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
