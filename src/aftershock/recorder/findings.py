"""Everything that was found out about an event, the kind that it is, and the labels under which it is kept."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.changes import ControlStep
from ..core.probe import own_loss
from ..core.scores import adjoint
from ..core.state import CHANNELS
from ..results.provenance import provenance
from .event import BARS, FEWEST, Event
from .examples import example_shares
from .hyperparameters import HyperChange
from .instruments import DataFinding, UpdateSizes
from .not_a_number import NotANumberFinding
from .quantity import seen
from .replay import Replay
from .stability import Amplification, Sharpness
from .store import Flight
from .sweep import CHANGES, Swept, readout_at
from .treatments import Outcome, sufficient
from .trials import Inquiry

if TYPE_CHECKING:
    import xarray as xr

AFTER = 16  # steps after the explained one that belong to the event, where they were recorded
ABRUPT = ("jump", "excursion", "restart")
NEAR = 0.5  # of a measured contribution, within which a prediction of it may speak of channels, layers and examples


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

    @property
    def kind(self) -> str:
        """What kind of event it was."""
        if self.nan is not None or self.asked != self.explained:
            return "not a number"
        if not self.event.is_one:
            return "no spike" if self.event.onset >= FEWEST else "unknown"
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
        if not self.inquiry.suspects:
            return "unknown"
        removed = self.inquiry.placebos and self.inquiry.share > BARS.specific
        return "instability" if removed or sufficient(self.outcomes) is not None else "unknown"

    @property
    def lost_in_scatter(self) -> bool:
        """Do replays of the unchanged run differ by more than the spike? Then no other run can be told from luck."""
        event, scatter = self.event, self.replayed.scatter(self.event.quantity)
        return bool(scatter) and event.is_one and scatter[event.step] >= event.values[event.step] - event.usual

    @property
    def rose_before(self) -> bool:
        """Was a loss that has risen slowly high already where the window begins?"""
        before = self.event.values[: max(self.event.onset, FEWEST)]
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
        change, guilty, group = self.changes[best], self.inquiry.blamed, self.inquiry.group
        as_well = group is not None and group.left > BARS.clear * left
        return best if not guilty or change.brief or change.at in guilty or as_well else None

    @property
    def condition(self) -> int | None:
        """The change without which a blamed batch would not have done it."""
        return min(self._removing)[1] if self.blamed and self._removing else None

    @property
    def _removing(self) -> list[tuple[float, int]]:
        """What is left with a hyperparameter at its former value, where that is at most half, and which change."""
        return [(o.left, i) for i, o in enumerate(self.held) if o.removes]

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
        """Several steps whose batches are high by themselves, where that is the event."""
        own = self.inquiry.own
        return own.steps if own is not None and own.removes and self.inquiry.share <= BARS.specific else ()


def labelled(f: Findings, examples: int) -> xr.Dataset:
    """The dataset of a `FlightExplanation`."""
    import xarray as xr

    records, last, event = f.replayed.records, f.replayed.last, f.event
    numbers = [record.step for record in records]
    steps = f.replayed.trajectory.steps
    measured, left, roles, emergence = _measured(f)
    tried = f.held + f.outcomes
    updates = f.updates.whole.numpy() if f.updates is not None else [math.nan] * len(steps)
    layer_updates = [[math.nan] * len(f.swept.layers)] * len(steps) if f.updates is None else f.updates.by_layer.numpy()
    data = xr.Dataset(
        {
            "contribution": (("change", "step", "channel"), f.swept.contribution.sum(-1).numpy()),
            "layer_contribution": (("change", "step", "layer"), f.swept.contribution.sum(-2).numpy()),
            "measured": (("change", "step"), measured.numpy()),
            "left": ("step", left.numpy()),
            "role": ("step", roles),
            "emergence": (("step", "horizon"), emergence.numpy()),
            "loss": ("place", [step.loss for step in steps]),
            "norm": ("place", [step.clip.norm for step in steps]),
            "clip_factor": ("place", [step.clip.factor for step in steps]),
            "lr": ("place", [record.lr for record in records]),
            "update_size": ("place", updates),
            "layer_update_size": (("place", "layer"), layer_updates),
            "batch_index": ("place", [record.indices[0] for record in records]),
            "treatment_left": ("treatment", [o.left for o in tried]),
            "treatment_prevents": ("treatment", [o.prevents for o in tried]),
            "treatment_delays": ("treatment", [o.delays for o in tried]),
            "treatment_blows_up": ("treatment", [o.blows_up for o in tried]),
            "treatment_lucky": ("treatment", [o.lucky for o in tried]),
            "treatment_after": ("treatment", [o.after for o in tried]),
            "treatment_value": (("treatment", "place"), _curves(tried, event)),
            "replay_deviation": f.replayed.deviation,
        },
        coords={
            "change": list(CHANGES),
            "step": numbers[:last],
            "place": numbers,
            "channel": list(CHANNELS),
            "layer": f.swept.layers,
            "horizon": list(range(1, len(steps))),
            "treatment": [o.treatment.name for o in tried],
        },
    )
    data.attrs = _attributes(f, numbers)
    _add_examples(data, f, examples)
    return data


def _curves(tried: list[Outcome], event: Event) -> Any:
    """The values of the run with each treatment; the path's own before it begins, NaN after it ended."""
    import numpy as np

    curves = [
        [o.values.get(i, value if i < o.treatment.run.at else math.nan) for i, value in enumerate(event.values)]
        for o in tried
    ]
    return np.array(curves, dtype=float).reshape(len(tried), len(event.values))


