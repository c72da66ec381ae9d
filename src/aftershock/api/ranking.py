"""`rank`: one adjoint sweep, then any number of batches or examples, calibrated by the few that are rerun."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.batches import Batch, example_count, joined, merged_examples, take_examples
from ..core.changes import ControlStep, Edit, Perturb
from ..core.examples import EXAMPLES_AT_ONCE, example_scores, example_weight
from ..core.planning import plan_history, plan_pool
from ..core.probe import Watch
from ..core.responses import first_disagreement
from ..core.scores import (
    SAMPLE,
    PoolScores,
    adjoint,
    example_direction,
    mean_write,
    midpoint_slopes,
    pool_scores,
)
from ..errors import InvalidInput
from ..results.certificate import TRUST, Certificate, Finding
from ..results.fidelity import nrmse
from ..results.labelled import LabelledResult
from ..results.provenance import provenance
from ..results.summaries import summarize
from .change import GRAPH_COST, PRODUCT_COST, Change
from .progress import Estimate, progress
from .response import sparkline

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
VERIFY = 5  # exact reruns, unless told otherwise: they calibrate, and each is judged by the others
SUMMARIES = ("peak", "max_increase", "max_decrease", "total_abs", "total_increase", "total_decrease")
LAST = "response"  # the signed response at the last horizon, which needs one outcome only


class Ranking(LabelledResult):
    """Predicted responses of a pool of batches, strongest first, and exact reruns of the strongest.

    `data` has, by change and horizon: `predicted` by the adjoint, `measured` where the batch was rerun, and
    `response`, the prediction plus `offset`, by which reruns differed from their predictions in the mean. `score`
    sorts them.
    `held_out_error` is the median NRMSE of reruns, each predicted with the calibration of the others.
    `curve_error` is how far one batch's prediction is from exact kicks at all coordinates.

    >>> ranking = path.rank(batches, probe, verify=2)
    >>> ranking.by, ranking.order[:2], ranking.verified, ranking.certificate.level
    ('peak', ['batch 5', 'batch 1'], ['batch 5', 'batch 1'], 'ok')
    """

    kind = "ranking"
    wanted = ("response", "predicted", "measured", "score")

    @property
    def order(self) -> list[str]:
        """Labels, strongest first.

        >>> path.rank(batches, probe).order[:2]
        ['batch 5', 'batch 1']
        """
        return [str(name) for name in self.data["change"].values]

    @property
    def by(self) -> str:
        """What it is sorted by.

        >>> path.rank(batches, probe, by="total_abs").by
        'total_abs'
        """
        return str(self.data["by"].item())

    @property
    def verified(self) -> list[str]:
        """Labels of the changes that were rerun exactly.

        >>> path.rank(batches, probe, verify=1).verified
        ['batch 5']
        """
        known = self.data["measured"].notnull().all("horizon")
        return [str(name) for name in self.data["change"].values[known.values]]

    @property
    def certificate(self) -> Certificate:
        """How far the ranking may be trusted: each rerun is compared with what the other reruns predict."""
        return Certificate((*_findings(self), *_curve_findings(float(self.data["curve_error"]))))

    def __str__(self) -> str:
        predicted, measured = (_signed(self.data[name], self.by).values for name in ("response", "measured"))
        sign = "" if self.by == "total_abs" else "+"
        width = max(6, *(len(name) for name in self.order[:SHOWN]))
        lines = [
            f"{self.data.sizes['change']} changes at step {int(self.data['at'])} by predicted {self.by}, largest first "
            "(one adjoint sweep, kicks at stiff coordinates):",
            f"{'rank':>4}  {'change':<{width}}  {self.by:>14}  {'measured':>12}  predicted response by horizon",
        ]
        shown = [i for i, name in enumerate(self.order) if i < SHOWN or name in self.verified]
        for i in shown:
            row = self.data.isel(change=i)
            real = f"{measured[i]:>{sign}12.4g}" if self.order[i] in self.verified else f"{'':>12}"
            curve = sparkline(row["response"].values)
            lines.append(f"{i + 1:>4}  {self.order[i]:<{width}}  {predicted[i]:>{sign}14.4g}  {real}  {curve}")
        return "\n".join([*lines, str(self.certificate)])


def _findings(ranking: Ranking) -> list[Finding]:
    count, data = len(ranking.verified), ranking.data
    if not count:
        sentence = "Not verified: pass verify=k to rerun k of them exactly. Do not trust it blindly."
        return [Finding("care", "ranking", "reruns", 0.0, 1.0, sentence)]
    error = float(data["held_out_error"])
    calibrated = f"Calibrated with exact reruns of {', '.join(ranking.verified[:4])}{' …' if count > 4 else ''}"
    if math.isnan(error):
        why = "one rerun cannot judge itself" if count == 1 else "fewer than two of them stayed finite"
        sentence = f"{calibrated}: {why}, so the error on others is not known."
        return [Finding("care", "ranking", "reruns", float(count), 2.0, sentence)]
    level = TRUST.level(error)
    word = {"ok": "trust it", "care": "use it with care", "bad": "do not trust the sizes"}[level]
    sentence = (
        f"{calibrated}: {word}. Each rerun, predicted with the calibration of the others, is off by {error:.2g} "
        f"(NRMSE, median of {count}); without calibration by {float(data['raw_error']):.2g}. "
        "The measured column is the truth."
    )
    return [Finding(level, "ranking", "NRMSE of reruns held out", error, TRUST.nrmse, sentence)]


def _curve_findings(error: float) -> list[Finding]:
    sentence = f"Responses read off curves are off by {error:.2g} (NRMSE) from exact kicks on one batch."
    return [Finding("care", "ranking", "NRMSE of curves", error, TRUST.curves, sentence)] * (error > TRUST.curves)


def reruns(verify: object) -> int:
    """How many exact reruns are asked for."""
    try:
        count = operator.index(verify)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidInput(f"verify is the number of exact reruns, a whole number from 0 on; got {verify!r}")
    return count


def rank(
    path: Path,
    pool: Iterable[Batch],
    probe: Any,
    *,
    at: int,
    horizon: int | None,
    by: str,
    verify: int,
    labels: Sequence[str] | None,
    memory: str | int | None,
) -> Ranking:
    """See `Path.rank`."""
    import xarray as xr

    if by not in (*SUMMARIES, LAST):
        raise InvalidInput(f"by is one of {', '.join((*SUMMARIES, LAST))}; got {by!r}")
    few = reruns(verify)
    batches, watch = _prepared(path, pool, probe, at, horizon)
    names = [f"batch {i}" for i in range(len(batches))] if labels is None else [str(name) for name in labels]
    if len(names) != len(batches) or len(set(names)) != len(names):
        raise InvalidInput(f"{len(batches)} batches need as many different labels")
    horizons = [watch.horizons] if by == LAST else watch.range
    found = _predict(path, batches, watch, horizons, memory)
    coords = {"change": names, "horizon": horizons}
    predicted = xr.DataArray(found.response.numpy(), coords, ("change", "horizon"))
    top = _score(predicted, by).argsort().values[::-1][:few]
    measured = xr.full_like(predicted, torch.nan)
    if len(top):
        measured[top] = _measure(path, [batches[i] for i in top], watch, horizons, memory).numpy()
    data = _calibrated(predicted, measured, by, found, watch, path)
    if float(data["held_out_error"]) > TRUST.careful_nrmse:
        exact, guess = (torch.as_tensor(curves.values[top]) for curves in (measured, predicted))
        none = torch.zeros(len(horizons))
        h = first_disagreement(exact, guess, none, gross=TRUST.careful_nrmse, parted=TRUST.symmetric_error)
        path.check_before(watch.at, None if h is None else watch.at + horizons[h - 1])
    return Ranking(data)


def _predict(
    path: Path, batches: Sequence[Batch], watch: Watch, horizons: Sequence[int], memory: str | int | None
) -> PoolScores:
    limit = path.memory if memory is None else memory
    place = plan_history(path.trajectory, sum(horizons) + 2 * watch.horizons, limit)  # with m and v at every step
    control = path.control(watch.at)
    with progress(
        "adjoint sweep", watch.horizons, _estimate(path, len(horizons), watch.horizons, len(batches))
    ) as tick:
        slopes = midpoint_slopes(watch, mean_write(control, batches), horizons)
        swept = adjoint(watch, slopes.__getitem__, horizons, place, tick)
    with progress("ranking", len(batches)) as tick:
        size = plan_pool(path.trajectory, len(horizons), limit)
        return pool_scores(control, swept, path.trajectory, batches, size, tick)


def _measure(
    path: Path, batches: list[Batch], watch: Watch, horizons: Sequence[int], memory: str | int | None
) -> Float[Tensor, "change horizon"]:
    """Exact reruns, read at some horizons: the truth."""
    change, read = path.replace(batches, watch.at), replace(watch, only=tuple(horizons))
    return change.numbers(read, memory=memory)[:, [h - 1 for h in horizons]]


def _calibrated(
    predicted: xr.DataArray, measured: xr.DataArray, by: str, found: PoolScores, watch: Watch, path: Path
) -> xr.Dataset:
    """Predictions with the mean residual of the reruns added, sorted, and how good that is on each rerun left out.

    eq:calibration.
    """
    import xarray as xr

    residual = (measured - predicted).where(abs(measured) < torch.inf)
    offset = residual.mean("change").fillna(0.0)
    response = predicted + offset
    known = residual.dropna("change", how="all")
    count, seen = known.sizes["change"], known.notnull()
    others = (known.sum("change") - known.fillna(0.0)) / (seen.sum("change") - seen).clip(min=1)
    truth, plain = measured.sel(change=known["change"]), predicted.sel(change=known["change"])
    held_out = nrmse(truth, plain + others).median() if count > 1 else torch.nan
    data = xr.Dataset(
        {
            "response": response,
            "predicted": predicted,
            "measured": measured,
            "offset": offset,
            "score": _score(response, by),
            "xi_norm": ("change", found.xi_norm.numpy()),
            "held_out_error": float(held_out),
            "raw_error": float(nrmse(truth, plain).median()) if count else torch.nan,
            "stiff_share": found.stiff,
            "curve_error": found.curve_error,
            "by": by,
            "at": watch.at,
            "probe": watch.probe.name,
        },
        attrs={**provenance(path.trajectory), "check": str(path.check())},
    )
    return data.isel(change=data["score"].argsort().values[::-1])


def _score(response: xr.DataArray, by: str) -> xr.DataArray:
    return response.isel(horizon=-1, drop=True) if by == LAST else summarize(response)[by]


def _signed(response: xr.DataArray, by: str) -> xr.DataArray:
    """The score as it is shown: positive means that the loss goes up."""
    score = _score(response, by)
    if by == "peak":
        return summarize(response)["peak_sign"] * score
    return -score if by.endswith("decrease") else score


def _prepared(path: Path, pool: Iterable[Batch], probe: Any, at: int, horizon: int | None) -> tuple[list[Batch], Watch]:
    batches = list(pool)
    if not batches:
        raise InvalidInput("the pool is empty: ranking needs at least one batch")
    watch = path.watch(at, probe, horizon)
    path.require_linear(watch)
    return batches, watch


def _estimate(path: Path, outcomes: int, steps: int, batches: int) -> Estimate:
    products = outcomes * (steps + 1) / 2 + steps
    gradients = outcomes + 2 * GRAPH_COST * steps + PRODUCT_COST * products + batches
    layout = path.point.loss.layout
    vector = layout.padded_size * layout.dtype.itemsize
    return Estimate(gradients, gradients * path.trajectory.seconds_per_step, vector * (5 * outcomes + 64), 1)


# --- examples


class ExampleRanking(LabelledResult):
    """Every example's share of its batch's predicted response at one outcome, strongest first.

    `data` has by example: `share` (calibrated by a common factor), `predicted`, `measured` where the example's part of
    the gradient was added in an exact rerun, and where the example stands: `batch`, `index`.

    >>> ranking = path.rank_examples(batches, probe, verify=2)
    >>> int(ranking.data["batch"][0]), ranking.certificate.findings[0].subject
    (5, 'examples')
    """

    kind = "example ranking"
    wanted = ("share", "predicted", "measured", "batch", "index")

    @property
    def certificate(self) -> Certificate:
        """How far the shares may be trusted: each rerun is compared with what the other reruns predict."""
        known = self.data.where(self.data["measured"].notnull(), drop=True)
        count = known.sizes["example"]
        if not count:
            sentence = "Not verified: pass verify=k to add the top k examples' gradients in exact reruns."
            return Certificate((Finding("care", "examples", "reruns", 0.0, 1.0, sentence),))
        error = float(self.data["held_out_error"])
        if count == 1:
            sentence = "Calibrated with one exact rerun, which cannot judge itself."
            return Certificate((Finding("care", "examples", "reruns", 1.0, 2.0, sentence),))
        level = TRUST.level(error)
        sentence = (
            f"Calibrated with {count} exact reruns; each, predicted with the calibration of the others, is off by "
            f"{error:.0%} (median). The measured column is the truth."
        )
        return Certificate((Finding(level, "examples", "error of reruns held out", error, TRUST.nrmse, sentence),))

    def __str__(self) -> str:
        lines = [
            f"{self.data.sizes['example']} examples ordered by the size of their share of the response at horizon "
            f"{int(self.data['horizon'])} (one forward-mode pass), largest first:",
            f"{'rank':>4}  {'batch':>6}  {'example':>8}  {'share':>12}  {'measured':>12}",
        ]
        known = self.data["measured"].notnull().values
        for i in [i for i, rerun in enumerate(known) if i < SHOWN or rerun]:
            row = self.data.isel(example=i)
            measured = float(row["measured"])
            real = f"{measured:>+12.4g}" if measured == measured else ""
            lines.append(
                f"{i + 1:>4}  {int(row['batch']):>6}  {int(row['index']):>8}  {float(row['share']):>+12.4g}  {real}"
            )
        return "\n".join([*lines, str(self.certificate)])


def rank_examples(
    path: Path, pool: Iterable[Batch], probe: Any, *, at: int, horizon: int | None, verify: int
) -> ExampleRanking:
    """See `Path.rank_examples`."""
    few = reruns(verify)
    batches, watch = _prepared(path, pool, probe, at, horizon)
    outcome, control = [watch.horizons], path.control(watch.at)
    weight = example_weight(control, batches[0])
    sample = batches[:: max(1, len(batches) // SAMPLE)][:SAMPLE]
    slopes = midpoint_slopes(watch, mean_write(control, sample), outcome)
    place = plan_history(path.trajectory, watch.horizons, path.memory)
    swept = adjoint(watch, slopes.__getitem__, outcome, place)
    direction = example_direction(control, swept, path.trajectory, sample)
    shares: list[Tensor] = []
    with progress("ranking examples", len(batches)) as tick:
        for group in merged_examples(batches, EXAMPLES_AT_ONCE):
            slope = example_scores(control, direction, joined(group), f"batch {len(shares)} of the pool and on")
            for part in slope.double().cpu().split([example_count(batch) for batch in group]):
                shares.append(part * (weight or 1 / len(part)))
                tick()
    share = torch.cat(shares)
    order = share.abs().argsort(descending=True, stable=True)
    batch_of = torch.cat([torch.full((len(s),), i) for i, s in enumerate(shares)])[order]
    index_of = torch.cat([torch.arange(len(s)) for s in shares])[order]
    measured = torch.full_like(share, torch.nan)
    chosen = [(int(batch_of[k]), int(index_of[k])) for k in range(min(few, len(share)))]
    measured[: len(chosen)] = _measure_examples(path, control, batches, watch, chosen, weight)
    return ExampleRanking(_examples(path, watch, share[order], measured, batch_of, index_of))


def _examples(
    path: Path, watch: Watch, share: Tensor, measured: Tensor, batch_of: Tensor, index_of: Tensor
) -> xr.Dataset:
    """Shares are small, so that what curvature adds is common to them as a factor: the reruns' median one."""
    import xarray as xr

    known = measured.isfinite()
    factor, held = common_factor(share[known], measured[known])
    errors = (held - measured[known]).abs() / measured[known].abs().clamp(min=1e-300)
    return xr.Dataset(
        {
            "share": ("example", (factor * share).numpy()),
            "predicted": ("example", share.numpy()),
            "measured": ("example", measured.numpy()),
            "batch": ("example", batch_of.numpy()),
            "index": ("example", index_of.numpy()),
            "held_out_error": float(errors.quantile(0.5)) if len(errors) > 1 else torch.nan,
            "at": watch.at,
            "horizon": watch.horizons,
            "probe": watch.probe.name,
        },
        attrs={**provenance(path.trajectory), "check": str(path.check())},
    )


