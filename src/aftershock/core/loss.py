"""The user's loss as a pure function of (parameters, buffers, batch, random state).

Everything runs inside `functional_call` on a wrapper around the captured model, so that backward
passes that call the model again (activation checkpointing) still see the right parameters. Buffers
are cloned per call, the global random state is put back, and the user's model is never touched.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import (
    AftershockError,
    InvalidLoss,
    MixedDevices,
    NoDerivative,
    NotFinite,
    UnsupportedModel,
)
from .batches import Batch, added, micro_batches
from .carried import Found, refuse_carried
from .clipping import global_norm
from .derivatives import derivative_error, first_line, named_line, refuse_reentrant
from .keeper import Keeper, Left
from .layout import Layout
from .outside import Mark, marked, refuse_written
from .playback import Player
from .randomness import RandomState, drawing_from
from .recordings import Program, Recording
from .rows import Sharing

T = TypeVar("T")
Surroundings = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]
WRITTEN = (
    "the model or loss_fn writes into parameters while the loss is computed (Embedding(max_norm=...), weights clamped "
    "in forward), which is no part of AdamW's step. This training point is spoilt: take the writing out of what "
    "loss_fn calls, and capture again"
)


@dataclass(frozen=True)
class Autocast:
    """The autocast that was in force at capture."""

    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


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


class Wrapper(nn.Module):
    """Runs a program with the model while `functional_call` holds the parameters in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, program: Callable[[nn.Module], Any]) -> Any:
        return program(self.model)


