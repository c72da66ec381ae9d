"""What a change wrote into m and v, where a derivative of AdamW is right and useless.

At a coordinate whose v is tiny (a row of a rare token, an untouched weight) a real gradient changes v by more than a
small part of itself: the step saturates, and its slope predicts moves a thousand times too large. But the write is
known exactly, and without new gradients it moves θ at every later step s by a known *kick*

    q(m_s + β1^k δm, v_s + β2^k δv) − q(m_s, v_s),      q(m, v) = −η m̂ / (√v̂ + ε)      (eq:kick)

so that only the feedback of the displacement through the network is linear: the response is Σ_s ⟨λ_θ(s+1), kick(s)⟩
(eq:kick_response) with the adjoint's θ part alone. Coordinates with |δv| ≤ τ v stay in the linear pairing.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from .adamw import Hyper, Run, displacement, runs_of, step_size
from .layout import Layout
from .reductions import parts
from .state import JointState, Tangent
from .trajectory import Trajectory

IN_CACHE = 2**17  # pairs of a change and a coordinate that a CPU works on at once
PAIRS_AT_ONCE = 2**24  # the same on a GPU, and pairs of all candidates whose kicks are computed at once: 40 bytes each
STIFF = 0.1  # τ: from a tenth of v on, a slope in v is off by more than a few percent


class History:
    """λ_θ after every step that an adjoint sweep has passed, one row per outcome, kept where there is room."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._kept: dict[int, Float[Tensor, "outcome param"]] = {}

    def keep(self, step: int, theta: Float[Tensor, "outcome param"]) -> None:
        """The cotangents at the state after `step`."""
        self._kept[step] = theta.clone() if theta.device == self.place else theta.to(self.place)

    def at(self, step: int, coordinates: Int64[Tensor, " coordinate"]) -> Float[Tensor, "outcome coordinate"]:
        """The same at some coordinates, on their device; no rows for a step that no outcome lies behind."""
        kept = self._kept.get(step)
        if kept is None:
            return torch.zeros(0, len(coordinates), device=coordinates.device)
        return kept.index_select(1, coordinates.to(self.place)).to(coordinates.device)

    def piece(self, step: int, where: slice, device: torch.device) -> Float[Tensor, "outcome param"]:
        """A stretch of them at the state after `step`, on a device."""
        kept = self._kept.get(step)
        return torch.zeros(0, 1, device=device) if kept is None else kept[:, where].to(device)

    def whole(self, step: int, device: torch.device) -> Float[Tensor, "outcome param"] | None:
        """All of them at the state after `step`; None where no outcome lies behind it."""
        kept = self._kept.get(step)
        return None if kept is None else kept.to(device)


