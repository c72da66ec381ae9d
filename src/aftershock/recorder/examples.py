"""Which examples of a batch carry its contribution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.batches import Accumulated, Batch, example_count
from ..core.changes import ControlStep, Replace
from ..core.operators import WriteIn
from ..core.scores import example_scores, example_weight
from ..core.state import Cotangent, JointState, difference, pair, stack
from ..errors import AftershockError, InvalidInput

MOST = 128  # examples that are tried one by one, a gradient each


def example_shares(
    control: ControlStep, adjoint: Cotangent, batch: Batch, ordinary: Batch
) -> tuple[Float[Tensor, " example"] | None, str]:
    """What each example adds to the loss, and how that was found; None and why, where it cannot be.

    Each example is put alone into its place in an ordinary batch: ⟨λ, x(ordinary with it) − x(ordinary)⟩, the step
    exact. Two equally bad examples are then both found; taking one out of their batch would show neither, because
    AdamW's step saturates. A gradient each; of a batch of more than 128, one forward-mode pass, which is linear.
    """
    if isinstance(batch, Accumulated):
        return None, "the step accumulated several micro-batches, whose examples are not told apart"
    try:
        if example_count(batch) > MOST:
            return _linear(control, adjoint, batch), "one forward-mode pass, linear"
        return _one_by_one(control, adjoint, batch, ordinary), "each put alone into the batch of the step before"
    except AftershockError as error:
        return None, str(error)


def _linear(control: ControlStep, adjoint: Cotangent, batch: Batch) -> Float[Tensor, " example"]:
    weight = example_weight(control, batch)
    slopes = example_scores(control, WriteIn(control.linear).rmv(adjoint)[0], batch, "the batch").double().cpu()
    return slopes * (weight or 1 / len(slopes))


def _one_by_one(control: ControlStep, adjoint: Cotangent, batch: Batch, ordinary: Batch) -> Float[Tensor, " example"]:
    def after(other: Batch) -> JointState:
        return Replace(other).shock(control).endpoint(1.0)[0]

    base = after(ordinary)
    found = [float(pair(adjoint, stack([difference(after(mixed), base)]))) for mixed in _mixtures(batch, ordinary)]
    return torch.tensor(found, dtype=torch.float64)


def _mixtures(batch: Batch, ordinary: Batch) -> Iterator[Batch]:
    """The ordinary batch with one example at a time taken from `batch`, at its place."""
    leaves, spec = tree_flatten(ordinary)
    others, other_spec = tree_flatten(batch)
    count = example_count(batch)
    if spec != other_spec or any(
        isinstance(x, Tensor) and x.shape != y.shape for x, y in zip(leaves, others, strict=True)
    ):
        raise InvalidInput("the neighbouring batch has another shape, so that no example of this one fits into it")

    def mixture(i: int) -> Batch:
        mixed = []
        for x, y in zip(leaves, others):
            if isinstance(x, Tensor) and x.ndim and x.shape[0] == count:
                x = x.clone()
                x[i] = y[i]
            mixed.append(x)
        return tree_unflatten(mixed, spec)

    return (mixture(i) for i in range(count))
