"""Everything that was found out about an event, and the kind that it is."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, field

from .alarm import ALARM
from .descriptions import Kept
from .event import BARS, Event
from .hyperparameters import HyperChange
from .instruments import DataFinding, UpdateSizes
from .not_a_number import NotANumberFinding
from .replay import Replay
from .scatter import Scatter
from .stability import Amplification, Sharpness
from .store import Flight
from .sweep import Swept
from .treatments import Outcome, sufficient
from .trials import Inquiry, Trial

AFTER = 16  # steps after the explained one that belong to the event, where they were recorded
ABRUPT = ("jump", "excursion", "restart")


@dataclass
class Findings:
    """One event, and what was asked about it."""

    flight: Flight
    replayed: Replay
    event: Event
    swept: Swept
    asked: int
    by_loss: Event  # the same stretch measured in the loss, whatever is explained
    norm_first: bool = False  # the gradient norm stands out as far as a trigger asks, and no loss of the stretch
    main: str = "skip"  # what a step is compared with
    refused: str | None = None  # why nothing was predicted
    nan: NotANumberFinding | None = None
    rise: tuple[float, float] | None = None  # the lowest running median, and σ, of a loss that has risen slowly
    finite_with: list[bool] = field(default_factory=list)  # is a step that is not finite so with each change undone?
    updates: UpdateSizes | None = None
    growth: Amplification | None = None
    sharp: Sharpness | None = None
    data: DataFinding | None = None
    changes: list[HyperChange] = field(default_factory=list)
    held: list[Outcome] = field(default_factory=list)  # of the changes, one each
    inquiry: Inquiry = field(default_factory=lambda: Inquiry([], []))
    outcomes: list[Outcome] = field(default_factory=list)
    untried: int = 0  # treatments, because the runs without steps had taken what may be run again
    which: str = ""  # which window and step this is, where there were others
    nothing_seen: str = ""  # that nothing triggered, where no step was asked for
    clip: float | None = None  # that `explain` was told
    descriptions: dict[int, Kept] = field(default_factory=dict)  # of batches, by step

    @property
    def kind(self) -> str:
        """What kind of event it was."""
        if self.nan is not None or self.asked != self.explained:
            return "not a number"
        if not self.is_event:
            return "no spike" if self.event.onset >= BARS.fewest else "unknown"
        if self.lost_in_scatter:
            return "unknown"
        if self.hyperparameter(ABRUPT) is not None:
            return "hyperparameter"
        if self.data is not None and self.data.kind == "shift":
            return "shift"
        if self.hyperparameter(("ramp",)) is not None:
            return "hyperparameter"
        if self._guilty:
            if self._guilty in ((self.replayed.last,), self._own):
                return "own batch"
            return "batch" if len(self._guilty) == 1 else "group"
        if self.data is not None and self.data.kind == "source":
            return "source"
        if not self.inquiry.suspects:
            return "unknown"
        removed = self.inquiry.placebos and self.inquiry.share > BARS.specific
        if self.data is not None and self.data.kind == "draw" and self.inquiry.placebos and not removed:
            return "draw"  # else another run of it has no spike with the same draw either
        removing = [t for t in self.inquiry.suspects if t.removes and t.steps != (self.event.step,)]
        anything = removed or len(removing) > BARS.together
        return "instability" if anything or sufficient(self.outcomes) is not None else "unknown"

    @property
    def is_event(self) -> bool:
        """Is there something to explain? Where nothing triggered and nobody asked for a step, only what a trigger would
        tell: the last step of an ordinary run may be 3 σ high by chance."""
        event = self.event
        bar = ALARM.threshold if self.nothing_seen else BARS.gone
        return event.values[event.step] > event.usual + bar * event.sigma

    @property
    def lost_in_scatter(self) -> bool:
        """Do replays of the unchanged run differ by more than the spike? Then no other run can be told from luck."""
        event = self.event
        return self.is_event and self.value_spread >= event.values[event.step] - event.usual

    @property
    def value_spread(self) -> float:
        """The ± of the explained value."""
        return self.scatter.spread(lambda run: run[self.event.step])

    @functools.cached_property
    def scatter(self) -> Scatter:
        """The ± of what is measured, by replays of the unchanged run."""
        return Scatter.of(self.replayed, self.event.quantity)

    @property
    def rose_before(self) -> bool:
        """Was a loss that has risen slowly high already where the window begins?"""
        before = self.event.values[: max(self.event.onset, BARS.fewest)]
        return self.rise is not None and statistics.median(before) > self.event.level

    @property
    def explained(self) -> int:
        return self.replayed.records[self.replayed.last].step

    def hyperparameter(self, kinds: tuple[str, ...]) -> int | None:
        """The change, of these kinds, with which at least half of the event goes. One that lasts is a condition of
        whatever comes after it: where a batch did what others did not at the new value, that is the cause; several
        steps, which undo part of the change, only where they leave clearly less than the former value does."""
        removes = [(left, i) for left, i in self._removing if self.changes[i].kind in kinds]
        if not removes:
            return None
        left, best = min(removes)
        change, guilty, group = self.changes[best], self._guilty, self.inquiry.group
        as_well = group is not None and group.left > BARS.clear * left
        return best if not guilty or change.brief or change.at in guilty or as_well else None

    @property
    def setting(self) -> int | None:
        """The change that did it."""
        if any(self.finite_with):
            return self._alone([i for i, finite in enumerate(self.finite_with) if finite])[0]
        if self.kind != "hyperparameter":
            return None
        abrupt = self.hyperparameter(ABRUPT)
        return self.hyperparameter((*ABRUPT, "ramp")) if abrupt is None else abrupt

    @property
    def condition(self) -> int | None:
        """The same, or the change without which a blamed batch would not have done it."""
        if self.setting is not None:
            return self.setting
        return min(self._removing)[1] if self.blamed and self._removing else None

    @property
    def group(self) -> Trial | None:
        """The run without several steps together that the verdict speaks of."""
        return self.inquiry.own if self.kind == "own batch" and len(self.blamed) > 1 else self.inquiry.group

    @property
    def _removing(self) -> list[tuple[float, int]]:
        """What is left with a hyperparameter at its former value, where that is at most half, and which change."""
        return [(self.held[i].left, i) for i in self._alone([i for i, o in enumerate(self.held) if o.removes])]

    def _alone(self, undoing: list[int]) -> list[int]:
        """Changes whose former values undo the event, less those that undo a later one of these, too: of such a one
        nobody knows that it did anything."""
        return [i for i in undoing if not any(self.changes[i].covers(self.changes[j]) for j in undoing)]

    @property
    def blamed(self) -> tuple[int, ...]:
        """Places in the path of the steps that did it."""
        return self._guilty if self.kind in ("batch", "group", "own batch") else ()

    @property
    def _guilty(self) -> tuple[int, ...]:
        """Whom the inquiry blames. Without the explained step its own value is gone, whoever raised it: it is blamed
        only where no earlier step is, and its batch is high on earlier weights too."""
        last, blamed = self.replayed.last, self.inquiry.blamed
        if self._own and set(blamed) <= set(self._own):
            return self._own
        if last not in blamed:
            return blamed
        own = self.data is not None and self.data.kind == "own batch"
        return tuple(i for i in blamed if i != last) or ((last,) if own else ())

    @property
    def _own(self) -> tuple[int, ...]:
        """The steps whose batches are high by themselves, where that is the event."""
        return self.inquiry.by_itself
