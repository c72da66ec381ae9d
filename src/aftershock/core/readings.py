"""Several numbers of a model at once, at many parameter sets: rows of readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .batches import Batch
from .loss import LossFunction
from .randomness import RandomState
from .rows import apart, mapped_over, tolerance, tried

READING = "reading"  # a kind of recorded pass


def row_readings(
    loss: LossFunction,
    thetas: Float[Tensor, "row param"],
    buffers: Sequence[Mapping[str, Tensor]],
    batch: Batch,
    read: Callable[[nn.Module, Batch], Float[Tensor, " reading"]],
    random: RandomState,
) -> Float[Tensor, "row reading"]:
    """Several numbers of the model on one batch at every row, in float64 on the CPU. A forward pass a row, or less."""

    def numbers(model: nn.Module) -> Float[Tensor, " reading"]:
        with torch.no_grad(), loss.surroundings(model), loss.forward():
            return read(model, loss.place(batch)).double()

    def alone(theta: Float[Tensor, " param"], i: int) -> Float[Tensor, " reading"]:
        found = loss.player.find(READING, loss.place(batch), evaluating=False) if loss.player.recordings else None
        if found is not None:
            return found[0].play(theta, buffers[i], found[1], random).loss.cpu()
        return loss.call(loss.layout.typed_views(theta), buffers[i], random, numbers)[0].cpu()

    def one(own: list[Tensor], held: dict[str, Tensor]) -> Float[Tensor, " reading"]:
        inside = {f"model.{name}": p for name, p in zip(loss.layout.names, own)}
        inside |= {f"model.{name}": b for name, b in held.items()}
        return torch.func.functional_call(loss.wrapper, inside, (numbers,), tie_weights=True)

    def mapped(rows: Float[Tensor, "row param"], held: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, "row reading"]:
        stacked = {name: torch.stack([each[name] for each in held]) for name in held[0]}
        own = list(loss.layout.row_views(rows))
        views = loss.layout.typed_views(rows[0])
        work = mapped_over((0, 0), one)
        return loss.call(views, held[0], random, lambda model: work(own, stacked), derivative=True)[0].cpu()

    def agrees() -> bool:
        far = apart(thetas)
        one, other = alone(far[1], -1), mapped(far, [buffers[0], buffers[-1]])[1]
        return torch.allclose(other, one, rtol=tolerance(loss), atol=0.0)

    if loss.sharing.tries("reading", len(thetas)):
        pieces = tried(loss, "reading", agrees, lambda s: mapped(thetas[s], buffers[s]), len(thetas))
        if pieces is not None:
            return torch.cat(pieces)
    return torch.stack([alone(thetas[i], i) for i in range(len(thetas))])


def rehearse_reading(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batch: Batch,
    read: Callable[[nn.Module, Batch], Float[Tensor, " reading"]],
    random: RandomState,
) -> bool:
    """Record a reading, which is then played back for every batch of this shape; what `read` depends on is in it."""

    def make(theta: Float[Tensor, " param"], batch: Batch) -> Any:
        def program(model: nn.Module) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            with torch.no_grad(), loss.surroundings(model), loss.forward():
                return read(model, batch).double(), [], None

        return loss.layout.typed_views(theta), program

    return loss.player.rehearse(loss, READING, make, theta, buffers, (batch, batch), random)
