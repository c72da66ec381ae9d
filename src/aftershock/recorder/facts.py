"""What an explanation states, as data: small records, each field of which is a variable of its dataset.

A number, a truth value or a text is a variable without a dimension, a tuple one along the dimension that it names. What
is not known is NaN or an empty text in the file, and None here where the field says so. A `…_spread` is the ± of the
number of that name: NaN where the run repeats itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast, get_args, get_origin, get_type_hints

import numpy as np

from .quantity import Quantity
from .stability import Amplification, Sharpness

if TYPE_CHECKING:
    import xarray as xr

DTYPES: dict[type, type] = {int: np.int64, float: np.float64, bool: np.bool_, str: np.str_}


def along(dimension: str) -> Any:
    """A tuple that is a variable along this dimension."""
    return field(metadata={"dimension": dimension})


@dataclass(frozen=True)
class EventFacts:
    """The event in numbers. Steps are told by their numbers."""

    kind: str  # what kind of event
    quantity: Quantity
    asked: int  # the step that was asked about
    explained: int  # the same, or the last finite one before it
    value: float  # of the explained step
    value_spread: float
    usual: float  # before the event
    sigma: float  # of the usual values
    peak: float  # above the usual
    peak_spread: float
    gone: float  # the share of the peak up to which what is left is no event
    highest: int  # the step with the largest value
    onset: int  # the first step of the event
    end: int  # the last one that is looked at
    tail: float  # the mean of the last values
    tail_spread: float
    rise: float | None  # the lowest running median, of a loss that has risen slowly
    rose_before: bool  # such a loss was high already where the window begins
    over: int  # values in the running medians by which runs are compared; 1: single values
    norm_first: bool  # the gradient norm stands out, and no loss
    loss_usual: float
    loss_sigma: float
    apart: tuple[int, ...] = along("apart")  # later steps whose batches are bad by themselves: events of their own

    @property
    def size(self) -> float:
        """How far the explained value is above the usual."""
        return self.value - self.usual


@dataclass(frozen=True)
class RecordingFacts:
    """Which run this is of, and what was recorded around the event."""

    run: str  # its id
    page: str  # the name of its page
    reason: str  # why the window was kept
    which: str  # which window and step this is, where there were others
    nothing_seen: str  # that nothing triggered, where no step was asked for
    after: int  # steps after the explained one
    after_wanted: int
    after_ends: str  # why there are no more
    not_finite: int | None  # the first step after it that is not finite
    more_recorded: bool  # before the window
    starts_here: bool  # the recording
    missing: tuple[int, ...] = along("missing")  # steps that are lost
    asked_batches: tuple[int, ...] = along("asked_batch")  # indices in the data of those of the step that was asked for


@dataclass(frozen=True)
class ReplayFacts:
    """How well the run repeats itself."""

    replay: str  # in words
    replayed: int  # steps compared with the record
    replay_deviation: float  # the largest relative difference of a loss; 0: to the bit
    replays: int  # of the unchanged run, where it does not repeat itself; else 0
    replays_with_it: int  # in which the event is there
    lost_in_scatter: bool  # they differ by more than the event


@dataclass(frozen=True)
class BlameFacts:
    """What the runs without some steps show. `…_change`: how many of them remove half of the event, double it or move
    it."""

    ranked_by: str  # what a step is compared with
    own_left: float  # without the explained step
    own_left_spread: float
    own_left_so_far: bool  # that run ended once half of the event was there
    own_after: float  # the mean of the last values without it
    own_after_spread: float
    replaced_placebos: int
    replaced_placebos_change: int
    kin: bool  # whoever was given batches like its own is of a rare kind of data, beside others of that kind
    group_left: float
    group_left_spread: float
    group_after: float
    group_after_spread: float
    group_back: float  # with one of the group back, at least
    group_back_spread: float
    group_replaced: bool  # it was given batches like its own, and not left out
    group_placebos: int
    group_placebos_change: int
    placebos: int
    placebos_change: int
    placebos_remove: int  # those of them that remove half of it
    placebos_asked: int  # fewer are tried where these decide it already, or no more were recorded
    several: int  # as many other steps at once, where each of several removes it
    several_change: int
    several_acquitted: bool
    blamed: tuple[int, ...] = along("blamed")  # the steps that did it
    replaced: tuple[int, ...] = along("replaced")  # those of them that were given batches like their own instead
    replaced_left: tuple[float, ...] = along("replaced")
    replaced_left_spread: tuple[float, ...] = along("replaced")
    replaced_after: tuple[float, ...] = along("replaced")
    replaced_after_spread: tuple[float, ...] = along("replaced")
    gone_with_others: tuple[int, ...] = along("gone_with_others")  # half is gone with batches like their own, too
    cleared: tuple[int, ...] = along("cleared")  # half is gone without them, and not with batches like their own
    group: tuple[int, ...] = along("group")  # steps that were left out, or given such batches, together


@dataclass(frozen=True)
class SettingFacts:
    """Hyperparameters that changed in the window, in words, and what holding each at its former value does; and how
    many other treatments are not known."""

    hyperparameter: str | None  # the one that did it
    condition: str | None  # the change, of it or of one without which the blamed batch would not have done it
    condition_left: float
    condition_left_spread: float
    untried: int  # treatments that were not tried, because the runs without steps had taken what may be run again
    settings: tuple[str, ...] = along("setting")
    setting_left: tuple[float, ...] = along("setting")
    setting_left_spread: tuple[float, ...] = along("setting")
    setting_left_so_far: tuple[bool, ...] = along("setting")  # the run ended once half was there: at least so much
    setting_finite: tuple[bool, ...] = along("setting")  # of a step that is not finite: it is so with the former value


@dataclass(frozen=True)
class InstrumentFacts:
    """What the instruments saw, in words where that is all that is kept. NaN or nothing: not looked at."""

    data_said: str
    kin_high: float  # of the earlier batch most like the explained one, when it came, where that was as high
    update_said: str
    update_large: bool
    growth: float  # of perturbations, over all of the steps
    growth_steps: int
    sharpness: float
    sharpness_bar: float
    not_a_number_said: str
    batch_is_bad: bool  # of the step that is not finite
    overflows: bool  # its numbers are finite, and the norm of its gradient is not
    refused: str  # why nothing is predicted
    check: str  # of Hessian products
    check_error: float
    check_tolerance: float

    @property
    def amplification(self) -> Amplification | None:
        if math.isnan(self.growth):
            return None
        return Amplification(0, self.growth_steps, self.growth)

    @property
    def linear_ok(self) -> bool:
        """May linear contributions follow the run, as far as is known?"""
        return self.amplification is None or self.amplification.linear_ok

    @property
    def sharp(self) -> Sharpness | None:
        return None if math.isnan(self.sharpness) else Sharpness(self.sharpness, self.sharpness_bar)


@dataclass(frozen=True)
class Facts:
    """All of them."""

    event: EventFacts
    recording: RecordingFacts
    replay: ReplayFacts
    blame: BlameFacts
    settings: SettingFacts
    instruments: InstrumentFacts

    @property
    def variables(self) -> dict[str, Any]:
        """For a dataset: (dimensions, values) by name."""
        return {name: one for part in vars(self).values() for name, one in _variables(part).items()}

    @classmethod
    def of(cls, data: xr.Dataset) -> Self:
        return cls(**{name: _read(kind, data) for name, kind in get_type_hints(cls).items()})


class _Form(NamedTuple):
    """How a field is kept."""

    name: str
    kind: type  # of it, or of what a tuple holds
    optional: bool
    dimension: str | None


@functools.cache
def _forms(facts: type) -> tuple[_Form, ...]:
    hints, found = get_type_hints(facts), []
    for each in dataclasses.fields(facts):
        hint = hints[each.name]
        optional = isinstance(hint, UnionType)
        kind = str if hint is Quantity else get_args(hint)[0] if optional or get_origin(hint) is tuple else hint
        found.append(_Form(each.name, kind, optional, each.metadata.get("dimension")))
    return tuple(found)


def _variables(facts: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for form in _forms(facts.__class__):
        value, dtype = getattr(facts, form.name), DTYPES[form.kind]
        if form.optional and form.kind is not str:
            value, dtype = math.nan if value is None else value, np.float64
        dimensions = () if form.dimension is None else (form.dimension,)
        found[form.name] = dimensions, np.array("" if value is None else value, dtype=dtype)
    return found


def _read(facts: type, data: xr.Dataset) -> Any:
    found: dict[str, Any] = {}
    for form in _forms(facts):
        values = data.variables[form.name].values
        if form.dimension is not None:
            found[form.name] = tuple(map(form.kind, values.tolist()))
        else:
            value = values.item()
            unknown = form.optional and (value == "" or value != value)
            found[form.name] = None if unknown else form.kind(value)
    return facts(**found)


NAMES = tuple(form.name for kind in get_type_hints(Facts).values() for form in _forms(cast(type, kind)))
