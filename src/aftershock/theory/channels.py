"""Which memory carries a change: hybrid states of θ, m and v after it, and their interactions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..core.changes import ControlStep, Edit, first_tangent, names_of, scales_of, tangent_lag
from ..core.exact_rows import same_state
from ..core.memory import in_chunks, in_one_piece
from ..core.planning import at_once
from ..core.probe import Reader, Watch
from ..core.reductions import count
from ..core.rollout import Rows, rollout
from ..core.row_costs import Load
from ..core.state import CHANNELS, JointState, Lag, Tangent, stack
from ..core.trajectory import Trajectory
from ..errors import InvalidInput
from ..results.provenance import asked, provenance
from ..results.summaries import summarize

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change

SUBSETS = tuple(kept for size in range(4) for kept in itertools.combinations(CHANNELS, size))
HYBRIDS = tuple("+".join(kept) or "none" for kept in SUBSETS)
ANSWERS = ("exact", "tangent")
NO_DERIVATIVE = "coordinates of the hybrid with v̂ = 0 and m̂ ≠ 0 at its first step: no derivative exists there"


def hybrid(control: JointState, shocked: JointState, channels: Sequence[str]) -> JointState:
    """x^{abc}: the named channels from the shocked state, step counts with all three; all else the control's."""
    counts = shocked.counts if set(channels) == set(CHANNELS) else control.counts
    return replace(control, counts=counts, **{name: getattr(shocked, name) for name in channels})


def channel_responses(
    change: Change,
    probe: Any,
    *,
    answers: Sequence[str] = ANSWERS,
    scale: float = 1.0,
    horizon: int | None = None,
    memory: str | int | None = None,
) -> xr.Dataset:
    """Responses to the eight hybrids x^{abc} = x^c + (aΔθ, bΔm, cΔv) after a change, and their interactions.

    `response[answer, channel, change, horizon]` and its summaries; `interaction`, by inclusion–exclusion
    I_S = Σ_{T⊆S} (−1)^{|S|−|T|} R_T: main effects on single channels, then pairs, then all three. "exact" runs
    on from each hybrid: 7·H g a change. "tangent" propagates only those blocks of B ξ; it is linear, so three
    isolated blocks give all eight (3·H Hessian products a change, 4·H after a skip) and its interactions are zero.
    `no_derivative` counts coordinates with v̂ = 0 and m̂ ≠ 0 at the hybrid's first step, where no derivative
    exists; on "none" these are the control's own. Where step counts differ (`counts_differ`), as after a skip, they
    are shocked in "theta+m+v" alone, which is then the whole change, and what they do is in the interaction of all
    three. Buffers stay the control's. Paper: "State-channel dependence and persistence".

    answers: "exact", "tangent" or both. probe, scale, horizon, memory: as in `change.response`.

    >>> found = theory.channel_responses(change, probe, answers=["exact"])
    >>> alone = found["peak"].sel(answer="exact", change="replace 1", channel=["theta", "m", "v"])
    >>> alone.values.round(4).tolist()  # most of it waits in m
    [0.0028, 0.0061, 0.0012]
    """
    wanted = list(answers)
    if not wanted or set(wanted) - set(ANSWERS):
        raise InvalidInput(f"answers are {', '.join(ANSWERS)}; got {wanted}")
    scales_of(change.edits, [scale])
    path, watch = change.path, change.path.watch(change.at, probe, horizon)
    if "tangent" in wanted:
        path.require_linear(watch)
    limit = path.memory if memory is None else memory
    size = _changes_at_once(path.trajectory, len(change), wanted, limit)
    read = Reader(path.trajectory, watch.probe)
    in_one_piece(lambda: _read_controls(read, watch), "the control alone")  # before anything else is in memory

    def answered(some: range) -> dict[str, Tensor]:
        starts = _Starts(watch, change.edits[some.start : some.stop], scale, "tangent" in wanted)
        counts = torch.tensor([end.counts != starts.control.counts for end in starts.ends])
        found = {"broken": starts.broken, "counts": counts}
        if "exact" in wanted:
            found["exact"] = _hybrids(watch, read, starts, limit)
        if "tangent" in wanted:
            found["tangent"] = _isolated(watch, read, starts)
        return found

    parts = in_chunks(len(change), size, answered, "hybrids of changes")
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return _labelled(watch, change, wanted, found, scale)


def _changes_at_once(trajectory: Trajectory, changes: int, answers: Sequence[str], memory: str | int | None) -> int:
    """As many as fit with all their hybrids; those of one change alone are cut further, down to one at a time."""
    tangents = len(CHANNELS) * ("tangent" in answers)

    def rows(n: int) -> Load:
        hybrids = n * (len(SUBSETS) - 1) if n > 1 else 1
        return Load(exact=hybrids * ("exact" in answers), linear=n * tangents)

    return at_once(trajectory, changes, rows, memory, lambda n: n * (3 + tangents), "a hybrid of one change")


def _read_controls(read: Reader, watch: Watch) -> None:
    for moment in rollout(watch.trajectory, watch.first, Rows(), watch.last):
        read.control(moment)


class _Starts:
    """Some changes right after their step: the control's state, theirs, their tangents; nothing else is kept."""

    def __init__(self, watch: Watch, edits: Sequence[Edit], scale: float, tangents: bool) -> None:
        self.ends, self.tangents, self.lags = list[JointState](), list[Tangent](), list[Lag]()
        control = ControlStep.of(watch.trajectory, watch.at)
        for edit in edits:
            shock = edit.shock(control)
            self.ends.append(shock.endpoint(scale)[0])
            if tangents:
                self.tangents.append(first_tangent(control, shock, scale))
                self.lags.append(tangent_lag(control, shock, self.ends[-1]))
            del shock
        self.control = control.after
        del control
        self.broken = _broken(watch, self.control, self.ends)


