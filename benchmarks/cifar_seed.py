"""One root seed of the CIFAR-10 study where zarr is missing, such as a bare GPU machine: a file per system.

A run that was stopped goes on where it was. On one H200, shared by seven processes under NVIDIA's multi-process service
(`nvidia-cuda-mps-control -d`), 16 systems of each network took 508 s.
`aftershock gather reproduction/cifar OUT` brings the files into a results folder and makes its tables.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from aftershock.studies.carried import CarriedStore
from aftershock.studies.cifar.recipe import cifar_study
from aftershock.studies.runner import machine_kinds, run_study, select
from aftershock.studies.study import SEEDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cifar_seed", description=__doc__)
    parser.add_argument("--root-seed", type=int, default=2026, help=f"root seeds are independent {SEEDS} apart")
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10, a file or folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for one file per system")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=7, help="processes that share the device; default: %(default)s")
    parser.add_argument("--systems", help="as of `aftershock reproduce`; default: all")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    study = cifar_study(options.data.absolute(), options.root_seed, options.quick, options.device)
    systems = study.systems if options.systems is None else select(study, options.systems)
    systems = sorted(systems, key=lambda system: system.kind != "cnn")  # the longest first: workers end together
    results = run_study(study, options.out, systems, workers=options.workers, kept=CarriedStore)
    print(f"took {time.monotonic() - began:.0f} s on {' | '.join(machine_kinds(results))}")


if __name__ == "__main__":
    main()
