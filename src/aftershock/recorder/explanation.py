"""`FlightExplanation`: what kind of event it was, who is to blame, and what would have prevented it."""

from __future__ import annotations

import functools
import html
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ..errors import InvalidInput, MissingPackage
from ..results.certificate import TRUST
from ..results.files import load_dataset, malformed, write_whole
from ..results.labelled import LabelledResult
from . import certificate as trust
from . import verdict as saying
from .descriptions import Kept
from .facts import NAMES, Facts
from .other_runs import idle_in_words, other_runs, untried_in_words, with_an_effect
from .quantity import Quantity
from .words import LESS_OWN, SO_FAR, plus_minus, share

if TYPE_CHECKING:
    from ..results.certificate import Certificate

SHOWN = 10
KEPT_AS = "saved explanation of a flight"
OFF_SCALE = TRUST.off_scale  # times the event: a prediction beyond it has no size
# Times the event: a predicted size beyond it is not shown. A step that did it adds about the whole event, and up to as
# much again where without it the value would lie below the usual, or others take something off.
SHOWABLE = 2.0
UNTRUSTED = "Predicted sizes are not shown: those of the steps that were run without are off by too much."
COLUMNS = {  # side and least width
    "step": (">", 8), "delay": (">", 5), "role": ("<", 8),
    "predicted": (">", 10), "measured": (">", 10), "left": (">", 6),
}  # fmt: skip
HEADS = {name: name for name in COLUMNS}


@dataclass(frozen=True)
class Culprit:
    """One earlier step, and what it did to the value that is explained, a loss or a gradient norm. Positive: it raised
    it.

    >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight", window=12) as recorder:
    ...     for batch in batches[:5] * 3 + batches[5:]:
    ...         recorder.step(batch, train_step(batch))
    >>> culprits = ak.explain(recorder, step=55, verify=1, placebos=2, treatments=False).culprits
    >>> len(culprits), all(c.step + c.delay == 55 for c in culprits), sorted({c.role for c in culprits})
    (12, True, ['', 'placebo', 'suspect'])
    """

    step: int
    delay: int
    role: str  # "suspect", "placebo", or nothing where the run without it was not made
    predicted: float  # infinite where it is off the scale, NaN where nothing was predicted
    measured: float  # by running again without it; NaN where that was not done
    measured_spread: float  # its ±; NaN where the run repeats itself
    left: float  # of the whole event, in the run without it
    left_spread: float
    left_so_far: bool  # that run ended once half of the event was there: `left` is the least that it leaves
    channels: dict[str, float]  # the predicted contribution by where it waited: θ, m, v
    batches: tuple[int, ...]  # indices of its batches in the data
    examples: tuple[tuple[int, float], ...]  # (place in the batch, share), largest first


class _Row(NamedTuple):
    """What the dataset holds of one earlier step."""

    step: int
    contribution: np.ndarray  # by channel
    measured: float
    measured_spread: float
    left: float
    left_spread: float
    left_so_far: bool
    role: str
    example_share: np.ndarray


