"""Passes over several rows, vectors or numbers at once, recorded for playing back: each is compared with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from .batches import Batch
from .graphs import GradientGraph, edges, write_mapped
from .loss import Evaluation, Gradient, LossFunction
from .playback import TOGETHER, Program, Recording, Shape
from .played_rows import PlayedRows, run
from .randomness import RandomState
from .readings import read_off
from .reductions import norms
from .rows import APART, over_parameters, tolerance

WHERE = "a recorded pass"


def rehearse_rows(
    loss: LossFunction,
    kind: str,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Batch],
    random: RandomState,
    *,
    evaluating: bool = False,
) -> bool:
    """Record "gradients" or "values" of all rows of `loss.player.rows` over batches of one shape.

    Says whether they are played back from now on. The first and the last row are compared with rows alone, at rows far
    from each other. Costs about seven passes over all rows, once.
    """
    place, layout = loss.player.rows, loss.layout
    assert place is not None
    alone = {"gradients": "gradient", "values": "value"}[kind]

    def make(thetas: Float[Tensor, "row param"], batch: Batch) -> tuple[list[Tensor], Program]:
        mapped = over_parameters(loss, batch, WHERE, layout.row_views(thetas), {}, kind == "gradients")

        def program(model: nn.Module) -> tuple[Any, list[Tensor | None], Tensor | None]:
            losses, grads, _ = mapped(model)
            if not grads:
                return (losses, None, None), [], None
            flat = layout.zeros(len(thetas))
            for place, grad in zip(layout.row_views(flat), grads):
                place.copy_(grad)
            return (losses, flat, norms(flat)), [], None

        return layout.typed_views(thetas[0]), program

    def agrees(recording: Recording, batch: Batch) -> bool:
        leaves = Shape.of("", evaluating, batch, layout.device)[1]
        for near, far in ((0, -1), (-1, 0)):
            place.copy_(theta.expand_as(place))
            place[far].mul_(APART)
            played = run(loss, recording, buffers, leaves, random)
            for row in (near, far):
                one = loss.plain(alone, place[row], buffers, batch, random, evaluating=evaluating)
                if not _same_row(loss, played, row, one):
                    return False
        return True

    place.copy_(theta.expand_as(place))
    return loss.player.rehearse(
        loss, kind, make, place, buffers, batches, random, evaluating=evaluating, derivative=True, agrees=agrees
    )


def _same_row(loss: LossFunction, played: PlayedRows, row: int, alone: Evaluation) -> bool:
    if not bool((played.losses[row] - alone.loss).abs() <= tolerance(loss) * alone.loss.abs().clamp(min=1e-30)):
        return False
    if played.grads is None or not isinstance(alone, Gradient):
        return True
    off = norms(played.grads[row] - loss.layout.join(alone.grads))
    return played.random.same(alone.random) and bool(off <= tolerance(loss) * alone.norm.clamp(min=1e-30))


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
    if not loss.sharing.tries("product", TOGETHER):
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
    if loss.player.rehearse(loss, "reading", make, theta, buffers, both, random):
        loss.sharing.settle("reading", False)
