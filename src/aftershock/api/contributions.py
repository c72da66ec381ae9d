"""`explain`: one adjoint sweep back from an outcome gives every earlier step's contribution to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.changes import Edit, Reset, Skip, Zero
from ..core.contributions import BentReadout, contributions
from ..core.planning import plan_history
from ..core.probe import Watch
from ..core.state import CHANNELS
from ..errors import InvalidInput
from ..results.certificate import TRUST, Certificate, Finding
from ..results.labelled import LabelledResult
from ..results.provenance import provenance
from ..results.statistics import rank_correlation
from .change import Change
from .progress import progress

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
EDITS: dict[str, Edit] = {"zero": Zero(), "skip": Skip(), "reset m": Reset(("m",)), "reset v": Reset(("v",))}


class Contributions(LabelledResult):
    """What each step of a path adds to one outcome.

    `data` has `contribution[step, channel]`, whose channels add up to the whole (`total`), and `measured[step]`: the
    exact rerun without the step, where it was made.
    """

    kind = "explanation"
    wanted = ("contribution", "measured")

    @property
    def total(self) -> xr.DataArray:
        """Contribution of each step, all channels together. Positive: the step raised the loss."""
        return self.data["contribution"].sum("channel")

    @property
    def certificate(self) -> Certificate:
        """How the predictions compare with the exact reruns."""
        known = self.data["measured"].notnull()
        count = int(known.sum())
        if not count:
            sentence = "Not verified: pass verify=k to rerun without the top k steps. Do not trust it blindly."
            return Certificate((Finding("care", "explanation", "reruns", 0.0, 1.0, sentence),))
        predicted, measured = self.total.values[known.values], self.data["measured"].values[known.values]
        error = float(abs(predicted - measured).sum() / max(abs(measured).sum(), 1e-300))
        signs = float((predicted * measured > 0).mean())
        level = TRUST.level(error)
        word = {"ok": "trust it", "care": "use the sizes with care", "bad": "do not trust the predicted sizes"}[level]
        order = f", their order by rank correlation {float(rank_correlation(predicted, measured)[0]):.2f}"
        sentence = (
            f"Verified by {count} exact reruns: {word}. Predictions are off by {error:.0%} in sum, signs are right "
            f"in {signs:.0%}{order if count > 2 else ''}. The measured column is the truth."
        )
        return Certificate((Finding(level, "explanation", "relative error of reruns", error, TRUST.nrmse, sentence),))

    def __str__(self) -> str:
        data = self.data
        lines = [
            f"Contribution of each step to {data['probe'].item()} at state {int(data['outcome'])} "
            f"(loss {float(data['value']):.4g}; against the run with '{data['change'].item()}' at that step), by the "
            "size of the prediction, largest first:",
            f"{'step':>5}  {'predicted':>11}  {'measured':>11}  {'in θ':>10}  {'in m':>10}  {'in v':>10}",
        ]
        order = abs(self.total).argsort().values[::-1][:SHOWN]
        for i in order:
            row = data.isel(step=int(i))
            measured = float(row["measured"])
            shown = f"{measured:>+11.3g}" if measured == measured else f"{'':>11}"
            parts = "  ".join(f"{float(x):>+10.3g}" for x in row["contribution"].values)
            lines.append(f"{int(row['step']):>5}  {float(self.total.isel(step=int(i))):>+11.3g}  {shown}  {parts}")
        return "\n".join([*lines, str(self.certificate)])


def explain(path: Path, probe: Any, *, outcome: int | None, change: str, verify: int) -> Contributions:
    """See `Path.explain`."""
    import xarray as xr

    if change not in EDITS:
        raise InvalidInput(f"change is one of {', '.join(EDITS)}; got {change!r}")
    watch = path.watch(0, probe, outcome)
    path.require_linear(watch)
    time, trajectory = watch.last, path.trajectory
    place = plan_history(trajectory, 2 * time, path.memory)
    with progress("adjoint sweep", time) as tick:
        bent = BentReadout.of(watch)
        parts = contributions(trajectory, time, bent, lambda step: {change: EDITS[change]}, place, tick=tick)[change]
    found = parts.sum(-1)
    measured = _measured(path, watch, found.sum(1), change, verify)
    state = trajectory.state(time)
    data = xr.Dataset(
        {
            "contribution": (("step", "channel"), found.numpy()),
            "measured": ("step", measured.numpy()),
            "outcome": time,
            "value": float(watch.probe.value(trajectory, time, state.theta, state)),
            "change": change,
            "probe": watch.probe.name,
        },
        coords={"step": list(range(time)), "channel": list(CHANNELS)},
        attrs={**provenance(trajectory), "check": str(path.check())},
    )
    return Contributions(data)


def _measured(path: Path, watch: Watch, total: Tensor, change: str, verify: int) -> Float[Tensor, " step"]:
    """The outcome less that of an exact run with the change, at the steps with the largest predictions."""
    measured = torch.full_like(total, torch.nan)
    for step in total.abs().argsort(descending=True)[: max(verify, 0)].tolist():
        exact = Change(path, step, change, (EDITS[change],)).response(
            watch.probe, answers=("exact",), horizon=watch.last - step
        )
        measured[step] = -float(exact.exact.isel(change=0, scale=0, horizon=-1))
    return measured
