"""What a training step leaves in Python for the next one: state outside (θ, m, v, buffers), unless it changes nothing.

Every call begins with what was there at capture, so that a counter which training would advance stands still. Models
store much that no later step reads (the last attention map, the last loss, a cache that is made anew): the first time
that something is left changed, the same gradient is run again from there, and must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import AftershockError, HiddenState, Nondeterministic
from .keeper import Left
from .reductions import norm, same_bits
from .things import GENERATORS

DISTANCES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)  # steps ahead at which a counter is tried
ABOVE_NOISE = 10  # times the difference of a gradient that does not repeat itself

Found = tuple[Tensor, list[Tensor | None]]  # a loss and its gradient by parameter
Again = Callable[[Callable[[], None]], tuple[Found, list[Left]]]  # the same call, begun with something done


def refuse_carried(left: Sequence[Left], plain: Found, again: Again) -> None:
    """Raise where the loss or its gradient depends on what the call left: 1 g, 7 where numbers changed."""
    distances = DISTANCES if any(each.counts for each in left) else DISTANCES[:1]
    for times in distances:
        if _matters(left, times, plain, again):
            guilty = [each for each in left if _matters([each], times, plain, again)] or list(left)
            raise _error(guilty)


def _matters(left: Sequence[Left], times: int, plain: Found, again: Again) -> bool:
    def begin() -> None:
        for each in left:
            each.apply(times)

    try:
        found, then = again(begin)
    except AftershockError:
        return True
    return any(_drawn_on(each, then) for each in left) or _differs(plain, found, again)


def _drawn_on(each: Left, then: Sequence[Left]) -> bool:
    """A generator ends elsewhere when it begins elsewhere, unless it is seeded in the call."""
    if not isinstance(each.thing, GENERATORS):
        return False
    ends = [other.after for other in then if other.thing is each.thing]
    return not ends or not each.thing.alike(each.after, ends[0])


def _differs(plain: Found, found: Found, again: Again) -> bool:
    if same_bits([plain[0], *plain[1]], [found[0], *found[1]]):
        return False
    repeated, _ = again(lambda: None)
    return _distance(plain, found) > ABOVE_NOISE * _distance(plain, repeated)


def _distance(a: Found, b: Found) -> float:
    if [x is None for x in a[1]] != [x is None for x in b[1]]:
        return float("inf")
    pairs = [(x, y) for x, y in zip([a[0], *a[1]], [b[0], *b[1]]) if x is not None and y is not None]
    return float(torch.stack([norm((x - y).double()) / (norm(x.double()) + 1e-300) for x, y in pairs]).max())


def _error(guilty: Sequence[Left]) -> AftershockError:
    names = ", ".join(f"`{name}`" for each in guilty for name in each.names[:3])
    if any(isinstance(each.thing, GENERATORS) for each in guilty):
        return Nondeterministic(
            f"the model or loss_fn draws from a random generator of its own ({names}), whose state a training point "
            "does not hold; draw from the global generators (torch, numpy.random, random), or in the data"
        )
    return HiddenState(
        f"the loss depends on what the model or loss_fn keeps from one step to the next in {names}: state outside "
        "(θ, m, v), which stands still in every step that aftershock computes. Register it as a buffer "
        "(register_buffer, and change it in forward), or put it into the batch"
    )
