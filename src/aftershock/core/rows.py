"""Many rows in one call: the loss of many parameter sets on one batch (`pools`: of one set on many batches).

Rows share everything but what differs between them, so that on a GPU with small batches a row costs a quarter to
two thirds of a gradient. Where a model cannot be mapped over rows, where it gives other numbers in rows than alone,
or where it does not pay (a CPU), rows run one after another and the answers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import OutOfMemory
from .batches import Batch, added, micro_batches
from .mapping import mapped_over
from .memory import free_of_all, ran_out
from .randomness import RandomState
from .reductions import equal, goes_on, joint_norm, row_norms

if TYPE_CHECKING:
    from .loss import Gradient, LossFunction

# Relative: the rounding of other kernels stays far below, another dropout mask or a hidden state far above.
AGREE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
AGREE_AUTOCAST = 5e-2
AT_ONCE = 128
APART = 1.1  # how far from the others, as a factor of θ, a row is compared

T = TypeVar("T")


class Sharing:
    """Whether the rows of a loss are computed together: wanted, possible, and equal to rows run alone.

    Each kind of work (values, gradients, products, pools) is compared once: one row together with another, far from it,
    against the same row alone. Rows as close as those of a path would hide that one of them leaks into the other.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.at_once = AT_ONCE
        self.at_least = {"gradient": 3, "value": 3}  # rows from which a mapped call, which costs two, pays
        self._agreed: dict[str, bool] = {}

    def tries(self, kind: str, rows: int) -> bool:
        return self.wanted and rows >= self.at_least.get(kind, 2) and self._agreed.get(kind, True)

    def compared(self, kind: str) -> bool:
        return kind in self._agreed

    def settle(self, kind: str, agreed: bool) -> None:
        self._agreed[kind] = agreed

    def in_pieces(self, count: int, run: Callable[[slice], T]) -> list[T]:
        """`run` over slices of at most `at_once` rows; where memory runs out the piece is halved and run again."""
        out: list[T] = []
        first = 0
        while first < count:
            size = min(self.at_once, count - first)
            found = _or_none(lambda: run(slice(first, first + size)))  # noqa: B023  (called at once)
            if found is not None:
                out.append(found)
                first += size
                continue
            torch.cuda.empty_cache()
            if size == 1:
                raise OutOfMemory(
                    f"one row alone does not fit into memory ({free_of_all()} are free); ask for fewer "
                    "changes, scales or answers at once, or use a smaller batch"
                )
            self.at_once = (size + 1) // 2
        return out


def _or_none(run: Callable[[], T]) -> T | None:
    """None where memory ran out; the error, and with it what it holds, is gone before another try."""
    try:
        return run()
    except Exception as error:
        if not ran_out(error):
            raise
        return None


# --- many parameter sets on one batch


def row_values(
    loss: LossFunction,
    thetas: Float[Tensor, "row param"],
    buffers: Sequence[Mapping[str, Tensor]],
    batch: Batch,
    random: RandomState,
    where: str,
    *,
    evaluating: bool = False,
) -> Float[Tensor, " row"]:
    """The loss at every row, in float64 on the CPU; +∞ where it is not finite. One forward pass a row, or less."""

    def alone(theta: Float[Tensor, " param"], i: int) -> Tensor:
        return loss.value(theta, buffers[i], batch, random, where, evaluating=evaluating, wait=False).loss

    def mapped(rows: Float[Tensor, "row param"], held: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, " row"]:
        return _mapped(loss, rows, held, batch, random, where, evaluating=evaluating).losses

    def agrees() -> bool:
        far = apart(thetas)
        one, other = float(alone(far[1], -1)), float(mapped(far, [buffers[0], buffers[-1]])[1])
        return math.isfinite(one) and abs(other - one) <= tolerance(loss) * max(abs(one), 1e-30)

    if loss.together("value", batch, len(thetas), evaluating=evaluating):
        pieces = tried(loss, "value", agrees, lambda s: mapped(thetas[s], buffers[s]), len(thetas))
        if pieces is not None:
            return seen(pieces)
    return seen(loss.spread("value", batch, len(thetas), lambda i: alone(thetas[i], i), evaluating=evaluating))


