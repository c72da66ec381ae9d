"""Results of a study on disk: one zarr group per system, written whole or not at all, verified when read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InvalidFile, InvalidInput, StudyStopped
from ..extras import require
from ..results.files import malformed
from .language.conditions import by_size
from .study import Study, System

if TYPE_CHECKING:
    import xarray as xr

FORMAT = "aftershock-study-2"  # a change of the code that changes numbers or names in the results changes this
PART = ".part"  # how the name of a group ends while it is being written
SEEDING = ("seed", "roots")  # attributes that say which systems, not what is done with each


@dataclass(frozen=True)
class SystemResults:
    """What one system gave, by setting, and the machines that its pieces ran on."""

    settings: Mapping[str, xr.Dataset]
    machines: tuple[Mapping[str, Any], ...]


class Store(Protocol):
    """Where the systems of a study are kept, each whole or not at all."""

    def prepare(self) -> None: ...
    def finished(self) -> tuple[str, ...]: ...
    def save(self, name: str, results: SystemResults) -> None: ...
    def load(self, name: str) -> SystemResults: ...


class ResultStore:
    """`OUT/results.zarr`: a group per finished system, a group per setting in it.

    A group is made beside its place and moved there by one rename, so that a run killed at any moment leaves
    whole groups and at most one `.part`, which the next run clears.
    """

    def __init__(self, out: Path, study: Study) -> None:
        self.folder = out / "results.zarr"
        self.identity = identity(study)

    def prepare(self) -> None:
        """Make the folder, clear what a killed run left, refuse results that something else made."""
        self._make_folder()
        for part in self.folder.glob(f".*{PART}"):
            shutil.rmtree(part)
        for name in self.finished():
            refuse_another(self.folder / name, self._header(name), self.identity)

    def finished(self) -> tuple[str, ...]:
        """Names of the systems whose results are there."""
        if not self.folder.is_dir():
            return ()
        return tuple(sorted(p.name for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith(".")))

    def save(self, name: str, results: SystemResults) -> None:
        """Write one system's group: about 0.1 s a setting."""
        import zarr

        part = self.folder / f".{name}{PART}"
        header = {
            **self.identity,
            "machines": [dict(machine) for machine in results.machines],
            "digests": {setting: digest(data) for setting, data in results.settings.items()},
        }
        try:
            zarr.create_group(part, attributes=header)
            for setting, data in results.settings.items():
                _write(data, part, setting)
            os.replace(part, self.folder / name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StudyStopped(
                f"no space is left for {self.folder / name}; the systems finished so far are kept: make room and "
                "run the same command again"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def load(self, name: str) -> SystemResults:
        """One system's group with every array verified against the digest it was written with."""
        require("zarr", "studies", "studies")
        import xarray as xr

        header, settings = self._header(name), {}
        for setting, written in header["digests"].items():
            try:
                data = xr.open_zarr(self.folder / name, group=setting, chunks=None, consolidated=False).load()
            except Exception as error:  # whatever zarr finds wrong in a foreign file
                raise self._damaged(name, f"{setting} cannot be read: {error}") from error
            if digest(data) != written:
                raise self._damaged(name, f"the arrays of {setting} are not the ones that were written")
            settings[setting] = data
        return SystemResults(settings, tuple(header["machines"]))

    def _make_folder(self) -> None:
        require("zarr", "studies", "studies")
        import zarr

        out = self.folder.parent
        if out.exists() and not out.is_dir():
            raise InvalidFile(f"{out} is a file; results need a folder: choose another one with --out")
        out.mkdir(parents=True, exist_ok=True)
        if not self.folder.is_dir():
            part = out / f".{self.folder.name}{PART}"
            shutil.rmtree(part, ignore_errors=True)
            zarr.create_group(part)
            os.replace(part, self.folder)
        probe = self.folder / f".writable{PART}"  # found out now, not after the first system
        probe.mkdir(exist_ok=True)

    def _header(self, name: str) -> dict[str, Any]:
        try:
            header = json.loads((self.folder / name / "zarr.json").read_text())["attributes"]
            if {*self.identity, "machines", "digests"} <= set(header):
                return header
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(name, f"its header cannot be read: {error}") from error
        raise self._damaged(name, "its header does not say what made it")

    def _damaged(self, name: str, why: str) -> InvalidFile:
        return InvalidFile(
            f"{self.folder / name} is damaged ({why}); delete that folder and run the same command again: "
            "the other systems are kept"
        )


def identity(study: Study) -> dict[str, Any]:
    """What must be equal for results to belong together: never the machine, the number of workers or the seed.

    A system's name says its seed, so a folder may hold the systems of several root seeds, one run each.
    """
    made: dict[str, Any] = json.loads(json.dumps(dict(study.attrs)))
    return {
        "format": FORMAT,
        "study": study.name,
        "pieces": list(study.pieces),
        "attrs": {key: value for key, value in made.items() if key not in SEEDING},
    }


def refuse_another(place: Path, header: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Results that something else made are left alone, and what differs is said."""
    theirs, ours = _flat(header, wanted), _flat(wanted, wanted)
    different = [
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
    if different:
        raise InvalidFile(f"{place} is from another run: {'; '.join(different)}; choose another folder with --out")


def digest(data: xr.Dataset) -> str:
    """SHA-256 over names, dimensions, types and bits of every array."""
    import numpy as np

    hashed = hashlib.sha256()
    for name in sorted(str(n) for n in data.variables):
        variable = data.variables[name]
        values = np.asarray(variable.values)
        text = values.dtype.kind in "OUT"  # zarr may give strings back in another width
        kind = "text" if text else values.dtype.str
        hashed.update(json.dumps([name, variable.dims, kind, values.shape]).encode())
        hashed.update(json.dumps(values.tolist()).encode() if text else values.tobytes())
    return hashed.hexdigest()


def merge_pieces(pieces: Sequence[Mapping[str, xr.Dataset]]) -> dict[str, xr.Dataset]:
    """The pieces of one system as one dataset per setting; coordinates that do not fit are an error."""
    import xarray as xr

    settings = dict.fromkeys(setting for piece in pieces for setting in piece)
    merged = {}
    for setting in settings:
        parts = [piece[setting] for piece in pieces if setting in piece]
        names = dict.fromkeys(str(name) for part in parts for name in part.data_vars)
        whole = [_one_variable([part[[name]] for part in parts if name in part]) for name in names]
        merged[setting] = xr.merge(whole, join="exact", compat="identical", combine_attrs="no_conflicts")
    return merged


def _one_variable(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    import xarray as xr

    if all(part.identical(parts[0]) for part in parts[1:]):
        return parts[0]
    combined = xr.combine_by_coords(
        parts, data_vars="minimal", coords="minimal", compat="equals", join="exact", combine_attrs="no_conflicts"
    )
    assert isinstance(combined, xr.Dataset)  # it is a DataArray only where DataArrays went in
    return combined


def stored_study(out: Path) -> Study:
    """The study whose systems a folder holds, as far as its results say: all of them, and nothing to run."""
    folder = out / "results.zarr"
    names = sorted(p.name for p in folder.iterdir() if (p / "zarr.json").is_file()) if folder.is_dir() else []
    if not names:
        raise InvalidFile(f"{out} holds no results of a study")
    with malformed(folder / names[0], "system's results"):
        header = json.loads((folder / names[0] / "zarr.json").read_text())["attributes"]
        study = _made_by(header)
        kinds = (name.rsplit("-", 2) for name in names)
        systems = sorted((System(kind, int(seed), int(index)) for kind, seed, index in kinds), key=_order)
    return replace(study, systems=tuple(systems))


def load_results(out: Path) -> tuple[Study, dict[str, xr.Dataset]]:
    """Everything that a results folder holds, of however many runs, joined along `system`."""
    study = stored_study(out)
    store = ResultStore(out, study)
    store.prepare()
    return study, join_systems(study, {system.name: store.load(system.name) for system in study.systems})


def _order(system: System) -> tuple[str, int, int]:
    return system.kind, system.seed, system.index


def store_of(out: Path, made: Mapping[str, Any]) -> ResultStore:
    """The store for systems whose study has this identity."""
    return ResultStore(out, _made_by(made))


def _made_by(header: Mapping[str, Any]) -> Study:
    return Study(header["study"], (), tuple(header["pieces"]), _finished, header["attrs"])


def _finished(system: System, piece: str) -> dict[str, xr.Dataset]:
    raise InvalidInput(f"{system.name}, {piece}: results that were read cannot be run again")


def join_systems(study: Study, results: Mapping[str, SystemResults]) -> dict[str, xr.Dataset]:
    """All systems of each setting along a leading `system`, with what made them in the attributes."""
    import xarray as xr

    machines = {json.dumps(machine, sort_keys=True) for one in results.values() for machine in one.machines}
    attrs = {
        **study.attrs,
        "study": study.name,
        "format": FORMAT,
        "machines": [json.loads(machine) for machine in sorted(machines)],
    }
    names = [system.name for system in study.systems if system.name in results]
    joined = {}
    for setting in dict.fromkeys(s for name in names for s in results[name].settings):
        having = [name for name in names if setting in results[name].settings]
        data = xr.concat(
            [results[name].settings[setting].expand_dims(system=[name]) for name in having],
            dim="system",
            data_vars="all",
            coords="minimal",
            compat="identical",
            join="exact",
            combine_attrs="drop",
        )
        variables = sorted(map(str, data.data_vars))  # zarr does not keep their order
        joined[setting] = by_size(data[variables]).assign_attrs(attrs)
    return joined


def systems_in(results: Mapping[str, xr.Dataset]) -> list[str]:
    """The systems of all settings by name, in their order."""
    return list(dict.fromkeys(str(name) for data in results.values() for name in data["system"].values))


def _write(data: xr.Dataset, folder: Path, group: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr's remarks on strings and metadata are not the user's concern
        # A chunk that is left out because it is empty would come back with other bits: -0.0 as 0.0.
        data.drop_encoding().to_zarr(folder, group=group, mode="w", consolidated=False, write_empty_chunks=True)


def _flat(header: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The identity in a header with the study's attributes beside the rest."""
    own = {key: header[key] for key in keys if key != "attrs"}
    return own | dict(header["attrs"])
