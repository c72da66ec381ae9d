"""`LabelledResult`: what every result has in common: labelled data, a file, and a look in a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from ..errors import InvalidInput
from .files import load_dataset, save_dataset

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, eq=False)  # equal datasets have no one meaning: compare `data` with xarray's own words
class LabelledResult:
    """A result whose every number and label is in `data`, so that a file of `data` is a file of the result.

    A kind of result is a subclass that names itself, and the variables without which a file is not one of its kind:

        class Ranking(LabelledResult):
            kind = "ranking"
            wanted = ("response", "score")

    It adds no fields of its own: what is not in `data` would be lost in the file. `attrs` hold what made it
    (versions, device, settings), never data. `str()` is the result in words, and a notebook shows the same.

    >>> response.save("response.zarr")
    >>> type(response).load("response.zarr").order[0]
    'replace 1'
    """

    data: xr.Dataset

    kind: ClassVar[str] = "result"
    wanted: ClassVar[tuple[str, ...]] = ()

    def save(self, path: str | Path) -> None:
        """Write it as zarr, whole or not at all. `load` of the same class reads it.

        >>> response.save("response.zarr")  # a folder, which other programs read with xarray
        """
        save_dataset(self.data, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A result of this kind that was saved with `save`; another file is an `InvalidFile`.

        >>> response.save("response.zarr")
        >>> ak.Response.load("response.zarr").verdict == response.verdict
        True
        """
        return cls(load_dataset(Path(path), cls.wanted, f"saved {cls.kind}"))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def require_dimension(values: xr.DataArray, dim: str) -> None:
    """Refuse values that have nothing along a dimension that is to be reduced."""
    if dim not in values.dims:
        raise InvalidInput(f"these values have no dimension {dim!r}; they have {', '.join(map(str, values.dims))}")
    if values.sizes[dim] == 0:
        raise InvalidInput(f"there is nothing along {dim!r}")
