"""The user's code as a pure call, with parameters, buffers and randomness in place.

Parameters and buffers are in the model's places until a program has ended, so that backward passes that
call the model again (activation checkpointing) still see the right ones. Buffers
are cloned per call, the global random state is put back, and the user's model is never touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import AftershockError, InvalidLoss, MixedDevices, NoDerivative, UnsupportedModel
from .batches import Batch
from .derivatives import derivative_error, first_line, named_line, refuse_reentrant
from .keeper import Keeper, Left
from .layout import Layout
from .memory import ran_out
from .outside import marked, refuse_written
from .places import Places
from .randomness import RandomState, drawing_from
from .structure import map_leaves

Surroundings = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]
WRITTEN = (
    "the model or loss_fn writes into parameters while the loss is computed (Embedding(max_norm=...), weights clamped "
    "in forward), which is no part of AdamW's step. This training point is spoilt: take the writing out of what "
    "loss_fn calls, and capture again"
)


@dataclass(frozen=True)
class Autocast:
    """The autocast that was in force at capture, and what a GradScaler multiplies the loss by before the backward pass:
    float16 loses small gradients without it."""

    enabled: bool
    dtype: torch.dtype
    scale: float = 1.0

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


class Calls:
    """loss_fn and the model, run with other parameters, buffers and randomness than the live ones.

    `model` is a private copy whose parameters hold no data; `constants` are the frozen parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Batch], Tensor],
        layout: Layout,
        constants: Mapping[str, Tensor],
        autocast: Autocast,
        place: Callable[[Batch], Batch],
        zeroed: frozenset[int],
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.layout = layout
        self.constants = constants
        self.autocast = autocast
        self.place = place
        self.zeroed = zeroed  # parameters that the loop leaves with zeros, not None, where a batch does not use them
        self.surroundings: Surroundings = lambda model: contextlib.nullcontext()
        self.moving = _running_statistics(model)  # buffers that a pass writes to; more are added where seen
        self.places = Places(model)
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self.keeper = Keeper(model, loss_fn)
        self._tried = False  # has a pass been seen to leave the constants as they are?

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
        constants = self._constants()
        copied = {name: b.clone() for name, b in buffers.items()}
        tensors = {**dict(zip(self.layout.names, parameters)), **constants, **copied}
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
                # flash and efficient attention have no second derivative; math agrees to rounding, with other masks
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                if self._recurrent and device.type == "cuda":  # nor have cuDNN's RNNs
                    stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            if evaluating:
                stack.enter_context(in_mode(self.model, training=False))
            drawing = stack.enter_context(drawing_from(random, device))
            stack.enter_context(self.keeper.untouched([] if left is None else left))
            if begin is not None:
                begin()
            with self.places.holding(tensors):
                result = program(self.model)
        kept = {name: tensors[name] for name in buffers}
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
                loss = self.loss_fn(model, map_leaves(_same, self.place(batch)))
        except AftershockError:
            raise
        except Exception as error:
            if ran_out(error):
                raise
            if "same device" in str(error):
                raise MixedDevices(
                    f"the model is on {self.layout.device}, and loss_fn met a tensor elsewhere at {where}: "
                    f"{first_line(error)}. Move the batch to {self.layout.device}"
                ) from error
            taken = ". Where loss_fn takes it out of the batch (pop), give recorder.step() a copy made before it ran"
            hint = taken if isinstance(error, KeyError) else ""
            raise InvalidLoss(f"loss_fn failed at {where}: {named_line(error)}{hint}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidLoss(f"loss_fn must return one floating-point number; at {where} it returned {got}")
        return loss.reshape(())

    def grad(
        self, loss: Tensor, leaves: Sequence[Tensor], where: str, *, create_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """The gradient times the loss scale: see `unscaled`."""
        if not loss.requires_grad:
            raise NoDerivative(
                f"the loss at {where} has no gradient: loss_fn(model, batch) must use the model it is given, "
                "without torch.no_grad() or .detach(). A probe without a derivative (an accuracy) has exact answers: "
                "change.response(..., answers=('exact',))"
            )
        try:
            scale = None if self.autocast.scale == 1.0 else torch.full_like(loss, self.autocast.scale)
            grads = torch.autograd.grad(loss, leaves, scale, create_graph=create_graph, allow_unused=True)
        except RuntimeError as error:
            if ran_out(error):
                raise
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

    def unscaled(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients, or Hessian products, without the loss scale: as `GradScaler.unscale_` leaves them."""
        scale = self.autocast.scale
        return list(grads) if scale == 1.0 else [None if grad is None else grad * (1 / scale) for grad in grads]


def _same(leaf: Any) -> Any:
    """Nothing but what holds it is made anew: loss_fn may take labels out of a dict, which runs more than once."""
    return leaf


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
