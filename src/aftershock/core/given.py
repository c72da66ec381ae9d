"""Numbers that a user gives, checked before they are used."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from ..errors import InvalidInput


def whole(value: SupportsIndex, what: str) -> int:
    """A whole number: an integer of any library. 2.0 is none, since it would fail much later as an index.

    what: what the number is, in the words of the error.

    >>> whole(2, "a horizon is a number of states")
    2
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidInput(f"{what}, a whole number; got {value!r}") from None
