"""A gradient with its graph, from which any number of Hessian products follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..errors import OutOfMemory
from .batches import Accumulated, Batch, micro_batches
from .calls import accumulated
from .clipping import global_norm
from .derivatives import derivative_error
from .layout import Layout
from .loss import Gradient, LossFunction
from .mapping import mapped_over
from .memory import ran_out
from .randomness import RandomState
from .recordings import Recording
from .reductions import gradients_apart, norms
from .rows import tolerance


class GradientGraph:
    """A gradient with its graph: `gradient`, then `products(vectors)` at about 1 to 2 g each.

    The gradient is kept once, as the flat vector `raw`; its graph is held by its edges. A batch of several
    micro-batches keeps no graph between calls; its graphs are rebuilt one at a time, so that memory does not grow
    with their number. A recorded pass rebuilds it too, which on a GPU takes less time than launching products anew;
    where it is given back meanwhile, the graph is rebuilt for every call.
    """

    def __init__(
        self,
        loss: LossFunction,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        batch: Batch,
        random: RandomState,
        where: str,
    ) -> None:
        self._function = loss
        self._arguments = (buffers, random)
        self._where = where
        self._batch = batch
        self._leaves = loss.leaves(theta)
        self._graph: dict[int, GradientEdge] | None = None
        self._at = (theta, theta._version)
        if isinstance(batch, Accumulated) or self._recorded() is not None:
            found = loss.gradient(theta, buffers, batch, random, where)
        else:
            (value, grads), after, random = self._run(lambda model: self._build(model, batch, lambda x: x))
            self._graph = edges(grads)
            plain = list(map(accumulated, loss.unscaled(grads), self._leaves))
            found = Gradient(value, after, random, plain, global_norm(plain, loss.layout.model_order))
            loss.refuse_not_finite(found, where)
            del grads, plain
        self.plain = self._graph is None  # the gradient is training's own: that of a graph may round otherwise
        self._hold(found)

    def _hold(self, found: Gradient) -> None:
        layout = self._function.layout
        self.raw: Float[Tensor, " param"] = layout.join(found.grads)  # ĝ
        views = layout.typed_views(self.raw)
        self.gradient = replace(found, grads=[v if ok else None for v, ok in zip(views, found.present)])

    def hold_plain(self, plain: Gradient) -> None:
        """Training's own gradient in place of the graph's."""
        self._hold(plain)
        self.plain = True

    @property
    def present(self) -> tuple[bool, ...]:
        return tuple(grad is not None for grad in self.gradient.grads)

    def products(self, vectors: Float[Tensor, "change param"]) -> Float[Tensor, "change param"]:
        """H u for every row u: together where that pays, else one after another."""
        theta, version = self._at
        if self._graph is None and theta._version != version:
            raise RuntimeError("the state of a linearized step was overwritten while it was in use")
        out = torch.zeros_like(vectors)
        if (recorded := self._recorded()) is not None:
            self._play(vectors, out, *recorded)
        else:
            self._run_products(vectors, out)
        scale = self._function.autocast.scale  # of the gradient that the graph is of, and so of its products
        return out if scale == 1.0 else out.mul_(1 / scale)

    def _run_products(self, vectors: Float[Tensor, "change param"], out: Float[Tensor, "change param"]) -> None:
        def program(model: nn.Module) -> None:
            if self._graph is not None:
                self._write_products(self._graph, vectors, out)
                return
            for batch, share in micro_batches(self._batch, self._function.layout.device):
                _, grads = self._build(model, batch, share)
                part = torch.zeros_like(vectors)
                self._write_products(edges(grads), vectors, part)
                out.add_(part)

        self._run(program)

    def add_products_(self, out: Float[Tensor, "change param"], vectors: Float[Tensor, "change param"]) -> None:
        """out ← out + H u for every row u; one after another, no product is a vector of its own."""
        graph, alone = self._graph, not self._function.together("product", self._batch, len(vectors))
        scaled = self._function.autocast.scale != 1.0
        if graph is None or not alone or not self._function.layout.uniform or scaled:
            out.add_(self.products(vectors))
            return

        def program(model: nn.Module) -> None:
            for u, row in zip(vectors, out):
                self._add_alone(graph, u, row)

        self._run(program)

    def pieces(self, count: int) -> list[slice]:
        """So many rows as they are computed: a few at a time where products of the path are played back, since room for
        no more is planned, whatever the shape of this batch; else at once."""
        vectors = self._function.player.vectors
        size = max(count, 1) if vectors is None else len(vectors)
        return [slice(first, first + size) for first in range(0, count, size)]

    def _recorded(self) -> tuple[Recording, list[Tensor]] | None:
        return None if self._graph is not None else self._function.recorded("products", self._batch)

    def _play(
        self,
        vectors: Float[Tensor, "change param"],
        out: Float[Tensor, "change param"],
        recording: Recording,
        inputs: list[Tensor],
    ) -> None:
        given, (buffers, random) = self._function.player.vectors, self._arguments
        assert given is not None
        for some in self.pieces(len(vectors)):
            count = len(vectors[some])
            given[:count].copy_(vectors[some])
            given[count:].zero_()
            recording.run(self._at[0], buffers, inputs, random)
            places = zip(self._function.layout.row_views(out[some]), recording.grads)
            pairs = [(place, found[:count]) for place, found in places if found is not None]
            torch._foreach_copy_([place for place, _ in pairs], [found for _, found in pairs])

    def _run(self, program: Callable[[nn.Module], Any]) -> tuple[Any, dict[str, Tensor], RandomState]:
        buffers, random = self._arguments
        return self._function.call(self._leaves, buffers, random, program, derivative=True)

    def _build(
        self, model: nn.Module, batch: Batch, share: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        loss = share(self._function.raw(model, batch, self._where))
        return loss.detach(), list(self._function.grad(loss, self._leaves, self._where, create_graph=True))

    def _write_products(
        self, curved: Mapping[int, GradientEdge], vectors: Float[Tensor, "change param"], out: Tensor
    ) -> None:
        if not curved:
            return
        together = self._function.together("product", self._batch, len(vectors))
        if together and self._write_together(curved, vectors, out):
            return
        for u, row in zip(vectors, out):
            self._add_alone(curved, u, row)

    def _write_together(
        self, curved: Mapping[int, GradientEdge], vectors: Float[Tensor, "change param"], out: Tensor
    ) -> bool:
        """Many vectors through one backward pass; says whether this model allows it and agrees with one alone."""
        sharing = self._function.sharing
        if not sharing.compared("product"):
            try:
                sharing.settle("product", self._agrees(curved, vectors[0]))
            except Exception as error:  # no batching rule for an operation of this model
                if ran_out(error):
                    return False  # not known yet
                sharing.settle("product", False)
        if not sharing.tries("product", len(vectors)):
            return False
        try:
            sharing.in_pieces(len(vectors), lambda some: self._write_batched(curved, vectors[some], out[some]))
        except OutOfMemory:
            raise
        except Exception:  # a batch whose operations cannot be batched, though others' could
            return False
        return True

    def _write_batched(
        self,
        curved: Mapping[int, GradientEdge],
        vectors: Float[Tensor, "change param"],
        out: Float[Tensor, "change param"],
    ) -> bool:
        with _explained():
            found = mapped_products(self._function.layout, curved, self._leaves, vectors)
        for place, values in zip(self._function.layout.row_views(out), found):
            if values is not None:
                place.copy_(values)
        return True

    def _agrees(self, curved: Mapping[int, GradientEdge], beside: Float[Tensor, " param"]) -> bool:
        """Whether a vector that no row resembles has the same product together with another as alone."""
        vector = self._function.layout.join([leaf.detach() for leaf in self._leaves])
        vector[1::2] *= -1
        together, alone = torch.zeros_like(vector).repeat(2, 1), torch.zeros_like(vector)
        self._write_batched(curved, torch.stack([beside, vector]), together)
        self._add_alone(curved, vector, alone)
        return bool(norms(together[1] - alone) <= tolerance(self._function) * norms(alone).clamp(min=1e-30))

    def _add_alone(
        self, curved: Mapping[int, GradientEdge], vector: Float[Tensor, " param"], out: Float[Tensor, " param"]
    ) -> None:
        """One product, parameter by parameter onto its place in `out`: it is never there twice.

        In shorter types than the flat vector's `out` must be zero.
        """
        if not curved:
            return
        layout = self._function.layout
        views, places = layout.typed_views(vector), layout.typed_views(out)
        try:
            for leaf, place in zip(self._leaves, places):
                leaf.grad = place
            with _explained():
                torch.autograd.backward(
                    list(curved.values()), [views[i] for i in curved], retain_graph=True, inputs=self._leaves
                )
        finally:
            for leaf in self._leaves:
                leaf.grad = None
        if not layout.uniform:
            layout.write(out, places)


def graph_gradient(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batch: Batch,
    random: RandomState,
    where: str,
) -> list[Tensor | None]:
    """The gradient of passes that are differentiated twice: 1.2 g. It may round otherwise than the plain one, and draw
    other dropout masks."""
    leaves = loss.leaves(theta)
    program = loss.program("gradient", leaves, batch, where, create_graph=True)
    (_, grads, _), _, _ = loss.call(leaves, buffers, random, program, derivative=True)
    return grads


def graph_apart(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batch: Batch,
    random: RandomState,
    where: str,
    plain: Gradient | None = None,
    graph: GradientGraph | None = None,
) -> float:
    """How far that is from the plain one, once for a model: 2 g, and 1 less for each of them that is there already."""
    if loss.graph_apart is None:
        given = (theta, buffers, batch, random, where)
        plain = plain or loss.gradient(*given)
        known = None if graph is None or graph.plain else graph.gradient.grads
        loss.graph_apart = gradients_apart(plain.grads, graph_gradient(loss, *given) if known is None else known)
        draws = not plain.random.same(random)  # what draws nothing and differs is another model, which the check finds
        loss.draws_otherwise = draws and loss.graph_apart > tolerance(loss)
    return loss.graph_apart


def mapped_products(
    layout: Layout,
    curved: Mapping[int, GradientEdge],
    leaves: Sequence[Tensor],
    vectors: Float[Tensor, "change param"],
) -> list[Tensor | None]:
    """Products of many vectors through one backward pass, by parameter, `[change, *shape]`."""
    views, used = layout.row_views(vectors), list[int]()

    def one(own: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(
            list(curved.values()), leaves, grad_outputs=own, retain_graph=True, allow_unused=True
        )
        used[:] = [i for i, values in enumerate(found) if values is not None]
        return [found[i] for i in used]

    # not `is_grads_batched`: its older batching runs row by row where it has no rule
    mapped = mapped_over((0,), one, randomness="error")([views[i] for i in curved])
    found = dict(zip(used, mapped))
    return [found.get(i) for i in range(len(leaves))]


def edges(grads: Sequence[Tensor | None]) -> dict[int, GradientEdge]:
    """Where the graph of each parameter's gradient ends, for those that have one."""
    return {i: get_gradient_edge(grad) for i, grad in enumerate(grads) if grad is not None and grad.requires_grad}


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What a missing second derivative means, in the user's words."""
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        raise derivative_error(error) from error
