"""Tables of the theory as files: one way for every dataset that a function here returns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from ..results.files import load_dataset, save_dataset

if TYPE_CHECKING:
    import xarray as xr


def save(table: xr.Dataset, path: str | Path) -> None:
    """Write a dataset that a function of the theory returned, whole or not at all, as zarr. `load` reads it.

    Values, labels and attributes come back to the bit. A labelled array is saved as `array.to_dataset(name="…")`;
    results that are classes, such as a decomposition, have a `save` of their own.

    path: a folder that does not exist yet, an empty one, or an older result, which is replaced.

    >>> found = theory.write_paths(change, probe)
    >>> theory.save(found, "paths.zarr")  # a folder, which other programs read with xarray
    >>> theory.load("paths.zarr").identical(found)
    True
    """
    import xarray as xr

    if not isinstance(table, xr.Dataset):
        raise InvalidInput(
            f"save takes an xarray.Dataset; got {type(table).__name__}. A labelled array becomes one with "
            '.to_dataset(name="…"); a result that is a class has a save of its own'
        )
    try:
        save_dataset(table, Path(path))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidInput(f"this dataset holds something that no file of numbers and texts can: {error}") from error


def load(path: str | Path) -> xr.Dataset:
    """A dataset that was saved with `save`; another file, or a damaged one, is an `InvalidFile`.

    path: the folder.

    >>> theory.save(theory.summarize(response.exact), "summaries.zarr")
    >>> float(theory.load("summaries.zarr")["peak"][1, 0]) == float(theory.summarize(response.exact)["peak"][1, 0])
    True
    """
    return load_dataset(Path(path), (), "saved table")
