"""Responses of a probe to changes at one step: rows are started, carried and read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import OutOfMemory
from .changes import ControlGradient, ControlStep, Edit, Shock, shocks_of, touched_zero_v
from .exact_rows import moved
from .layout import Layout
from .memory import ran_out
from .noise import Noise
from .operators import WriteIn
from .probe import Reader, Watch
from .reductions import norms
from .rollout import Rows, rollout
from .state import CHANNELS, JointState, Lag, Tangent, lag_of

ANSWERS = ("exact", "semilinear", "tangent")


@dataclass
class Responses:
    """Raw results. `values[answer]` is `[change, scale, horizon]` in float64 on the CPU."""

    values: dict[str, Float[Tensor, "change scale horizon"]]
    control: Float[Tensor, " horizon"]
    clip_switched: Bool[Tensor, "change scale"]  # clipping bound on one side of the pair only
    zero_v: list[tuple[int, int, int]] = field(default_factory=list)
    xi_norm: list[float] = field(default_factory=list)


def first_disagreement(
    exact: Float[Tensor, "row horizon"],
    predicted: Float[Tensor, "row horizon"],
    noise: Float[Tensor, " horizon"],
    *,
    gross: float,
    parted: float,
) -> int | None:
    """The first horizon at which a grossly wrong prediction leaves the exact response; None where none does.

    gross: a relative error over all horizons that is. parted: the symmetric error at which it has left.
    """
    known = exact.isfinite() & (exact.abs() > noise)
    truth = torch.where(known, exact, 0.0)
    miss = torch.where(known, (truth - predicted).abs().nan_to_num(torch.inf), 0.0)
    wrong = miss.norm(dim=1) > gross * truth.norm(dim=1)
    left = wrong[:, None] & known & ~(miss <= parted * (truth.abs() + predicted.abs()))  # a NaN has left
    where = left.any(0).nonzero()
    return int(where[0]) + 1 if len(where) else None


def first_lost(predicted: Float[Tensor, "row horizon"]) -> int | None:
    """The first horizon at which a prediction is not finite, as a loss that is no number is not; None where all are."""
    where = (~predicted.isfinite()).any(0).nonzero()
    return int(where[0]) + 1 if len(where) else None


def respond(
    watch: Watch,
    edits: Sequence[Edit],
    scales: Sequence[float],
    passes: Sequence[Pass],
    tick: Callable[[], None] = lambda: None,
    noise: Noise | None = None,
) -> Responses:
    """δF_{t+h} for every change, scale and horizon, in passes that fit into memory.

    noise: looks at what rounding alone does; its own row goes along with the last changes that are run exactly.
    """
    shape = (len(edits), len(scales), watch.horizons)
    answers = [answer for answer in ANSWERS if any(answer in each.answers for each in passes)]
    out = Responses(
        {answer: torch.full(shape, torch.nan, dtype=torch.float64) for answer in answers},
        torch.zeros(watch.horizons, dtype=torch.float64),
        torch.zeros(shape[:2], dtype=torch.bool),
        [(0, 0, 0)] * len(edits),
        [torch.nan] * len(edits),
    )
    reader = Reader(watch.trajectory, watch.probe)
    for each in passes:
        if each.unrecorded:
            watch.trajectory.dynamics.loss.player.release()
        elif "exact" not in each.answers:
            watch.trajectory.dynamics.loss.player.narrow()
        if each.apart:
            _read_control(watch, out, reader, noise)
        first, size = 0, each.at_once
        units = len(edits) + (noise is not None and "exact" in each.answers)
        seen = ControlGradient.of(watch.trajectory, watch.at) if each.holds_gradient else None
        while first < units:
            some = Chunk(first, min(first + size, units), len(edits))
            if _fits(lambda: _carry(watch, edits, scales, each, out, some, reader, tick, noise, seen)):  # noqa: B023
                first += size
            elif size == 1:
                plan = ", ".join(f"{other.at_once} × {'/'.join(other.answers)}" for other in passes)
                raise OutOfMemory(
                    f"{' and '.join(each.answers)} of one change ran out of memory in spite of the plan ({plan}); "
                    "free some memory, or use a smaller batch"
                )
            else:
                size = (size + 1) // 2
    return out


def _fits(work: Callable[[], None]) -> bool:
    """Whether a piece of work ends within memory; where not, what it held is gone before the next try.

    Rows that run together raise the library's own error, once not even one of them fits beside the others.
    """
    try:
        work()
    except Exception as error:
        if not ran_out(error):
            raise
    else:
        return True
    torch.cuda.empty_cache()
    return False


@dataclass(frozen=True)
class Pass:
    """One way through the path: which answers it gives, and for how many changes at once; where rounding is looked at,
    its row counts as one of the changes that are run exactly."""

    answers: tuple[str, ...]
    at_once: int
    parked: bool = False
    shocks_in_rows: bool = False  # the gradients of the changes themselves too
    apart: bool = False  # the control goes first, alone: rows that run alone need no more of it than was read
    holds_gradient: bool = False  # the control's, at the step of the changes, from chunk to chunk
    unrecorded: bool = False  # recorded passes give their memory back before it


@dataclass(frozen=True)
class Chunk:
    """Some of the changes, and the row of rounding where that is past the last of them."""

    first: int
    stop: int
    changes: int  # in all

    @property
    def some(self) -> slice:
        return slice(min(self.first, self.changes), min(self.stop, self.changes))

    @property
    def rounded(self) -> bool:
        return self.stop > self.changes


def _read_control(watch: Watch, out: Responses, reader: Reader, noise: Noise | None) -> None:
    """The control alone, from the change to the last horizon."""
    for moment in rollout(watch.trajectory, watch.first, Rows(), watch.last):
        if watch.reads(h := moment.time - watch.at):
            out.control[h - 1] = reader.control(moment)
            if noise is not None:
                noise.look(moment, reader)


def _carry(
    watch: Watch,
    edits: Sequence[Edit],
    scales: Sequence[float],
    each: Pass,
    out: Responses,
    chunk: Chunk,
    reader: Reader,
    tick: Callable[[], None],
    noise: Noise | None,
    seen: ControlGradient | None,
) -> None:
    """Some changes from their step to the last horizon."""
    some = chunk.some
    shape = (some.stop - some.start, len(scales))
    rows = math.prod(shape)
    answers = each.answers if rows else ("exact",)
    starts = _Starts(watch, edits[some], scales, each, out, some, noise if chunk.rounded else None, seen)
    for moment in rollout(watch.trajectory, watch.first, starts.rows, watch.last):
        h = moment.time - watch.first
        tick()
        if not watch.reads(h + 1):
            continue
        if "exact" in answers:
            exact = reader.exact(moment)
            out.values["exact"][some, :, h] = exact[:rows].view(shape)
            if chunk.rounded and noise is not None:
                noise.ran(exact[rows])
        if "semilinear" in answers:
            out.values["semilinear"][some, :, h] = reader.semilinear(moment).view(shape)
        if "tangent" in answers:
            out.values["tangent"][some, :, h] = starts.scaled(reader.linear(moment))
        out.control[h] = reader.control(moment)
        if noise is not None:
            noise.look(moment, reader)
        if moment.last and "exact" in answers:
            switched = torch.tensor(moment.exact.clip_switches()[:rows], dtype=torch.bool).view(shape)
            out.clip_switched[some] |= switched


class _Starts:
    """The rows of some changes right after their step, and how tangents are read for every scale.

    A change without ξ has no write-in to linearize: its tangent starts from the exact difference at each scale.
    """

    def __init__(
        self,
        watch: Watch,
        edits: Sequence[Edit],
        scales: Sequence[float],
        each: Pass,
        out: Responses,
        some: slice,
        noise: Noise | None,
        seen: ControlGradient | None,
    ) -> None:
        self.scales, self.changes = scales, len(edits)
        self._answers, self._out, self._parked = each.answers, out, each.parked
        self._exact: list[JointState] = []
        layout, control = watch.trajectory.dynamics.layout, ControlStep.of(watch.trajectory, watch.at, seen)
        self._semilinear, self._linear = (_Collected(layout) for _ in range(2))
        for i, shock in enumerate(shocks_of(control, edits, in_rows=each.shocks_in_rows)):
            self._start(control, shock, some.start + i)
            del shock
        # without the control nobody can see that a change is none: one whose ξ is not zero is one
        distinct = each.apart and all(out.xi_norm[i] > 0 for i in range(some.start, some.stop))
        if noise is not None:
            self._add_exact(noise.row(control.after, spend=distinct and control.kept is None))
        self.rows = Rows(
            _handed_over(self._exact), self._semilinear.rows, self._linear.rows, self._semilinear.lags,
            self._linear.lags, control=None if distinct else control.after, distinct=distinct, owned=True,
            parked=each.parked,
        )  # fmt: skip

    def _start(self, control: ControlStep, shock: Shock, i: int) -> None:
        """The rows of one change; what it took to make them is gone with this call."""
        out, count = self._out, self.changes * len(self.scales)
        self.by_scale = shock.xi is not None  # one tangent serves all scales
        for j, scale in enumerate(self.scales):
            end, clip = shock.endpoint(scale)
            out.clip_switched[i, j] |= clip.binds != control.step.clip.binds
            if j + 1 == len(self.scales) and math.isnan(out.xi_norm[i]):  # not counted by an earlier pass
                out.zero_v[i] = touched_zero_v(control, shock, end)
            if "tangent" in self._answers and shock.xi is None:
                self._linear.add_difference(end, control.after, count, spend=False)
            if "exact" in self._answers:
                self._add_exact(end)
            if "semilinear" in self._answers:
                spend = "exact" not in self._answers
                self._semilinear.add_difference(end, control.after, count, spend=spend)
            del end
        if shock.xi is not None:
            out.xi_norm[i] = float(norms(shock.xi))
            if "tangent" in self._answers:
                self._linear.add(WriteIn(control.linear).mv(shock.xi), self.changes)

    def _add_exact(self, state: JointState) -> None:
        self._exact.append(moved(state, torch.device("cpu")) if self._parked else state)

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
        self.lags: list[Lag] = []

    def add(self, dx: Tangent, count: int) -> None:
        """The next of `count` tangents, which is given away."""
        if count == 1:
            self.rows = dx[None]
            return
        for name in CHANNELS:
            self._place(name, count).copy_(getattr(dx, name))
        self._next += 1

    def add_difference(self, end: JointState, control: JointState, count: int, *, spend: bool) -> None:
        """The next of `count` differences; `spend` gives the end's own tensors away where it is the only one."""
        self.lags.append(lag_of(end, control))
        if count == 1 and spend:
            self.rows = Tangent(*(getattr(end, name).sub_(getattr(control, name))[None] for name in CHANNELS))
            return
        for name in CHANNELS:
            torch.sub(getattr(end, name), getattr(control, name), out=self._place(name, count))
        self._next += 1

    def _place(self, name: str, count: int) -> Float[Tensor, " param"]:
        if self.rows is None:
            self.rows = Tangent(*(self._layout.zeros(count) for _ in CHANNELS))
        place: Tensor = getattr(self.rows, name)[self._next]
        return place