def seen(values: Sequence[Tensor]) -> Float[Tensor, " row"]:
    """Losses that were launched, in float64 on the CPU, +∞ where they are not finite: one wait for the device."""
    if not values:
        return torch.zeros(0, dtype=torch.float64)
    found = torch.cat([value.reshape(-1) for value in values]).double().cpu()
    return torch.where(found.isfinite(), found, math.inf)


def row_gradients(
    loss: LossFunction,
    thetas: Float[Tensor, "row param"],
    buffers: Sequence[Mapping[str, Tensor]],
    batch: Batch,
    random: RandomState,
    where: str,
    present: Sequence[bool] | None,
) -> list[Gradient | None]:
    """The gradient at every row; None where it is not finite. 1 g a row alone, a quarter to two thirds together.

    `present` says which parameters the batch uses, as the control's own pass over it saw; where that is not
    known, rows run alone.
    """

    def alone(theta: Float[Tensor, " param"], i: int) -> Gradient:
        return loss.gradient(theta, buffers[i], batch, random, where, wait=False)

    def mapped(rows: Float[Tensor, "row param"], held: Sequence[Mapping[str, Tensor]]) -> list[Gradient | None]:
        assert present is not None
        return _mapped(loss, rows, held, batch, random, where, gradients=True).split(present)

    def agrees() -> bool:
        far = apart(thetas)
        return same_gradient(loss, mapped(far, [buffers[0], buffers[-1]])[1], finite([alone(far[1], -1)])[0])

    if present is not None and loss.together("gradient", batch, len(thetas)):
        pieces = tried(loss, "gradient", agrees, lambda s: mapped(thetas[s], buffers[s]), len(thetas))
        if pieces is not None:
            return [gradient for piece in pieces for gradient in piece]
    return finite(loss.spread("gradient", batch, len(thetas), lambda i: alone(thetas[i], i)))


def finite(found: Sequence[Gradient]) -> list[Gradient | None]:
    """Gradients that were launched, None where they are not finite: one wait for the device."""
    if not found:
        return []
    losses, norms = (torch.stack([getattr(gradient, name) for gradient in found]) for name in ("loss", "norm"))
    return [gradient if ok else None for gradient, ok in zip(found, goes_on(losses, norms))]


def apart(thetas: Float[Tensor, "row param"]) -> Float[Tensor, "row param"]:
    """The first row, and one far from it."""
    return torch.stack([thetas[0], APART * thetas[len(thetas) - 1]])


# --- inside


@dataclass
class Mapped:
    """What one mapped call gives: tensors with a leading dimension of rows."""

    loss: LossFunction
    losses: Float[Tensor, " row"]
    grads: list[Tensor]
    moving: dict[str, Tensor]
    static: Mapping[str, Tensor]
    random: RandomState

    def norms(self, present: Sequence[bool]) -> Float[Tensor, " row"]:
        """Of the rows' gradients."""
        return row_norms([self.grads[i] for i in self.loss.layout.model_order if present[i]])

    def split(self, present: Sequence[bool]) -> list[Gradient | None]:
        """Row by row, as plain gradients are."""
        from .calls import accumulated
        from .loss import Gradient

        norms = self.norms(present)
        finite = goes_on(self.losses, norms)
        shapes = self.loss.layout.views(self.loss.layout.example)
        rows = [grad.unbind() if ok else [None] * len(finite) for grad, ok in zip(self.grads, present)]
        out: list[Gradient | None] = []
        for r, ok in enumerate(finite):
            grads = [accumulated(row[r], like) for row, like in zip(rows, shapes)]
            buffers = {**self.static, **{name: stack[r] for name, stack in self.moving.items()}}
            out.append(Gradient(self.losses[r], buffers, self.random, grads, norms[r]) if ok else None)
        return out