class FlightExplanation(LabelledResult):
    """What happened around one loss or gradient norm, and each earlier step's part in it. `data` is labelled;
    nothing else is kept, so that `save` and `load` give the same words and page.

    A number that was measured has its ± in a variable of the same name and `_spread`: NaN where the run repeats itself.

    >>> from types import SimpleNamespace
    >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight", window=12) as recorder:
    ...     for batch in batches[:5] * 3 + batches[5:]:
    ...         recorder.step(batch, train_step(batch), index=1000 + len(recorder.recent))
    >>> found = ak.explain(recorder, 55, verify=1, placebos=2, treatments=False, describe=lambda batch: str(batch[1]))
    >>> found.kind, found.blamed, found.skip, found.treatment, found.hyperparameter
    ('own batch', (55,), [1012], None, None)
    >>> found.quantity, len(found.course), round(found.size, 2), found.tried > 0, len(found.culprits)
    ('loss', 13, 0.76, True, 12)
    >>> round(found.facts.event.usual, 2), found.facts.blame.placebos, found.culprits[0].left_spread
    (0.45, 2, nan)
    >>> found.verdict.split(":")[0], found.descriptions[55]
    ('The batch of step 55 itself is the spike', 'tensor([1, 0, 1, 1, 0, 0, 1, 0])')
    >>> found.certificate.findings[0].quantity, found.sizes_hold
    ('replay_deviation', True)
    >>> scalars = []
    >>> found.to_tensorboard(SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar)))
    >>> found.page().name, found.report("spike.html").name, found.save_skip_list("skip.json").read_text().split()
    ('flight-step55.html', 'spike.html', ['[', '1012', ']'])
    """

    wanted = (
        *("contribution", "layer_contribution", "measured", "measured_spread", "left", "left_spread"),
        *("left_so_far", "tail_without", "tail_without_spread", "lucky", "role", "emergence", "example_share"),
        *("example_note", "loss", "norm", "spread"),
        *("clip_factor", "lr", "update_size"),
        *("layer_update_size", "batch_index", "batch_count", "described", "description", "description_is_image"),
        *(f"treatment_{name}" for name in ("left", "left_spread", "after", "after_spread", "prevents", "delays")),
        *(f"treatment_{name}" for name in ("blows_up", "lucky", "left_so_far", "idle", "sufficient", "held", "value")),
        *NAMES,
    )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """An explanation that was saved with `save`."""
        found = cls(load_dataset(Path(path), cls.wanted, KEPT_AS))
        with malformed(Path(path), KEPT_AS):
            str(found)  # every number that it states can be read
        return found

    @functools.cached_property
    def facts(self) -> Facts:
        """What it states beside its numbers by step and treatment: the event, the recording, the replays, the blame,
        settings that changed, instruments."""
        return Facts.of(self.data)

    @property
    def kind(self) -> str:  # type: ignore[override]  # of the event, which is what a reader asks for
        """What kind of event: "batch", "group", "own batch", "shift", "source", "draw" (of random numbers),
        "hyperparameter", "instability", "not a number", "no spike" or "unknown"."""
        return self.facts.event.kind

    @property
    def blamed(self) -> tuple[int, ...]:
        """The steps that did it, by number: the event is gone without them, and not without others."""
        return self.facts.blame.blamed

    @property
    def treatment(self) -> str | None:
        """The mildest treatment that prevents the event, proved by replay; None where none of those tried does."""
        found = self.data["treatment"].values[self.data["treatment_sufficient"].values]
        return str(found[0]) if len(found) else None

    @property
    def hyperparameter(self) -> str | None:
        """The hyperparameter whose change did it."""
        return self.facts.settings.hyperparameter

    @property
    def quantity(self) -> Quantity:
        """What is explained: "loss" or "gradient norm"."""
        return self.facts.event.quantity

    @property
    def course(self) -> np.ndarray:
        """It by step of the window."""
        return self.data["loss" if self.quantity == "loss" else "norm"].values

    @property
    def size(self) -> float:
        """How far it is above what was usual before."""
        return self.facts.event.size

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """Every step: the blamed, those that were run without by what is left of the event, the rest by prediction."""
        data, blamed = self.data.sel(change=self.facts.blame.ranked_by), self.blamed
        rows = [_Row(*row) for row in zip(*(data[name].values for name in _Row._fields))]

        def rank(row: _Row) -> tuple[bool, float, float]:
            guess = row.contribution.sum()
            tried = math.inf if math.isnan(row.left) else row.left
            return row.step not in blamed, tried, -(guess if math.isfinite(guess) else -math.inf)

        return tuple(self._culprit(row, data["channel"].values.tolist()) for row in sorted(rows, key=rank))

    def _culprit(self, row: _Row, channels: list[str]) -> Culprit:
        predicted, shares = on_scale(float(row.contribution.sum()), self), row.example_share
        parts = [math.nan] * len(channels) if math.isinf(predicted) else row.contribution.tolist()
        return Culprit(
            step=int(row.step),
            delay=self.facts.event.explained - int(row.step),
            role=str(row.role),
            predicted=predicted,
            measured=float(row.measured),
            measured_spread=float(row.measured_spread),
            left=float(row.left),
            left_spread=float(row.left_spread),
            left_so_far=bool(row.left_so_far),
            channels=dict(zip(channels, parts)),
            batches=batches_of(self, int(row.step)),
            examples=tuple((int(i), float(shares[i])) for i in np.argsort(-shares) if math.isfinite(shares[i])),
        )

    @property
    def tried(self) -> int:
        """How many suspects were run without."""
        return int((self.data["role"] == "suspect").sum())

    @property
    def verdict(self) -> str:
        """What happened, in words; every number in it is measured here."""
        return saying.verdict(self)

    @property
    def certificate(self) -> Certificate:
        """How far to trust it: findings with their levels."""
        return trust.certificate(self)

    @functools.cached_property
    def sizes_hold(self) -> bool:
        """May predicted sizes be shown? Not where the certificate says not to trust them."""
        return all(each.level != "bad" for each in self.certificate.findings if each.subject == "prediction")

    @property
    def descriptions(self) -> dict[int, str | bytes]:
        """What `describe=` made of a step's batch, by step number: a text, or the bytes of a PNG."""
        data = self.data
        kept = map(Kept, data["description"].values.tolist(), data["description_is_image"].values.tolist())
        return {step: one.read() for step, one in zip(data["described"].values.tolist(), kept)}

    @property
    def skip(self) -> list[int]:
        """Indices of the batches to leave out, each once: those of the blamed steps; none where no batch did it, or
        where the verdict says that it may be a sound one of a rare kind."""
        if self._perhaps_sound:
            return []
        if self.kind == "not a number" and self.facts.instruments.batch_is_bad:
            return list(dict.fromkeys(self.facts.recording.asked_batches))
        return list(dict.fromkeys(index for step in self.blamed for index in batches_of(self, step)))

    @property
    def _perhaps_sound(self) -> bool:
        return self.kind == "own batch" and not math.isnan(self.facts.instruments.kin_high)

    def save_skip_list(self, path: str | Path) -> Path:
        """Write `skip` as the JSON list of batch indices that Lightning's SpikeDetection writes and loaders read.

        Where there is none to skip it writes nothing and raises `InvalidInput`: a list that was there stays as it was.
        """
        path = Path(path)
        if not self.skip:
            reason = f"no batch is to blame ({self.kind})"
            if self._perhaps_sound:
                reason = f"the batch of step {self.facts.event.explained} may be a sound one of a rare kind"
            raise InvalidInput(
                f"{reason}, so no skip list is written"
                + (f", and {path} stays as it was" if path.exists() else "")
                + "; found.skip tells beforehand"
            )
        write_whole(path, lambda part: Path(part).write_text(json.dumps(self.skip, indent=4)))
        return path

    def to_tensorboard(self, writer: Any, tag: str = "aftershock") -> None:
        """Contributions as scalars: predicted at each step of the window, where that has a size that may be shown, and
        measured where it was run again.

        writer: such as `torch.utils.tensorboard.SummaryWriter`.
        """
        for culprit in self.culprits:
            if math.isfinite(shown_size(culprit.predicted, self)):
                writer.add_scalar(f"{tag}/contribution", culprit.predicted, culprit.step)
            if math.isfinite(culprit.measured):
                writer.add_scalar(f"{tag}/measured", culprit.measured, culprit.step)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page; default: under the name of the flight, the run and the step, in the working folder."""
        from ..report.flight_page import write_flight_page

        return write_flight_page(self, self.page() if path is None else Path(path))

    def page(self, folder: Path = Path()) -> Path:
        """A name such as flight-run2-step216.html; with a number where another run's page has it."""
        recording = self.facts.recording
        name = Path(recording.page)
        places = (folder / f"{name.stem}{f'-{n}' if n > 1 else ''}{name.suffix}" for n in itertools.count(1))
        return next(
            place for place in places if not place.exists() or recording.run in place.read_text("utf-8", "replace")
        )

    def _repr_html_(self) -> str:
        try:
            from ..report.flight_page import notebook_view
        except MissingPackage:  # a notebook shows the words where nothing can draw
            return f"<pre>{html.escape(str(self))}</pre>"
        return notebook_view(self)

    def __str__(self) -> str:
        blocks = [
            self.verdict,
            self.facts.recording.which,
            "How far to trust this:\n" + str(self.certificate),
            self._treatments(),
            self._steps(),
        ]
        return "\n\n".join(block for block in blocks if block)

    def _treatments(self) -> str:
        runs = other_runs(self)
        if not runs:
            return ""
        telling, idle = with_an_effect(runs)
        lines = ["What would have prevented it (each run again, until half of the event was there or it was over):"]
        width = max((len(run.name) for run in telling), default=0)
        words = max([18, *(len(run.word) for run in telling)])
        for run in telling:
            known = not math.isnan(run.after)
            after = f"{self.quantity} after it {run.after:.4g}{plus_minus(run.after_spread)}" if known else ""
            lines.append(f"  {run.name:<{width}}  {run.word:<{words}} {after}".rstrip())
        rest = [idle_in_words(idle, runs) if idle else "", untried_in_words(self)]
        ended = [SO_FAR] if any(run.ended for run in runs) else []
        return "\n".join([*lines, *(f"  {words}" for words in rest if words), *ended])

    def _steps(self) -> str:
        """Those that were run without, and the highest predicted; none where there is nothing to say of any."""
        facts = self.facts
        shown = [c for c in self.culprits[:SHOWN] if c.role or not math.isnan(shown_size(c.predicted, self))]
        other = self.kind == "not a number" or (facts.recording.nothing_seen and self.kind == "no spike")
        if not shown or other:  # what happened is not the value of this step
            return ""
        added = (
            f"what each added, against '{facts.blame.ranked_by}', and how much of the event the run without it leaves; "
            f"blamed first, then by what is left{', then as predicted' if self.sizes_hold else ''}:"
            if any(c.role for c in shown)
            else "what each added, as predicted:"
        )
        rows = [_cells(culprit, self) for culprit in shown]
        widths = {name: max(len(row[name]) for row in rows) for name in COLUMNS}
        columns = {name: f"{side}{max(least, widths[name])}" for name, (side, least) in COLUMNS.items() if widths[name]}
        lines = ("  ".join(f"{row[name]:{form}}" for name, form in columns.items()) for row in [HEADS, *rows])
        event = facts.event
        value = (
            f"the {self.quantity} {event.value:.4g}{plus_minus(event.value_spread)} of step {event.explained} (usual "
            f"{event.usual:.4g})"
        )
        notes = [SO_FAR] if any(c.left_so_far for c in shown) else []
        notes += [LESS_OWN] if saying.less_own(self, shown) else []
        notes += [] if self.sizes_hold else [UNTRUSTED]
        return "\n".join([f"Earlier steps and {value}: {added}", *lines, *notes])


