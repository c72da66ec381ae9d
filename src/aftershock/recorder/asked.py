"""What a recorder or an explanation is asked for, refused by name where it has no meaning."""

from __future__ import annotations

import operator

from ..errors import InvalidInput


def whole(name: str, value: object, least: int) -> int:
    """A whole number from `least` on."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidInput(f"{name}= is a whole number from {least} on; got {value!r}")
    return number


def max_norm(clip: object) -> None:
    """Raises where it is no `max_norm` of `clip_grad_norm_`; None: the loop does not clip."""
    try:
        clips = clip is None or float(clip) > 0  # type: ignore[arg-type]  # it may be a tensor
    except (TypeError, ValueError):
        clips = False
    if not clips:
        raise InvalidInput(
            f"clip= is the max_norm that the loop gives clip_grad_norm_, a number above 0, or None; got {clip!r}"
        )