def _measured(f: Findings) -> tuple[Tensor, Tensor, list[str], Tensor]:
    """Measured contributions to the explained value, what each run leaves of the event, roles, and emergence."""
    last, count = f.replayed.last, len(f.event.values)
    measured = torch.full((len(CHANGES), last), torch.nan, dtype=torch.float64)
    left = torch.full((last,), torch.nan, dtype=torch.float64)
    emergence = torch.full((last, count - 1), torch.nan, dtype=torch.float64)
    roles = [""] * last
    for role, trials in (("suspect", f.inquiry.suspects), ("placebo", f.inquiry.placebos)):
        for trial in trials:
            (at,) = trial.steps
            if at == last:
                continue  # the explained step itself: its value is what is explained
            roles[at], left[at] = role, trial.left
            for i in range(at + 1, max(trial.values) + 1):
                emergence[at, i - at - 1] = f.event.values[i] - trial.values[i]
            measured[CHANGES.index(f.main), at] = f.event.values[last] - trial.values[last]
    return measured, left, roles, emergence


def _attributes(f: Findings, numbers: list[int]) -> dict[str, Any]:
    event, inquiry, records = f.event, f.inquiry, f.replayed.records
    best, scatter = sufficient(f.outcomes), f.replayed.scatter(event.quantity)
    change = f.hyperparameter(ABRUPT) if f.kind == "hyperparameter" else None
    change = f.hyperparameter((*ABRUPT, "ramp")) if change is None and f.kind == "hyperparameter" else change
    if any(f.finite_with):
        change = f.finite_with.index(True)
    condition = change if change is not None else f.condition
    group = inquiry.own if f.kind == "own batch" and len(f.blamed) > 1 else inquiry.group
    replaced = inquiry.blamed_by_replacing if f.blamed else ()
    return {
        **provenance(f.replayed.trajectory),
        "check": f.refused if f.growth is None and f.refused else str(f.replayed.path.check()),
        "predicted": f.refused is None,
        "kind": "flight",
        "event": f.kind,
        "reason": f.flight.reason,
        "asked": f.asked,
        "step": f.explained,
        "quantity": event.quantity,
        "value": event.values[event.step],
        "usual": event.usual,
        "sigma": event.sigma,
        "peak": event.peak,
        "gone": event.gone,
        "highest": numbers[event.highest],
        "norm_first": f.norm_first,
        "loss_usual": [f.by_loss.usual, f.by_loss.sigma],
        "stretch": [numbers[event.onset], numbers[event.last]],
        "after": event.last - event.step,
        "after_wanted": max(1, min(AFTER, f.flight.run.get("after", AFTER))),
        "after_ends": _ends(f),
        "not_finite": next((n for n, r in sorted(f.flight.records.items()) if n > f.explained and not r.finite), None),
        "ranked_by": f.main,
        "blamed": [numbers[i] for i in f.blamed],
        "own_left": next((t.left for t in inquiry.suspects if t.steps == (f.replayed.last,)), math.nan),
        "replaced": {str(numbers[t.steps[0]]): t.left for t in inquiry.replaced if t.steps[0] in replaced},
        "replaced_placebos": len(inquiry.replaced_placebos),
        "replaced_placebos_change": sum(not t.keeps for t in inquiry.replaced_placebos),
        "replaced_kin": inquiry.kin,
        "cleared": [numbers[t.steps[0]] for t in inquiry.cleared],
        "group": [] if group is None else [numbers[i] for i in group.steps],
        "group_replaced": group is inquiry.group and inquiry.group_replaced,
        "group_back": inquiry.group_back,
        "group_left": math.nan if group is None else group.left,
        "placebos": len(inquiry.placebos),
        "placebos_change": inquiry.changing,
        "group_placebos": len(inquiry.group_placebos),
        "group_placebos_change": sum(not t.keeps for t in inquiry.group_placebos),
        "several": len(inquiry.several),
        "several_change": sum(not t.keeps for t in inquiry.several),
        "several_acquitted": inquiry.acquitted,
        "treatment": None if best is None else best.treatment.name,
        "hyperparameter": None if change is None else f.changes[change].name,
        "hyperparameter_said": None if condition is None else f.changes[condition].sentence,
        "hyperparameter_left": math.nan if condition is None or not f.held else f.held[condition].left,
        "changes": [c.sentence for c in f.changes],
        "changes_left": [o.left for o in f.held],
        "finite_with": f.finite_with,
        "rise": None if f.rise is None else f.rise[0],
        "rose_before": f.rose_before,
        "more_recorded": records[0].step > min(f.flight.records) and f.replayed.last < f.flight.run["window"],
        "starts_here": records[0].step == min(f.flight.records) and f.replayed.last < f.flight.run["window"],
        "data": "" if f.data is None else f.data.sentence,
        "update": "" if f.updates is None else f.updates.sentence(max(event.onset - 1, 0)),
        "update_large": f.updates is not None and f.updates.large(max(event.onset - 1, 0)),
        "growth": "" if f.growth is None else f.growth.sentence,
        "linear_ok": f.growth is None or f.growth.linear_ok,
        "sharpness": "" if f.sharp is None else f.sharp.sentence,
        "not_a_number": "" if f.nan is None else f.nan.sentence,
        "batch_is_bad": f.nan is not None and f.nan.kind in ("batch values", "batch"),
        "replay": str(f.replayed),
        "replayed": f.replayed.proved,
        "lost_in_scatter": f.lost_in_scatter,
        "scatter": scatter[event.step] if scatter else 0.0,
        "repeats": _repeats(f),
        "missing": list(f.flight.missing),
        "batches": {str(r.step): list(r.indices) for r in (*records, f.flight.records[f.asked])},
    }


