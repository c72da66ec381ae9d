"""Gates: the control's activation pattern, recorded in one pass and held in another.

A gate is an operation with a kink: a choice between smooth pieces (ReLU and its kin, clamp, abs), between
inputs (max, pooling, sort) or between truths (comparisons). Holding every choice where the control made it,
and following the chosen piece past its kink, gives the smooth extension f̃ of the paper (section 3.6,
appendix D): equal to the bit to f where no choice differs, smooth in the parameters everywhere.

`recording` and `replaying` go around the user's loss (`LossFunction.within`); the model is not changed. Only
operations on tensors that need a gradient count: what the parameters do not move cannot switch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UnfrozenGate
from .kinks import CHOICES, PIECEWISE, REDUCTIONS, TRUTHS, WINDOWS, Piecewise, function_name, is_rough, windows
from .loss import Surroundings

OUTSIDE, ROOT = "(loss_fn)", "(model)"  # the layer of a gate outside any module, and in the model's own forward
# kinks inside these only guard against division by zero, or choose between finite and -inf
GUARDED = {"normalize", "cosine_similarity", "pairwise_distance", "gaussian_nll_loss", "scaled_dot_product_attention"}
GUARDED |= {"multi_head_attention_forward"}


@dataclass(frozen=True)
class Gate:
    """One call of an operation with a kink: what it chose, element by element.

    `pattern` is the piece, index or truth of every element. Gates between two pieces also carry the `value`
    that chose (the pre-activation a), its `margin` |a| from the nearest kink, and the piece `across` that kink.
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


def recording(pattern: Pattern) -> Surroundings:
    """Around a loss: writes its gates into `pattern`, which must be empty. Changes no bit of the pass."""

    def around(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        pattern.calls.append([])
        return _watching(model, lambda gate: pattern.calls[-1].append(gate))

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
def _watching(model: nn.Module, settle: Settle) -> Iterator[None]:
    watch = _Watch(settle, {module: name or ROOT for name, module in model.named_modules()})
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

    def __init__(self, settle: Settle, names: dict[nn.Module, str]) -> None:
        super().__init__()
        self.settle, self.names = settle, names
        self.layers: list[str] = []
        self.refusal: UnfrozenGate | None = None
        self.known = False  # inside a function whose kinks are taken care of

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
        if handler is None and base not in GUARDED:
            return func(*args, **kwargs)
        before, self.known = self.known, True
        try:
            if handler is None or not _needs_gradient(args, kwargs):
                return func(*args, **kwargs)
            _refuse_checkpointing(base, self.layer)
            return handler(self, base, func, args, kwargs)
        finally:
            self.known = before


def _piecewise(watch: _Watch, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    try:
        kink: Piecewise = PIECEWISE[name](*args, **kwargs)
    except TypeError as error:
        raise UnfrozenGate(f"{name} in {watch.layer!r} is called in a way that cannot be held: {error}") from error
    in_place = kink.in_place or (function_name(func).endswith("_") and not function_name(func).endswith("__"))
    seen = kink.x.detach().clone() if in_place else kink.x.detach()
    held = watch.settle(Gate(name, watch.layer, kink.pieces(), seen, kink.margin(), kink.across()))
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
    """A comparison, or the place of an extreme: its value is its choice."""
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor):
        return result
    held = watch.settle(Gate(name, watch.layer, result.detach().clone()))
    return result if held is None else held.clone()


_HANDLERS: dict[str, Callable[[_Watch, str, Any, Any, Any], Any]] = {
    **dict.fromkeys(PIECEWISE, _piecewise),
    **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(CHOICES, _choice),
    **dict.fromkeys(TRUTHS, _truth),
}


class _Tripwire(TorchDispatchMode):
    """Sees what runs below Python: a kink that `_Watch` was not asked about cannot be held."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if not self.watch.known and is_rough(name, args) and _needs_gradient(args, kwargs):
            self.watch.refusal = UnfrozenGate(
                f"{name} in {self.watch.layer!r} has a kink that cannot be held at the control's side: it runs inside "
                "a compiled or scripted function, nn.RNN('relu'), or an operation that is not known. Write it with "
                "torch.relu, clamp, abs, max, where or pooling in Python"
            )
            raise self.watch.refusal
        return func(*args, **(kwargs or {}))


def _needs_gradient(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))


def _refuse_checkpointing(name: str, layer: str) -> None:
    """Checkpointing runs the forward pass again during the backward one, where no gate is held."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and "checkpoint" in getattr(hooks[0], "__qualname__", ""):
        raise UnfrozenGate(
            f"{name} in {layer!r} is inside activation checkpointing, which would run it again without its gates "
            "held; turn checkpointing off (model.gradient_checkpointing_disable()) for this analysis"
        )
