"""Explanations with some of their facts otherwise, for words and pages of what hardly happens."""

from __future__ import annotations

import dataclasses
from typing import Any

from aftershock.recorder.explanation import FlightExplanation
from aftershock.recorder.facts import NAMES


def with_facts(found: FlightExplanation, **given: Any) -> FlightExplanation:
    assert set(given) <= set(NAMES)
    facts, parts = found.facts, {}
    for name, part in vars(facts).items():
        own = {each.name for each in dataclasses.fields(part)} & set(given)
        parts[name] = dataclasses.replace(part, **{each: given[each] for each in own})
    rest = found.data.drop_vars(NAMES)  # lists may be of another length
    return FlightExplanation(rest.assign(dataclasses.replace(facts, **parts).variables))