def common_factor(
    predicted: Float[Tensor, " rerun"], measured: Float[Tensor, " rerun"]
) -> tuple[float, Float[Tensor, " rerun"]]:
    """The factor that brings predictions to what reruns measured, and each prediction times the others' factor.

    It is the median ratio; one that would turn signs around calibrates nothing, and is 1.
    """

    def factor(known: Tensor) -> float:
        ratios = (measured / predicted)[known & (predicted != 0)]
        middle = float(ratios.quantile(0.5)) if len(ratios) else 1.0
        return middle if middle > 0 else 1.0

    each = torch.eye(len(predicted), dtype=torch.bool)
    held = torch.tensor([factor(~own) for own in each], dtype=torch.float64) * predicted
    return factor(torch.ones_like(predicted, dtype=torch.bool)), held


def _measure_examples(
    path: Path,
    control: ControlStep,
    batches: Sequence[Batch],
    watch: Watch,
    chosen: Sequence[tuple[int, int]],
    weight: float | None,
) -> Float[Tensor, " example"]:
    """The exact response to adding each chosen example's share of its batch's gradient to the control's."""
    if not chosen:
        return torch.zeros(0, dtype=torch.float64)
    loss, edits = path.point.loss, list[Edit]()
    for b, i in chosen:
        one = take_examples(batches[b], slice(i, i + 1))
        state, step = control.before, control.step
        found = loss.gradient(state.theta, state.buffers, one, step.random, f"example {i} of batch {b}")
        edits.append(Perturb(loss.layout.join(found.grads) * (weight or 1 / example_count(batches[b]))))
    last = replace(watch, only=(watch.horizons,))
    return Change(path, watch.at, "example", tuple(edits)).numbers(last)[:, -1]
