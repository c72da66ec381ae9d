"""Which modules and tensors a function uses beside its arguments, each with the words that lead to it.

It reads bytecode for the names that the function uses (`net`, `self.teacher.body`), and follows them through closures,
globals, defaults, `functools.partial`, methods and the user's own functions that it calls. Only what is used counts: a
method of a trainer may use `self.weight` beside a `self.model` that it leaves alone. What could be left changed is
another question, answered by `reach`, which takes in everything.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from .hooks import name_of, origin

DEPTH = 8  # calls and containers in each other
ITEMS = 256  # of a container
LIBRARIES = {"torch", "numpy", "aftershock", "transformers", "lightning", "accelerate", "torchvision", "jaxtyping"}
PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)
NOTHING = object()


class Found(NamedTuple):
    """A module or tensor that a function uses, and how it gets there."""

    words: str
    value: nn.Module | Tensor


class Use(NamedTuple):
    """A name in a function's code with the attributes taken from it: `self.teacher.body`."""

    name: str
    attributes: tuple[str, ...]
    is_global: bool


def used_by(function: Any) -> list[Found]:
    """Every module and tensor that a call of `function` may use without being given it."""
    walk = _Walk()
    walk.callable(function, name_of(function), 0)
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found: list[Found] = []
        self._seen: dict[tuple[int, int], Any] = {}  # held, so that no id is used twice

    def callable(self, function: Any, words: str, depth: int) -> None:
        """A call of something: what its code uses."""
        if isinstance(function, functools.partial):
            self.callable(function.func, words, depth)
            for item in (*function.args, *function.keywords.values()):
                self.whole(item, f"an argument of {words}", depth + 1)
        elif isinstance(function, types.MethodType):
            self.method(function.__self__, function.__func__, words, depth)
        elif isinstance(function, types.FunctionType):
            self.code(function, NOTHING, words, depth)
        elif not isinstance(function, PLAIN):
            name = "forward" if isinstance(function, nn.Module) else "__call__"
            called = inspect.getattr_static(type(function), name, None)
            if isinstance(called, types.FunctionType):
                self.code(called, function, words, depth)

    def code(self, function: Any, bound: object, words: str, depth: int) -> None:
        key = (id(function), id(bound))
        if depth > DEPTH or key in self._seen or not isinstance(function, types.FunctionType):
            return
        self._seen[key] = (function, bound)
        if origin(function).partition(".")[0] in LIBRARIES:
            return
        for name, default in _defaults(function):
            self.whole(default, name, depth + 1)
        names = closure_of(function)
        if bound is not NOTHING and function.__code__.co_argcount:
            names[function.__code__.co_varnames[0]] = bound
        for use in _uses(function.__code__):
            source: Mapping[str, Any] = function.__globals__ if use.is_global else names
            if use.name in source:
                self.attributes(source[use.name], use, depth)

    def attributes(self, value: Any, use: Use, depth: int) -> None:
        """`name.a.b`: looked up without running anything of the user's."""
        words = use.name
        for attribute in use.attributes:
            if isinstance(value, types.ModuleType):
                value = vars(value).get(attribute)
            elif isinstance(value, (Tensor, dict, list, tuple, *PLAIN)):
                break
            else:
                inner = _attribute(value, attribute)
                if isinstance(inner, types.FunctionType | property):
                    self.method(value, inner, words, depth)
                    return
                if inner is NOTHING:
                    break
                value = inner
            words += f".{attribute}"
        self.whole(value, words, depth + 1)

    def method(self, value: Any, inner: Any, words: str, depth: int) -> None:
        inner = inner.fget if isinstance(inner, property) else inner
        if isinstance(value, nn.Module) and origin(inner).partition(".")[0] in LIBRARIES:
            self.whole(value, words, depth + 1)  # model.parameters(), model.state_dict()
        else:
            self.code(inner, value, words, depth + 1)

    def whole(self, value: Any, words: str, depth: int) -> None:
        """Something that is used as a whole: passed on, called, or iterated over."""
        if isinstance(value, Tensor | nn.Module):
            self.found.append(Found(words, value))
            return
        key = (id(value), 0)
        if depth > DEPTH or isinstance(value, PLAIN) or key in self._seen:
            return
        self._seen[key] = value
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.callable(value, words, depth + 1)
            return
        for name, item in _items(value):
            self.whole(item, f"{words}{name}", depth + 1)
        self.callable(value, words, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in islice(value.items(), ITEMS))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", item) for i, item in enumerate(islice(value, ITEMS)))
    elif type(value).__module__.partition(".")[0] not in LIBRARIES:
        yield from ((f".{name}", item) for name, item in list(getattr(value, "__dict__", {}).items())[:ITEMS])


def _attribute(value: Any, name: str) -> Any:
    """An attribute as `getattr` would find it, without running code; a property or function as itself."""
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    for part in ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ():
        if name in own.get(part, {}):
            return own[part][name]
    found = inspect.getattr_static(type(value), name, NOTHING)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    given = function.__defaults__ or ()
    code = function.__code__
    yield from zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given)
    yield from (function.__kwdefaults__ or {}).items()


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """What its free names hold; those that are not assigned yet are left out."""
    names = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue
    return names


@functools.lru_cache(maxsize=1024)
def _uses(code: types.CodeType) -> tuple[Use, ...]:
    """The names that a piece of code and those inside it load from outside, and its own first argument."""
    first = code.co_varnames[0] if code.co_argcount else None
    return tuple(dict.fromkeys(_loads(code, first)))


def _loads(code: types.CodeType, first: str | None) -> Iterator[Use]:
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("PUSH_NULL", "NOP", "CACHE")]
    for i, instruction in enumerate(instructions):
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        kind = instruction.opname
        if kind in ("LOAD_GLOBAL", "LOAD_NAME") or ("DEREF" in kind and kind.startswith("LOAD")):
            yield Use(names[0], tuple(_chain(instructions, i + 1)), "DEREF" not in kind)
        elif kind.startswith("LOAD_FAST") and first in names:
            yield Use(str(first), tuple(_chain(instructions, i + 1)) if names[-1] == first else (), False)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loads(constant, None)


def _chain(instructions: list[dis.Instruction], start: int) -> Iterator[str]:
    for instruction in islice(instructions, start, None):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield instruction.argval
