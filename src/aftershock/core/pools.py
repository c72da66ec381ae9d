"""One parameter set on many batches: the gradients of a pool, in one call where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .batches import Accumulated, Batch, same_batch, same_value
from .mapping import mapped_over
from .randomness import RandomState
from .reductions import equal
from .reductions import finite as all_finite
from .rows import Mapped, MappedProgram, finite, loss_at, same_gradient, tried, unscaled
from .structure import flatten

if TYPE_CHECKING:
    from .loss import Gradient, LossFunction


@dataclass(frozen=True)
class Pool:
    """Batches whose gradients at one θ are asked for: 1 g each alone, a fifth together, or in lanes, where batches are
    small.

    where: what a batch is called. present: which parameters the control's batch uses, where that is known.
    """

    loss: LossFunction
    theta: Float[Tensor, " param"]
    buffers: Mapping[str, Tensor]
    batches: Sequence[Batch]
    random: RandomState
    where: Callable[[int], str]
    present: Sequence[bool] | None

    def gradients(self) -> Iterator[Gradient]:
        """One after another. Alone, each is computed when it is asked for: one that is let go leaves the next its
        memory, which is in the cache."""
        together = self._together()
        if together is None:
            yield from self._alone()
            return
        found = [gradient for piece in together[0] for gradient in piece.split(self._everything)]
        del together
        while found:
            gradient = found.pop(0)
            assert gradient is not None  # all of them are finite
            yield gradient

    def write(
        self, rows: Float[Tensor, "row param"], tick: Callable[[], None] = lambda: None
    ) -> tuple[Float[Tensor, " row"], list[tuple[bool, ...]]]:
        """All of them into rows of flat vectors, whose padding is zero: their norms, and which parameters each uses."""

        def write(row: Float[Tensor, " param"], gradient: Gradient) -> tuple[Tensor, tuple[bool, ...]]:
            if not all(gradient.present):
                row.zero_()
            self.loss.layout.write(row, gradient.grads)
            tick()
            return gradient.norm, gradient.present

        together = self._together()
        if together is None:
            # not a loop, which would hold a gradient while the next is made: that one's memory is not in the cache
            norms, present = zip(*map(write, rows, self._alone()))
            return torch.stack(norms), list(present)
        first = 0
        for piece in together[0]:
            places = self.loss.layout.row_views(rows[first : first + len(piece.losses)])
            torch._foreach_copy_(places, piece.grads)
            first += len(piece.losses)
        for _ in self.batches:
            tick()
        return together[1], [self._everything] * len(self.batches)

    @property
    def _everything(self) -> tuple[bool, ...]:
        return (True,) * len(self.loss.layout.names)

    def _together(self) -> tuple[list[Mapped], Float[Tensor, " row"]] | None:
        """In rows, and their norms; None where that does not pay, or one of them is not finite: alone it says which."""
        loss, batches = self.loss, self.batches
        stackable = bool(batches) and self.present is not None and all(self.present) and _alike(batches)
        if not stackable or not loss.together("pool", batches[0], len(batches)):
            return None
        if not loss.sharing.compared("pool") and self._pair is None:
            return None  # not known yet
        pieces = tried(loss, "pool", self._agrees, self._mapped, len(batches))
        if pieces is None:
            return None
        norms = torch.cat([piece.norms(self._everything) for piece in pieces])
        return (pieces, norms) if all_finite(norms + torch.cat([piece.losses for piece in pieces])) else None

    @property
    def _pair(self) -> tuple[int, int] | None:
        """A batch, and the last one where it is another: of equal ones nothing shows that one leaks into the other."""
        last = len(self.batches) - 1
        return next(((i, last) for i in range(last) if not same_batch(self.batches[i], self.batches[last])), None)

    def _agrees(self) -> bool:
        assert self._pair is not None
        together = self._mapped_of([self.batches[i] for i in self._pair], 0).split(self._everything)[1]
        return same_gradient(self.loss, together, finite([self._one(self._pair[1])])[0])

    def mapped(self) -> object:
        """In rows, whether or not they agree with batches alone: what that takes."""
        return self._mapped(slice(0, len(self.batches))).split(self._everything)

    def _mapped(self, some: slice) -> Mapped:
        return self._mapped_of(self.batches[some], some.start)

    def _mapped_of(self, batches: Sequence[Batch], first: int) -> Mapped:
        return _mapped_pool(self.loss, self.theta, self.buffers, batches, self.random, self.where(first))

    def _one(self, i: int) -> Gradient:
        return self.loss.gradient(self.theta, self.buffers, self.batches[i], self.random, self.where(i), wait=False)

    def _alone(self) -> Iterator[Gradient]:
        loss, size = self.loss, max(1, len(self.loss.player.lanes))
        for first in range(0, len(self.batches), size):
            places = range(first, min(first + size, len(self.batches)))
            found = loss.spread("gradient", self.batches[0], len(places), lambda i: self._one(places[i]))  # noqa: B023  (called at once)
            for i, gradient in zip(places, finite(found)):
                if gradient is None:
                    loss.refuse_not_finite(found[i - first], self.where(i))
            del gradient
            while found:
                yield found.pop(0)


def _alike(batches: Sequence[Batch]) -> bool:
    """Whether batches differ in the numbers of their tensors only, so that they stack."""
    if any(isinstance(batch, Accumulated) for batch in batches):
        return False
    (first, spec), *others = map(flatten, batches)

    def same(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return same_value(x, y)
        return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)

    return all(spec == other and all(map(same, first, leaves)) for leaves, other in others)


def _mapped_pool(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Batch],
    random: RandomState,
    where: str,
) -> Mapped:
    moving = {name: torch.stack([buffers[name]] * len(batches)) for name in loss.moving if name in buffers}
    views = loss.layout.typed_views(theta)
    program = _over_batches(loss, batches, where, views, moving)
    static = {name: b for name, b in buffers.items() if name not in moving}
    (losses, grads, after), _, random = loss.call(views, buffers, random, program, derivative=True)
    return Mapped(loss, losses, grads, after, static, random)


def _over_batches(
    loss: LossFunction, batches: Sequence[Batch], where: str, parameters: Sequence[Tensor], moving: dict[str, Tensor]
) -> MappedProgram:
    """Gradients of many batches at one θ."""
    placed = [flatten(loss.place(batch)) for batch in batches]
    spec = placed[0][1]
    stacked, dims = _stacked([leaves for leaves, _ in placed])

    def one(own: list[Tensor], held: dict[str, Tensor], leaves: list[Any]) -> Any:
        return loss_at(loss, own, held, spec.unflatten(leaves), where)

    def program(model: nn.Module) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        work = mapped_over((None, 0, dims), torch.func.grad_and_value(one, has_aux=True))
        grads, (values, state) = work(list(parameters), moving, stacked)
        return *unscaled(loss, values.detach(), grads), {n: b.detach() for n, b in state.items()}

    return program


def _stacked(batches: Sequence[Sequence[Any]]) -> tuple[list[Any], list[int | None]]:
    """Leaf by leaf, a tensor of all batches and 0; what all of them share (a padding mask of ones) once and None.

    A model may look at what is shared, as attention masks are looked at to pick a kernel; a mapped tensor has no
    value to look at.
    """
    stacked: list[Any] = []
    dims: list[int | None] = []
    for column in zip(*batches):
        whole = torch.stack(column) if isinstance(column[0], Tensor) else None
        mapped = whole is not None and not equal(whole, column[0].expand_as(whole))
        stacked.append(whole if mapped else column[0])
        dims.append(0 if mapped else None)
    if all(dim is None for dim in dims):  # the same batch over and over
        tensors = [isinstance(leaf, Tensor) for leaf in stacked]
        stacked = [torch.stack([x] * len(batches)) if is_tensor else x for x, is_tensor in zip(stacked, tensors)]
        dims = [0 if is_tensor else None for is_tensor in tensors]
    return stacked, dims
