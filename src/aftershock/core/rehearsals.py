"""Hessian products and readings, recorded for playing back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .batches import Batch
from .graphs import GradientGraph, edges, mapped_products
from .loss import LossFunction
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
    count: int,
) -> None:
    """Record Hessian products of so many vectors, and the graph that they need, over batches of one shape.

    Of one where rows together do not give what they give alone; of as many as are recorded already, if any, whose place
    they share. Costs about ten products, once.
    """
    layout, player = loss.layout, loss.player
    vectors = layout.zeros(count) if player.vectors is None else player.vectors
    for i, row in enumerate(vectors):
        row.copy_(theta)[:: i + 2] *= -1
    GradientGraph(loss, theta, buffers, batches[0], random, WHERE).products(vectors)
    if player.vectors is None and not loss.together("product", batches[0], count):
        vectors = vectors[:1].clone()
    player.vectors, count = vectors, len(vectors)

    def make(theta: Float[Tensor, " param"], batch: Batch) -> tuple[list[Tensor], Program]:
        leaves = loss.leaves(theta)

        def program(model: nn.Module) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            value = loss.raw(model, batch, WHERE)
            curved = edges(loss.grad(value, leaves, WHERE, create_graph=True))
            if count > 1:
                return value.detach(), mapped_products(layout, curved, leaves, vectors), None
            views = layout.views(vectors[0])
            found = torch.autograd.grad(
                list(curved.values()), leaves, grad_outputs=[views[i] for i in curved], allow_unused=True
            )
            return value.detach(), [None if x is None else x[None] for x in found], None

        return leaves, program

    player.rehearse(loss, "products", make, theta, buffers, batches, random, derivative=True)
    if not player.has("products"):
        player.vectors = None


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
