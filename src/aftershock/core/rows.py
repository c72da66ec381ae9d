"""Many rows in one call: the loss of many parameter sets on one batch, of one parameter set on many batches.

Rows share everything but what differs between them, so that on a GPU with small batches a row costs a quarter to
two thirds of a gradient. Where a model cannot be mapped over rows, where it gives other numbers in rows than alone,
or where it does not pay (a CPU), rows run one after another and the answers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import OutOfMemory
from .batches import Accumulated, Batch, added, micro_batches, same_value
from .mapping import mapped_over
from .memory import readable
from .randomness import RandomState
from .reductions import equal, joint_norm, row_norms
from .structure import flatten

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
                free, total = torch.cuda.mem_get_info()
                raise OutOfMemory(
                    f"one row alone does not fit into the GPU's memory ({readable(free)} of {readable(total)} are "
                    "free); ask for fewer changes, scales or answers at once, or use a smaller batch"
                )
            self.at_once = (size + 1) // 2
        return out


def _or_none(run: Callable[[], T]) -> T | None:
    """None where memory ran out; the error, and with it what it holds, is gone before another try."""
    try:
        return run()
    except torch.OutOfMemoryError:
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
        return _same_gradient(loss, mapped(far, [buffers[0], buffers[-1]])[1], finite([alone(far[1], -1)])[0])

    if present is not None and loss.together("gradient", batch, len(thetas)):
        pieces = tried(loss, "gradient", agrees, lambda s: mapped(thetas[s], buffers[s]), len(thetas))
        if pieces is not None:
            return [gradient for piece in pieces for gradient in piece]
    return finite(loss.spread("gradient", batch, len(thetas), lambda i: alone(thetas[i], i)))


def finite(found: Sequence[Gradient]) -> list[Gradient | None]:
    """Gradients that were launched, None where they are not finite: one wait for the device."""
    if not found:
        return []
    sums = torch.stack([gradient.norm + gradient.loss for gradient in found])
    return [gradient if ok else None for gradient, ok in zip(found, sums.isfinite().tolist())]


def apart(thetas: Float[Tensor, "row param"]) -> Float[Tensor, "row param"]:
    """The first row, and one far from it."""
    return torch.stack([thetas[0], APART * thetas[len(thetas) - 1]])


# --- one parameter set on many batches


def pool_gradients(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Batch],
    random: RandomState,
    where: Callable[[int], str],
    present: Sequence[bool] | None,
) -> Iterator[Gradient]:
    """The gradient of every batch at one θ: 1 g each alone, a fifth together, or in lanes, where batches are small.

    Alone, each is computed when it is asked for: one that is let go leaves the next its memory, which is in the cache.
    """

    def alone(i: int) -> Gradient:
        return loss.gradient(theta, buffers, batches[i], random, where(i), wait=False)

    def mapped(some: slice) -> list[Gradient | None]:
        everything = (True,) * len(loss.layout.names)
        return _mapped_pool(loss, theta, buffers, batches[some], random, where(some.start)).split(everything)

    def agrees() -> bool:
        last = len(batches) - 1
        return _same_gradient(loss, mapped(slice(last - 1, last + 1))[1], finite([alone(last)])[0])

    if not batches:
        return
    stackable = present is not None and all(present) and _alike(batches)
    if stackable and loss.together("pool", batches[0], len(batches)):
        pieces = tried(loss, "pool", agrees, mapped, len(batches))
        if pieces is not None:
            found = [gradient for piece in pieces for gradient in piece if gradient is not None]
            del pieces
            if len(found) == len(batches):
                while found:
                    yield found.pop(0)
                return
    size = max(1, len(loss.player.lanes))
    for first in range(0, len(batches), size):
        places = range(first, min(first + size, len(batches)))
        found = loss.spread("gradient", batches[0], len(places), lambda i: alone(places[i]))  # noqa: B023  (called at once)
        for i, gradient in zip(places, finite(found)):
            if gradient is None:
                loss.refuse_not_finite(found[i - first], where(i))
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


# --- inside


@dataclass
class _Mapped:
    """What one mapped call gives: tensors with a leading dimension of rows."""

    loss: LossFunction
    losses: Float[Tensor, " row"]
    grads: list[Tensor]
    moving: dict[str, Tensor]
    static: Mapping[str, Tensor]
    random: RandomState

    def split(self, present: Sequence[bool]) -> list[Gradient | None]:
        """Row by row, as plain gradients are."""
        from .calls import accumulated
        from .loss import Gradient

        order = [i for i in self.loss.layout.model_order if present[i]]
        norms = row_norms([self.grads[i] for i in order])
        finite = torch.isfinite(norms + self.losses).tolist()  # the one wait for the device
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
) -> _Mapped:
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
    return _Mapped(loss, losses, grads, after, static, random)


def _mapped_pool(
    loss: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Batch],
    random: RandomState,
    where: str,
) -> _Mapped:
    moving = {name: torch.stack([buffers[name]] * len(batches)) for name in loss.moving if name in buffers}
    views = loss.layout.typed_views(theta)
    program = _over_batches(loss, batches, where, views, moving)
    static = {name: b for name, b in buffers.items() if name not in moving}
    (losses, grads, after), _, random = loss.call(views, buffers, random, program, derivative=True)
    return _Mapped(loss, losses, grads, after, static, random)


MappedProgram = Callable[[nn.Module], tuple[Tensor, list[Tensor], dict[str, Tensor]]]


def _loss_at(
    loss: LossFunction, parameters: Sequence[Tensor], moving: Mapping[str, Tensor], batch: Batch, where: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """One row's loss, and the moving buffers that it leaves."""
    inside = dict(zip(loss.layout.names, parameters)) | {name: b.clone() for name, b in moving.items()}
    with loss.places.holding(inside):
        value = loss.raw(loss.model, batch, where)
    return value, {name: inside[name] for name in moving}


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
                value, after = _loss_at(loss, own, held, micro, where)
                return loss.autocast.scale * share(value), after

            if gradients:
                grads, (values, state) = mapped_over((0, 0), torch.func.grad_and_value(one, has_aux=True))(
                    list(parameters), state
                )
                sums = [a + b for a, b in zip(sums, grads)] if sums else list(grads)
            else:
                with torch.no_grad():
                    values, state = mapped_over((0, 0), one)(list(parameters), state)
            totals.append(values.detach() / loss.autocast.scale)
        return added(totals), _unscaled(loss, sums), {n: b.detach() for n, b in state.items()}

    return program


