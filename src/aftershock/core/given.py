"""Numbers that a user gives, checked before they are used."""

from __future__ import annotations

import numbers
import operator
from typing import SupportsIndex

from torch import Tensor

from ..errors import InvalidInput, UnsupportedClipping


def whole(value: SupportsIndex, what: str, least: int | None = None) -> int:
    """A whole number: an integer of any library. 2.0 is none, since it would fail much later as an index.

    what: what the number is, in the words of the error. least: the smallest that has a meaning.

    >>> whole(2, "a horizon is a number of states")
    2
    """
    bound = "" if least is None else f" from {least} on"
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidInput(f"{what}, a whole number{bound}; got {value!r}") from None
    if least is not None and number < least:
        raise InvalidInput(f"{what}, a whole number{bound}; got {value!r}")
    return number


def max_norm(clip: object) -> float | None:
    """A `max_norm` of `clip_grad_norm_`, which may be a tensor; None: the loop does not clip."""
    if clip is None:
        return None
    number = clip.item() if isinstance(clip, Tensor) and clip.numel() == 1 else clip
    if isinstance(number, bool) or not isinstance(number, numbers.Real) or not float(number) > 0:
        raise UnsupportedClipping(
            "clip= is the max_norm of torch.nn.utils.clip_grad_norm_ over all parameters, a positive number, or None; "
            f"got {clip!r}. Clipping by value or per group is not modelled"
        )
    return float(number)
