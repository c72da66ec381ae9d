"""`python -m benchmarks`: the table of ratios, each with its bar."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console

from aftershock.core.memory import keep_freed

from . import recording, rows
from .table import Growth, Row, Skipped, bars, growths

BENCHMARKS: dict[str, Callable[[torch.device, bool], list]] = {
    "hessian": rows.hessian,
    "tangents": rows.tangents,
    "rank": rows.rank,
    "examples": rows.examples,
    "scores": rows.scores,
    "elementwise": rows.elementwise,
    "adjoint": rows.adjoint,
    "recording": recording.recording,
    "growth": rows.growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the real pools and longer paths, more rounds")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), help="one part; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on a busy machine can be far slower than one
    keep_freed()
    device = torch.device(options.device)
    began = time.perf_counter()
    found: list[Row | Skipped | Growth] = []
    for name in options.only or BENCHMARKS:
        if sys.stderr.isatty():
            print(f"{name} …", file=sys.stderr)
        found += BENCHMARKS[name](device, options.full)
    title = (
        f"aftershock, {_device_name(device)}, torch {torch.__version__}, batch 64, float32, one CPU thread; "
        f"{time.perf_counter() - began:.0f} s. g: one plain gradient of the same batch"
    )
    console = Console() if sys.stdout.isatty() else Console(width=160)
    measured = [row for row in found if not isinstance(row, Growth)]
    grown = [row for row in found if isinstance(row, Growth)]
    if measured:
        console.print(bars(measured, title))
    if grown:
        console.print(growths(grown))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


if __name__ == "__main__":
    main()
