"""`rank`: one adjoint sweep, then any number of batches, calibrated by the few that are rerun."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.batches import Batch
from ..core.changes import ControlStep, Replace, names_of
from ..core.memory import in_smaller_pieces
from ..core.probe import Watch
from ..core.responses import first_disagreement
from ..core.scores import Adjoint, PoolScores, adjoint, mean_write, midpoint_slopes, pool_scores
from ..core.sweep_plans import SweepPlan, plan_ranking, widen, with_reruns
from ..errors import InvalidInput
from ..results.calibration import held_out, shared_offset
from ..results.certificate import TRUST, Certificate, Finding, masks, slopes
from ..results.fidelity import nrmse, sign_agreement
from ..results.labelled import LabelledResult
from ..results.provenance import provenance
from ..results.summaries import summarize
from .change import FORWARD_COST, GRAPH_COST, PRODUCT_COST
from .progress import Estimate, progress
from .reruns import judging_in_words, odd_one, odd_ones, reruns, to_rerun
from .response import sparkline

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
SUMMARIES = ("peak", "max_increase", "max_decrease", "total_abs", "total_increase", "total_decrease")
BATCHES = "batches of the pool"
LAST = "response"  # the signed response at the last horizon, which needs one outcome only


class Ranking(LabelledResult):
    """Predicted responses of a pool of batches, strongest first, and exact reruns of some: of the strongest, and of
    others spread over the ranking, or of those that were named.

    `data` has, by change and horizon: `predicted` by the adjoint, `measured` where the batch was rerun, and
    `response`, the prediction plus `offset`, by which reruns differ from their predictions in the mean, as far as that
    helps to predict each of them from the others (`offset_share` of it). The control's own batch is no change: its
    prediction and its response are 0. `score` sorts them: that of `measured` where there is one, else of `response`.
    `held_out_error` is the median NRMSE of the reruns that judge (`judging`), which are those spread over the ranking,
    or all where the user named them (`named`): each predicted with the calibration of all others. `odd` is the one that
    was rerun because its gradient is several times the usual one; it calibrates none of the others. One without any
    response, as of the control's own batch, has none. `held_out_sign` is the share of horizons at which their signs are
    right.
    `curve_error` is how far one batch's prediction is from exact kicks at all coordinates.

    >>> ranking = path.rank(batches, probe, verify=2)
    >>> ranking.by, ranking.order[:2], ranking.verified, ranking.certificate.level
    ('peak', ['batch 5', 'batch 1'], ['batch 5', 'batch 3'], 'ok')
    """

    kind = "ranking"
    wanted = ("response", "predicted", "measured", "score", "judging", "odd", "named")

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
        """How far the ranking may be trusted: reruns spread over it are compared with what the others predict."""
        curves = _curve_findings(float(self.data["curve_error"]))
        return Certificate((*_findings(self), *_strongest(self.data), *curves, *masks(self.data), *slopes(self.data)))

    def __str__(self) -> str:
        predicted, measured = (_signed(self.data[name], self.by).values for name in ("response", "measured"))
        sign = "" if self.by == "total_abs" else "+"
        width = max(6, *(len(name) for name in self.order[:SHOWN]))
        lines = [
            f"{self.data.sizes['change']} changes at step {int(self.data['at'])} by {self.by}, largest first: as "
            "measured where they were rerun, else as predicted (one adjoint sweep, kicks at stiff coordinates):",
            f"{'rank':>4}  {'change':<{width}}  {'predicted':>14}  {'measured':>12}  predicted response by horizon",
        ]
        shown = [i for i, name in enumerate(self.order) if i < SHOWN or name in self.verified]
        for i in shown:
            row = self.data.isel(change=i)
            # 0.0 + takes the sign of a zero away
            real = f"{0.0 + measured[i]:>{sign}12.4g}" if self.order[i] in self.verified else f"{'':>12}"
            curve = sparkline(row["response"].values)
            lines.append(f"{i + 1:>4}  {self.order[i]:<{width}}  {0.0 + predicted[i]:>{sign}14.4g}  {real}  {curve}")
        return "\n".join([*lines, str(self.certificate)])


def _findings(ranking: Ranking) -> list[Finding]:
    data = ranking.data
    odd = [str(name) for name in data["change"].values[data["odd"].values]]
    verified = [name for name in ranking.verified if name not in odd]
    count = len(verified)
    if not count:
        sentence = "Not verified: pass verify=k to rerun k of them exactly. Do not trust it blindly."
        return [Finding("care", "ranking", "reruns", 0.0, 1.0, sentence)]
    error = float(data["held_out_error"])
    share, names = float(data["offset_share"]), f"{', '.join(verified[:4])}{' …' if count > 4 else ''}"
    calibrated = f"Calibrated with exact reruns of {names}" + f", {share:.0%} of their mean residual" * (share < 1)
    if share == 0:
        calibrated = f"Not calibrated, since the residuals of exact reruns of {names} have nothing in common"
    if math.isnan(error):
        finite = (abs(data["measured"]) < math.inf).any("horizon") & ~data["odd"]
        why = "none but the strongest stayed finite"
        if count == 1:
            why = "one rerun cannot judge itself"
        elif int(finite.sum()) < 2:
            why = "fewer than two of them stayed finite"
        elif bool((finite & data["judging"]).any()):
            why = f"those {judging_in_words(data)[0]} change nothing at all, so that there is no error relative to them"
        sentence = f"{calibrated}: {why}, so the error on others is not known."
        return [Finding("care", "ranking", "reruns", float(count), 2.0, sentence)]
    level = TRUST.level(error)
    signs = float(data["held_out_sign"])
    bad = "do not trust the sizes" if signs >= TRUST.careful_signs else "trust neither sizes nor signs"
    word = {"ok": "trust it", "care": "use it with care", "bad": bad}[level]
    which, left = judging_in_words(data)
    held, plain = "", ""
    if share:  # else nothing is added to them either
        held = ", each predicted with the calibration of the others,"
        plain = f"; without calibration by {float(data['raw_error']):.2g}"
    beside = "".join(f" {name} was rerun for its odd gradient, and calibrates nobody." for name in odd)
    sentence = (
        f"{calibrated}: {word}. Reruns {which}{held} are off by {error:.2g} (NRMSE, median of "
        f"{int(_judges(data).sum())}){plain}. Their signs are right at {signs:.0%} of horizons. The measured column is "
        f"the truth.{left}{beside}"
    )
    return [Finding(level, "ranking", "NRMSE of reruns held out", error, TRUST.nrmse, sentence)]


def _judges(data: xr.Dataset) -> xr.DataArray:
    """Which reruns tell how far predictions are off: finite somewhere, and not nothing, as the control's own batch."""
    measured = data["measured"]
    judges: xr.DataArray = data["judging"] & ((abs(measured) < math.inf) & (measured != 0)).any("horizon")
    return judges


