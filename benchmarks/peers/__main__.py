"""`python -m benchmarks.peers`: aftershock beside its neighbours, on the same models and windows, in one run.

First the adjoint of H steps: ours against autograd through unrolled AdamW (torchopt, torch). Then what each of the H
steps did to a held-out batch: explain, bergson, dattri, captum and the gradient norm against exact leave-one-out.
A peer that is not installed is named with the reason. bergson asks for torchvision, torchaudio and bitsandbytes, and
uses none of them here: `pip install --no-deps bergson`, then what else the `bench` extra lists.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import platform
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console

import aftershock
from aftershock.core.memory import keep_freed

from ..timing import quiet
from ..truth_models import Data
from . import scores, unrolled
from .memory import hand_back_freed
from .tables import adjoints, judgements, missing
from .window import RECIPES, STEPS, prepare, with_bad_batch

ROUNDS = 5
THINNER = 2  # batches of 16 pictures or 8 texts
MODULES = {  # what is imported before anything is timed
    "torchopt": ("torchopt",),
    "captum": ("captum.influence",),
    "dattri": ("dattri.algorithm", "dattri.task"),
    "bergson": ("bergson.magic.trainer",),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=[r.slug for r in RECIPES], help="one model; may be repeated")
    parser.add_argument("--text", type=Path, help="a text file; else a synthetic text")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10's folder or file; else synthetic images")
    parser.add_argument("--steps", type=int, default=STEPS, help="length of the window (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    hand_back_freed()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own, by the hundred
    began, data = time.perf_counter(), Data(options.text, None, options.cifar, THINNER)
    lost = {name: reason for name in MODULES if (reason := _import(name))}
    windows = [prepare(r, data, options.steps) for r in RECIPES if not options.only or r.slug in options.only]
    peaks = {window.name: unrolled.peaks(window, lost) for window in windows}
    keep_freed()
    measured: list[unrolled.Measured] = []
    judged: list[scores.Judged] = []
    for window in windows:
        print(f"{window.name} …", file=sys.stderr)
        with quiet():
            measured += unrolled.compare(window, ROUNDS, peaks[window.name], lost)
            sides = [side for side in scores.SIDES if side.package not in lost]
            for one in (window, with_bad_batch(window)):
                judged += scores.judge(one, sides)
        if options.out:
            found = {"versions": versions(), "missing": lost, "adjoint": measured, "steps": judged}
            options.out.write_text(json.dumps(found, indent=1, default=dataclasses.asdict))
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(f"{data}; {platform.machine()} CPU, one thread, float32; {time.perf_counter() - began:.0f} s")
    console.print(adjoints(measured, options.steps))
    console.print(judgements(judged, options.steps))
    gone = lost | {f"{one.side}, {one.window}": one.failed for one in judged if one.failed}
    if gone:
        console.print(missing(gone))


def _import(package: str) -> str:
    """Why a peer cannot be used here; nothing where it can."""
    try:
        for module in MODULES[package]:
            importlib.import_module(module)
    except Exception as error:  # a peer may fail at its import in any way
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "aftershock": aftershock.__version__}
    for name in ("torch", *MODULES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
