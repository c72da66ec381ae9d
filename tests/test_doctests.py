"""The examples in docstrings are executed."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

from aftershock import results
from aftershock.api import response

MODULES = [
    importlib.import_module(f"{results.__name__}.{found.name}") for found in pkgutil.iter_modules(results.__path__)
]
EXPLAINED = ("summaries", "certificate", "statistics")


@pytest.mark.parametrize("module", [*MODULES, response], ids=lambda module: module.__name__)
def test_examples_give_what_they_say(module: ModuleType) -> None:
    assert doctest.testmod(module, verbose=False).failed == 0


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_public_function_has_an_example(name: str) -> None:
    module = importlib.import_module(f"{results.__name__}.{name}")
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    public = [f for f in own if not f.__name__.startswith("_")]
    assert public
    assert [f.__name__ for f in public if ">>>" not in (f.__doc__ or "")] == []