def _strongest(data: xr.Dataset) -> list[Finding]:
    """Those of the strongest, and the one with an odd gradient, that their own reruns refute, in a ranking that is
    usable otherwise."""
    top = data.isel(change=(~data["judging"] & (abs(data["measured"]) < math.inf).any("horizon")).values)
    error = nrmse(top["measured"], top["response"])
    wrong = [
        f"{name} ({value:.2g})"
        for name, value in zip(top["change"].values, error.values)
        if value > TRUST.careful_nrmse
    ]
    if not wrong or not float(data["held_out_error"]) <= TRUST.careful_nrmse:
        return []
    sentence = (
        f"Predictions of the strongest are wrong (NRMSE): {', '.join(wrong)}. A batch unlike the others may be "
        f"predicted far worse than they are; rerun more of them (verify=){_unlike(data)}."
    )
    return [Finding("care", "strongest", "NRMSE of the strongest", float(error.max()), TRUST.careful_nrmse, sentence)]


def _unlike(data: xr.Dataset) -> str:
    """Who else has an odd gradient."""
    names = data["change"].values[odd_ones(torch.as_tensor(data["xi_norm"].values)).numpy()].tolist()
    return f", first those with several times the usual gradient: {', '.join(names[:4])}" if len(names) > 1 else ""


def _curve_findings(error: float) -> list[Finding]:
    sentence = f"Responses read off curves are off by {error:.2g} (NRMSE) from exact kicks on one batch."
    return [Finding("care", "ranking", "NRMSE of curves", error, TRUST.curves, sentence)] * (error > TRUST.curves)


