"""The exact step map of training, equal to the bit to torch's, and its linearization.

The record owns its time index: a `Step` knows its batch, random state, hyperparameters and what was seen of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from ..errors import UnsupportedModel
from .adamw import Hyper, adamw_step
from .batches import Batch
from .clipping import Clip, clip_, global_norm, scale_
from .graphs import GradientGraph, graph_apart
from .linear_step import LinearStep
from .loss import Gradient, LossFunction
from .randomness import RandomState
from .state import JointState

NOT_TAKEN = Clip(math.nan, 1.0)


@dataclass(frozen=True)
class Step:
    """One update of the path: everything that made it, and what was seen of it."""

    index: int  # position in the path, from 0
    batch: Batch
    random: RandomState  # before the forward pass
    hypers: tuple[Hyper, ...]
    max_norm: float | None
    own_random: bool = False  # recorded, rather than left by the step before
    bounded: bool = False  # updates divided by their RMS, where that is larger than one
    loss: float = math.nan
    clip: Clip = NOT_TAKEN
    present: tuple[bool, ...] | None = None  # which parameters had a gradient, once the step was taken

    @property
    def where(self) -> str:
        return f"step {self.index} (batch {self.index} of the path)"


@dataclass(frozen=True)
class Taken:
    """A step that was launched, with what it left of randomness: `settle` waits for its numbers."""

    step: Step
    loss: Tensor
    norm: Tensor
    factor: Tensor | float
    present: tuple[bool, ...]
    random: RandomState

    def settle(self) -> Step:
        """The step as it was seen."""
        clip = Clip(float(self.norm), float(self.factor))
        return replace(self.step, loss=float(self.loss), clip=clip, present=self.present)


@dataclass(frozen=True)
class Linearized:
    """A step's derivative at the control: closed form (`linear`) and Hessian products (`graph`)."""

    step: Step
    linear: LinearStep
    graph: GradientGraph


@dataclass(frozen=True)
class Heads:
    """Parameters that another batch must use, and those that it may: others' gradients would then be zeros or None,
    as the loop leaves them, which is not known."""

    must: frozenset[int] = frozenset()
    may: frozenset[int] | None = None

    def refuse(self, present: Sequence[bool], names: Sequence[str], where: str) -> None:
        used = {i for i, ok in enumerate(present) if ok}
        odd = sorted(self.must - used) + sorted(used - self.may if self.may is not None else ())
        if odd:
            raise UnsupportedModel(
                f"{where} uses other parameters than the path does ({names[odd[0]]!r}), and what the loop does with a "
                'parameter that a step does not use is not known. Say capture(…, unused="skip") after zero_grad(), '
                "which drops gradients; where it leaves zeros, take batches that use the same parameters"
            )


class Dynamics:
    """f_s: the exact step map, from any state, and its linearization."""

    def __init__(self, loss: LossFunction) -> None:
        self.loss = loss
        self.layout = loss.layout
        self.heads = Heads()

    def advance(self, step: Step, state: JointState, *, consume: bool = False) -> tuple[JointState, Step, RandomState]:
        """x_{s+1} = f_s(x_s), equal to the bit to training: 1 g and one elementwise pass.

        `consume` writes into the tensors of `state`, which is then gone.
        """
        given = (state.theta, state.buffers, step.batch, step.random, step.where)
        return self.advance_with(self.loss.gradient(*given, lent=True), step, state, consume=consume)

    def launch(self, step: Step, state: JointState, *, consume: bool = False) -> tuple[JointState, Taken]:
        """The same without waiting for a GPU; nobody has looked whether the step's numbers are finite."""
        given = (state.theta, state.buffers, step.batch, step.random, step.where)
        return self.take(self.loss.gradient(*given, wait=False, lent=True), step, state, consume=consume)

    def advance_with_graph(
        self, step: Step, state: JointState, plain: Gradient | None = None
    ) -> tuple[JointState, Taken, Linearized]:
        """The same, keeping the gradient's graph for later products; `plain` is the gradient where it is known."""
        graph = self.graph(step, state, plain)
        found = self.plain_gradient(graph, step, state, plain)
        if step.max_norm is not None:  # clipping writes into it
            found = replace(found, grads=[None if grad is None else grad.clone() for grad in found.grads])
        after, taken = self.take(found, step, state, consume=False)
        seen = taken.settle()
        linear = self.linear_step(seen, state, graph.raw, graph.present)
        return after, taken, Linearized(seen, linear, graph)

    def plain_gradient(
        self, graph: GradientGraph, step: Step, state: JointState, plain: Gradient | None = None
    ) -> Gradient:
        """The gradient that training would have, from a graph that is there anyway where that is the same.

        `create_graph` and the math attention kernel may change a gradient by an ulp, and the control's must be the
        plain one.
        """
        if graph.plain or self.loss.graph_apart == 0:
            return graph.gradient
        return plain or self.loss.gradient(state.theta, state.buffers, step.batch, step.random, step.where)

    def graph(self, step: Step, state: JointState, plain: Gradient | None = None) -> GradientGraph:
        """The gradient at `state` with its graph. Where that draws other masks than training, which the check has found
        out or the first one does, it holds the plain gradient: 1 g more."""
        given = (state.theta, state.buffers, step.batch, step.random, step.where)
        graph = GradientGraph(self.loss, *given)
        graph_apart(self.loss, *given, plain, graph)
        if not graph.plain and self.loss.draws_otherwise:
            graph.hold_plain(plain or self.loss.gradient(*given))
        return graph

    def advance_with(
        self, found: Gradient, step: Step, state: JointState, *, consume: bool = False
    ) -> tuple[JointState, Step, RandomState]:
        """The same, having waited for its numbers."""
        after, taken = self.take(found, step, state, consume=consume)
        return after, taken.settle(), found.random

    def take(
        self, found: Gradient, step: Step, state: JointState, *, consume: bool = False
    ) -> tuple[JointState, Taken]:
        """The same with a gradient that is already there, which is clipped in place."""
        factor = scale_(found.grads, found.norm, step.max_norm)
        new = adamw_step(self.layout, state, found.grads, step.hypers, consume=consume, bounded=step.bounded)
        taken = Taken(step, found.loss, found.norm, factor, found.present, found.random)
        return replace(new, buffers=found.buffers), taken

    def apply(
        self, step: Step, state: JointState, raw: Float[Tensor, " param"], present: Sequence[bool]
    ) -> tuple[JointState, Clip]:
        """The same step with another raw gradient: one elementwise pass. Buffers stay as they are."""
        own = raw if step.max_norm is None else raw.clone()  # clipping writes into it
        views = [v if ok else None for v, ok in zip(self.layout.typed_views(own), present)]
        clip = clip_(views, global_norm(views, self.layout.model_order), step.max_norm)
        return adamw_step(self.layout, state, views, step.hypers), clip

    def linearize(self, step: Step, state: JointState) -> Linearized:
        """A_s at `state`: about 1.2 g, then 1 to 2 g per vector."""
        graph = self.graph(step, state)
        return Linearized(step, self.linear_step(step, state, graph.raw, graph.present), graph)

    def linear_step(
        self, step: Step, state: JointState, raw: Float[Tensor, " param"], present: Sequence[bool]
    ) -> LinearStep:
        """The closed-form part alone, where the raw gradient is already known."""
        return LinearStep.at(self.layout, state, raw, present, step.clip, step.hypers)
