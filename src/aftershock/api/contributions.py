"""`explain`: one adjoint sweep back from an outcome gives every earlier step's contribution to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.changes import Edit, Reset, Skip, Zero
from ..core.probe import Probe
from ..core.scores import contributions
from ..core.state import CHANNELS
from ..errors import InvalidInput
from ..results.provenance import provenance
from .change import Change
from .probing import Readouts, require_linear
from .progress import progress

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
EDITS: dict[str, Edit] = {"zero": Zero(), "skip": Skip(), "reset m": Reset(("m",)), "reset v": Reset(("v",))}


@dataclass(frozen=True)
class Explanation:
    """What each step of a path adds to one outcome. `data` has `contribution[step, channel]`."""

    data: xr.Dataset

    @property
    def total(self) -> xr.DataArray:
        """Contribution of each step, all channels together. Positive: the step raised the loss."""
        return self.data["contribution"].sum("channel")

    def __str__(self) -> str:
        attrs = self.data.attrs
        lines = [
            f"Contribution of each step to {attrs['probe']} at state {attrs['outcome']} "
            f"(loss {attrs['value']:.4g}; against the run with '{attrs['change']}' at that step), largest first:",
            f"{'step':>5}  {'predicted':>11}  {'measured':>11}  {'in θ':>10}  {'in m':>10}  {'in v':>10}",
        ]
        order = abs(self.total).argsort().values[::-1][:SHOWN]
        for i in order:
            row = self.data.isel(step=int(i))
            measured = float(row["measured"])
            shown = f"{measured:>+11.3g}" if measured == measured else f"{'':>11}"
            parts = "  ".join(f"{float(x):>+10.3g}" for x in row["contribution"].values)
            lines.append(f"{int(row['step']):>5}  {float(self.total.isel(step=int(i))):>+11.3g}  {shown}  {parts}")
        if not self.data["measured"].notnull().any():
            lines.append("Not verified: pass verify=k to rerun without the top k steps. Do not trust it blindly.")
        return "\n".join(lines)


def explain(path: Path, probe: Any, *, at: int | None = None, change: str = "zero", verify: int = 0) -> Explanation:
    """Each step's contribution to the probe's loss at state `at` (default: the last), by channel.

    A contribution is the outcome as it is, less the outcome with `change` made at that step: "zero" its
    gradient, "skip" it, "reset m" or "reset v" before it. Channels say where the step's write waits: in θ,
    m or v right after it. verify: rerun the top k exactly.
    """
    import xarray as xr

    if change not in EDITS:
        raise InvalidInput(f"change is one of {', '.join(EDITS)}; got {change!r}")
    found = Probe.of(probe)
    last = found.last_time(path.trajectory)
    time = last if at is None else at
    readouts = Readouts(path, found, 0, time)
    require_linear(path, readouts)
    with progress("adjoint sweep", time) as tick:
        parts = contributions(path.trajectory, time, readouts.gradient(time), lambda step: EDITS[change], tick)
    measured = torch.full((time,), torch.nan, dtype=torch.float64)
    for step in parts.sum(1).abs().argsort(descending=True)[:verify].tolist():
        exact = Change(path, step, change, (EDITS[change],)).response(found, answers=("exact",), horizon=time - step)
        measured[step] = -float(exact.exact.isel(change=0, scale=0, horizon=-1))
    state = path.trajectory.state(time)
    data = xr.Dataset(
        {"contribution": (("step", "channel"), parts.numpy()), "measured": ("step", measured.numpy())},
        coords={"step": list(range(time)), "channel": list(CHANNELS)},
        attrs={
            **provenance(path.trajectory),
            "check": str(path.check()),
            "outcome": time,
            "value": float(found.value(path.trajectory, time, state.theta, state)),
            "change": change,
            "probe": found.name,
        },
    )
    return Explanation(data)
