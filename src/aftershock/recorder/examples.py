"""Which examples of a batch carry its contribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from jaxtyping import Float
from torch import Tensor

from ..core.batches import Accumulated, Batch, example_count
from ..core.changes import ControlStep, Replace
from ..core.examples import EXAMPLES_AT_ONCE, example_scores, example_weight
from ..core.memory import in_smaller_pieces, ran_out
from ..core.scores import Adjoint, difference_scores, example_direction
from ..core.state import JointState, difference
from ..core.structure import flatten
from ..core.trajectory import Trajectory
from ..errors import AftershockError, InvalidInput

MOST = 128  # examples that are tried one by one, a gradient each


def example_shares(
    control: ControlStep, trajectory: Trajectory, adjoint: Adjoint, batch: Batch, ordinary: Batch
) -> tuple[Float[Tensor, " example"] | None, str]:
    """What each example adds to the loss, and how that was found; None and why, where it cannot be.

    Each example is put alone into its place in an ordinary batch: ⟨λ, x(ordinary with it) − x(ordinary)⟩, the step
    exact, with kicks at stiff coordinates. Two equally bad examples are then both found; taking one out of their
    batch would show neither, because AdamW's step saturates. A gradient each; of a batch of more than 128, one
    forward-mode pass, which is linear.
    """
    if isinstance(batch, Accumulated):
        return None, "the step accumulated several micro-batches, whose examples are not told apart"
    try:
        if example_count(batch) > MOST:
            return _linear(control, trajectory, adjoint, batch), "one forward-mode pass, linear"
        return _one_by_one(
            control, trajectory, adjoint, batch, ordinary
        ), "each put alone into the batch of the step before"
    except AftershockError as error:
        return None, str(error)
    except Exception as error:
        if not ran_out(error):
            raise
        return None, "memory ran out while the examples were looked at one by one"


def _linear(control: ControlStep, trajectory: Trajectory, adjoint: Adjoint, batch: Batch) -> Float[Tensor, " example"]:
    weight = example_weight(control, batch)
    direction = example_direction(control, adjoint, trajectory, [batch])
    scored = partial(example_scores, control, direction, batch, "the batch", weight=weight, tested=example_count(batch))
    slopes = in_smaller_pieces(
        EXAMPLES_AT_ONCE, scored, lambda chunk: chunk // 2 or None, "a forward pass of single examples"
    )
    return slopes.double().cpu() * (weight or 1 / len(slopes))


def _one_by_one(
    control: ControlStep, trajectory: Trajectory, adjoint: Adjoint, batch: Batch, ordinary: Batch
) -> Float[Tensor, " example"]:
    def after(other: Batch) -> JointState:
        return Replace(other).shock(control).endpoint(1.0)[0]

    base = after(ordinary)
    moved = [difference(after(mixed), base) for mixed in _mixtures(batch, ordinary)]
    ordinary_control = replace(control, kept=base)  # what a write is measured against is the ordinary state
    return difference_scores(ordinary_control, adjoint, trajectory, moved)[:, 0]


def _mixtures(batch: Batch, ordinary: Batch) -> Iterator[Batch]:
    """The ordinary batch with one example at a time taken from `batch`, at its place."""
    leaves, spec = flatten(ordinary)
    others, other_spec = flatten(batch)
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
        return spec.unflatten(mixed)

    return (mixture(i) for i in range(count))