class LossFunction:
    """ℓ(θ; B) and its gradients, Hessian products and directional derivatives.

    `model` is a private copy whose parameters hold no data; `constants` are the frozen parameters.
    """

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
        self.model = model
        self.loss_fn = loss_fn
        self.layout = layout
        self.constants = constants
        self.autocast = autocast
        self.place = place
        self.zeroed = zeroed  # parameters that the loop leaves with zeros, not None, where a batch does not use them
        self.graph_is_plain: bool | None = None  # does a gradient with its graph have the plain one's bits?
        self._tried = False  # has a pass been seen to leave the constants as they are?
        self.frozen: list[Mark] = []  # constants that are the live model's own tensors, as they were at capture
        self.noise: float | None = None  # relative difference of a gradient that was run twice
        self.arithmetic: torch.dtype | None = None  # the coarsest that a pass computes in, once it was seen
        self.refused: AftershockError | None = None  # why a check failed; it is not drawn again
        self.surroundings: Surroundings = lambda model: contextlib.nullcontext()
        self.sharing = Sharing(wanted=layout.device.type == "cuda" and layout.uniform)
        self.player = Player(layout, wanted=self.sharing.wanted)
        self.moving = _running_statistics(model)  # buffers that a pass writes to; more are added where seen
        self.wrapper = Wrapper(model)
        self.keeper = Keeper(model, loss_fn)
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
    ) -> Gradient:
        """The plain gradient, equal to the bit to `loss.backward()`: 1 g.

        wait: until it is seen to be finite; else whoever asks looks at its norm later, and a GPU is not held up.
        """
        found = self._played("gradient", theta, buffers, batch, random, evaluating)
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
    ) -> Evaluation | None:
        """The same by a recording, where there is one for batches of this shape."""
        found = self.recorded(kind, batch, evaluating=evaluating)
        if found is None:
            return None
        played = found[0].play(theta, buffers, found[1], random)
        if played.norm is None:
            return Evaluation(played.loss, played.buffers, played.random)
        return Gradient(played.loss, played.buffers, played.random, played.grads(self.layout), played.norm)

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

    def program(self, kind: str, leaves: Sequence[Tensor], batch: Batch, where: str) -> Program:
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
                found = map(accumulated, self.grad(loss, leaves, where), leaves)
                for i, grad in enumerate(found):
                    before = grads[i]
                    grads[i] = grad if before is None else before if grad is None else before + grad
                total = loss.detach() if total is None else total + loss.detach()
            assert total is not None
            return total, grads, global_norm(grads, self.layout.model_order)

        return value if kind == "value" else gradient

    # -- inside

    def _constants(self) -> Mapping[str, Tensor]:
        """The frozen parameters: the live model's own, of which the first pass gets copies, should it write to them."""
        return self.constants if self._tried else {name: p.clone() for name, p in self.constants.items()}

    def leaves(self, theta: Float[Tensor, " param"]) -> list[Tensor]:
        return [view.detach().requires_grad_() for view in self.layout.typed_views(theta)]

    def call(
        self,
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        random: RandomState,
        program: Callable[[nn.Module], Any],
        *,
        derivative: bool = False,
        evaluating: bool = False,
        begin: Callable[[], None] | None = None,
        left: list[Left] | None = None,
    ) -> tuple[Any, dict[str, Tensor], RandomState]:
        """Run a program with everything in place; returns its result, the buffers and the random state.

        What user code changes otherwise ends with the call; `left` is filled with it, `begin` runs first.
        """
        device = self.layout.device
        tensors = {f"model.{n}": p for n, p in zip(self.layout.names, parameters)}
        constants = self._constants()
        tensors |= {f"model.{n}": p for n, p in constants.items()}
        tensors |= {f"model.{n}": b.clone() for n, b in buffers.items()}
        # views of one vector share its count of writes
        counted = parameters[:1] if self.layout.uniform else parameters
        held = [p for p in (*counted, *constants.values()) if not p.is_inference()]
        versions = [p._version for p in held]
        copies = [] if self._tried else marked(constants)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if torch.is_autocast_enabled(device.type):  # the caller's own, which is not the run's
                stack.enter_context(torch.autocast(device.type, enabled=False))
            if derivative:
                # flash and efficient attention have no second derivative; math agrees to rounding
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if evaluating:
                stack.enter_context(in_mode(self.model, training=False))
            drawing = stack.enter_context(drawing_from(random, device))
            stack.enter_context(self.keeper.untouched([] if left is None else left))
            if begin is not None:
                begin()
            result = torch.func.functional_call(self.wrapper, tensors, (program,), tie_weights=True)
        kept = {n: tensors[f"model.{n}"] for n in buffers}
        self.moving |= {name for name, b in kept.items() if b._version}
        refuse_written(copies)
        if versions != [p._version for p in held]:
            raise UnsupportedModel(WRITTEN)
        self._tried = True
        return result, {name: b.detach() for name, b in kept.items()}, drawing.after

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The run's autocast, around a forward pass alone: loops leave it before they call backward()."""
        if not self.autocast.enabled:
            yield
            return
        torch.clear_autocast_cache()  # it would hand out casts of other parameters
        with torch.autocast(self.layout.device.type, dtype=self.autocast.dtype):
            yield
        torch.clear_autocast_cache()

    def raw(self, model: nn.Module, batch: Batch, where: str) -> Tensor:
        try:
            with self.surroundings(model), self.forward():
                loss = self.loss_fn(model, self.place(batch))
        except (AftershockError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if "same device" in str(error):
                raise MixedDevices(
                    f"the model is on {self.layout.device}, and loss_fn met a tensor elsewhere at {where}: "
                    f"{first_line(error)}. Move the batch to {self.layout.device}"
                ) from error
            raise InvalidLoss(f"loss_fn failed at {where}: {named_line(error)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidLoss(f"loss_fn must return one floating-point number; at {where} it returned {got}")
        return loss.reshape(())

    def grad(
        self, loss: Tensor, leaves: Sequence[Tensor], where: str, *, create_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        if not loss.requires_grad:
            raise NoDerivative(
                f"the loss at {where} has no gradient: loss_fn(model, batch) must use the model it is given, "
                "without torch.no_grad() or .detach(). A probe without a derivative (an accuracy) has exact answers: "
                "change.response(..., answers=('exact',))"
            )
        try:
            grads = torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise derivative_error(error) from error
        if any(grad is None for grad in grads):
            refuse_reentrant(loss)
        if all(grad is None for grad in grads):
            raise NoDerivative(f"the loss at {where} does not depend on any parameter of the model it was given")
        for name, grad in zip(self.layout.names, grads):
            if grad is not None and grad.layout != torch.strided:
                raise UnsupportedModel(f"parameter {name!r} has sparse gradients; set sparse=False on its embedding")
        if not self.zeroed:
            return grads
        return tuple(
            torch.zeros_like(leaf) if grad is None and i in self.zeroed else grad
            for i, (grad, leaf) in enumerate(zip(grads, leaves))
        )

    def refuse_not_finite(self, found: Gradient, where: str) -> None:
        """Raise `NotFinite` unless loss and gradient are finite: the one wait for a GPU."""
        if torch.isfinite(found.norm + found.loss):
            return
        if not torch.isfinite(found.loss):
            raise NotFinite(f"the loss at {where} is {float(found.loss)}")
        bad = [n for n, g in zip(self.layout.names, found.grads) if g is not None and not torch.isfinite(g).all()]
        raise NotFinite(f"the gradient of {bad[0] if bad else 'the model'} at {where} is not finite")


def _as_number(value: Any) -> Any:
    """A probe may count: whole numbers and Python's become floating-point ones."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else value.double()
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, int | float) else value


def _running_statistics(model: nn.Module) -> set[str]:
    """Buffers of normalization layers, whose kernels write to them without a trace."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for buffer, _ in module.named_buffers(recurse=False)
    }


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in train or eval mode, then as it was."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes.items():
            module.training = before


def accumulated(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    """A gradient as `backward` leaves it in .grad: with its parameter's strides, in which fused kernels read it."""
    if grad is None or grad.stride() == parameter.stride():
        return None if grad is None else grad.detach()
    return torch.empty_strided(grad.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).copy_(
        grad.detach()
    )