def _mapped(
    loss: LossFunction,
    thetas: Float[Tensor, "row param"],
    buffers: Sequence[Mapping[str, Tensor]],
    batch: Batch,
    random: RandomState,
    where: str,
    *,
    gradients: bool = False,
    evaluating: bool = False,
) -> Mapped:
    first = buffers[0]
    moving = {
        name: torch.stack([each[name] for each in buffers])
        for name in first
        if name in loss.moving or not all(equal(each[name], first[name]) for each in buffers[1:])
    }
    program = _over_parameters(loss, batch, where, loss.layout.row_views(thetas), moving, gradients)
    static = {name: b for name, b in first.items() if name not in moving}
    (losses, grads, after), _, random = loss.call(
        loss.layout.typed_views(thetas[0]), first, random, program, derivative=True, evaluating=evaluating
    )
    return Mapped(loss, losses, grads, after, static, random)


MappedProgram = Callable[[nn.Module], tuple[Tensor, list[Tensor], dict[str, Tensor]]]


def loss_at(
    loss: LossFunction, parameters: Sequence[Tensor], moving: Mapping[str, Tensor], batch: Batch, where: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """One row's loss, times the loss scale, and the moving buffers that it leaves."""
    inside = dict(zip(loss.layout.names, parameters)) | {name: b.clone() for name, b in moving.items()}
    with loss.places.holding(inside):
        value = loss.raw(loss.model, batch, where)
    return loss.autocast.scale * value, {name: inside[name] for name in moving}


def unscaled(loss: LossFunction, losses: Float[Tensor, " row"], grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What rows of `loss_at` give, without the loss scale."""
    return losses / loss.autocast.scale, [grad.detach() for grad in loss.unscaled(grads) if grad is not None]


def _over_parameters(
    loss: LossFunction,
    batch: Batch,
    where: str,
    parameters: Sequence[Float[Tensor, "row ..."]],
    moving: dict[str, Tensor],
    gradients: bool,
) -> MappedProgram:
    """Losses of rows of parameters, each with its own moving buffers; micro-batches one after another."""

    def program(model: nn.Module) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        state, totals, sums = moving, [], []  # type: ignore[var-annotated]
        for micro, share in micro_batches(batch, loss.layout.device):

            def one(own: list[Tensor], held: dict[str, Tensor], micro: Batch = micro, share: Any = share) -> Any:
                value, after = loss_at(loss, own, held, micro, where)
                return share(value), after

            if gradients:
                grads, (values, state) = mapped_over((0, 0), torch.func.grad_and_value(one, has_aux=True))(
                    list(parameters), state
                )
                sums = [a + b for a, b in zip(sums, grads)] if sums else list(grads)
            else:
                with torch.no_grad():
                    values, state = mapped_over((0, 0), one)(list(parameters), state)
            totals.append(values.detach())
        return *unscaled(loss, added(totals), sums), {n: b.detach() for n, b in state.items()}

    return program


def tried(
    loss: LossFunction, kind: str, agrees: Callable[[], bool], run: Callable[[slice], T], count: int
) -> list[T] | None:
    """The mapped pieces; None, from now on, where this model cannot be mapped or is another one when it is."""
    if not loss.sharing.compared(kind):
        try:
            loss.sharing.settle(kind, agrees())
        except Exception as error:  # whatever cannot be mapped runs alone, with the same answer or its own error
            if ran_out(error):
                return None  # not known yet
            loss.sharing.settle(kind, False)
    if not loss.sharing.tries(kind, count):
        return None
    try:
        return loss.sharing.in_pieces(count, run)
    except OutOfMemory:
        raise
    except Exception:  # a batch that cannot be mapped, though others could
        return None


def same_gradient(loss: LossFunction, together: Gradient | None, alone: Gradient | None) -> bool:
    if together is None or alone is None or alone.present != together.present:
        return False
    pairs = [(a, b) for a, b in zip(together.grads, alone.grads) if a is not None and b is not None]
    off = joint_norm([a - b for a, b in pairs])
    return bool(off <= tolerance(loss) * alone.norm.clamp(min=1e-30))


def tolerance(loss: LossFunction) -> float:
    """How far a row together may be from the same row alone."""
    if loss.autocast.enabled:
        return AGREE_AUTOCAST
    frozen = [p.dtype for p in loss.constants.values() if p.is_floating_point()]
    return max(AGREE.get(dtype, AGREE_AUTOCAST) for dtype in [*loss.layout.dtypes, *frozen])  # the coarsest rounds most
