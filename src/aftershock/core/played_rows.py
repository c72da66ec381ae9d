"""Many parameter sets on one batch by a single recorded pass, which reads them where they live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from .batches import Batch
from .playback import Recording
from .randomness import RandomState

if TYPE_CHECKING:
    from .loss import Gradient, LossFunction


@dataclass(frozen=True)
class PlayedRows:
    """What one recorded pass over many rows gave, in the recording's own memory: it is gone with the next pass."""

    loss: LossFunction
    losses: Float[Tensor, " row"]
    grads: Float[Tensor, "row param"] | None
    norms: Float[Tensor, " row"] | None
    random: RandomState

    def split(self, buffers: Sequence[Mapping[str, Tensor]], present: Sequence[bool]) -> list[Gradient | None]:
        """Row by row, as plain gradients are; nobody has looked whether they are finite."""
        from .loss import Gradient

        assert self.grads is not None
        assert self.norms is not None
        views, out = self.loss.layout.views, list[Gradient | None]()
        for held, value, grad, norm in zip(buffers, self.losses, self.grads, self.norms):
            own = [view if ok else None for view, ok in zip(views(grad), present)]
            out.append(Gradient(value, dict(held), self.random, own, norm))
        return out


def played(
    loss: LossFunction,
    kind: str,
    thetas: Float[Tensor, "row param"],
    buffers: Mapping[str, Tensor],
    batch: Batch,
    random: RandomState,
    *,
    evaluating: bool = False,
) -> PlayedRows | None:
    """One recorded pass over the rows, where they lie in its place and it was recorded for such batches."""
    if not loss.player.in_place(thetas):
        return None
    found = loss.player.find(kind, loss.place(batch), evaluating=evaluating)
    return None if found is None else run(loss, found[0], buffers, found[1], random)


def run(
    loss: LossFunction,
    recording: Recording,
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    random: RandomState,
) -> PlayedRows:
    place = loss.player.rows
    assert place is not None
    random = recording.run(place, buffers, inputs, random)
    losses, grads, sizes = recording.result
    return PlayedRows(loss, losses, grads, sizes, random)
