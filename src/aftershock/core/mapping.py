"""One call for many rows, by torch's `vmap`, which says nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_ours: list[object] = []  # the filter, once it was set


def mapped_over(
    dims: tuple[Any, ...], work: Callable[..., Any], *, randomness: str = "same", chunk: int | None = None
) -> Callable[..., Any]:
    """`work` over rows, which lie along these dimensions of its arguments.

    Where torch has no rule for an operation, as for a recurrent layer, it runs that row by row and warns of it. Nobody
    asked for rows, and they take no longer than alone: that warning, and no other, is left out.
    """
    mapped = torch.func.vmap(work, in_dims=dims, randomness=randomness, chunk_size=chunk)

    def silent(*given: Any) -> Any:
        _leave_out()
        return mapped(*given)

    return silent


def _leave_out() -> None:
    """The filter first in line, set only where it is not: every change of the filters makes Python forget which
    warnings it has shown, and one that the model gives at each step would be shown each time."""
    if not _ours or warnings.filters[:1] != _ours:
        warnings.filterwarnings("ignore", "There is a performance drop because", UserWarning)
        _ours[:] = warnings.filters[:1]
