"""Responses of a probe to changes at one step: rows are started, carried and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .changes import ControlStep, Edit, touched_zero_v
from .layout import Layout
from .operators import WriteIn
from .probe import Reader, Watch
from .reductions import norms
from .rollout import Rows, moved, rollout
from .state import CHANNELS, JointState, Tangent, difference

ANSWERS = ("exact", "semilinear", "tangent")


@dataclass
class Responses:
    """Raw results. `values[answer]` is `[change, scale, horizon]` in float64 on the CPU."""

    values: dict[str, Float[Tensor, "change scale horizon"]]
    control: Float[Tensor, " horizon"]
    noise: Float[Tensor, " horizon"]  # one rounding of the probe's loss
    clip_switched: Bool[Tensor, "change scale"]  # clipping bound on one side of the pair only
    zero_v: list[tuple[int, int, int]] = field(default_factory=list)
    xi_norm: list[float] = field(default_factory=list)


def respond(
    watch: Watch,
    edits: Sequence[Edit],
    scales: Sequence[float],
    passes: Sequence[Pass],
    tick: Callable[[], None] = lambda: None,
) -> Responses:
    """δF_{t+h} for every change, scale and horizon, in passes that fit into memory."""
    shape = (len(edits), len(scales), watch.horizons)
    answers = [answer for answer in ANSWERS if any(answer in each.answers for each in passes)]
    out = Responses(
        {answer: torch.full(shape, torch.nan, dtype=torch.float64) for answer in answers},
        torch.zeros(watch.horizons, dtype=torch.float64),
        torch.zeros(watch.horizons, dtype=torch.float64),
        torch.zeros(shape[:2], dtype=torch.bool),
        [(0, 0, 0)] * len(edits),
        [torch.nan] * len(edits),
    )
    reader = Reader(watch.trajectory, watch.probe)
    for each in passes:
        for first in range(0, len(edits), each.at_once):
            some = slice(first, min(first + each.at_once, len(edits)))
            _carry(watch, edits[some], scales, each, out, some, reader, tick)
    return out


@dataclass(frozen=True)
class Pass:
    """One way through the path: which answers it gives, and for how many changes at once."""

    answers: tuple[str, ...]
    at_once: int
    parked: bool = False


def _carry(
    watch: Watch,
    edits: Sequence[Edit],
    scales: Sequence[float],
    each: Pass,
    out: Responses,
    some: slice,
    reader: Reader,
    tick: Callable[[], None],
) -> None:
    """Some changes from their step to the last horizon."""
    starts = _Starts(watch, edits, scales, each, out, some)
    eps = torch.finfo(watch.trajectory.dynamics.layout.dtypes[0]).eps
    for moment in rollout(watch.trajectory, watch.first, starts.rows, watch.last):
        h = moment.time - watch.first
        if "exact" in each.answers:
            out.values["exact"][some, :, h] = reader.exact(moment).view(len(edits), len(scales))
        if "semilinear" in each.answers:
            out.values["semilinear"][some, :, h] = reader.semilinear(moment).view(len(edits), len(scales))
        if "tangent" in each.answers:
            out.values["tangent"][some, :, h] = starts.scaled(reader.linear(moment))
        out.control[h] = reader.control(moment)
        out.noise[h] = eps * abs(out.control[h])
        if moment.last and "exact" in each.answers:
            switched = torch.tensor(moment.exact.clip_switches(), dtype=torch.bool).view(len(edits), len(scales))
            out.clip_switched[some] |= switched
        tick()


class _Starts:
    """The rows of some changes right after their step, and how tangents are read for every scale.

    A change without ξ has no write-in to linearize: its tangent starts from the exact difference at each scale.
    """

    def __init__(
        self, watch: Watch, edits: Sequence[Edit], scales: Sequence[float], each: Pass, out: Responses, some: slice
    ) -> None:
        self.scales, self.changes = scales, len(edits)
        self._answers, self._out, self._parked = each.answers, out, each.parked
        self._exact: list[JointState] = []
        layout, control = watch.trajectory.dynamics.layout, ControlStep.of(watch.trajectory, watch.at)
        self._semilinear, self._linear = (_Collected(layout) for _ in range(2))
        for i, edit in enumerate(edits):
            self._start(control, edit, some.start + i)
        rows = self._semilinear.rows, self._linear.rows
        self.rows = Rows(_handed_over(self._exact), *rows, owned=True, parked=each.parked)

    def _start(self, control: ControlStep, edit: Edit, i: int) -> None:
        """The rows of one change; what it took to make them is gone with this call."""
        out, count = self._out, self.changes * len(self.scales)
        shock = edit.shock(control)
        self.by_scale = shock.xi is not None  # one tangent serves all scales
        for j, scale in enumerate(self.scales):
            end, clip = shock.endpoint(scale)
            out.clip_switched[i, j] |= clip.binds != control.step.clip.binds
            if "semilinear" in self._answers:
                self._semilinear.add(difference(end, control.after), count)
            if "tangent" in self._answers and shock.xi is None:
                self._linear.add(difference(end, control.after), count)
            if j + 1 == len(self.scales):
                out.zero_v[i] = touched_zero_v(control, shock, end)
            if "exact" in self._answers:
                own = end.clone() if end is control.before else end
                self._exact.append(moved(own, torch.device("cpu")) if self._parked else own)
                del own
            del end
        if shock.xi is not None:
            out.xi_norm[i] = float(norms(shock.xi))
            if "tangent" in self._answers:
                self._linear.add(WriteIn(control.linear).mv(shock.xi), self.changes)

    def scaled(self, values: Float[Tensor, " row"]) -> Float[Tensor, "change scale"]:
        """The tangent of every scale: α times that of the change."""
        if self.by_scale:
            return values[:, None] * torch.tensor(self.scales, dtype=torch.float64)
        return values.view(self.changes, len(self.scales))


def _handed_over(states: list[JointState]) -> Iterator[JointState]:
    """Each state once, and then forgotten here."""
    while states:
        yield states.pop(0)


class _Collected:
    """Tangents written into one batch as they come, so that none is held twice."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._next = layout, 0
        self.rows: Tangent | None = None

    def add(self, dx: Tangent, count: int) -> None:
        """The next of `count` tangents."""
        if self.rows is None:
            self.rows = Tangent(*(self._layout.zeros(count) for _ in CHANNELS))
        for name in CHANNELS:
            getattr(self.rows, name)[self._next].copy_(getattr(dx, name))
        self._next += 1