def rank(
    path: Path,
    pool: Iterable[Batch],
    probe: Any,
    *,
    at: int,
    horizon: int | None,
    by: str,
    verify: int | Sequence[int],
    labels: Sequence[str] | None,
    memory: str | int | None,
) -> Ranking:
    """See `Path.rank`."""
    import xarray as xr

    batches, watch = prepared(path, pool, probe, at, horizon)
    few, named = reruns(verify, BATCHES, range(len(batches)))
    given = [f"batch {i}" for i in range(len(batches))] if labels is None else labels
    names = names_of([Replace(batch) for batch in batches], given)
    horizons = horizons_of(watch, by)
    plan, cost = planned(path, watch, horizons, len(batches), few, memory)
    found = _predict(path, batches, watch, horizons, plan, cost)
    coords = {"change": names, "horizon": horizons}
    path.check_lost(watch.at, found.response, horizons)
    predicted = xr.DataArray(found.response.numpy(), coords, ("change", "horizon"))
    scores, odd = torch.as_tensor(_score(predicted, by).values), None if named else odd_one(found.xi_norm, few)
    top, judging = ([], named) if named else to_rerun(scores, few, odd)
    rerun = [*top, *judging]
    measured = xr.full_like(predicted, torch.nan)
    if rerun:
        measured[rerun] = _measure(path, [batches[i] for i in rerun], watch, horizons, memory).numpy()
    data = _calibrated(predicted, measured, judging, odd, by, found, watch, path)
    if float(data["held_out_error"]) > TRUST.careful_nrmse:
        exact, guess = (torch.as_tensor(curves.values[rerun]) for curves in (measured, predicted))
        none = torch.zeros(len(horizons))
        h = first_disagreement(exact, guess, none, gross=TRUST.careful_nrmse, parted=TRUST.symmetric_error)
        path.check_before(watch.at, None if h is None else watch.at + horizons[h - 1])
    return Ranking(data.assign(named=bool(named)))


def _predict(
    path: Path, batches: Sequence[Batch], watch: Watch, horizons: Sequence[int], plan: SweepPlan, cost: Estimate
) -> PoolScores:
    control = path.control(watch.at)
    with progress("adjoint sweep", watch.horizons, cost) as tick:
        swept = sweep_back(watch, control, batches, horizons, plan, tick)

    widen(plan, path.trajectory)

    def scored(plan: SweepPlan) -> PoolScores:
        with progress("ranking", len(batches)) as tick:
            return pool_scores(control, swept, path.trajectory, batches, plan.at_once, tick)

    return in_smaller_pieces(plan, scored, SweepPlan.smaller, "gradients of the pool")


def sweep_back(
    watch: Watch,
    control: ControlStep,
    sample: Sequence[Batch],
    horizons: Sequence[int],
    plan: SweepPlan,
    tick: Callable[[], None] = lambda: None,
) -> Adjoint:
    """The adjoint of some outcomes, with the probe read half way along the mean displacement of a sample."""

    def swept(plan: SweepPlan) -> Adjoint:
        slopes = midpoint_slopes(watch, mean_write(control, sample, plan.at_once.gradients), horizons)
        return adjoint(watch, slopes.pop, horizons, plan.place, tick, plan.products)

    return in_smaller_pieces(plan, swept, SweepPlan.elsewhere, "the adjoint sweep")


def _measure(
    path: Path, batches: list[Batch], watch: Watch, horizons: Sequence[int], memory: str | int | None
) -> Float[Tensor, "change horizon"]:
    """Exact reruns, read at some horizons: the truth."""
    change, read = path.replace(batches, watch.at), replace(watch, only=tuple(horizons))
    return change.numbers(read, memory=memory)[:, [h - 1 for h in horizons]]


