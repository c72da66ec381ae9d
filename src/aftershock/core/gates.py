"""Gates: the control's activation pattern, recorded in one pass and held in another.

A gate is an operation with a kink: a choice between smooth pieces (ReLU and its kin, clamp, abs), between
inputs (max, pooling, sort) or between truths (comparisons). Holding every choice where the control made it,
and following the chosen piece past its kink, gives the smooth extension f̃ of the paper (section 3.6,
appendix D): equal to the bit to f where no choice differs, smooth in the parameters everywhere.

`recording` and `replaying` go around the user's loss (`LossFunction.within`); the model is not changed. Operations
on numbers that depend on the parameters count, through detach() and no_grad too (`dependence`): what the parameters
do not move cannot switch. What cannot be held is refused by name.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UnfrozenGate
from .calls import Surroundings
from .dependence import Dependence
from .kinks import CASTS, CHOICES, PIECEWISE, REDUCTIONS, TRUTHS, WINDOWS, Piecewise, function_name, is_rough, windows

OUTSIDE, ROOT = "(loss_fn)", "(model)"  # the layer of a gate outside any module, and in the model's own forward
# kinks inside these, by their aten names, only guard against division by zero, or tell finite numbers from others
GUARDED: dict[str, frozenset[str]] = {
    "normalize": frozenset({"clamp_min"}),
    "cosine_similarity": frozenset({"clamp_min"}),
    "gaussian_nll_loss": frozenset({"lt", "clamp"}),
    "isfinite": frozenset({"abs"}),
    **dict.fromkeys(("__repr__", "__format__"), frozenset({"item"})),
}
LEAVING = {"tolist", "numpy", "__array__", "__dlpack__"}  # a tensor's numbers go to Python without an operation


@dataclass(frozen=True)
class Gate:
    """One call of an operation with a kink: what it chose, element by element.

    `pattern` is the piece, index or truth of every element. Where they are recorded with their values, gates between
    two pieces also carry the `value` that chose (the pre-activation a), its `margin` |a| from the nearest kink, and the
    piece `across` that kink.
    """

    kind: str
    layer: str
    pattern: Tensor
    value: Tensor | None = None
    margin: Tensor | None = None
    across: Tensor | None = None

    def differs(self, other: Gate) -> Tensor:
        """Where two passes chose differently."""
        if self.kind != other.kind or self.pattern.shape != other.pattern.shape:
            raise UnfrozenGate(_another_path(self, f"{other.kind} of shape {tuple(other.pattern.shape)}"))
        return self.pattern != other.pattern


@dataclass
class Pattern:
    """Every gate of one gradient, in order; one list per call of loss_fn (a micro-batch each)."""

    calls: list[list[Gate]] = field(default_factory=list)

    @property
    def gates(self) -> list[Gate]:
        return [gate for call in self.calls for gate in call]

    @property
    def labels(self) -> list[str]:
        """One name per gate: its layer and kind, numbered where a layer has several."""
        seen: dict[str, int] = {}
        labels = []
        for gate in self.gates:
            name = f"{gate.layer} {gate.kind}"
            seen[name] = seen.get(name, 0) + 1
            labels.append(name if seen[name] == 1 else f"{name} {seen[name]}")
        return labels

    def switches(self, other: Pattern) -> list[Tensor]:
        """S_s: where the other pass's choices differ, gate by gate."""
        mine, theirs = self.gates, other.gates
        if len(mine) != len(theirs):
            raise UnfrozenGate(f"the control has {len(mine)} gates and the other pass {len(theirs)}: {CONTROL_FLOW}")
        return [gate.differs(twin) for gate, twin in zip(mine, theirs)]

    def with_choices(self, patterns: Sequence[Tensor]) -> Pattern:
        """The same gates with other choices, one tensor per gate."""
        left = iter(patterns)
        return Pattern([[replace(gate, pattern=next(left)) for gate in call] for call in self.calls])


CONTROL_FLOW = (
    "the model takes another way through its code at the changed parameters, so its gates cannot be matched; "
    "replace control flow that depends on parameters by torch.where"
)


def _another_path(gate: Gate, found: str) -> str:
    return f"at {gate.kind} in {gate.layer!r} the other pass has {found}: {CONTROL_FLOW}"


