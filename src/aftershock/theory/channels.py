"""Which memory carries a change: hybrid states of θ, m and v after it, and their interactions.

Also `Watch`, where a probe is read after a change: shared with the baselines and the matching.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.changes import ControlStep, Edit, Shock
from ..core.dynamics import Step
from ..core.guards import hidden_buffers
from ..core.memory import budget
from ..core.operators import WriteIn, readout
from ..core.probe import Probe
from ..core.state import CHANNELS, JointState, Tangent, difference, pair
from ..core.sweeps import tangent_sweep
from ..errors import HiddenState, InvalidInput, NotFinite
from ..results.summaries import summarize

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change
    from ..api.path import Path

SUBSETS = tuple(kept for size in range(4) for kept in itertools.combinations(CHANNELS, size))
HYBRIDS = tuple("+".join(kept) or "none" for kept in SUBSETS)
ANSWERS = ("exact", "tangent")
VECTORS = 24  # flat vectors a change needs: three rows of δx with products, ξ, the endpoint
NO_DERIVATIVE = "coordinates of the hybrid with v̂ = 0 and m̂ ≠ 0 at its first step: no derivative exists there"


@dataclass(frozen=True)
class Watch:
    """Where a probe is read after step `at` of a path: horizons 1 … `horizons`."""

    path: Path
    at: int
    probe: Probe
    horizons: int

    @classmethod
    def of(cls, path: Path, at: int, probe: Any, horizon: int | None = None) -> Watch:
        found = Probe.of(probe)
        longest = found.last_time(path.trajectory) - at
        wanted = longest if horizon is None else horizon
        if not 1 <= wanted <= longest:
            raise InvalidInput(
                f"horizon {wanted} does not fit: a change at step {at} of this path of {len(path)} steps can be "
                f"followed for {max(longest, 0)} with {found.name} as the probe"
            )
        return cls(path, at, found, wanted)

    def require_linear(self) -> None:
        """Refuse linear answers where moving buffers are state outside (θ, m, v)."""
        trajectory = self.path.trajectory
        state, after = trajectory.state(0), trajectory.state(1)
        moved = {name: b for name, b in after.buffers.items() if not torch.equal(b, state.buffers[name])}
        loss, batch, random, _ = self.probe.arguments(trajectory, 0)
        hidden = self.path.check().hidden or hidden_buffers(
            loss, state, moved, batch, random, evaluating=self.probe.evaluating
        )
        if hidden:
            raise HiddenState(
                f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), "
                "which are state outside (θ, m, v): only exact answers exist; probe in training mode"
            )

    def states(self) -> Iterator[tuple[int, JointState]]:
        """(time, control state) of every horizon."""
        last = self.at + self.horizons
        for step, state in self.path.trajectory.forward(self.at + 1, last):
            yield step.index, state
        yield last, self.path.trajectory.state(last)

    def readouts(self) -> tuple[Float[Tensor, " horizon"], Float[Tensor, "horizon param"]]:
        """F and c̄_h = ∇F at the control of every horizon: 1 g each."""
        trajectory = self.path.trajectory
        found = [self.probe.gradient(trajectory, time, state) for time, state in self.states()]
        slopes = torch.stack([trajectory.dynamics.layout.join(each.grads) for each in found])
        return torch.tensor([float(each.loss) for each in found], dtype=torch.float64), slopes

    def rerun(self, start: JointState, steps: Sequence[Step] | None = None) -> Float[Tensor, " horizon"]:
        """The probe's loss along the exact run from a state after step `at`: 1 g per horizon but the first.

        `steps` may stand in for the path's own. Where the run leaves the finite numbers its loss is +∞ from
        there on: hybrids lie off the states that training reaches.
        """
        trajectory, losses = self.path.trajectory, torch.full((self.horizons,), math.inf, dtype=torch.float64)
        state, steps = start, trajectory.steps if steps is None else steps
        try:
            for h in range(self.horizons):
                time = self.at + 1 + h
                if h:
                    state = trajectory.dynamics.advance(steps[time - 1], state)[0]
                losses[h] = float(self.probe.value(trajectory, time, state.theta, state))
        except NotFinite:
            pass
        return losses

    def chunks(self, edits: Sequence[Edit], vectors: int, memory: str | int | None) -> Iterator[Sequence[Edit]]:
        """Edits in groups that fit the memory budget, `vectors` flat vectors each."""
        layout = self.path.trajectory.dynamics.layout
        available = budget(self.path.memory if memory is None else memory, layout.device)
        size = max(1, available // (vectors * layout.padded_size * layout.dtype.itemsize))
        for first in range(0, len(edits), size):
            yield edits[first : first + size]

    def coordinates(self, edits: Sequence[Edit]) -> dict[str, list[Any]]:
        names = [edit.name for edit in edits]
        unique = len(set(names)) == len(names)
        labels = names if unique else [f"{name} {i}" for i, name in enumerate(names)]
        return {"change": labels, "horizon": list(range(1, self.horizons + 1))}

    def attributes(self, kind: str) -> dict[str, Any]:
        layout = self.path.trajectory.dynamics.layout
        return {
            "torch": torch.__version__,
            "device": str(layout.device),
            "dtype": str(layout.dtypes[0]).removeprefix("torch."),
            "parameters": layout.size,
            "path_steps": len(self.path),
            "kind": kind,
            "at": self.at,
            "probe": self.probe.name,
        }


def first_tangent(control: ControlStep, shock: Shock, scale: float = 1.0) -> Tangent:
    """δx_{t+1} = α B ξ. A change without ξ has no write-in to linearize: its exact difference at α."""
    if shock.xi is None:
        return difference(shock.endpoint(scale)[0], control.after)
    return WriteIn(control.linear).mv(shock.xi) * scale


def hybrid(control: JointState, shocked: JointState, channels: Sequence[str]) -> JointState:
    """x^{abc}: the named channels from the shocked state, all else, counts and buffers included, the control's."""
    return replace(control, **{name: getattr(shocked, name) for name in channels})


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
    isolated blocks give all eight (3·H Hessian products a change) and its interactions are zero.
    `no_derivative` counts coordinates with v̂ = 0 and m̂ ≠ 0 at the hybrid's first step, where no derivative
    exists; on "none" these are the control's own. Step counts and buffers stay the control's, so a skip's
    "theta+m+v" is not the whole skip (`counts_differ`). Paper: "State-channel dependence and persistence".
    """
    wanted = list(answers)
    if not wanted or set(wanted) - set(ANSWERS):
        raise InvalidInput(f"answers are {', '.join(ANSWERS)}; got {wanted}")
    require_scale(change, scale)
    watch = Watch.of(change.path, change.at, probe, horizon)
    if "tangent" in wanted:
        watch.require_linear()
    control = change.path.control(change.at)
    following = change.path.control(change.at + 1) if watch.horizons > 1 else None
    losses, slopes = watch.readouts()
    found: dict[str, list[Tensor]] = {name: [] for name in [*wanted, "broken", "counts"]}
    for some in watch.chunks(change.edits, VECTORS, memory):
        shocks = [edit.shock(control) for edit in some]
        ends = [shock.endpoint(scale)[0] for shock in shocks]
        if "exact" in wanted:
            found["exact"] += [_exact(watch, control, end, losses) for end in ends]
        if "tangent" in wanted:
            found["tangent"] += list(_tangent(watch, [first_tangent(control, s, scale) for s in shocks], slopes))
        found["broken"] += [_broken(following, control, end) for end in ends]
        found["counts"] += [torch.tensor(end.counts != control.after.counts) for end in ends]
    return _labelled(watch, change, wanted, {name: torch.stack(rows) for name, rows in found.items()}, scale)


def _labelled(watch: Watch, change: Change, answers: list[str], found: dict[str, Tensor], scale: float) -> xr.Dataset:
    import xarray as xr

    response = xr.DataArray(
        torch.stack([found[name] for name in answers]).numpy(),
        dims=("answer", "change", "channel", "horizon"),
        coords={"answer": answers, "channel": list(HYBRIDS), **watch.coordinates(change.edits)},
    ).transpose("answer", "channel", "change", "horizon")
    data = summarize(response).assign(
        response=response,
        interaction=interactions(response),
        no_derivative=(("change", "channel"), found["broken"].numpy(), {"meaning": NO_DERIVATIVE}),
        counts_differ=("change", found["counts"].numpy()),
    )
    return data.assign_attrs(watch.attributes(change.kind), scale=scale)


def interactions(response: xr.DataArray) -> xr.DataArray:
    """I_S = Σ_{T⊆S} (−1)^{|S|−|T|} R_T over `channel`: what S does that no part of it does."""
    import xarray as xr

    rows = []
    for whole in SUBSETS:
        parts = [(T, name) for T, name in zip(SUBSETS, HYBRIDS) if set(T) <= set(whole)]
        rows.append(sum((-1) ** (len(whole) - len(T)) * response.sel(channel=name, drop=True) for T, name in parts))
    return xr.concat(rows, dim="channel").assign_coords(channel=list(HYBRIDS)).transpose(*response.dims)


def _exact(watch: Watch, control: ControlStep, end: JointState, losses: Tensor) -> Float[Tensor, "channel horizon"]:
    runs = [watch.rerun(hybrid(control.after, end, kept)) - losses for kept in SUBSETS[1:]]
    return torch.stack([torch.zeros_like(losses), *runs])


def _tangent(
    watch: Watch, starts: Sequence[Tangent], slopes: Float[Tensor, "horizon param"]
) -> Float[Tensor, "change channel horizon"]:
    """One sweep of the three isolated blocks of every change; a hybrid is the sum of its blocks."""
    count, none = len(starts), torch.zeros_like(starts[0].theta)
    blocks = {c: [getattr(dx, c) if c == name else none for name in CHANNELS for dx in starts] for c in CHANNELS}
    dx = Tangent(*(torch.stack(blocks[c]) for c in CHANNELS))
    alone = torch.zeros(3, count, watch.horizons, dtype=torch.float64)
    for time, tangent in tangent_sweep(watch.path.trajectory, watch.at + 1, watch.at + watch.horizons, dx):
        h = time - watch.at - 1
        alone[:, :, h] = pair(readout(slopes[h : h + 1]), tangent)[0].double().cpu().view(3, count)
    member = torch.tensor([[float(name in kept) for name in CHANNELS] for kept in SUBSETS], dtype=torch.float64)
    return torch.einsum("sc,cih->ish", member, alone)


def _broken(following: ControlStep | None, control: ControlStep, end: JointState) -> Tensor:
    """Coordinates of each hybrid at which its first step, at the control's gradient, has no derivative."""
    if following is None:  # a single horizon: no step is taken
        return torch.zeros(len(SUBSETS), dtype=torch.int64)
    states = [hybrid(control.after, end, kept) for kept in SUBSETS]
    linear_step, now = following.dynamics.linear_step, following
    steps = [linear_step(now.step, state, now.raw, now.present) for state in states]
    return torch.stack([step.broken.sum().cpu() for step in steps])


def require_scale(change: Change, scale: float) -> None:
    """Refuse a scale α that has no meaning for a change."""
    if not math.isfinite(scale) or scale == 0:
        raise InvalidInput(f"scale must be a nonzero number; got {scale}")
    if scale != 1.0 and not all(edit.scalable for edit in change.edits):
        raise InvalidInput(f"a {change.kind} has no scale between control and change; set scale=1")