def _calibrated(
    predicted: xr.DataArray,
    measured: xr.DataArray,
    judging: Sequence[int],
    odd: int | None,
    by: str,
    found: PoolScores,
    watch: Watch,
    path: Path,
) -> xr.Dataset:
    """Predictions with what reruns share added, sorted, and how good that is on those that judge, each left out.

    eq:calibration.
    """
    import xarray as xr

    changed = xr.DataArray((found.xi_norm != 0).numpy(), {"change": measured["change"]}, ("change",))
    unlike = xr.zeros_like(changed)
    if odd is not None:
        unlike[odd] = True  # what it is off by says nothing of the others
    known = measured["change"][(changed & ~unlike & (abs(measured) < torch.inf).any("horizon")).values]
    truth, plain = measured.sel(change=known), predicted.sel(change=known)
    offset, share = shared_offset(plain.values, truth.values)
    response = predicted + changed * xr.DataArray(offset, {"horizon": predicted["horizon"]}, ("horizon",))
    judged = xr.zeros_like(measured["change"], dtype=bool)
    judged[list(judging)] = True
    judges = _judges(xr.Dataset({"measured": measured, "judging": judged}))
    sized, several = judges["change"][judges.values], len(known) > 1
    # where nothing is added to those that are not rerun, nothing is added to these
    others = plain.copy(data=held_out(plain.values, truth.values) if share else plain.values) if several else None
    left_out = None if others is None else nrmse(truth, others)
    signs = None if others is None else sign_agreement(truth, others, xr.DataArray(0.0)).sel(change=sized)
    raw = nrmse(truth, plain).sel(change=sized if several else known)
    if left_out is not None:  # a judge has a size: what has no error has no prediction
        left_out, raw = left_out.sel(change=sized).fillna(math.inf), raw.fillna(math.inf)
    data = xr.Dataset(
        {
            "response": response,
            "predicted": predicted,
            "measured": measured,
            "judging": judged,
            "odd": unlike,
            "offset": ("horizon", offset),
            "offset_share": share,
            "score": _score(measured.fillna(response), by),
            "xi_norm": ("change", found.xi_norm.numpy()),
            "held_out_error": torch.nan if left_out is None else float(left_out.median()),
            "raw_error": float(raw.median()),
            "held_out_sign": torch.nan if signs is None else float(signs.mean()),
            "stiff_share": found.stiff,
            "curve_error": found.curve_error,
            "check": str(path.check()),
            "other_masks": path.check().other_masks,
            "slope_error": watch.slope_error(),
            "by": by,
            "at": watch.at,
            "probe": watch.probe.name,
        },
        attrs=provenance(path.trajectory),
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


def prepared(path: Path, pool: Iterable[Batch], probe: Any, at: int, horizon: int | None) -> tuple[list[Batch], Watch]:
    batches = list(pool)
    if not batches:
        raise InvalidInput("the pool is empty: ranking needs at least one batch")
    watch = path.watch(at, probe, horizon)
    path.require_linear(watch)
    return batches, watch


def horizons_of(watch: Watch, by: str) -> list[int]:
    """The outcomes that a ranking needs."""
    if by not in (*SUMMARIES, LAST):
        raise InvalidInput(f"by is one of {', '.join((*SUMMARIES, LAST))}; got {by!r}")
    return [watch.horizons] if by == LAST else watch.range


def estimate(
    path: Path,
    pool: Iterable[Batch],
    probe: Any,
    *,
    at: int,
    horizon: int | None,
    by: str,
    verify: int | Sequence[int],
    memory: str | int | None,
) -> Estimate:
    """See `Path.estimate_rank`."""
    batches, watch = prepared(path, pool, probe, at, horizon)
    few, _ = reruns(verify, BATCHES, range(len(batches)))
    return planned(path, watch, horizons_of(watch, by), len(batches), few, memory)[1]


def planned(
    path: Path, watch: Watch, horizons: Sequence[int], batches: int, few: int, memory: str | int | None
) -> tuple[SweepPlan, Estimate]:
    """How the sweep and the pool are cut to fit, and what they and the reruns cost; the reruns must fit, too."""
    limit, few = path.memory if memory is None else memory, min(few, batches)
    plan = with_reruns(lambda: plan_ranking(watch, horizons, batches, limit), watch, few, limit)
    steps, outcomes = watch.horizons, len(horizons)
    products = outcomes * (steps + 1) / 2 + steps
    gradients = outcomes + 2 * GRAPH_COST * steps + PRODUCT_COST * products + batches
    gradients += few * (1 + steps + FORWARD_COST * outcomes)
    seconds = gradients * path.trajectory.seconds_per_step
    return plan, Estimate(gradients, seconds, plan.peak, math.ceil(batches / plan.at_once.gradients))
