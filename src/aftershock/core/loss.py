"""The user's loss as a pure function of (parameters, buffers, batch, random state): values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import AftershockError, NotFinite
from .batches import Batch, added, micro_batches
from .calls import Autocast, Calls, Surroundings, accumulated
from .carried import Found, refuse_carried
from .clipping import global_norm
from .keeper import Left
from .layout import Layout
from .outside import Mark
from .playback import Player
from .randomness import RandomState
from .recordings import Program, Recording
from .reductions import finite, goes_on
from .rows import Sharing

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """A loss, and the buffers and random state that the forward pass leaves behind."""

    loss: Tensor
    buffers: dict[str, Tensor]
    random: RandomState


@dataclass(frozen=True)
class Gradient(Evaluation):
    """One gradient per parameter, `None` where the loss does not use it, and their global norm."""

    grads: list[Tensor | None]
    norm: Tensor

    @property
    def present(self) -> tuple[bool, ...]:
        return tuple(grad is not None for grad in self.grads)


class LossFunction(Calls):
    """ℓ(θ; B) and its gradients: by running the user's code, or by playing back what was recorded of it."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Batch], Tensor],
        layout: Layout,
        constants: Mapping[str, Tensor],
        autocast: Autocast,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        *,
        zeroed: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(model, loss_fn, layout, constants, autocast, place, zeroed)
        self.graph_apart: float | None = None  # how far a gradient with its graph is from the plain one; 0: no bit
        # whether that is because passes that are differentiated twice draw other dropout masks than training does:
        # torch's fused attention draws its own, and has no second derivative
        self.draws_otherwise = False
        self.frozen: list[Mark] = []  # constants that are the live model's own tensors, as they were at capture
        self.noise: float | None = None  # relative difference of a gradient that was run twice
        self.arithmetic: torch.dtype | None = None  # the coarsest that a pass computes in, once it was seen
        self.refused: AftershockError | None = None  # why a check failed; it is not drawn again
        self.sharing = Sharing(wanted=layout.device.type == "cuda" and layout.uniform)
        self.player = Player(layout, wanted=self.sharing.wanted)
        self._functions: dict[Callable[[nn.Module], Tensor], LossFunction] = {}

    def with_function(self, function: Callable[[nn.Module], Tensor]) -> LossFunction:
        """The same model under another function of its parameters; one function is looked at once."""
        if function not in self._functions:
            self._functions[function] = LossFunction(
                self.model, lambda model, _: _as_number(function(model)), self.layout, self.constants, self.autocast
            )
        found = self._functions[function]
        found.sharing.wanted, found.player = self.sharing.wanted, self.player
        return found

    def within(self, surroundings: Surroundings) -> LossFunction:
        """The same loss, with every call of the user's loss_fn made inside `surroundings(model)`."""
        other = copy.copy(self)
        other.surroundings, other._functions = surroundings, {}
        other.sharing = Sharing(wanted=False)  # what watches a pass cannot watch a mapped one
        other.player = Player(self.layout, wanted=False)  # nor a recorded one
        return other

    # -- evaluations

    def value(
        self,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batch: Batch,
        random: RandomState,
        where: str,
        *,
        evaluating: bool = False,
        wait: bool = True,
    ) -> Evaluation:
        """The loss alone: one forward pass. wait: until it is seen to be finite."""
        found = self._played("value", theta, buffers, batch, random, evaluating)
        if found is None:
            found = self.plain("value", theta, buffers, batch, random, where, evaluating=evaluating)
        if wait and not torch.isfinite(found.loss):
            raise NotFinite(f"the loss at {where} is {float(found.loss)}")
        return found

    def gradient(
        self,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batch: Batch,
        random: RandomState,
        where: str,
        *,
        evaluating: bool = False,
        wait: bool = True,
        lent: bool = False,
    ) -> Gradient:
        """The plain gradient, equal to the bit to `loss.backward()`: 1 g.

        wait: until it is seen to be finite; else whoever asks looks at its norm later, and a GPU is not held up.
        lent: it is used up before the next pass, which may write over it.
        """
        found = self._played("gradient", theta, buffers, batch, random, evaluating, lent=lent)
        if found is None:
            found = self.plain("gradient", theta, buffers, batch, random, where, evaluating=evaluating)
        assert isinstance(found, Gradient)
        if wait:
            self.refuse_not_finite(found, where)
        return found

    def together(self, kind: str, batch: Batch, rows: int, *, evaluating: bool = False) -> bool:
        """Whether so many rows of a kind of work over this batch are computed together: in a large model not where one
        of them alone is recorded or keeps a GPU busy. Hessian products and pools are as busy as a gradient."""
        shared = self.sharing.tries(kind, rows)
        if not shared or not self.player.pays:
            return shared
        single = {"product": "gradient", "pool": "gradient"}.get(kind, kind)
        found, _ = self.player.looked_at(self.loss_fn, single, self.place(batch), evaluating=evaluating)
        return found is None or not (found.busy or (found.recordings and kind != "product"))

    def recorded(self, kind: str, batch: Batch, *, evaluating: bool = False) -> tuple[Recording, list[Tensor]] | None:
        """The recording that plays this pass over batches of this shape, and what is copied into it; None where there
        is none. It is not to be kept: it may be given back."""
        if not self.player.recordings:
            return None
        found, inputs = self.player.looked_at(self.loss_fn, kind, self.place(batch), evaluating=evaluating)
        lane = self.player.lanes.turn
        return None if found is None or len(found.recordings) <= lane else (found.recordings[lane], inputs)

    def spread(
        self, kind: str, batch: Batch, count: int, run: Callable[[int], T], *, evaluating: bool = False
    ) -> list[T]:
        """run(0) … run(count - 1), of which each makes such a pass: beside each other where it is recorded in lanes."""
        known, lanes = None, self.player.lanes
        if count > 1 and len(lanes) > 1:
            known, _ = self.player.looked_at(self.loss_fn, kind, self.place(batch), evaluating=evaluating)
        most = 1 if known is None else len(known.recordings)
        found = lanes.spread(count, run, most=most)
        if most > 1:  # made on lanes, and used on the current stream from now on
            grads = [grad for each in found if isinstance(each, Gradient) for grad in each.grads]
            for grad in grads:
                if grad is not None:
                    grad.record_stream(torch.cuda.current_stream(self.layout.device))
        return found

    def _played(
        self,
        kind: str,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batch: Batch,
        random: RandomState,
        evaluating: bool,
        *,
        lent: bool = False,
    ) -> Evaluation | None:
        """The same by a recording, where there is one for batches of this shape."""
        found = self.recorded(kind, batch, evaluating=evaluating)
        if found is None:
            return None
        played = found[0].play(theta, buffers, found[1], random, lent=lent)
        if played.norm is None:
            return Evaluation(played.loss, played.buffers, played.random)
        return Gradient(played.loss, played.buffers, played.random, played.grads, played.norm)

    def rehearse(
        self,
        kind: str,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batches: Sequence[Batch],
        random: RandomState,
        *,
        evaluating: bool = False,
        lanes: int = 1,
    ) -> bool:
        """Record "value" or "gradient" over batches of one shape; says whether it is played back from now on."""

        def make(theta: Float[Tensor, " param"], batch: Batch) -> tuple[list[Tensor], Program]:
            leaves = self.leaves(theta)
            return leaves, self.program(kind, leaves, batch, "a recorded pass")

        return self.player.rehearse(
            self, kind, make, theta, buffers, batches, random, evaluating=evaluating, lanes=lanes
        )

    def plain(
        self,
        kind: str,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batch: Batch,
        random: RandomState,
        where: str = "a plain pass",
        *,
        evaluating: bool = False,
    ) -> Evaluation:
        """A "value" or a "gradient" by running the user's code; nobody has looked whether it is finite."""
        leaves = self.leaves(theta)
        program = self.program(kind, leaves, batch, where)
        if kind == "value":
            (loss, _, _), after, random = self.call(leaves, buffers, random, program, evaluating=evaluating)
            return Evaluation(loss, after, random)
        left: list[Left] = []
        (loss, grads, norm), after, drawn = self.call(
            leaves, buffers, random, program, evaluating=evaluating, left=left
        )

        def again(begin: Callable[[], None]) -> tuple[Found, list[Left]]:
            then: list[Left] = []
            found = self.call(leaves, buffers, random, program, evaluating=evaluating, left=then, begin=begin)[0]
            return found[:2], then

        if fresh := self.keeper.not_judged(left):
            refuse_carried(fresh, (loss, grads), again)
            self.keeper.settle(fresh)
        return Gradient(loss, after, drawn, grads, norm)

    def program(
        self, kind: str, leaves: Sequence[Tensor], batch: Batch, where: str, *, create_graph: bool = False
    ) -> Program:
        """What a pass computes with the model: its loss and, where wanted, its gradient and that one's norm."""

        def value(model: nn.Module) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            # parameters and gradients as in training: a penalty differentiates inside, a decay sums what is trainable
            micro = micro_batches(batch, self.layout.device)
            return added([share(self.raw(model, b, where)).detach() for b, share in micro]), [], None

        def gradient(model: nn.Module) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            total: Tensor | None = None
            grads: list[Tensor | None] = [None] * len(leaves)
            for b, share in micro_batches(batch, self.layout.device):
                loss = share(self.raw(model, b, where))
                scaled = self.grad(loss, leaves, where, create_graph=create_graph)
                found = map(accumulated, self.unscaled(scaled), leaves)
                for i, grad in enumerate(found):
                    before = grads[i]
                    grads[i] = grad if before is None else before if grad is None else before + grad
                total = loss.detach() if total is None else total + loss.detach()
            assert total is not None
            return total, grads, global_norm(grads, self.layout.model_order)

        return value if kind == "value" else gradient

    def refuse_not_finite(self, found: Gradient, where: str) -> None:
        """Raise `NotFinite` unless loss and gradient are finite: the one wait for a GPU."""
        if all(goes_on(found.loss, found.norm)):
            return
        if not torch.isfinite(found.loss):
            raise NotFinite(f"the loss at {where} is {float(found.loss)}")
        bad = [n for n, g in zip(self.layout.names, found.grads) if g is not None and not finite(g)]
        raise NotFinite(f"the gradient of {bad[0] if bad else 'the model'} at {where} is not finite")


def _as_number(value: Any) -> Any:
    """A probe may count: whole numbers and Python's become floating-point ones."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else value.double()
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, int | float) else value
