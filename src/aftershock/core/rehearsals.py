"""Hessian products and readings, recorded for playing back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor, nn

from .batches import Batch
from .graphs import GradientGraph, edges, write_mapped
from .loss import LossFunction
from .playback import TOGETHER
from .randomness import RandomState
from .readings import read_off
from .recordings import Program

WHERE = "a recorded pass"


def rehearse_products(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Batch],
    random: RandomState,
) -> None:
    """Record Hessian products of a few vectors, and the graph that they need, over batches of one shape.

    Only where rows together give what they give alone. Costs about ten products, once.
    """
    vectors, layout = loss.player.vectors, loss.layout
    for i, row in enumerate(vectors):
        row.copy_(theta)[:: i + 2] *= -1
    GradientGraph(loss, theta, buffers, batches[0], random, WHERE).products(vectors)
    if not loss.together("product", batches[0], TOGETHER):
        return

    def make(theta: Float[Tensor, " param"], batch: Batch) -> tuple[list[Tensor], Program]:
        leaves = loss.leaves(theta)

        def program(model: nn.Module) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            value = loss.raw(model, batch, WHERE)
            curved = edges(loss.grad(value, leaves, WHERE, create_graph=True))
            out = layout.zeros(TOGETHER)
            write_mapped(layout, curved, leaves, vectors, out)
            return out, [], None

        return leaves, program

    loss.player.rehearse(loss, "products", make, theta, buffers, batches, random, derivative=True)


def rehearse_reading(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batch: Batch,
    read: Callable[[nn.Module, Batch], Float[Tensor, " reading"]],
    random: RandomState,
) -> None:
    """Record a reading where it can be: rows are then read one after another, each faster than its share of many."""

    def make(theta: Float[Tensor, " param"], given: Batch) -> tuple[list[Tensor], Program]:
        return loss.layout.typed_views(theta), lambda model: (read_off(loss, model, given[1], read), [], None)

    both = ((read, batch), (read, batch))
    loss.player.rehearse(loss, "reading", make, theta, buffers, both, random, lanes=len(loss.player.lanes))
