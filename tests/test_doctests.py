"""The examples in docstrings are executed, and every public name has one.

They start from the names that `docs/snippets/tiny_run.py` makes, which the reference page shows to the reader.
"""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import aftershock as ak
from aftershock import api, results, theory
from aftershock.api.contributions import Contributions
from aftershock.api.examples import ExampleRanking
from aftershock.api.progress import Estimate
from aftershock.api.ranking import Ranking
from aftershock.core import operators
from aftershock.integrations import distributed
from aftershock.recorder import triggers
from aftershock.recorder.explanation import Culprit, FlightExplanation
from aftershock.recorder.forecast import Forecast
from aftershock.results.labelled import LabelledResult
from aftershock.theory.matching import Matched
from aftershock.theory.remainder import Decomposition

DOCS = Path(__file__).parent.parent / "docs"
NEEDED = {"lightning": ["lightning"], "transformers": ["transformers", "accelerate"]}
TRAINERS = [name for name, packages in NEEDED.items() if all(map(find_spec, packages))]
LOSSES = {"lightning": "training_loss", "transformers": "model_loss"}  # what is imported beside the callback
ALONE = [
    f"aftershock.{name}"
    for name in (
        "core.batches",
        "core.given",
        "core.operators",
        "core.probe",
        "errors",
        "integrations.distributed",
        *(f"integrations.{name}" for name in TRAINERS),
        "recorder.drift",
        "recorder.explain",
        "recorder.explanation",
        "recorder.forecast",
        "recorder.recorder",
        "recorder.triggers",
    )
]
PUBLIC = {
    **{name: getattr(ak, name) for name in dir(ak)},
    **{name: getattr(theory, name) for name in theory.__all__},
    **{name: getattr(distributed, name) for name in ("RankRecorder", "recorder_for")},
    **{
        LOSSES[name]: getattr(importlib.import_module(f"aftershock.integrations.{name}"), LOSSES[name])
        for name in TRAINERS
    },
    "default_triggers": triggers.default_triggers,
    **{
        kind.__name__: kind
        for kind in (
            *(Contributions, Culprit, Decomposition, ExampleRanking, FlightExplanation, Forecast, LabelledResult),
            *(Matched, Ranking),
            *(triggers.Spike, triggers.Drift, triggers.NotANumber, triggers.AtStep, triggers.OnSignal),
            *(triggers.Triggered, triggers.Trigger, Estimate),
            *(operators.LinearOperator, operators.WriteIn, operators.Transition, operators.Propagator),
            operators.ResponseOperator,
        )
    },
}
NO_FUNCTION = {"own_loss": "a probe: the example of its class shows it"}
INSIDE = {"RankRecorder.before_forward": "as FlightRecorder's"}


def modules() -> list[ModuleType]:
    homes = (api, results, theory)
    found = [f"{home.__name__}.{one.name}" for home in homes for one in pkgutil.iter_modules(home.__path__)]
    return [importlib.import_module(name) for name in [*found, *ALONE]]


def members(kind: type) -> dict[str, Any]:
    """What a class itself defines for others: methods and properties by name."""
    routine = (classmethod, staticmethod, property, cached_property)
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, routine))
    }


def examples() -> Iterator[tuple[str, tuple[ModuleType, str]]]:
    """Every docstring with an example, by the name of what it describes.

    doctest's own finder leaves out what is decorated and what is cached.
    """
    for module in modules():
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", "") != module.__name__ or not callable(thing):
                continue
            parts = members(thing) if inspect.isclass(thing) else {}
            for part, one in {name: thing, **{f"{name}.{part}": one for part, one in parts.items()}}.items():
                if has_example(one):
                    yield f"{module.__name__.removeprefix('aftershock.')}.{part}", (module, one.__doc__)


def has_example(thing: Any) -> bool:
    return ">>>" in (thing.__doc__ or "")


EXAMPLES = dict(examples())


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        exec((DOCS / "snippets" / "tiny_run.py").read_text(), found)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_says(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, text = EXAMPLES[name]
    live = (names["model"], names["optimizer"])
    before = copy.deepcopy([one.state_dict() for one in live])
    test = doctest.DocTestParser().get_doctest(text, {**vars(module), **names}, name, None, None)
    said: list[str] = []
    with torch.random.fork_rng(devices=[]):
        failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed
    for one, state in zip(live, before):
        one.load_state_dict(state)
    assert failed == 0, "".join(said)


def code_of(thing: Any) -> str:
    """The code of its example, if that is among those that are run."""
    run = {text for _, text in EXAMPLES.values()}
    found = doctest.DocTestParser().get_examples(thing.__doc__) if thing.__doc__ in run else []
    return "".join(example.source for example in found)


def inherited(kind: type) -> set[str]:
    """What another public class shows for it: one that it derives from, and the protocol of triggers."""
    bases = [base for base in kind.__mro__[1:] if base in PUBLIC.values()]
    protocol = [triggers.Trigger] * (kind.__module__ == triggers.__name__ and kind is not triggers.Trigger)
    return {part for base in [*bases, *protocol] for part in members(base)}


def without_example(name: str, thing: Any) -> list[str]:
    """A class shows something of itself; a function is called in its own example, a method there or in its class's."""
    code = code_of(thing)
    if not inspect.isclass(thing):
        return [] if re.search(rf"\b{name}\b", code) else [name]
    parts = {part: code + code_of(member) for part, member in members(thing).items() if part not in inherited(thing)}
    missing = [f"{name}.{part}" for part, code in parts.items() if not re.search(rf"(\.|def ){part}\b", code)]
    return [part for part in missing if part not in INSIDE] + [name] * (not code)


def test_every_public_name_has_an_example() -> None:
    named = {name: thing for name, thing in PUBLIC.items() if name not in NO_FUNCTION}
    assert [part for name, thing in named.items() for part in without_example(name, thing)] == []


@pytest.mark.parametrize("name", ["summaries", "certificate", "statistics"])
def test_every_function_of_the_results_has_an_example(name: str) -> None:
    module = importlib.import_module(f"{results.__name__}.{name}")
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    public = [f for f in own if not f.__name__.startswith("_")]
    assert public
    assert [f.__name__ for f in public if not has_example(f)] == []


@pytest.mark.parametrize("name", TRAINERS)
def test_a_callback_is_shown_in_a_run(name: str) -> None:
    """Its methods are the trainer's events, which nobody calls."""
    code = code_of(importlib.import_module(f"aftershock.integrations.{name}").FlightCallback)
    assert re.search(r"callbacks=\[callback\]", code)


def test_exceptions_are_real() -> None:
    defined = {f"{name}.{part}" for name, kind in PUBLIC.items() if inspect.isclass(kind) for part in members(kind)}
    assert set(INSIDE) <= defined
    assert set(NO_FUNCTION) <= set(PUBLIC)