def _labelled(watch: Watch, change: Change, answers: list[str], found: dict[str, Tensor], scale: float) -> xr.Dataset:
    import xarray as xr

    coords = {"answer": answers, "change": names_of(change.edits), "channel": list(HYBRIDS), "horizon": watch.range}
    response = xr.DataArray(
        torch.stack([found[name] for name in answers]).numpy(), coords, ("answer", "change", "channel", "horizon")
    ).transpose("answer", "channel", "change", "horizon")
    data = summarize(response).assign(
        response=response,
        interaction=interactions(response),
        no_derivative=(("change", "channel"), found["broken"].numpy(), {"meaning": NO_DERIVATIVE}),
        counts_differ=("change", found["counts"].numpy()),
        scale=scale,
        **asked(change.kind, watch.at, watch.probe),
    )
    return data.assign_attrs(provenance(watch.trajectory))


def _hybrids(
    watch: Watch, read: Reader, starts: _Starts, memory: str | int | None
) -> Float[Tensor, "change channel horizon"]:
    """Seven exact hybrids of every change, as many at once as fit; nothing for the one that is the control."""
    trajectory = watch.trajectory
    wanted = [(end, kept) for end in starts.ends for kept in SUBSETS[1:]]
    held = 3 * (len(starts.ends) + len(starts.tangents))
    size = at_once(trajectory, len(wanted), lambda n: Load(exact=n), memory, lambda _: held, "a hybrid of one change")

    def run(few: range) -> Float[Tensor, "hybrid horizon"]:
        some = [hybrid(starts.control, *wanted[i]) for i in few]
        # where none of them is the control, whose readings are known, it need not run along
        distinct = not any(same_state(one, starts.control) for one in some)
        rows = Rows(some, control=None if distinct else starts.control, distinct=distinct)
        moments = rollout(trajectory, watch.first, rows, watch.last)
        return torch.stack([read.exact(moment) for moment in moments], dim=-1)

    values = torch.cat(in_chunks(len(wanted), size, run, "hybrids")).view(len(starts.ends), -1, watch.horizons)
    return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)


def _isolated(watch: Watch, read: Reader, starts: _Starts) -> Float[Tensor, "change channel horizon"]:
    """Three isolated blocks of every tangent; it is linear, so that a hybrid is the sum of its blocks.

    But for the whole one with other step counts, which shift its steps: it is a row of its own.
    """
    member = torch.tensor([[float(name in kept) for name in CHANNELS] for kept in SUBSETS], dtype=torch.float64)
    found = _tangents(watch, read, Rows(linear=_blocks(starts.tangents)))
    values = member @ found.view(len(starts.tangents), len(CHANNELS), watch.horizons)
    if any(any(lag) for lag in starts.lags):
        values[:, -1] = _tangents(watch, read, Rows(linear=stack(starts.tangents), linear_lags=starts.lags))
    return values


def _tangents(watch: Watch, read: Reader, rows: Rows) -> Float[Tensor, "row horizon"]:
    moments = rollout(watch.trajectory, watch.first, rows, watch.last)
    return torch.stack([read.linear(moment) for moment in moments], dim=-1)


def _blocks(starts: Sequence[Tangent]) -> Tangent:
    """δx of every change three times, each with one block alone: rows `[change · channel]`."""
    none = torch.zeros_like(starts[0].theta)
    blocks = {c: [getattr(dx, c) if c == name else none for dx in starts for name in CHANNELS] for c in CHANNELS}
    return Tangent(*(torch.stack(blocks[c]) for c in CHANNELS))


def interactions(response: xr.DataArray) -> xr.DataArray:
    """I_S = Σ_{T⊆S} (−1)^{|S|−|T|} R_T over `channel`: what S does that no part of it does. No gradient.

    response: one value R_T for each of the eight hybrids, by their names in `channel`.

    >>> import xarray as xr
    >>> names = ["none", "theta", "m", "v", "theta+m", "theta+v", "m+v", "theta+m+v"]
    >>> sizes = xr.DataArray([0.0, 1.0, 2.0, 0.0, 5.0, 1.0, 2.0, 5.0], {"channel": names}, "channel")
    >>> float(theory.interactions(sizes).sel(channel="theta+m"))  # 5 − 1 − 2
    2.0
    """
    import xarray as xr

    rows = []
    for whole in SUBSETS:
        parts = [(T, name) for T, name in zip(SUBSETS, HYBRIDS) if set(T) <= set(whole)]
        rows.append(sum((-1) ** (len(whole) - len(T)) * response.sel(channel=name, drop=True) for T, name in parts))
    return xr.concat(rows, dim="channel").assign_coords(channel=list(HYBRIDS)).transpose(*response.dims)


def _broken(watch: Watch, control: JointState, ends: Sequence[JointState]) -> Int64[Tensor, "change channel"]:
    """Coordinates of each hybrid at which its first step, at the control's gradient, has no derivative."""
    out = torch.zeros(len(ends), len(SUBSETS), dtype=torch.int64)
    if watch.horizons == 1:  # no step is taken
        return out
    dynamics, step = watch.trajectory.dynamics, watch.trajectory.steps[watch.first]
    found = dynamics.loss.gradient(control.theta, control.buffers, step.batch, step.random, step.where)
    raw, present = dynamics.layout.join(found.grads), found.present
    del found
    for i, end in enumerate(ends):
        for j, kept in enumerate(SUBSETS):
            out[i, j] = count(dynamics.linear_step(step, hybrid(control, end, kept), raw, present).broken)
    return out