def recording(pattern: Pattern, *, values: bool = False) -> Surroundings:
    """Around a loss: writes its gates into `pattern`, which must be empty. Changes no bit of the pass.

    values: with what chose; a choice alone takes a byte an element, its values twice the size of the activations.
    """

    def around(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        pattern.calls.append([])
        return _watching(model, lambda gate: pattern.calls[-1].append(gate), values=values)

    return around


def replaying(pattern: Pattern) -> Surroundings:
    """Around a loss: every gate chooses as in `pattern`. Equal to the bit where it would have chosen so anyway."""
    turns = itertools.count()

    @contextlib.contextmanager
    def around(model: nn.Module) -> Iterator[None]:
        left = list(reversed(pattern.calls[next(turns) % len(pattern.calls)]))

        def settle(now: Gate) -> Tensor | None:
            if not left:
                raise UnfrozenGate(f"{now.kind} in {now.layer!r} has no counterpart in the control: {CONTROL_FLOW}")
            held = left.pop()
            return held.pattern if held.differs(now).any() else None

        with _watching(model, settle):
            yield
        if left:
            raise UnfrozenGate(_another_path(left[-1], "no gate"))

    return around


# --- inside


Settle = Callable[[Gate], Tensor | None]  # the choice to hold instead of the gate's own, or None


@contextlib.contextmanager
def _watching(model: nn.Module, settle: Settle, *, values: bool = False) -> Iterator[None]:
    names = {module: name or ROOT for name, module in model.named_modules()}
    watch = _Watch(settle, names, Dependence(model), values)
    before = register_module_forward_pre_hook(watch.enter)
    after = register_module_forward_hook(watch.leave, always_call=True)
    try:
        with _Tripwire(watch), watch:
            yield
    except Exception as error:
        # scripted code wraps what is raised inside it
        if watch.refusal is not None and error is not watch.refusal:
            raise watch.refusal from error
        raise
    finally:
        before.remove()
        after.remove()


class _Watch(TorchFunctionMode):
    """Sees every torch function that Python calls, and lets `settle` decide the choices of gates."""

    def __init__(self, settle: Settle, names: dict[nn.Module, str], dependence: Dependence, values: bool) -> None:
        super().__init__()
        self.settle, self.names, self.dependence, self.values = settle, names, dependence, values
        self.layers: list[str] = []
        self.refusal: UnfrozenGate | None = None
        # aten kinks that the function being run takes care of; None: all of them
        self.known: frozenset[str] | None = frozenset()

    @property
    def layer(self) -> str:
        return self.layers[-1] if self.layers else OUTSIDE

    def enter(self, module: nn.Module, args: Any) -> None:
        if module in self.names:
            self.layers.append(self.names[module])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self.names:
            self.layers.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        base = name.rstrip("_") if not name.endswith("__") else name
        handler = _HANDLERS.get(base)
        if base in LEAVING and self.dependence.among(args):
            self.refuse(base, READ)
        if handler is None and base not in GUARDED:
            return func(*args, **kwargs)
        held = handler is not None and self.dependence.among(args, kwargs)
        before, self.known = self.known, None if held else GUARDED.get(base, self.known)
        try:
            if handler is None or not held:
                return func(*args, **kwargs)
            if any(map(_is_mapped, tree_leaves((args, kwargs)))):
                self.refuse(base, "is inside torch.func (vmap, grad, jvp), where its choices have no values")
            _refuse_checkpointing(base, self.layer)
            return handler(self, base, func, args, kwargs)
        finally:
            self.known = before

    def refuse(self, name: str, why: str) -> NoReturn:
        self.refusal = UnfrozenGate(f"{name} in {self.layer!r} {why}")
        raise self.refusal


READ = (
    "reads a number that depends on the parameters into Python, where a comparison is not seen; compare tensors "
    "(if h.mean() > 0, torch.where), and for a log keep the tensor itself: h.detach()"
)


def _is_mapped(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def _in_place(func: Any) -> bool:
    name = function_name(func)
    return name.endswith("_") and not name.endswith("__")


def _piecewise(watch: _Watch, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    try:
        kink: Piecewise = PIECEWISE[name](*args, **kwargs)
    except TypeError as error:
        raise UnfrozenGate(f"{name} in {watch.layer!r} is called in a way that cannot be held: {error}") from error
    in_place = kink.in_place or _in_place(func)
    gate = Gate(name, watch.layer, kink.pieces())
    if watch.values:
        seen = kink.x.detach().clone() if in_place else kink.x.detach()
        gate = replace(gate, value=seen, margin=kink.margin(), across=kink.across())
    held = watch.settle(gate)
    if held is None:
        return func(*args, **kwargs)
    if not in_place:
        return kink.follow(held, kink.x)
    return kink.x.copy_(kink.follow(held, kink.x.clone()))


def _window(watch: _Watch, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    with torch.no_grad():
        _, index = windows(name)(*args, **kwargs)
    held = watch.settle(Gate(name, watch.layer, index))
    result = func(*args, **kwargs)
    if held is None:
        return result
    spatial = WINDOWS[name]
    values = x.flatten(-spatial).gather(-1, held.flatten(-spatial)).view(held.shape)
    return (values, held) if isinstance(result, tuple) else values


def _choice(watch: _Watch, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.max and min are three functions: of two tensors, of one over all its elements, or along a dimension."""
    if name in ("max", "min"):
        second = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("dim"))
        if isinstance(second, Tensor):
            return _piecewise(watch, name + "imum", func, args, kwargs)
        if second is None:
            return _reduction(watch, name, func, args, kwargs)
    result = func(*args, **kwargs)
    held = watch.settle(Gate(name, watch.layer, result[1].detach()))
    if held is None:
        return result
    x, dim, keepdim = CHOICES[name](*args, **kwargs)
    taken = x.gather(dim, held if held.ndim == x.ndim else held.unsqueeze(dim))
    return type(result)((taken if keepdim else taken.squeeze(dim), held))


def _reduction(watch: _Watch, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The largest or smallest element over some dimensions; ties share it."""
    x, dims, keepdim = REDUCTIONS["a" + name.removeprefix("a")](*args, **kwargs)
    result = func(*args, **kwargs)
    extreme = getattr(torch, "a" + name.removeprefix("a"))(x.detach(), dims, keepdim=True)
    held = watch.settle(Gate(name, watch.layer, x.detach() == extreme))
    if held is None:
        return result
    total = torch.where(held, x, 0.0).sum(dims, keepdim=keepdim)
    return total / held.sum(dims, keepdim=keepdim)


def _truth(watch: _Watch, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """A comparison, the place of an extreme, a rounding: its value is its choice."""
    result = func(*args, **kwargs)
    if name in CASTS and (not isinstance(result, Tensor) or result.is_floating_point() or result.is_complex()):
        return result
    if isinstance(result, bool):
        held = watch.settle(Gate(name, watch.layer, torch.tensor(result)))
        return result if held is None else bool(held)
    held = watch.settle(Gate(name, watch.layer, result.detach().clone()))
    if held is None:
        return result
    if _in_place(func):
        return result.copy_(held)
    # roundings have a gradient of zero, which belongs to the graph
    return torch.where(held == result, result, held) if result.requires_grad else held.clone()


_HANDLERS: dict[str, Callable[[_Watch, str, Any, Any, Any], Any]] = {
    **dict.fromkeys(PIECEWISE, _piecewise),
    **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(CHOICES, _choice),
    **dict.fromkeys(TRUTHS | CASTS, _truth),
}


class _Tripwire(TorchDispatchMode):
    """Sees what runs below Python: a kink that `_Watch` was not asked about cannot be held."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watch.dependence.among(args, kwargs):
            return func(*args, **kwargs)
        if self.watch.known is not None:
            self._examine(func, args, kwargs)
        result = func(*args, **kwargs)
        self.watch.dependence.after(func, args, kwargs, result)
        return result

    def _examine(self, func: Any, args: Any, kwargs: Any) -> None:
        name, watch = func.overloadpacket.__name__.rstrip("_"), self.watch
        name = "item" if name == "_local_scalar_dense" else name
        if name in (watch.known or ()):
            return
        if name == "item":
            watch.refuse(name, READ)
        if func.namespace not in ("aten", "prims"):
            watch.refuse(str(func), "is an operation of its own, whose kinks are not known; write it in torch")
        if is_rough(name, args, kwargs):
            watch.refuse(
                name,
                "has a kink that cannot be held at the control's side: it runs inside a compiled or scripted function, "
                "nn.RNN('relu'), a loss of torch.nn.functional, or an operation that is not known. Write it with "
                "torch.relu, clamp, abs, max, where or pooling in Python",
            )
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and isinstance(x.grad_fn, BackwardCFunction):
                function = type(x.grad_fn).__name__.removesuffix("Backward")
                watch.refuse(function, "is a custom autograd function, whose backward pass may choose unseen")


def _refuse_checkpointing(name: str, layer: str) -> None:
    """Checkpointing runs the forward pass again during the backward one, where no gate is held."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and "checkpoint" in getattr(hooks[0], "__qualname__", ""):
        raise UnfrozenGate(
            f"{name} in {layer!r} is inside activation checkpointing, which would run it again without its gates "
            "held; turn checkpointing off (model.gradient_checkpointing_disable()) for this analysis"
        )
