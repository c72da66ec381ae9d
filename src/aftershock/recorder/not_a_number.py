"""A loss or gradient that is not finite: which of them, in which module, and whether the batch did it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from ..core.batches import Batch, micro_batches, undrawn
from ..core.layout import Layout
from ..core.loss import LossFunction
from ..core.randomness import RandomState
from ..core.reductions import finite, total_norm
from ..core.state import JointState
from ..core.structure import flatten


@dataclass(frozen=True)
class Odd:
    """The number that decides whether a batch or a draw is what a step that is not finite is laid to."""

    # Of the others on the same weights: it is the odd one where more than half of them are finite. Not all need be: one
    # of them may be as bad.
    finite: float = 0.5


ODD = Odd()
WHERE = "the step that is not finite"
NAMED = 3  # parameters in a sentence


@dataclass(frozen=True)
class NotANumberFinding:
    """kind: "batch values" (the batch itself holds NaN), "draw" (it is finite with the random numbers of most other
    steps), "batch" (other batches are finite on the same weights),
    "weights" (others are not), "weights values" (a weight itself is NaN), "unknown" (nothing else was tried),
    "overflow" (every number is finite, and the norm of the gradient is more than its type holds), "finite" (the step is
    finite when it is run again)."""

    kind: str
    loss: float
    module: str | None  # where NaN or infinity first appears: on the way to a loss, or back to a gradient
    operation: str | None  # in it
    parameters: tuple[str, ...]  # whose gradient is not finite; whose value is, for "weights values"
    others: tuple[bool, ...]  # for each other batch: are loss and gradient finite on the same weights?
    norm: float = math.nan  # of the gradient, in float64
    redrawn: tuple[bool, ...] = ()  # for the random numbers of each other step: is it finite with them?

    @property
    def loss_finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def sentence(self) -> str:
        if self.kind == "finite":
            return f"run again, the step is finite: its loss is {self.loss:.4g}, and so is every gradient"
        if self.kind == "overflow":
            return (
                f"run again, its loss is {self.loss:.4g} and every element of its gradient is finite; their norm, "
                f"{self.norm:.3g}, is the root of a sum that this type of number does not hold"
            )
        return f"{self._what()}. {self._why()}"

    def _what(self) -> str:
        names = ", ".join(self.parameters[:NAMED]) + (", …" if len(self.parameters) > NAMED else "")
        if self.kind == "weights values":
            return f"the weights before the step are not finite: {names}"
        if not self.loss_finite:
            outside = "loss_fn" if self.operation else "loss_fn, after the model's last module"
            place = f"module `{self.module}`" if self.module else outside
            of = f"`{self.operation}` in " if self.operation else ""
            return f"the loss is {self.loss}; the first value that is not finite comes out of {of}{place}"
        if self.operation is None:
            return f"the loss is {self.loss:.4g}, and the gradient of {names} is not finite"
        inside = f"`{self.module}`" if self.module else "loss_fn"
        return (
            f"the loss is {self.loss:.4g}, and the gradient is not finite from `{self.operation}` in {inside} on "
            f"({len(self.parameters)} parameter{'s' if len(self.parameters) > 1 else ''}: {names})"
        )

    def _why(self) -> str:
        finite, count = sum(self.others), len(self.others)
        beside = f"; {finite} of {count} other batches are finite on the same weights" if count else ""
        return {
            "batch values": f"The batch itself holds values that are not finite{beside}",
            "weights values": "The step before wrote them",
            "draw": "It is what was drawn at random: on the same weights the batch is finite with the random numbers "
            f"of {sum(self.redrawn)} of {len(self.redrawn)} other steps"
            + (f"; with its own {finite} of {count} other batches are finite there" if count else ""),
            "batch": f"It is the batch: {finite} of {count} other batches are finite on the same weights",
            "weights": f"It is not the batch alone: {finite} of {count} other batches are finite on the same weights",
            "unknown": "No other batch was tried on the same weights",
        }[self.kind]


def not_a_number(
    loss: LossFunction,
    state: JointState,
    batch: Batch,
    random: RandomState,
    others: Sequence[Batch] = (),
    draws: Sequence[RandomState] = (),
) -> NotANumberFinding:
    """Run the step again from the last finite state, watching every module and every operation's gradient.

    state: before the step. random: before its forward pass. others: batches to try on the same weights. draws: random
    numbers of other steps, to try with this batch. One gradient each; a module whose output is not finite with a finite
    batch either (a mask of −∞) is not blamed.
    """
    bad = _not_finite(loss.layout, loss.layout.views(state.theta))
    if bad:
        return NotANumberFinding("weights values", math.nan, None, None, bad, ())
    seen = _watched(loss, state, batch, random)
    beside = [_watched(loss, state, other, random) for other in others]
    sound = [other for other in beside if other.finite]
    redrawn = () if seen.finite else tuple(_watched(loss, state, undrawn(batch), draw).finite for draw in draws)
    if seen.finite:
        kind = "overflow" if seen.overflows else "finite"
    elif any(isinstance(x, Tensor) and not finite(x) for x in flatten(batch)[0]):
        kind = "batch values"
    elif sum(redrawn) > ODD.finite * len(redrawn):
        kind = "draw"
    elif not beside:
        kind = "unknown"
    else:
        kind = "batch" if len(sound) > ODD.finite * len(beside) else "weights"
    module, operation = None, None
    if not math.isfinite(seen.loss):
        module, operation = seen.source(sound)
    elif not seen.finite:
        module, operation = seen.module_of(seen.operations[0]) if seen.operations else (None, None)
    tried = tuple(other.finite for other in beside)
    return NotANumberFinding(kind, seen.loss, module, operation, seen.parameters, tried, seen.norm, redrawn)


def is_finite(loss: LossFunction, state: JointState, batch: Batch, random: RandomState) -> bool:
    """Are the step's loss, gradient and its norm finite from this state? One gradient."""
    if _not_finite(loss.layout, loss.layout.views(state.theta)):
        return False
    seen = _watched(loss, state, batch, random)
    return seen.finite and not seen.overflows


