"""`rank` and `explain`: one adjoint sweep, any number of batches, examples or past steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..analysis.certificate import nrmse, sign_agreement
from ..analysis.summaries import summarize
from ..core.changes import ControlStep, Edit, Perturb, Reset, Skip, Zero
from ..core.loss import Batch, example_count, take_examples
from ..core.memory import budget
from ..core.operators import WriteIn
from ..core.probe import Probe
from ..core.scores import batch_scores, contributions, example_scores, example_weight, horizon_adjoints
from ..core.state import CHANNELS
from ..errors import HiddenState, InvalidInput
from .change import Change
from .probing import Readouts
from .progress import progress
from .response import Response, provenance, sparkline

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
CHUNK = 16  # gradients held at once: their product with the adjoints then reads those once per chunk
SUMMARIES = ("peak", "max_increase", "max_decrease", "total_abs", "total_increase", "total_decrease")
EDITS: dict[str, Edit] = {"zero": Zero(), "skip": Skip(), "reset m": Reset(("m",)), "reset v": Reset(("v",))}


@dataclass(frozen=True)
class Ranking:
    """Predicted responses, strongest first. `data` is labelled; `verified` holds exact reruns of the top."""

    data: xr.Dataset
    by: str
    verified: Response | None = None

    @property
    def order(self) -> list[str]:
        """Labels, strongest first."""
        return [str(name) for name in self.data["change"].values]

    def __str__(self) -> str:
        predicted = self.data["response"].isel(method=-1)
        width = max(6, *(len(name) for name in self.order[:SHOWN]))
        lines = [
            f"{self.data.sizes['change']} changes at step {self.data.attrs['at']} ranked by {self.by} "
            f"({self.data['method'].values[-1]}, one adjoint sweep), strongest first:",
            f"{'rank':>4}  {'change':<{width}}  {self.by:>12}  {'measured':>12}  predicted response by horizon",
        ]
        measured = self._measured()
        for i, name in enumerate(self.order[:SHOWN]):
            score = float(self.data["score"].isel(change=i))
            real = f"{measured[name]:>12.4g}" if name in measured else f"{'':>12}"
            curve = sparkline(predicted.isel(change=i).values)
            lines.append(f"{i + 1:>4}  {name:<{width}}  {score:>12.4g}  {real}  {curve}")
        return "\n".join([*lines, self._proof()])

    def _measured(self) -> dict[str, float]:
        if self.verified is None:
            return {}
        values = self.verified.summary[self.by].sel({"method": "exact", "scale": 1.0})
        return {str(name): float(values.sel(change=name)) for name in values["change"].values}

    def _proof(self) -> str:
        """How the prediction compares with the exact reruns."""
        if self.verified is None:
            return "Not verified: pass verify=k to rerun the top k exactly. Do not trust it blindly."
        exact = self.verified.exact.sel(scale=1.0, drop=True)
        predicted = self.data["response"].isel(method=-1).sel(change=exact["change"], horizon=exact["horizon"])
        error = nrmse(exact, predicted)
        signs = sign_agreement(exact, predicted, self.verified.data["noise_floor"])
        word = "trust the order" if float(error.median()) <= 0.5 else "do not trust the sizes"
        return (
            f"Verified by rerunning the top {exact.sizes['change']}: {word}. The median error (NRMSE) is "
            f"{float(error.median()):.2g} and signs agree at {float(signs.median()):.0%} of horizons."
        )


@dataclass(frozen=True)
class ExampleRanking:
    """Every example's share of its batch's predicted response at one outcome, strongest first."""

    data: xr.Dataset
    verified: dict[int, float]

    def __str__(self) -> str:
        horizon = self.data.attrs["horizon"]
        lines = [
            f"{self.data.sizes['example']} examples ranked by their share of the response at horizon {horizon} "
            f"(tangent, one forward-mode pass), strongest first:",
            f"{'rank':>4}  {'batch':>6}  {'example':>8}  {'share':>12}  {'measured':>12}",
        ]
        for i in range(min(SHOWN, self.data.sizes["example"])):
            row = self.data.isel(example=i)
            real = f"{self.verified[i]:>12.4g}" if i in self.verified else ""
            lines.append(
                f"{i + 1:>4}  {int(row['batch']):>6}  {int(row['index']):>8}  {float(row['share']):>12.4g}  {real}"
            )
        if not self.verified:
            lines.append("Not verified: pass verify=k to add the top k examples' gradients in exact reruns.")
        return "\n".join(lines)


def rank(
    path: Path,
    pool: Iterable[Batch],
    probe: Any,
    *,
    at: int = 0,
    horizon: int | None = None,
    by: str = "peak",
    examples: bool = False,
    verify: int = 0,
    exact_write: bool = False,
    labels: Sequence[str] | None = None,
    memory: str | int | None = None,
) -> Ranking | ExampleRanking:
    """Score batches, or single examples, in the place of step `at`'s batch by one adjoint sweep.

    by: the summary to sort by (peak, max_increase, max_decrease, total_abs, total_increase, total_decrease).
    examples: score every example of the pool at one outcome (`horizon`, default the last) instead.
    verify: rerun the top k exactly.
    exact_write: also pair the adjoint with each batch's exact one-step difference, and sort by that.
    """
    at = path.index(at)
    batches = list(pool)
    if not batches:
        raise InvalidInput("the pool is empty: rank() needs at least one batch")
    if by not in SUMMARIES:
        raise InvalidInput(f"by is one of {', '.join(SUMMARIES)}; got {by!r}")
    readouts = Readouts(path, Probe.of(probe), at, horizon)
    _require_linear(path, readouts)
    if examples:
        return _rank_examples(path, batches, readouts, verify)
    names = [f"batch {i}" for i in range(len(batches))] if labels is None else [str(name) for name in labels]
    if len(names) != len(batches) or len(set(names)) != len(names):
        raise InvalidInput(f"{len(batches)} batches need as many different labels")
    data = _score(path, batches, readouts, names, exact_write, memory)
    data["score"] = summarize(data["response"].isel(method=-1))[by]
    data = data.isel(change=data["score"].argsort().values[::-1])
    verified = None
    if verify:
        top = [str(name) for name in data["change"].values[:verify]]
        change = path.replace([batches[names.index(name)] for name in top], at)
        verified = change.response(
            readouts.probe, methods=("exact",), horizon=len(readouts.horizons), labels=top, memory=memory
        )
    return Ranking(data, by, verified)


def _require_linear(path: Path, readouts: Readouts) -> None:
    hidden = path.check().hidden or readouts.hidden()
    if hidden:
        raise HiddenState(
            f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), which "
            "are state outside (θ, m, v), so an adjoint would be wrong; probe in training mode, or use "
            "change.response(..., methods=('exact',))"
        )


def _rows_at_once(path: Path, memory: str | int | None) -> int:
    layout = path.point.loss.layout
    available = budget(path.memory if memory is None else memory, layout.device)
    return max(1, available // (2 * 5 * layout.padded_size * layout.dtype.itemsize))


def _score(
    path: Path,
    batches: Sequence[Batch],
    readouts: Readouts,
    names: Sequence[str],
    exact_write: bool,
    memory: str | int | None,
) -> xr.Dataset:
    import xarray as xr

    horizons = readouts.horizons
    control = path.control(readouts.at)
    rows = _rows_at_once(path, memory)
    with progress("adjoint sweep", len(horizons) * -(-len(horizons) // rows)) as tick:
        adjoints = horizon_adjoints(path.trajectory, readouts.at, horizons, readouts.gradient, rows, tick)
    gradients = WriteIn(control.linear).rmv(adjoints)
    with progress("ranking", len(batches)) as tick:
        chunks = list(
            batch_scores(
                control, adjoints, gradients, batches, min(CHUNK, rows), exact_write=exact_write, tick=tick
            )
        )
    found = {"tangent": torch.cat([tangent for tangent, _, _ in chunks])}
    if exact_write:
        found["write"] = torch.cat([written for _, written, _ in chunks if written is not None])
    values = torch.stack(list(found.values())).double().cpu()
    return xr.Dataset(
        {
            "response": (("method", "change", "horizon"), values.numpy()),
            "xi_norm": ("change", torch.cat([norm for _, _, norm in chunks]).double().cpu().numpy()),
        },
        coords={"method": list(found), "change": list(names), "horizon": horizons},
        attrs={**provenance(path), "at": readouts.at, "probe": readouts.probe.name},
    )


def _rank_examples(path: Path, batches: Sequence[Batch], readouts: Readouts, verify: int) -> ExampleRanking:
    import xarray as xr

    horizon = readouts.horizons[-1]
    control = path.control(readouts.at)
    adjoint = horizon_adjoints(path.trajectory, readouts.at, [horizon], readouts.gradient, 1)
    direction = WriteIn(control.linear).rmv(adjoint)[0]
    weight = example_weight(control, batches[0])
    shares: list[Tensor] = []
    with progress("ranking examples", len(batches)) as tick:
        for i, batch in enumerate(batches):
            slopes = example_scores(control, direction, batch, f"batch {i} of the pool")
            shares.append(slopes.double().cpu() * (weight or 1 / example_count(batch)))
            tick()
    share = torch.cat(shares)
    order = share.abs().argsort(descending=True, stable=True)
    batch_of = torch.cat([torch.full((len(s),), i) for i, s in enumerate(shares)])[order]
    index_of = torch.cat([torch.arange(len(s)) for s in shares])[order]
    data = xr.Dataset(
        {
            "share": ("example", share[order].numpy()),
            "batch": ("example", batch_of.numpy()),
            "index": ("example", index_of.numpy()),
        },
        attrs={**provenance(path), "at": readouts.at, "horizon": horizon, "probe": readouts.probe.name},
    )
    chosen = [(int(batch_of[k]), int(index_of[k])) for k in range(min(verify, len(share)))]
    measured = _verify_examples(path, control, batches, readouts, chosen, weight)
    return ExampleRanking(data, measured)


def _verify_examples(
    path: Path,
    control: ControlStep,
    batches: Sequence[Batch],
    readouts: Readouts,
    chosen: Sequence[tuple[int, int]],
    weight: float | None,
) -> dict[int, float]:
    """The exact response to adding each chosen example's share of its batch's gradient to the control's."""
    if not chosen:
        return {}
    edits: list[Edit] = []
    for b, i in chosen:
        one = take_examples(batches[b], slice(i, i + 1))
        state, step = control.before, control.step
        found = path.point.loss.gradient(state.theta, state.buffers, one, step.random, f"example {i} of batch {b}")
        edits.append(Perturb(path.point.loss.layout.join(found.grads) * (weight or 1 / example_count(batches[b]))))
    response = Change(path, readouts.at, "example", tuple(edits)).response(
        readouts.probe, methods=("exact",), horizon=readouts.horizons[-1]
    )
    last = response.exact.isel(horizon=-1, scale=0)
    return {k: float(last.isel(change=k)) for k in range(len(chosen))}


# --- explaining an outcome ------------------------------------------------------------------------


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


def explain(
    path: Path, probe: Any, *, at: int | None = None, change: str = "zero", verify: int = 0
) -> Explanation:
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
    _require_linear(path, readouts)
    with progress("adjoint sweep", time) as tick:
        parts = contributions(path.trajectory, time, readouts.gradient(time), lambda step: EDITS[change], tick)
    measured = torch.full((time,), torch.nan, dtype=torch.float64)
    for step in parts.sum(1).abs().argsort(descending=True)[:verify].tolist():
        exact = Change(path, step, change, (EDITS[change],)).response(
            found, methods=("exact",), horizon=time - step
        )
        measured[step] = -float(exact.exact.isel(change=0, scale=0, horizon=-1))
    state = path.trajectory.state(time)
    data = xr.Dataset(
        {"contribution": (("step", "channel"), parts.numpy()), "measured": ("step", measured.numpy())},
        coords={"step": list(range(time)), "channel": list(CHANNELS)},
        attrs={
            **provenance(path),
            "outcome": time,
            "value": float(found.value(path.trajectory, time, state.theta, state)),
            "change": change,
            "probe": found.name,
        },
    )
    return Explanation(data)
