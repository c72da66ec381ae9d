"""Which examples of a batch carry its contribution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.batches import Accumulated, Batch, example_count
from ..core.changes import ControlStep
from ..core.scores import example_scores, example_weight
from ..errors import AftershockError, ExamplesCouple, InvalidInput

MOST = 128  # examples that are exchanged one by one, a gradient each


def example_shares(
    control: ControlStep, direction: Float[Tensor, " param"], batch: Batch, other: Batch
) -> tuple[Float[Tensor, " example"] | None, str]:
    """Each example's share of the batch's contribution, and how it was found; None and why, where it cannot be.

    Where examples stand alone, one forward-mode pass. Where they couple (batch normalization, dropout masks),
    each is exchanged for the one at its place in `other`, which keeps shapes and masks: a gradient each.
    """
    if isinstance(batch, Accumulated):
        return None, "the step accumulated several micro-batches, whose examples are not told apart"
    try:
        weight = example_weight(control, batch)
        slopes = example_scores(control, direction, batch, "the batch").double().cpu()
        return slopes * (weight or 1 / len(slopes)), "one forward-mode pass"
    except ExamplesCouple:
        return _exchanged(control, direction, batch, other)
    except AftershockError as error:
        return None, str(error)


def _exchanged(
    control: ControlStep, direction: Float[Tensor, " param"], batch: Batch, other: Batch
) -> tuple[Float[Tensor, " example"] | None, str]:
    loss, step, before = control.dynamics.loss, control.step, control.before
    try:
        count, pieces = example_count(batch), _exchanges(batch, other)
    except InvalidInput as error:
        return None, str(error)
    if count > MOST:
        return None, f"the examples depend on each other, and exchanging {count} of them one by one is too dear"
    shares = []
    for mixed in pieces:
        found = loss.gradient(before.theta, before.buffers, mixed, step.random, "an exchanged example")
        shares.append(torch.dot(direction, control.raw - loss.layout.join(found.grads)))
    return torch.stack(shares).double().cpu(), "each example exchanged for the one at its place in the step before"


def _exchanges(batch: Batch, other: Batch) -> Iterator[Batch]:
    """The batch with one example at a time taken from `other`."""
    leaves, spec = tree_flatten(batch)
    others, other_spec = tree_flatten(other)
    count = example_count(batch)
    if spec != other_spec or any(
        isinstance(x, Tensor) and x.shape != y.shape for x, y in zip(leaves, others, strict=True)
    ):
        raise InvalidInput("the examples depend on each other, and the neighbouring batch has another shape")

    def exchanged(i: int) -> Batch:
        mixed = []
        for x, y in zip(leaves, others):
            if isinstance(x, Tensor) and x.ndim and x.shape[0] == count:
                x = x.clone()
                x[i] = y[i]
            mixed.append(x)
        return tree_unflatten(mixed, spec)

    return (exchanged(i) for i in range(count))