def batches_of(found: FlightExplanation, step: int) -> tuple[int, ...]:
    """Indices in the data of the batches of a step: one of the window, or that which was asked about."""
    places = found.data["place"].values.tolist()
    if step not in places:
        return found.facts.recording.asked_batches
    at = places.index(step)
    return tuple(found.data["batch_index"].values[at, : found.data["batch_count"].values[at]].tolist())


def on_scale(value: float, found: FlightExplanation, most: float = OFF_SCALE) -> float:
    """A predicted size; infinite where it is so many times the event that it has none."""
    absurd = abs(value) > most * max(found.facts.event.peak, 0.0) > 0
    return math.copysign(math.inf, value) if absurd else value


def shown_size(value: float, found: FlightExplanation) -> float:
    """A predicted size as it may be shown: infinite where it is off the scale, NaN where none is to be trusted."""
    return on_scale(value, found, SHOWABLE) if found.sizes_hold else math.nan


def _cells(culprit: Culprit, found: FlightExplanation) -> dict[str, str]:
    """A step in words; what is not known is empty."""
    predicted = shown_size(culprit.predicted, found)
    measured, left = culprit.measured, culprit.left
    told = share(left, culprit.left_spread, so_far=culprit.left_so_far)
    return {
        "step": str(culprit.step),
        "delay": str(culprit.delay),
        "role": culprit.role,
        "predicted": "" if math.isnan(predicted) else "off scale" if math.isinf(predicted) else f"{predicted:+.3g}",
        "measured": "" if math.isnan(measured) else f"{measured:+.3g}{plus_minus(culprit.measured_spread)}",
        "left": "" if math.isnan(left) else f"> {OFF_SCALE:g}×" if left >= OFF_SCALE else told,
    }