def _over_batches(
    loss: LossFunction, batches: Sequence[Batch], where: str, parameters: Sequence[Tensor], moving: dict[str, Tensor]
) -> MappedProgram:
    """Gradients of many batches at one θ."""
    placed = [flatten(loss.place(batch)) for batch in batches]
    spec = placed[0][1]
    stacked, dims = _stacked([leaves for leaves, _ in placed])

    def one(own: list[Tensor], held: dict[str, Tensor], leaves: list[Any]) -> Any:
        value, after = _loss_at(loss, own, held, spec.unflatten(leaves), where)
        return loss.autocast.scale * value, after

    def program(model: nn.Module) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        work = mapped_over((None, 0, dims), torch.func.grad_and_value(one, has_aux=True))
        grads, (values, state) = work(list(parameters), moving, stacked)
        losses = values.detach() / loss.autocast.scale
        return losses, _unscaled(loss, grads), {n: b.detach() for n, b in state.items()}

    return program


def _unscaled(loss: LossFunction, grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad.detach() for grad in loss.unscaled(grads) if grad is not None]


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


def tried(
    loss: LossFunction, kind: str, agrees: Callable[[], bool], run: Callable[[slice], T], count: int
) -> list[T] | None:
    """The mapped pieces; None, from now on, where this model cannot be mapped or is another one when it is."""
    if not loss.sharing.compared(kind):
        try:
            loss.sharing.settle(kind, agrees())
        except (OutOfMemory, torch.OutOfMemoryError):
            return None  # not known yet
        except Exception:  # whatever cannot be mapped runs alone, with the same answer or its own error
            loss.sharing.settle(kind, False)
    if not loss.sharing.tries(kind, count):
        return None
    try:
        return loss.sharing.in_pieces(count, run)
    except OutOfMemory:
        raise
    except Exception:  # a batch that cannot be mapped, though others could
        return None


def _same_gradient(loss: LossFunction, together: Gradient | None, alone: Gradient | None) -> bool:
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