class _Made(NamedTuple):
    """An operation that made a value that is not finite of finite ones, or NaN of an infinite one."""

    operation: str
    module: str | None  # in which it ran


class _Output(NamedTuple):
    """A module whose output is not finite."""

    module: str
    sound: bool  # what it was given is finite
    before: int  # how many operations had made such a value when it was called


@dataclass
class _Seen:
    """What was not finite in one forward and backward pass, in the order in which it came."""

    loss: float = math.nan
    outputs: list[_Output] = field(default_factory=list)  # inner modules are done first
    made: list[_Made] = field(default_factory=list)
    operations: list[tuple[str, int]] = field(default_factory=list)  # with such a gradient; name and number of the node
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # the numbers of the nodes that each module made
    parameters: tuple[str, ...] = ()
    norm: float = math.nan  # of the gradient, in float64
    overflows: bool = False  # the norm in the gradient's own type is infinite

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and not self.parameters

    def source(self, sound: Sequence[_Seen]) -> tuple[str | None, str | None]:
        """The module and the operation that the loss of NaN or infinity comes from, as far as they are known; `sound`
        are passes with a finite loss, in which such values are part of the computation.

        Where the first module with such an output was given such a value, an operation before it made it.
        """
        passed, harmless = {out.module for one in sound for out in one.outputs}, {x for one in sound for x in one.made}
        first = next((out for out in self.outputs if out.module not in passed), None)
        if first is not None and not first.sound:
            for operation, module in reversed(self.made[: first.before]):
                if (operation, module) not in harmless:
                    return module, operation
        module = None if first is None else first.module
        inside = (x.operation for x in self.made if x.module == module and x not in harmless)
        return module, next(inside, None)

    def module_of(self, operation: tuple[str, int]) -> tuple[str | None, str]:
        """The innermost module that made a node, and the node's operation in the user's words."""
        name, number = operation
        inside = [(last - first, module) for module, first, last in self.spans if first < number < last]
        return min(inside)[1] if inside else None, name


