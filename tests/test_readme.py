"""The README's Python is executed, on a small live run of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .cases import make

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks, "the README has no Python"
    case = make("tanh_mlp")
    monkeypatch.chdir(tmp_path)
    names = {
        "model": case.model,
        "optimizer": case.optimizer,
        "loss_fn": case.loss_fn,
        "usual": case.batch(),
        "future": case.batches(23),
        "suspect": case.batch(),
        "held_out": case.batch(),
        "pool": case.batches(6),
    }
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "Exact" in printed or "exact" in printed
    assert "Verified by rerunning" in printed
    assert (tmp_path / "report.html").stat().st_size > 100_000
