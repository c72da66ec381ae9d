"""Tables of the theory as files: one way for every dataset and labelled array that a function here returns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from ..results.files import load_dataset, save_dataset

if TYPE_CHECKING:
    import xarray as xr

ARRAY = "aftershock_array"  # the attribute of a file that holds a labelled array: its name


def save(table: xr.Dataset | xr.DataArray, path: str | Path) -> None:
    """Write a dataset or a named array that a function of the theory returned, whole or not at all, as zarr. `load`
    reads it.

    Values, labels and attributes come back to the bit. Results that are classes, such as a decomposition, have a `save`
    of their own.

    path: a folder that does not exist yet, an empty one, or an older result, which is replaced.

    >>> found = theory.write_paths(change, probe)
    >>> theory.save(found, "paths.zarr")  # a folder, which other programs read with xarray
    >>> theory.load("paths.zarr").identical(found)
    True
    """
    import xarray as xr

    if not isinstance(table, xr.Dataset | xr.DataArray):
        raise InvalidInput(
            f"save takes an xarray.Dataset or a named xarray.DataArray; got {type(table).__name__}. A result that is a "
            "class has a save of its own"
        )
    if isinstance(table, xr.DataArray) and not (isinstance(table.name, str) and table.name):
        raise InvalidInput('a labelled array is saved under its name, and this one has none: array.rename("…")')
    try:
        data = table if isinstance(table, xr.Dataset) else table.to_dataset().assign_attrs({ARRAY: table.name})
        if nested := [name for name in data.variables if "/" in str(name)]:
            raise ValueError(f"the name {nested[0]!r} is one of a folder; rename it without /")
        save_dataset(data, Path(path))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidInput(f"this table holds something that no file of numbers and texts can: {error}") from error


def load(path: str | Path) -> xr.Dataset | xr.DataArray:
    """A dataset or an array that was saved with `save`; another file, or a damaged one, is an `InvalidFile`.

    path: the folder.

    >>> theory.save(theory.summarize(response.exact), "summaries.zarr")
    >>> float(theory.load("summaries.zarr")["peak"][1, 0]) == float(theory.summarize(response.exact)["peak"][1, 0])
    True
    """
    data = load_dataset(Path(path), (), "saved table")
    return data[data.attrs[ARRAY]] if ARRAY in data.attrs else data
