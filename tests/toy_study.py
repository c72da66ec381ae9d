"""A study of nothing, quick and with every kind of array, that tells who ran it and fails on request."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from aftershock.errors import NotFinite
from aftershock.studies.study import Study, System

PIECES = ("mechanism", "futures-0", "futures-1")
CHANGES = ["candidate 0", "candidate 1", "candidate 10"]


def study(log: Path, delay: float = 0.0, systems: int = 2, seed: int = 2026, **attrs: Any) -> Study:
    """`systems` of each of two kinds; `log` receives a file per unit that starts and holds requests to fail."""
    chosen = tuple(System(kind, seed, index) for kind in ("mlp", "cnn") for index in range(systems))
    run = functools.partial(run_unit, log=str(log), delay=delay)
    return Study("toy", chosen, PIECES, run, {"seed": seed, "quick": False, "dtype": "float64", **attrs})


def run_unit(system: System, piece: str, log: str, delay: float) -> dict[str, xr.Dataset]:
    note(Path(log), system, piece)
    time.sleep(delay)
    generator = torch.Generator().manual_seed(system.entropy(piece))

    def draw(*shape: int) -> np.ndarray:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).numpy()

    if piece == "mechanism":
        exact = draw(3, 2, 5)
        data = xr.Dataset(
            {
                "exact": (("change", "scale", "horizon"), exact),
                "accepted": ("change", exact[:, 1, 0] > 0),
                "identity_residual": ((), float(exact.size)),
                "nothing": ("change", np.full(3, -np.nan)),  # the NaN of 0/0 on x86 has its sign bit set
                "zero": ("change", np.full(3, -0.0)),
                "threads": ((), torch.get_num_threads()),
            },
            {"change": CHANGES, "scale": [0.1, 1.0], "horizon": np.arange(1, 6)},
        )
        return {system.kind: data, f"{system.kind}-rotating": data[["exact"]] * 2}
    futures = range(4) if piece == "futures-0" else range(4, 8)
    response = (("change", "future", "horizon"), draw(3, 4, 5))
    coords = {"change": CHANGES, "future": list(futures), "horizon": np.arange(1, 6)}
    return {system.kind: xr.Dataset({"future_response": response}, coords)}


def note(log: Path, system: System, piece: str) -> None:
    """Say that this process starts this unit; do what the log asks for."""
    unit = f"{system.name} {piece}"
    (log / f"{unit} {os.getpid()} {time.time_ns()}").touch()
    if (log / f"die {unit}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (log / f"hang {unit}").exists():
        time.sleep(600)
    if (log / f"refuse {unit}").exists():
        raise NotFinite("the loss is NaN; lower the learning rate")
    if (log / f"crash {unit}").exists():
        raise ZeroDivisionError("a bug")
    if (log / f"miss {unit}").exists():
        Path("no/such/data").read_bytes()


def units(log: Path) -> list[tuple[str, str, int]]:
    """(system, piece, process) of every unit that was started, in order."""
    named = [path.name.split() for path in log.iterdir() if len(path.name.split()) == 4]
    return [(system, piece, int(pid)) for system, piece, pid, _ in sorted(named, key=lambda words: int(words[3]))]


def main() -> None:
    """`reproduce` with this study in the place of the paper's: LOG DELAY OUT."""
    from aftershock.commands import cli

    log, delay, out = sys.argv[1:]
    cli._recipe = lambda *_: study(Path(log), float(delay))  # type: ignore[assignment]
    cli._publish = lambda *_: None  # type: ignore[assignment]
    sys.argv = ["aftershock", "reproduce", "quadratic", "--out", out, "--workers", "2"]
    cli.app()
