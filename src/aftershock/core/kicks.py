"""What a change wrote into m and v, where a derivative of AdamW is right and useless.

At a coordinate whose v is tiny (a row of a rare token, an untouched weight) a real gradient changes v by more than a
small part of itself: the step saturates, and its slope predicts moves a thousand times too large. But the write is
known exactly, and without new gradients it moves θ at every later step s by a known *kick*

    q(m_s + β1^k δm, v_s + β2^k δv) − q(m_s, v_s),      q(m, v) = −η m̂ / (√v̂ + ε)      (eq:kick)

so that only the feedback of the displacement through the network is linear: the response is Σ_s ⟨λ_θ(s+1), kick(s)⟩
(eq:kick_response) with the adjoint's θ part alone. Of one change, coordinates with |δv| ≤ τ v stay in the linear
pairing; of changes of all steps, those where a parabola in δv holds are summed along the sweep (`waiting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from .adamw import Hyper, Run, pieces_of, runs_of
from .layout import Layout
from .linear_step import displacement, recounted
from .reductions import marked, parts
from .state import JointState, Tangent
from .trajectory import Trajectory

IN_CACHE = 2**17  # pairs of a change and a coordinate that a CPU works on at once
PAIRS_AT_ONCE = 2**24  # the same on a GPU, and numbers, one per pair and outcome, that its kicks add up to at once
STIFF = 0.1  # τ: from a tenth of v on, a slope in v is off by more than a few percent


class History:
    """λ_θ after every step that an adjoint sweep has passed, one row per outcome, kept where there is room.

    `rows` of them in all, in one block: among what comes and goes at every step they would leave holes behind.
    """

    def __init__(self, place: torch.device, layout: Layout, rows: int) -> None:
        self.place = place
        self._free = torch.empty(rows, layout.padded_size, dtype=layout.dtype, device=place)
        self._kept: dict[int, Float[Tensor, "outcome param"]] = {}

    def keep(self, step: int, theta: Float[Tensor, "outcome param"]) -> None:
        """The cotangents at the state after `step`."""
        self._kept[step] = self._free[: len(theta)].copy_(theta)
        self._free = self._free[len(theta) :]

    def at(self, step: int, where: Int64[Tensor, " coordinate"] | slice) -> Float[Tensor, "outcome coordinate"] | None:
        """The same at some coordinates, on their device; None for a step that no outcome lies behind."""
        kept = self._kept.get(step)
        return None if kept is None else _chosen(kept, where)

    def piece(self, step: int, where: slice, device: torch.device) -> Float[Tensor, "outcome param"]:
        """A stretch of them at the state after `step`, on a device."""
        kept = self._kept.get(step)
        return torch.zeros(0, 1, device=device) if kept is None else kept[:, where].to(device)

    def whole(self, step: int, device: torch.device) -> Float[Tensor, "outcome param"] | None:
        """All of them at the state after `step`; None where no outcome lies behind it."""
        kept = self._kept.get(step)
        return None if kept is None else kept.to(device)


def _chosen(x: Tensor, where: Int64[Tensor, " coordinate"] | slice) -> Tensor:
    """Some coordinates, on their device."""
    return x[..., where] if isinstance(where, slice) else x.index_select(-1, where.to(x.device)).to(where.device)


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
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS))

    def __getitem__(self, some: Tensor | slice) -> Writes:
        return Writes(*(getattr(self, name)[some] for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.row)


COLUMNS = ("row", "coordinate", "dm", "dv", "at", "lag")


def stiff(dv: Float[Tensor, " param"], v: Float[Tensor, " param"]) -> Int64[Tensor, " coordinate"]:
    """Where a write changes v by more than τ of itself."""
    return marked(dv.abs() > STIFF * v)


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


def near(writes: Sequence[Writes], size: int) -> list[Writes]:
    """The same pairs in groups of coordinates that are near each other: what a group reads stays in a core's cache.

    `writes` are in the order of their steps, each in the order of its coordinates, of which there are `size`.
    """
    if not writes:
        return []
    device = writes[0].row.device
    groups = max(1, -(-sum(map(len, writes)) // IN_CACHE)) if device.type == "cpu" else 1
    bounds = torch.arange(1, groups, device=device) * (size // groups)
    cuts = [[0, *torch.searchsorted(some.coordinate, bounds).tolist(), len(some)] for some in writes]
    return [Writes.joined([w[cut[i] : cut[i + 1]] for w, cut in zip(writes, cuts)]) for i in range(groups)]


def kick_responses(
    trajectory: Trajectory, history: History, writes: Writes, rows: int, outcomes: int
) -> Float[Tensor, "outcome row"]:
    """Σ_s ⟨λ_θ(s+1), kick(s)⟩ of changes of one step. No gradient.

    Outcomes are in the order of the sweep, the last one first, so that those alive at a step are the leading ones.
    """
    size = IN_CACHE if writes.row.device.type == "cpu" else max(len(writes), 1)
    few = [writes[first : first + size] for first in range(0, len(writes), size)]
    found = Kicks(trajectory, history, few, rows, outcomes)
    pass_by(trajectory, [found])
    return found.result()


Rule = Callable[[Run, Tensor, Tensor, Tensor, Tensor], Tensor]  # of m, v, δm and δv at a step


class Kicks:
    """The same of changes of many steps, once it has read every later one, by a rule of what a write does at a step.

    `writes` come in groups that are worked on at once, each in the order of its steps.
    """

    where: Int64[Tensor, " coordinate"] | slice

    def __init__(
        self,
        trajectory: Trajectory,
        history: History,
        writes: Sequence[Writes],
        rows: int,
        outcomes: int,
        rule: Rule = displacement,
    ) -> None:
        self.layout, self.history, device = trajectory.dynamics.layout, history, trajectory.device
        size, self.where = self.layout.padded_size, slice(None)  # where it reads: at all coordinates
        place = [some.coordinate.int() if size < 2**31 else some.coordinate for some in writes]  # among these
        if history.place != device and writes:  # as little as possible is moved
            self.where, joined = places(torch.cat([some.coordinate for some in writes]), size)
            place = list(joined.split([len(some) for some in writes]))
        self.out = torch.zeros(outcomes, rows, dtype=torch.float64, device=device)
        alike = [group for some, at in zip(writes, place) for group in _by_lag(some, at)]
        self.groups = [_Group(*group, rule, outcomes) for group in alike]
        self.first = 1 + min((int(group.begin[0]) for group in self.groups), default=len(trajectory))

    def read(self, step: Passed) -> bool:
        """Add the kicks of one step; False where no outcome lies behind it."""
        slopes = self.history.at(step.index, self.where)
        if slopes is None:
            return False
        m, v = _chosen(step.after.m, self.where), _chosen(step.after.v, self.where)
        runs = {lag: step.runs(self.layout, lag) for lag in {group.lag for group in self.groups}}
        for group in self.groups:
            group.kick(step, runs[group.lag], m, v, slopes)
        return True

    def result(self) -> Float[Tensor, "outcome row"]:
        for group in self.groups:
            group.add_up(self.out)
        return self.out


def _by_lag(writes: Writes, place: Int[Tensor, " pair"]) -> Iterator[tuple[Writes, Int[Tensor, " pair"], int]]:
    """Groups of pairs after which the counts are equally far behind."""
    for lag in range(int(writes.lag.min()), int(writes.lag.max()) + 1) if len(writes) else ():
        alike = writes.lag == lag
        if alike.all():
            yield writes, place, lag
        elif alike.any():
            yield writes[alike], place[alike], lag


class _Group:
    """Pairs in the order of their steps, with equal lags: what is left of their writes, and their responses so far."""

    def __init__(self, writes: Writes, place: Int[Tensor, " pair"], lag: int, rule: Rule, outcomes: int) -> None:
        self.row, self.coordinate, self.place, self.lag = writes.row, writes.coordinate, place, lag
        self.dm, self.dv, self.begin = writes.dm.clone(), writes.dv.clone(), writes.at.cpu()
        self.rule, self.found = rule, [torch.zeros_like(self.dm) for _ in range(outcomes)]
        self.reach = int(self.coordinate.min()), int(self.coordinate.max())

    def kick(self, step: Passed, runs: Sequence[Run], m: Tensor, v: Tensor, slopes: Tensor) -> None:
        """Add the kicks of a step; m, v and slopes are those of all coordinates that have a place."""
        begun = slice(0, int(torch.searchsorted(self.begin, step.index)))  # pairs written before this step
        for run in runs if begun.stop else ():
            few = _inside(self.coordinate[begun], run, self.reach, begun)
            if run.active and run.bias2 > 0 and few is not None:
                self._kick(run, few, m, v, slopes)

    def _kick(self, run: Run, few: Int64[Tensor, " pair"] | slice, m: Tensor, v: Tensor, slopes: Tensor) -> None:
        self.dm[few] *= run.beta1
        self.dv[few] *= run.beta2
        at = self.place[few]
        kick = self.rule(run, m.index_select(0, at), v.index_select(0, at), self.dm[few], self.dv[few])
        for found, slope in zip(self.found, slopes):
            found[few] = torch.addcmul(found[few], kick, slope.index_select(0, at))

    def add_up(self, out: Float[Tensor, "outcome row"]) -> None:
        """Responses by change: up to a million pairs, so float32 would lose digits."""
        for total, found in zip(out, self.found):
            total.index_add_(0, self.row, found.double())


def places(coordinates: Int64[Tensor, " pair"], size: int) -> tuple[Int64[Tensor, " coordinate"], Int[Tensor, " pair"]]:
    """The coordinates that occur, in order, and where each pair's is among them; by counting, since sorting is slow."""
    there = torch.zeros(size, dtype=torch.bool, device=coordinates.device)
    there[coordinates] = True
    return marked(there), (there.cumsum(0, dtype=torch.int32) - 1)[coordinates]


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
            for _, w in pieces_of([now] if late.bias2 > 0 else [], moved):
                m, v = after.m[w], after.v[w]
                moved[w] = recounted(now, late, m, v)
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


def _inside(
    coordinates: Int64[Tensor, " pair"], run: Run, reach: tuple[int, int], everything: slice
) -> Int64[Tensor, " pair"] | slice | None:
    """Which pairs lie in a run: all of them where it holds all they reach, None where it holds none."""
    low, high = reach
    if run.where.start <= low and high < run.where.stop:
        return everything
    if high < run.where.start or low >= run.where.stop:
        return None
    return marked((coordinates >= run.where.start) & (coordinates < run.where.stop))
