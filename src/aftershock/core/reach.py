"""Everything that user code could leave changed, from the model and from loss_fn: found once per loss.

From the model: the attributes of every module, and what is inside them. From a function: the variables that it closes
over, the global variables that it names, its defaults and attributes, and what is inside those. All of it, whether the
code uses it or not (that is what `uses` asks): what is missed here would be left changed. Objects of libraries
(loggers, progress bars, data loaders) that are the user's own are not entered: half of their state put back would
break them.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from .things import PLAIN, Attributes, Globals, Thing, Variable, thing_of

DEEPEST = 6  # containers inside containers
MOST = 20_000  # things
LONGEST = 10_000  # entries of a container; a longer one is data
NEVER_ENTERED = (*PLAIN, type, ModuleType, CodeType)
REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass
class Reach:
    """Everything found; beside it the registries of modules, and those of their hooks, that had no entry."""

    things: list[Thing] = field(default_factory=list)
    empty: list[Attributes] = field(default_factory=list)
    hooks: list[Attributes] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)  # by id, and kept alive so that an id stays one object's

    @classmethod
    def of(cls, model: nn.Module, function: Callable[..., Any]) -> Reach:
        self = cls()
        for name, module in model.named_modules():
            self._module(module, name, ours=True)
        self._enter(function, "loss_fn", 0, ours=False)
        return self

    def _enter(self, value: Any, label: str, depth: int, ours: bool) -> None:
        """`ours`: in the private copy of the model, where any object may be entered."""
        if isinstance(value, NEVER_ENTERED) or id(value) in self._seen or len(self.things) > MOST:
            return
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._module(module, f"{label}.{name}" if name else label, ours)
            return
        self._seen[id(value)] = value
        thing = thing_of(label, value)
        if thing is not None:
            if hasattr(value, "__len__") and not isinstance(value, Tensor) and len(value) > LONGEST:
                return
            self.things.append(thing)
        if depth >= DEEPEST:
            return
        for name, inner in self._inside(value, label, ours):
            self._enter(inner, name, depth + 1, ours and not isinstance(value, FunctionType))

    def _inside(self, value: Any, label: str, ours: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            yield from ((f"{label}[{key!r}]", inner) for key, inner in list(value.items()))
        elif isinstance(value, list | tuple | deque):
            yield from ((f"{label}[{i}]", inner) for i, inner in enumerate(list(value)))
        elif isinstance(value, MethodType):
            yield from (("the object of loss_fn", value.__self__), (label, value.__func__))
        elif isinstance(value, functools.partial):
            yield from ((f"{label}.func", value.func), (f"{label}.args", value.args), (label, value.keywords))
        elif isinstance(value, FunctionType):
            yield from self._function(value, label)
        elif (ours or not _is_library(type(value).__module__)) and hasattr(value, "__dict__"):
            yield from self._object(value, label)

    def _object(self, value: Any, label: str) -> Iterator[tuple[str, Any]]:
        if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
            return
        self.things.append(Attributes(label, vars(value), attributes=True))
        yield from ((f"{label}.{name}", inner) for name, inner in list(vars(value).items()))
        if not _is_library(type(value).__module__):
            yield from self._methods(type(value))

    def _function(self, function: FunctionType, label: str) -> Iterator[tuple[str, Any]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.things.append(Variable(name, cell))
            yield name, self.things[-1].read()
        yield f"the defaults of {label}", function.__defaults__
        yield f"the defaults of {label}", function.__kwdefaults__
        self.things.append(Attributes(label, vars(function), attributes=True))
        yield from ((f"{label}.{name}", inner) for name, inner in list(vars(function).items()))
        if _is_library(function.__module__):
            return
        names = tuple(sorted(name for name in _globals_of(function.__code__) if name in function.__globals__))
        if names:
            self.things.append(Globals(function.__globals__, names))
        yield from ((name, function.__globals__[name]) for name in names)

    def _module(self, module: nn.Module, name: str, ours: bool) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        self.things.append(Attributes(name, vars(module), attributes=True))
        for key, value in list(vars(module).items()):
            if key in REGISTRIES or (isinstance(value, OrderedDict) and "hooks" in key):
                self._registry(value, name, key)
            elif key != "_non_persistent_buffers_set":
                self._enter(value, f"{name}.{key}" if name else key, 0, ours)
        if not ours:
            for key, buffer in module.named_buffers(recurse=False):
                self._enter(buffer, f"{name}.{key}", 0, ours)
        if not _is_library(type(module).__module__):
            for label, method in self._methods(type(module)):
                self._enter(method, label, 0, ours=False)

    def _registry(self, value: Any, name: str, key: str) -> None:
        self._seen[id(value)] = value
        if value:
            self.things.append(Attributes(name, value, attributes=key in REGISTRIES))
        else:
            registry = Attributes(name if key in REGISTRIES else f"{name}.{key}", value, attributes=key in REGISTRIES)
            (self.empty if key in REGISTRIES else self.hooks).append(registry)

    def _methods(self, kind: type) -> Iterator[tuple[str, Any]]:
        for base in kind.__mro__:
            if not _is_library(base.__module__):
                for name, method in vars(base).items():
                    if isinstance(method, FunctionType):
                        yield f"{base.__name__}.{name}", method


@functools.lru_cache(maxsize=4096)
def _is_library(module: str | None) -> bool:
    """Whether code comes with Python or from an installed package, rather than from the user."""
    if module is None or module == "__main__":  # made by exec, or run by whatever program
        return False
    if module.partition(".")[0] in (*sys.stdlib_module_names, "torch"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _globals_of(code: CodeType) -> set[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _globals_of(constant)
    return found
