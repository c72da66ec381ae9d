"""Results of a system as one safetensors file: written where zarr is missing, and brought home from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidFile, InvalidInput
from ..results.files import malformed, read_header, read_tensors, write_tensors
from .results import FORMAT, ResultStore, SystemResults, digest, identity, refuse_another, store_of
from .study import Study

if TYPE_CHECKING:
    import xarray as xr

CARRIED = "aftershock-carried-1"
ENDING = ".safetensors"
WHAT = "system's results"


class CarriedStore:
    """`OUT/NAME.safetensors`: one file per finished system, whole or not at all, its digest inside.

    The same calls as `ResultStore`; `bring_in` makes a study's results of such files.
    """

    def __init__(self, out: Path, study: Study) -> None:
        self.folder = out
        self.identity = identity(study)

    def prepare(self) -> None:
        """Make the folder; refuse results that something else made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.finished():
            refuse_another(self._file(name), read_header(self._file(name))[1]["made"], self.identity)

    def finished(self) -> tuple[str, ...]:
        return tuple(sorted(path.stem for path in self.folder.glob(f"[!.]*{ENDING}")))

    def save(self, name: str, results: SystemResults) -> None:
        carry_out(self._file(name), results, self.identity)

    def load(self, name: str) -> SystemResults:
        return carried(self._file(name))[0]

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{ENDING}"


def carry_out(path: Path, results: SystemResults, made: Mapping[str, Any]) -> None:
    """Write one system's results: numbers as tensors, text and labels in the header. made: `identity(study)`."""
    tensors: dict[str, torch.Tensor] = {}
    labels: dict[str, dict[str, Any]] = {}
    for setting, data in results.settings.items():
        for name in map(str, data.variables):
            variable = data.variables[name]
            label = {"dims": list(variable.dims), "coordinate": name in data.coords}
            if variable.dtype.kind in "OUT":
                label["text"] = variable.values.tolist()
            else:
                tensors[f"{setting}/{name}"] = torch.from_numpy(variable.values.copy())
            labels.setdefault(setting, {})[name] = label
    header = {
        "format": CARRIED,
        "made": dict(made),
        "machines": [dict(machine) for machine in results.machines],
        "digests": {setting: digest(data) for setting, data in results.settings.items()},
        "labels": labels,
    }
    write_tensors(path, tensors, header)


def carried(path: Path) -> tuple[SystemResults, dict[str, Any]]:
    """What `carry_out` wrote, every array proved, and the identity of the study that made it."""
    tensors, header = read_tensors(path, WHAT, CARRIED)
    with malformed(path, WHAT):
        settings = {setting: _dataset(setting, labels, tensors) for setting, labels in header["labels"].items()}
        for setting, data in settings.items():
            if digest(data) != header["digests"][setting]:
                raise InvalidFile(f"{path}: the arrays of {setting} are not the ones that were written")
        return SystemResults(settings, tuple(header["machines"])), header["made"]


def _dataset(setting: str, labels: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> xr.Dataset:
    import numpy as np
    import xarray as xr

    def variable(name: str) -> tuple[list[str], Any]:
        label = labels[name]
        return label["dims"], np.array(label["text"]) if "text" in label else tensors[f"{setting}/{name}"].numpy()

    coordinates = {name: variable(name) for name, label in labels.items() if label["coordinate"]}
    return xr.Dataset({name: variable(name) for name in labels if name not in coordinates}, coordinates)


def bring_in(files: Iterable[Path], out: Path) -> tuple[str, ...]:
    """Put systems that were carried out into a study's results folder, and say which; ones that it has stay.

    files: what `carry_out` wrote, or folders of them.
    """
    found = [file for path in files for file in (sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path])]
    if not found:
        raise InvalidInput(f"there is no *{ENDING} of a system's results to bring in")
    names = []
    for file in found:
        results, made = carried(file)
        if made["format"] != FORMAT:
            raise InvalidFile(f"{file} was made by another version of the study ({made['format']}; here is {FORMAT})")
        store: ResultStore = store_of(out, made)
        store.prepare()
        if file.stem not in store.finished():
            store.save(file.stem, results)
            names.append(file.stem)
    return tuple(names)