def _watched(loss: LossFunction, state: JointState, batch: Batch, random: RandomState) -> _Seen:
    """One gradient, with everything that is not finite on the way."""
    seen, leaves = _Seen(), loss.leaves(state.theta)

    def program(model: nn.Module) -> None:
        totals: list[Tensor] = []
        bad: set[str] = set()
        whole: list[Tensor | None] = [None] * len(leaves)  # the gradient of all micro-batches
        for micro, share in micro_batches(batch, loss.layout.device):
            inside: list[str] = []
            with _watching_modules(model, seen, inside), _Operations(seen, inside):
                value = share(loss.raw(model, micro, WHERE))
            totals.append(value.detach())
            with _watching_gradients(value, seen):
                grads = loss.grad(value, leaves, WHERE)
            bad.update(_not_finite(loss.layout, grads))  # scaled, as the loop has them
            own = loss.unscaled(grads)
            whole = [new if old is None else old if new is None else old + new for old, new in zip(whole, own)]
        seen.loss = float(torch.stack(totals).sum())
        seen.parameters = tuple(name for name in loss.layout.names if name in bad)
        known = [grad for grad in whole if grad is not None]
        seen.overflows = not bad and not math.isfinite(float(total_norm(known)))
        seen.norm = float(total_norm([grad.double() for grad in known]))

    loss.call(leaves, state.buffers, random, program)
    return seen


def _not_finite(layout: Layout, tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    return tuple(n for n, x in zip(layout.names, tensors) if x is not None and not finite(x))


@contextlib.contextmanager
def _watching_modules(model: nn.Module, seen: _Seen, inside: list[str]) -> Iterator[None]:
    """Note each module whose output is not finite, and which nodes of the graph it made. inside: those that run now."""
    begun: dict[str, tuple[int, int, bool]] = {}  # the next node's number, `made` so far, whether the inputs are finite
    handles = []
    for name, module in model.named_modules():
        if not name:
            name = type(module).__name__

        def before(module: nn.Module, inputs: object, named: object, name: str = name) -> None:
            begun[name] = _node_number(), len(seen.made), _finite(_values((inputs, named)))
            inside.append(name)

        def after(module: nn.Module, inputs: object, output: object, name: str = name) -> None:
            node, made, sound = begun[name]
            seen.spans.append((name, node, _node_number()))
            inside.pop()
            if not _finite(_values(output)):
                seen.outputs.append(_Output(name, sound, made))

        handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Operations(TorchFunctionMode):
    """Notes each operation that makes a value that is not finite of values that are, or NaN of others than NaN."""

    def __init__(self, seen: _Seen, inside: list[str]) -> None:
        super().__init__()
        self._seen, self._inside = seen, inside

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _values((args, kwargs))  # looked at before the call, which may write in place
        finite, numbers = bool(given) and _finite(given), bool(given) and _numbers(given)
        made = func(*args, **kwargs)
        values = _values(made)
        if (finite and not _finite(values)) or (numbers and not _numbers(values)):
            name = getattr(func, "__name__", str(func)).strip("_")
            self._seen.made.append(_Made(name, self._inside[-1] if self._inside else None))
        return made


def _values(found: object) -> list[Tensor]:
    return [x.detach() for x in flatten(found)[0] if isinstance(x, Tensor) and x.is_floating_point()]


def _node_number() -> int:
    """The number of a node made now: nodes are counted as they are made."""
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return node._sequence_nr()


@contextlib.contextmanager
def _watching_gradients(value: Tensor, seen: _Seen) -> Iterator[None]:
    """Note each operation whose gradient is not finite; what it comes from was noted before it."""
    handles = []
    for node in _nodes(value.grad_fn):

        def after(inner: Sequence[Tensor | None], outer: Sequence[Tensor | None], node: Node = node) -> None:
            if not _finite(inner):
                seen.operations.append((_operation(node), node._sequence_nr()))

        handles.append(node.register_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(tensors: Sequence[Tensor | None]) -> bool:
    return all(finite(x) for x in tensors if x is not None)


def _numbers(tensors: Sequence[Tensor]) -> bool:
    """None of them is NaN; infinity is a number here."""
    return not any(bool(torch.isnan(x).any()) for x in tensors)


def _operation(node: Node) -> str:
    """`log` of `LogBackward0`."""
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _nodes(root: Node | None) -> Iterator[Node]:
    found, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            yield node
            waiting += [inner for inner, _ in node.next_functions]
