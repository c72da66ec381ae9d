"""Systems of the language study where zarr is missing, such as a bare GPU machine: a file per system, cost beside bars.

`aftershock gather reproduction/language OUT` brings the files into a results folder and makes its tables.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aftershock.studies.carried import CarriedStore
from aftershock.studies.language.recipe import SETTING, language_study
from aftershock.studies.language.scene import DTYPES
from aftershock.studies.results import SystemResults
from aftershock.studies.runner import this_machine

if TYPE_CHECKING:
    import xarray as xr

SECONDS = {"pythia-410m": 30.0, "pythia-1.4b": 75.0}
GIB = 75.0
PAPER = {"pythia-410m": 464.0, "pythia-1b": 645.0, "pythia-1.4b": 941.0}  # seconds


def against(bar: float | None, value: float) -> str:
    return "" if bar is None else f" (bar {bar:g}: {'met' if value <= bar else 'MISSED'})"


def told(name: str, data: xr.Dataset) -> str:
    """What one system cost, by part, and what it found, in a few lines."""
    model, parts = str(data["model"].values), data["seconds"]
    seconds, gib = float(parts.sum()), int(data["peak_bytes"]) / 2**30
    paper = f", the paper's {PAPER[model]:g} s" if model in PAPER else ""
    exact = abs(data["response"].sel(answer="exact", scale=1.0)).max("horizon")
    lines = [
        f"{name}: {int(data['parameters']) / 1e6:,.1f} million parameters, {data['weights'].values} weights",
        f"  {seconds:.1f} s{against(SECONDS.get(model), seconds)}{paper}; peak {gib:.1f} GiB{against(GIB, gib)}",
        "  " + ", ".join(f"{part} {float(parts.sel(part=part)):.2f} s" for part in parts["part"].values),
        f"  control loss {float(data['control_loss'][0]):.4f}; peaks of the exact response "
        f"{float(exact.min()):.2e} to {float(exact.max()):.2e}; noise floor {float(data['noise_floor'].max()):.1e}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language_study", description=__doc__)
    parser.add_argument("--model", nargs="+", required=True, help="as of `aftershock reproduce language`")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="folder for one file per system")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=list(DTYPES))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    study = language_study(
        options.model, options.text, tokenizer=options.tokenizer, fresh=options.fresh, seed=options.seed,
        quick=options.quick, device=options.device, dtypes=options.dtype,
    )  # fmt: skip
    store = CarriedStore(options.out, study)
    store.prepare()
    card = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    print(f"{card}, torch {torch.__version__}, Python {platform.python_version()}", flush=True)
    for system in study.systems:
        if system.name not in store.finished():
            found = study.run(system, study.pieces[0])
            store.save(system.name, SystemResults(found, (this_machine(),)))
        print(told(system.name, store.load(system.name).settings[SETTING]), flush=True)


if __name__ == "__main__":
    main()
