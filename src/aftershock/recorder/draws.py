"""Random numbers that loss_fn draws before it calls the model: noise, masks, times.

A recorder reads the random state when the model is called, and so cannot replay them unless the loop says where loss_fn
begins.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.batches import Batch
from ..core.loss import LossFunction
from ..core.randomness import RandomState

REMEDY = (
    "call recorder.before_forward() in the loop, right before loss_fn, or draw these numbers where the batch is made, "
    "and let them be a part of it"
)


class _Called(BaseException):
    """The model was called, and nothing more is asked; no `except Exception` of the user's takes it."""


def drawn_before_the_model(
    loss: LossFunction, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor], batch: Batch, random: RandomState
) -> bool:
    """Does loss_fn move a random state before it calls the model or a part of it? Runs it up to that call only."""
    seen: list[RandomState] = []

    def look(*_: Any) -> None:
        seen.append(RandomState.now(loss.layout.device))
        raise _Called

    loss = copy.copy(loss)
    loss._tried = True  # no copies of frozen weights, which may be most of a GPU's memory: nothing is run with them
    handles = [part.register_forward_pre_hook(look) for part in loss.model.modules()]
    try:
        loss.call(parameters, buffers, random, lambda model: loss.raw(model, batch, "the first call of the model"))
    except _Called:
        return not seen[0].same(random)
    finally:
        for handle in handles:
            handle.remove()
    return False
