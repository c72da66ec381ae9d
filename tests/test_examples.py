"""Every example runs as it stands, and finds what was put into its data."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

FOLDER = Path(__file__).parent.parent / "examples"
FEW = {"verify": 1, "placebos": 2, "treatments": False}  # proofs; the programs themselves make more


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _own_random_state() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


def test_every_example_is_tested() -> None:
    programs = {file.stem for file in FOLDER.glob("*.py")} - {"letters"}
    source = Path(__file__).read_text()
    assert programs
    assert not [name for name in programs if f'"{name}"' not in source]


def test_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = example("plain_loop", monkeypatch).main(tmp_path, **FEW)
    assert found.facts.event.explained == 334
    assert (found.kind, found.blamed) == ("batch", (320,))


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = example("with_lightning", monkeypatch).main(tmp_path, **FEW)
    assert (found.kind, found.skip) == ("own batch", [90])


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = example("with_hugging_face", monkeypatch).main(tmp_path, **FEW)
    assert (found.kind, found.skip) == ("own batch", [66])


def rank(number: int, folder: Path) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    found = importlib.import_module("with_ddp").main(folder / "flight", **FEW)
    assert (found is None) == (number == 1)
    if found is not None:
        (folder / "verdict").write_text(f"{found.kind} {found.blamed}\n{found}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ddp(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank, (tmp_path,), nprocs=2)
    said = (tmp_path / "verdict").read_text()
    assert said.startswith("own batch (90,)")
    assert "equal to the recorded one to the bit" in said


def test_custom_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    response = example("custom_probe", monkeypatch).main()
    assert response.data["probe"].item() == "a function of the model"
    assert np.isfinite(response.exact).all()
    assert float(abs(response.exact).min()) > 0  # a sound batch and a misread one both move it, at every horizon


def test_a_ranked_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("rank_a_pool", monkeypatch)
    order = list(module.main().data["change"].values)
    assert {int(str(name).split()[-1]) for name in order[:2]} == set(module.BAD)


def test_frozen_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in example("frozen_memory", monkeypatch).main().values():
        direct = [np.linalg.matrix_power(memory.matrix, h)[0, 1:] for h in range(4)]
        np.testing.assert_allclose(memory.short_response().values.T, direct, rtol=1e-12, atol=0)
