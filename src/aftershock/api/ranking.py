"""`rank`: one adjoint sweep, then any number of batches or examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.batches import Batch, example_count, take_examples
from ..core.changes import ControlStep, Edit, Perturb
from ..core.memory import budget
from ..core.operators import WriteIn
from ..core.probe import Probe
from ..core.scores import batch_scores, example_scores, example_weight, horizon_adjoints
from ..errors import InvalidInput
from ..results.certificate import TRUST, nrmse, sign_agreement
from ..results.provenance import provenance
from ..results.summaries import summarize
from .change import GRAPH_COST, PRODUCT_COST, Change
from .probing import Readouts, require_linear
from .progress import Estimate, progress
from .response import Response, sparkline

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
CHUNK = 32  # gradients held at once: their product with the adjoints then reads those once per chunk
SUMMARIES = ("peak", "max_increase", "max_decrease", "total_abs", "total_increase", "total_decrease")


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
        predicted = self.data["response"].isel(answer=-1)
        width = max(6, *(len(name) for name in self.order[:SHOWN]))
        lines = [
            f"{self.data.sizes['change']} changes at step {self.data.attrs['at']} ranked by {self.by} "
            f"({self.data['answer'].values[-1]}, one adjoint sweep), strongest first:",
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
        values = self.verified.summary[self.by].sel({"answer": "exact", "scale": 1.0})
        return {str(name): float(values.sel(change=name)) for name in values["change"].values}

    def _proof(self) -> str:
        """How the prediction compares with the exact reruns: its order first, then its sizes."""
        if self.verified is None:
            return "Not verified: pass verify=k to rerun the top k exactly. Do not trust it blindly."
        exact = self.verified.exact.sel(scale=1.0, drop=True)
        predicted = self.data["response"].isel(answer=-1).sel(change=exact["change"], horizon=exact["horizon"])
        error = nrmse(exact, predicted)
        signs = sign_agreement(exact, predicted, self.verified.data["noise_floor"])
        measured = list(self._measured().values())
        word = "trust the sizes" if float(error.max()) <= TRUST.nrmse else "do not trust the sizes"
        if measured != sorted(measured, reverse=True):
            word = "their measured order is another one: do not trust the order"
        return (
            f"Verified by rerunning the top {exact.sizes['change']}: {word}. The error (NRMSE) is "
            f"{float(error.median()):.2g} (worst {float(error.max()):.2g}), and signs agree at "
            f"{float(signs.median()):.0%} of horizons. The measured column is the truth."
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
    at: int,
    horizon: int | None,
    by: str,
    verify: int,
    exact_write: bool,
    labels: Sequence[str] | None,
    memory: str | int | None,
) -> Ranking:
    """See `Path.rank`."""
    if by not in SUMMARIES:
        raise InvalidInput(f"by is one of {', '.join(SUMMARIES)}; got {by!r}")
    batches, readouts = _prepared(path, pool, probe, at, horizon)
    names = [f"batch {i}" for i in range(len(batches))] if labels is None else [str(name) for name in labels]
    if len(names) != len(batches) or len(set(names)) != len(names):
        raise InvalidInput(f"{len(batches)} batches need as many different labels")
    data = _score(path, batches, readouts, names, exact_write, memory)
    data["score"] = summarize(data["response"].isel(answer=-1))[by]
    data = data.isel(change=data["score"].argsort().values[::-1])
    verified = None
    if verify:
        top = [str(name) for name in data["change"].values[:verify]]
        change = path.replace([batches[names.index(name)] for name in top], readouts.at)
        verified = change.response(
            readouts.probe, answers=("exact",), horizon=len(readouts.horizons), labels=top, memory=memory
        )
    return Ranking(data, by, verified)


def _prepared(
    path: Path, pool: Iterable[Batch], probe: Any, at: int, horizon: int | None
) -> tuple[list[Batch], Readouts]:
    batches = list(pool)
    if not batches:
        raise InvalidInput("the pool is empty: ranking needs at least one batch")
    readouts = Readouts(path, Probe.of(probe), path.index(at), horizon)
    require_linear(path, readouts)
    return batches, readouts


def _rows_at_once(path: Path, memory: str | int | None) -> int:
    layout = path.point.loss.layout
    available = budget(path.memory if memory is None else memory, layout.device)
    return max(1, available // (2 * 5 * layout.padded_size * layout.dtype.itemsize))


def _estimate(path: Path, horizons: int, batches: int, rows: int, sweeps: int) -> Estimate:
    layout = path.point.loss.layout
    gradients = horizons * (1 + GRAPH_COST * sweeps + PRODUCT_COST * (horizons + 1) / 2) + batches
    vector = layout.padded_size * layout.dtype.itemsize
    return Estimate(gradients, gradients * path.trajectory.seconds_per_step, vector * (5 * rows + 2 * CHUNK), sweeps)


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
    sweeps = -(-len(horizons) // rows)
    estimate = _estimate(path, len(horizons), len(batches), min(rows, len(horizons)), sweeps)
    with progress("adjoint sweep", len(horizons) * sweeps, estimate) as tick:
        adjoints = horizon_adjoints(path.trajectory, readouts.at, horizons, readouts.gradient, rows, tick)
    gradients = WriteIn(control.linear).rmv(adjoints)
    with progress("ranking", len(batches)) as tick:
        chunks = list(
            batch_scores(control, adjoints, gradients, batches, min(CHUNK, rows), exact_write=exact_write, tick=tick)
        )
    found = {"tangent": torch.cat([tangent for tangent, _, _ in chunks])}
    if exact_write:
        found["write"] = torch.cat([written for _, written, _ in chunks if written is not None])
    values = torch.stack(list(found.values())).double().cpu()
    return xr.Dataset(
        {
            "response": (("answer", "change", "horizon"), values.numpy()),
            "xi_norm": ("change", torch.cat([norm for _, _, norm in chunks]).double().cpu().numpy()),
        },
        coords={"answer": list(found), "change": list(names), "horizon": horizons},
        attrs={
            **provenance(path.trajectory),
            "check": str(path.check()),
            "at": readouts.at,
            "probe": readouts.probe.name,
        },
    )


def rank_examples(
    path: Path, pool: Iterable[Batch], probe: Any, *, at: int, horizon: int | None, verify: int
) -> ExampleRanking:
    """See `Path.rank_examples`."""
    import xarray as xr

    batches, readouts = _prepared(path, pool, probe, at, horizon)
    outcome = readouts.horizons[-1]
    control = path.control(readouts.at)
    adjoint = horizon_adjoints(path.trajectory, readouts.at, [outcome], readouts.gradient, 1)
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
        attrs={
            **provenance(path.trajectory),
            "check": str(path.check()),
            "at": readouts.at,
            "horizon": outcome,
            "probe": readouts.probe.name,
        },
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
        readouts.probe, answers=("exact",), horizon=readouts.horizons[-1]
    )
    last = response.exact.isel(horizon=-1, scale=0)
    return {k: float(last.isel(change=k)) for k in range(len(chosen))}
