"""Numbers that a function reads off the model on one batch, at many parameter sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .batches import Batch
from .loss import LossFunction
from .mapping import mapped_over
from .randomness import RandomState
from .rows import apart, tolerance, tried


def row_readings(
    loss: LossFunction,
    thetas: Float[Tensor, "row param"],
    buffers: Sequence[Mapping[str, Tensor]],
    batch: Batch,
    read: Callable[[nn.Module, Batch], Float[Tensor, " reading"]],
    random: RandomState,
) -> Float[Tensor, "row reading"]:
    """Several numbers of the model on one batch at every row, in float64 on the device, which nobody has waited for.
    A forward pass a row, or less."""

    placed = loss.place(batch)

    def numbers(model: nn.Module) -> Float[Tensor, " reading"]:
        return read_off(loss, model, placed, read)

    def alone(theta: Float[Tensor, " param"], i: int) -> Float[Tensor, " reading"]:
        recorded = loss.recorded("reading", (read, placed))
        if recorded is not None:
            return recorded[0].play(theta, buffers[i], recorded[1], random).loss
        found: Tensor = loss.call(loss.layout.typed_views(theta), buffers[i], random, numbers)[0]
        return found

    def one(own: list[Tensor], held: dict[str, Tensor]) -> Float[Tensor, " reading"]:
        with loss.places.holding({**dict(zip(loss.layout.names, own)), **held}):
            return numbers(loss.model)

    def mapped(rows: Float[Tensor, "row param"], held: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, "row reading"]:
        stacked = {name: torch.stack([each[name] for each in held]) for name in held[0]}
        own = list(loss.layout.row_views(rows))
        views = loss.layout.typed_views(rows[0])
        work = mapped_over((0, 0), one)
        found: Tensor = loss.call(views, held[0], random, lambda model: work(own, stacked), derivative=True)[0]
        return found

    def agrees() -> bool:
        far = apart(thetas)
        one, other = alone(far[1], -1), mapped(far, [buffers[0], buffers[-1]])[1]
        return torch.allclose(other, one, rtol=tolerance(loss), atol=0.0)

    if loss.together("reading", (read, placed), len(thetas)):
        pieces = tried(loss, "reading", agrees, lambda s: mapped(thetas[s], buffers[s]), len(thetas))
        if pieces is not None:
            return torch.cat(pieces)
    return torch.stack(loss.spread("reading", (read, placed), len(thetas), lambda i: alone(thetas[i], i)))


def read_off(
    loss: LossFunction, model: nn.Module, batch: Batch, read: Callable[[nn.Module, Batch], Tensor]
) -> Float[Tensor, " reading"]:
    with torch.no_grad(), loss.surroundings(model), loss.forward():
        return read(model, batch).double()
