"""What the live run shows of its loop beside model and optimizer, and refusals where a path would be another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InvalidInput, UnsupportedModel, WrongHessian
from .batches import Accumulated
from .dynamics import Heads, Step
from .hooks import Hook, Hooks
from .loss import LossFunction
from .outside import Outside, refuse_rewritten
from .state import JointState

Unused = Literal["skip", "zero"]
TAILS = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}  # bits of a float32 that a number of this dtype leaves zero
ENOUGH = 16  # numbers that are not zero: fewer may be short by chance
LOOKED_AT = 8  # weights: embeddings and norms are not computed in autocast's dtype


@dataclass(frozen=True)
class LiveLoop:
    """What is known of the loop that trains the captured model."""

    scheduled: bool = False  # a scheduler of torch's has been attached to the optimizer
    unused: Unused | None = None  # what happens to a parameter that a step does not use; None: nothing tells
    held: frozenset[int] = frozenset()  # parameters that had a gradient at capture
    computed_in: tuple[int, torch.dtype] | None = None  # a parameter whose live gradient comes from autocast
    hooks: Hooks | None = None  # what the user said of hooks
    gradient_hook: Hook | None = None  # a backward hook that runs in every pass
    outside: Outside | None = None  # what loss_fn uses beside the model

    @property
    def zeroed(self) -> frozenset[int]:
        """Parameters whose gradient is zero, not None, in a step that does not use them."""
        return self.held if self.unused == "zero" else frozenset()

    def refuse_unscheduled(self, lr: object) -> None:
        if self.scheduled and lr is None:
            raise InvalidInput(
                "a scheduler is attached to the optimizer, and follow() was given no lr: pass lr=scheduler, which is "
                'copied, or lr="constant" to keep the present learning rates'
            )

    def refuse_moved(self, loss: LossFunction) -> None:
        """Refuse constants that have changed since capture: frozen parameters, and what loss_fn uses."""
        refuse_rewritten(loss.frozen)
        if self.outside is not None:
            self.outside.refuse_moved()

    def refuse_live(self, function: Callable[..., Any] | None) -> None:
        """Refuse a probe that reads the live model."""
        if self.outside is not None and function is not None:
            self.outside.refuse_live("the probe", function)

    def refuse_distorted(self) -> None:
        """Predictions take the gradient for the loss's derivative."""
        if self.gradient_hook is not None:
            raise WrongHessian(
                f'{self.gradient_hook}, which runs in every pass (hooks="run") and may change gradients: they are then '
                "not derivatives of the loss, and no prediction could be trusted. Exact answers can: "
                "answers=('exact',). Where the hook only looks, capture with hooks=\"ignore\""
            )

    def refuse_other_precision(self, loss: LossFunction, state: JointState, step: Step) -> None:
        """Refuse a float32 pass where the live gradient comes from autocast: one more gradient where it does."""
        if self.computed_in is None or loss.autocast.enabled:
            return
        place, dtype = self.computed_in
        # a sum over micro-batches has longer numbers than each of them
        batch = step.batch.batches[0] if isinstance(step.batch, Accumulated) else step.batch
        found = loss.gradient(state.theta, state.buffers, batch, step.random, step.where).grads[place]
        if found is None or low_precision(found) is not None or int(found.count_nonzero()) < ENOUGH:
            return
        raise InvalidInput(
            f"the live gradient of {loss.layout.names[place]!r} was computed in {dtype}, and this one is not: the loop "
            f"trains under autocast, and capture was called outside of it. Say capture(…, autocast={dtype}), or "
            "capture(…, autocast=False) if it does not"
        )

    def heads(self, steps: Sequence[Step]) -> Heads:
        """What another batch in the path must and may use, where a parameter that is not used may still move."""
        if self.unused == "skip":
            return Heads()
        used = self.held.union(*({i for i, ok in enumerate(step.present or ()) if ok} for step in steps))
        return Heads(used if self.unused is None else used - self.held, used)

    def refuse_unused(self, steps: Sequence[Step], names: Sequence[str]) -> None:
        """Refuse a step that leaves a parameter without the gradient that it had before, where that may matter."""
        if self.unused == "skip":
            return
        held = set(self.held)
        for step in steps:
            present = {i for i, ok in enumerate(step.present or ()) if ok}
            lost = sorted(held - present)
            if lost and self.unused is None:
                raise UnsupportedModel(
                    f"{step.where} does not use parameter {names[lost[0]]!r}, and nothing tells what the loop does "
                    'then. Say capture(…, unused="skip") after zero_grad(), which drops gradients, or unused="zero" '
                    "after zero_grad(set_to_none=False), which leaves zeros that decay and moments still act on"
                )
            if lost:
                raise UnsupportedModel(
                    f"parameter {names[lost[0]]!r} is first used in the path and not used in {step.where}; with "
                    'unused="zero", capture after a step that uses it'
                )
            held |= present


def unused_gradients(grads: Sequence[Tensor | None], counts: Sequence[int]) -> Unused | None:
    """How the loop treats a parameter that a step does not use; None where nothing tells.

    `zero_grad()` forgets a gradient, and the optimizer then skips the parameter: one that has been stepped is left
    without, or falls behind in its count. `zero_grad(set_to_none=False)` leaves zeros, with which decay and moments
    move it on.
    """
    if any(grad is None and count for grad, count in zip(grads, counts)):
        return "skip"
    held = [grad for grad in grads if grad is not None]
    if held and not any(bool(grad.any()) for grad in held):
        return "zero"
    behind = len({count for count in counts if count}) > 1
    return "skip" if behind and all(bool(grad.any()) for grad in held) else None


def computed_in(grads: Sequence[Tensor | None]) -> tuple[int, torch.dtype] | None:
    """A parameter whose gradient shows autocast's dtype."""
    weights = [i for i, grad in enumerate(grads) if grad is not None and grad.ndim > 1]
    for i in weights[:LOOKED_AT]:
        dtype = low_precision(grads[i])
        if dtype is not None:
            return i, dtype
    return None


def low_precision(grad: Tensor | None) -> torch.dtype | None:
    """The dtype below a float32 gradient in which it was computed: its numbers are short."""
    if grad is None or grad.dtype != torch.float32 or grad.layout != torch.strided:
        return None
    bits = grad.detach().flatten()[:1024].view(torch.int32)
    if bool((bits & TAILS[torch.float16]).any()) or int(bits.count_nonzero()) < ENOUGH:
        return None
    return torch.float16 if bool((bits & TAILS[torch.bfloat16]).any()) else torch.bfloat16