def _ends(f: Findings) -> str:
    """Why no step after the event's last one belongs to it: that is not finite or ran in another way, the window was
    closed, or it still records."""
    last = f.replayed.records[-1]
    following = f.flight.records.get(last.step + 1)
    if following is not None and not following.finite:
        return "not finite"
    if following is not None and following.forward != last.forward:
        return "other forward"
    return "open" if f.flight.trigger is None or f.flight.folder.name == "ring" else "closed"


def _repeats(f: Findings) -> list[int]:
    """In how many of how many replays the event is there; nothing where the run repeats itself."""
    again = f.replayed.again
    if not again:
        return []
    runs = [{i: seen(f.event.quantity, step) for i, step in enumerate(steps)} for steps in again]
    high = sum(f.event.left(run) > BARS.half for run in runs)
    return [high + f.event.is_one, len(again) + 1]


def _add_examples(data: xr.Dataset, f: Findings, examples: int) -> None:
    """Shares of examples in the blamed steps, where the prediction of the step was right."""
    trajectory, last = f.replayed.trajectory, f.replayed.last
    shares: dict[int, Tensor] = {}
    notes: dict[str, str] = {}
    predicted = f.swept.total(f.main)
    for at in [i for i in f.blamed if i < last][:examples]:
        measured = float(data["measured"].sel({"change": f.main}).values[at])
        if not abs(float(predicted[at]) - measured) <= NEAR * abs(measured):
            wrong = "the prediction of the step was wrong, and its parts would be too"
            notes[str(data["step"].values[at])] = wrong if f.refused is None else "nothing could be predicted here"
            continue
        watch = f.replayed.path.watch(at, own_loss, last - at)
        other = trajectory.steps[at - 1 if at else at + 1].batch
        swept = adjoint(
            watch, lambda _: readout_at(trajectory, last, f.event.quantity).rows[0], [last - at], trajectory.device
        )
        control = ControlStep.of(trajectory, at)
        found, note = example_shares(control, trajectory, swept, trajectory.steps[at].batch, other)
        notes[str(data["step"].values[at])] = note
        if found is not None:
            shares[at] = found
    width = max((len(found) for found in shares.values()), default=0)
    table = torch.full((last, width), torch.nan, dtype=torch.float64)
    for at, found in shares.items():
        table[at, : len(found)] = found
    data["example_share"] = (("step", "example"), table.numpy())
    data.attrs["examples"] = notes