@dataclass(frozen=True)
class Writes:
    """Exact writes (δm, δv) of many changes at stiff coordinates: one entry per pair of change and coordinate."""

    row: Int64[Tensor, " pair"]
    coordinate: Int64[Tensor, " pair"]
    dm: Float[Tensor, " pair"]
    dv: Float[Tensor, " pair"]
    at: Int64[Tensor, " pair"]  # the changed step
    lag: Int64[Tensor, " pair"]  # by how many steps the changed run's counts are behind, as after a skipped step

    @classmethod
    def joined(cls, parts: Sequence[Writes]) -> Writes:
        """All pairs together, by the step at which they begin."""
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS}
        whole, at = cls(**columns), columns["at"]
        return whole if bool((at[1:] >= at[:-1]).all()) else whole[at.argsort(stable=True)]

    def __getitem__(self, some: Tensor) -> Writes:
        return Writes(*(getattr(self, name)[some] for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.row)


COLUMNS = ("row", "coordinate", "dm", "dv", "at", "lag")


def stiff(dv: Float[Tensor, " param"], v: Float[Tensor, " param"]) -> Int64[Tensor, " coordinate"]:
    """Where a write changes v by more than τ of itself."""
    return (dv.abs() > STIFF * v).nonzero()[:, 0]


def taken_out(
    dx: Tangent, v: Float[Tensor, " param"], layout: Layout, step: int, lag: Sequence[int], row: int
) -> Writes:
    """The stiff part of a write at `step`, which leaves the difference. `lag` is by parameter."""
    where = stiff(dx.v, v)
    behind = torch.tensor(lag, device=where.device)[layout.parameter_of(where)]
    at, rows = torch.full_like(where, step), torch.full_like(where, row)
    found = Writes(rows, where, dx.m.index_select(0, where), dx.v.index_select(0, where), at, behind)
    dx.m.index_fill_(0, where, 0.0)
    dx.v.index_fill_(0, where, 0.0)
    return found


def kick_responses(
    trajectory: Trajectory, history: History, writes: Writes, rows: int, outcomes: int, *, split: bool = True
) -> Float[Tensor, "channel outcome row"]:
    """Σ_s ⟨λ_θ(s+1), kick(s)⟩ of every change, with `split` what m does alone and what v adds. No gradient.

    Outcomes are in the order of the sweep, the last one first, so that those alive at a step are the leading ones.
    """
    found = Kicks(trajectory, history, writes, rows, outcomes, split=split)
    pass_by(trajectory, found.readers)
    return found.out


class Kicks:
    """The same as `out`, once its readers have seen every later step."""

    def __init__(
        self, trajectory: Trajectory, history: History, writes: Writes, rows: int, outcomes: int, *, split: bool = True
    ) -> None:
        self.out = torch.zeros(2 if split else 1, outcomes, rows, dtype=torch.float64, device=writes.row.device)
        self.readers: list[Reader] = []
        for lag in range(int(writes.lag.min()), int(writes.lag.max()) + 1) if len(writes) else ():
            some = writes.lag == lag
            if some.any():
                alike = writes if some.all() else writes[some]
                self.readers.append(_KicksOfOneLag(self.out, trajectory, history, alike, lag))


class _KicksOfOneLag:
    """Kicks of writes after which the counts are equally far behind."""

    def __init__(
        self,
        out: Float[Tensor, "channel outcome row"],
        trajectory: Trajectory,
        history: History,
        writes: Writes,
        lag: int,
    ) -> None:
        self.out, self.layout, self.history, self.lag = out, trajectory.dynamics.layout, history, lag
        self.where, self.place = places(writes.coordinate, self.layout.padded_size)
        self.pairs = Pairs(writes, self.place)
        self.dm, self.dv, self.begin = writes.dm.clone(), writes.dv.clone(), writes.at.cpu()
        self.coordinate = writes.coordinate
        self.first = int(self.begin[0]) + 1
        self.reach = int(self.where[0]), int(self.where[-1])

    def read(self, step: Passed) -> bool:
        """Add the kicks of one step; False where no outcome lies behind it."""
        out, where, dm, dv = self.out, self.where, self.dm, self.dv
        slopes = self.history.at(step.index, where)
        if not len(slopes):
            return False
        begun = int(torch.searchsorted(self.begin, step.index))  # pairs written before this step
        m, v = step.after.m.index_select(0, where), step.after.v.index_select(0, where)  # thrice as fast as m[where]
        kicks = torch.zeros(len(out), begun, dtype=dm.dtype, device=dm.device)
        runs = step.runs(self.layout, self.lag)
        for few, run in itertools.product(_in_cache(begun, dm.device), runs):
            some = _inside(self.coordinate[few], run, self.reach)
            if run.active and run.bias2 > 0 and some is not None:
                dm[few][some] *= run.beta1
                dv[few][some] *= run.beta2
                at, moved_m, moved_v, kick = self.place[few][some], dm[few][some], dv[few][some], kicks[:, few]
                own_m, own_v = m.index_select(0, at), v.index_select(0, at)
                kick[-1, some] = displacement(run, own_m, own_v, moved_m, moved_v)
                if len(out) == 2:
                    kick[0, some] = displacement(run, own_m, own_v, moved_m, torch.zeros_like(moved_v))
                    kick[1, some] -= kick[0, some]
        slopes = slopes.double()  # a change has up to a million pairs: float32 would lose digits
        # a transposed row counts as contiguous, and a sparse product is three times as slow with its strides
        by_coordinate = slopes.reshape(-1, 1) if len(slopes) == 1 else slopes.mT.contiguous()
        for channel, values in zip(out, kicks):
            self.pairs.add_(channel[: len(slopes)], values.double(), by_coordinate)
        return True


def _in_cache(count: int, device: torch.device) -> list[slice]:
    """So many pairs as they are worked on: on a CPU no more at once than its cache holds."""
    size = IN_CACHE if device.type == "cpu" else max(count, 1)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def places(coordinates: Int64[Tensor, " pair"], size: int) -> tuple[Int64[Tensor, " coordinate"], Int[Tensor, " pair"]]:
    """The coordinates that occur, in order, and where each pair's is among them; by counting, since sorting is slow."""
    there = torch.zeros(size, dtype=torch.bool, device=coordinates.device)
    there[coordinates] = True
    return there.nonzero()[:, 0], (there.cumsum(0, dtype=torch.int32) - 1)[coordinates]


class Pairs:
    """Sums over the pairs of each change as products with one sparse matrix: its rows are stretches of pairs."""

    def __init__(self, writes: Writes, place: Int[Tensor, " pair"]) -> None:
        last = torch.ones_like(writes.row, dtype=torch.bool)  # of its stretch
        last[:-1] = (writes.row[1:] != writes.row[:-1]) | (writes.at[1:] != writes.at[:-1])
        ends = last.nonzero()[:, 0]
        self._row, self._place = writes.row[ends], place
        self._ends, self._starts = ends.cpu() + 1, torch.cat([ends.new_zeros(1), ends + 1]).int()

    def add_(
        self,
        out: Float[Tensor, "outcome row"],
        values: Float[Tensor, " pair"],
        slopes: Float[Tensor, "coordinate outcome"],
    ) -> None:
        """Σ_pairs slope · value of every change, over the leading pairs, of which `values` holds one each."""
        count = int(torch.searchsorted(self._ends, len(values), right=True))
        shape = (count, len(slopes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls these matrices a beta
            matrix = torch.sparse_csr_tensor(self._starts[: count + 1], self._place[: len(values)], values, shape)
            found = matrix @ slopes.to(values)
        out.index_add_(1, self._row[:count], found.mT.to(out))


def count_responses(
    trajectory: Trajectory,
    history: History,
    lags: Int64[Tensor, "row parameter"],
    begin: Int64[Tensor, " row"],
    outcomes: int,
) -> Float[Tensor, "outcome row parameter"]:
    """Σ_s ⟨λ_θ(s+1), q' − q⟩ over steps after `begin`: what step counts that are `lags` behind do by themselves."""
    found = Counts(trajectory, history, lags, begin, outcomes)
    pass_by(trajectory, [found])
    return found.out


class Counts:
    """The same as `out`, once it has read every later step."""

    def __init__(
        self,
        trajectory: Trajectory,
        history: History,
        lags: Int64[Tensor, "row parameter"],
        begin: Int64[Tensor, " row"],
        outcomes: int,
    ) -> None:
        self.layout, self.history, self.lags, self.begin = trajectory.dynamics.layout, history, lags, begin
        self.out = torch.zeros(outcomes, *lags.shape, dtype=torch.float64)
        self.first = int(begin.min()) + 1
        self._behind = sorted(set(lags.unique().tolist()) - {0})

    def read(self, step: Passed) -> bool:
        """Add what the counts do at one step; False where no outcome lies behind it, or none is behind."""
        slopes = self.history.whole(step.index, step.after.theta.device) if self._behind else None
        if slopes is None:
            return False
        for lag in self._behind:
            moved = self._moved(step, lag)
            begun = (self.lags == lag).double() * (self.begin < step.index)[:, None]
            for outcome, slope in enumerate(slopes):
                self.out[outcome] += begun * parts(slope, moved, self.layout.padded_sizes).double().cpu()
        return True

    def _moved(self, step: Passed, lag: int) -> Float[Tensor, " param"]:
        """q' − q: how counts that are `lag` behind change the step."""
        after, moved = step.after, torch.zeros_like(step.after.theta)
        for now, late in zip(step.runs(self.layout), step.runs(self.layout, lag), strict=True):
            if now.active and late.bias2 > 0:
                m, v = after.m[now.where], after.v[now.where]
                moved[now.where] = step_size(late, m, v) - step_size(now, m, v)
        return moved


@dataclass(frozen=True)
class Passed:
    """A step of the path, and the state after it."""

    index: int
    hypers: tuple[Hyper, ...]
    counts: tuple[int, ...]  # before it
    present: tuple[bool, ...]
    after: JointState

    def runs(self, layout: Layout, lag: int = 0) -> list[Run]:
        """Its scalars, where counts are `lag` behind."""
        return runs_of(layout, self.hypers, [c - lag for c in self.counts], self.present)


class Reader(Protocol):
    """Reads the steps of a path from `first` on, until it says that it needs no more."""

    first: int

    def read(self, step: Passed) -> bool: ...


def pass_by(trajectory: Trajectory, readers: Sequence[Reader]) -> None:
    """Show every step to all that read: states that are not kept are computed once for all of them."""
    going = list(readers)
    for step in _passed(trajectory, min(reader.first for reader in going)) if going else ():
        going = [reader for reader in going if step.index < reader.first or reader.read(step)]
        if not going:
            return


def _passed(trajectory: Trajectory, first: int) -> Iterator[Passed]:
    counts = None
    for time, state in trajectory.states(first, len(trajectory)):
        if counts is not None:
            step = trajectory.steps[time - 1]
            present = step.present or tuple(a != b for a, b in zip(counts, state.counts))
            yield Passed(time - 1, step.hypers, counts, present, state)
        counts = state.counts


def steps_after(trajectory: Trajectory, first: int) -> Iterator[tuple[int, list[Run], JointState]]:
    """Steps from `first` on with their scalars, and the state after each."""
    for step in _passed(trajectory, first):
        yield step.index, step.runs(trajectory.dynamics.layout), step.after


def _inside(coordinates: Int64[Tensor, " pair"], run: Run, reach: tuple[int, int]) -> Tensor | slice | None:
    """Which pairs lie in a run: all of them where it holds all they reach, None where it holds none."""
    low, high = reach
    if run.where.start <= low and high < run.where.stop:
        return slice(None)
    if high < run.where.start or low >= run.where.stop:
        return None
    return (coordinates >= run.where.start) & (coordinates < run.where.stop)
