"""`explain`: one adjoint sweep back from an outcome gives every earlier step's contribution to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..core.changes import Edit, Reset, Skip, Zero
from ..core.contributions import DIRECTIONS, LANCZOS, BentReadout, displacements
from ..core.given import whole
from ..core.memory import in_smaller_pieces
from ..core.planning import plan_reruns
from ..core.probe import Watch
from ..core.state import CHANNELS
from ..core.sweep_plans import SweepPlan, plan_explanation, with_reruns
from ..errors import InvalidInput
from ..results.certificate import TRUST, Certificate, Finding, masks, slopes
from ..results.labelled import LabelledResult
from ..results.provenance import provenance
from ..results.statistics import rank_correlation
from .change import FORWARD_COST, GRAPH_COST, PRODUCT_COST, Change
from .progress import Estimate, progress
from .reruns import common_factor, relative_error, reruns, to_rerun

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path

SHOWN = 10
EDITS: dict[str, Edit] = {"zero": Zero(), "skip": Skip(), "reset m": Reset(("m",)), "reset v": Reset(("v",))}
# Without v the next steps are many times too large, and what they do is no small change: on an MLP, a CNN and a
# transformer the adjoint with exact kicks had rank correlations of −0.48 to 0.31 with exact reruns of up to 1e5 nats.
MEASURED_ONLY = ("reset v",)
READOUTS = {"straight": "by the probe's slope alone", "bent": "with the probe's sharpest curvature"}


class Contributions(LabelledResult):
    """What each step of a path adds to one outcome.

    `data` has `contribution[step, channel]`, whose channels add up to the whole (`total`), and `measured[step]`: the
    same by an exact rerun, where one was made. The reruns decide whether the probe is read as a straight line or with
    its curvature (`readout`: "straight" or "bent"), and give a factor for all contributions (`factor`).
    `predicted[step]` is before that factor. `held_out[step]` is the prediction for a rerun step calibrated by the
    other reruns alone: compare it with `measured`.

    >>> found = path.explain(probe, verify=2)
    >>> found.total.dims, int(found.off_scale.sum()), found.certificate.level
    (('step',), 0, 'ok')
    """

    kind = "explanation"
    wanted = ("contribution", "measured", "predicted", "held_out", "readout", "factor")

    @property
    def total(self) -> xr.DataArray:
        """Contribution of each step, all channels together. Positive: the step raised the loss.

        >>> (path.explain(probe).total < 0).values.tolist()
        [True, False, True, True]
        """
        return self.data["contribution"].sum("channel", skipna=False)

    @property
    def certificate(self) -> Certificate:
        """How far the contributions may be trusted: each rerun is compared with what the other reruns predict."""
        return Certificate((*_findings(self), *masks(self.data), *slopes(self.data)))

    @property
    def off_scale(self) -> xr.DataArray:
        """Steps whose prediction is far beyond anything measured and beyond the outcome itself.

        >>> path.explain(probe).off_scale.values.tolist()
        [False, False, False, False]
        """
        measured, value = self.data["measured"], abs(float(self.data["value"]))
        largest = float(abs(measured.where(abs(measured) < math.inf)).max())
        limit = TRUST.off_scale * value if math.isnan(largest) else max(TRUST.off_scale * largest, value)
        return abs(self.total) > limit

    def __str__(self) -> str:
        data, predicted = self.data, bool(self.total.notnull().any())
        by = "prediction" if predicted else "rerun"
        lines = [
            f"Contribution of each step to {data['probe'].item()} at state {int(data['outcome'])} "
            f"(loss {float(data['value']):.4g}; against the run with '{data['change'].item()}' at that step), by the "
            f"size of the {by}, largest first:",
            f"{'step':>5}  {'predicted':>13}  {'measured':>11}  {'in θ':>10}  {'in m':>10}  {'in v':>10}",
        ]
        size = abs(self.total if predicted else data["measured"]).fillna(-1.0).values
        rerun = data["measured"].notnull().values
        order = enumerate((-size).argsort(kind="stable"))
        lines += [self._line(int(i)) for place, i in order if (size[i] >= 0 and place < SHOWN) or rerun[i]]
        return "\n".join([*lines, str(self.certificate)])

    def _line(self, i: int) -> str:
        row, total = self.data.isel(step=i), float(self.total.isel(step=i))
        away = bool(self.off_scale.isel(step=i))
        shown = "off the scale" if away else _number(total, 13)
        parts = "  ".join(_number(math.nan if away else float(x), 10) for x in row["contribution"].values)
        return f"{int(row['step']):>5}  {shown}  {_number(float(row['measured']), 11)}  {parts}".rstrip()


def _number(value: float, width: int) -> str:
    """A signed number; nothing where there is none."""
    return " " * width if math.isnan(value) else f"{value + 0.0:>+{width}.3g}"  # + 0.0: no sign of a zero


def _reruns_of(count: int) -> str:
    return f"{count} exact rerun" + "s" * (count != 1)


def _findings(found: Contributions) -> list[Finding]:
    data = found.data
    known = abs(data["measured"]) < math.inf
    count, lost = int(known.sum()), int((abs(data["measured"]) == math.inf).sum())
    diverged = f" {lost} of the reruns diverged." if lost else ""
    if data["change"].item() in MEASURED_ONLY:
        sentence = (
            f"No sizes are predicted: a '{data['change'].item()}' is no small change, and the adjoint is of no use for "
            f"it. {_reruns_of(count)} of steps along the path show the truth; pass verify=k for k."
        )
        return [Finding("bad", "explanation", "predictions", 0.0, 1.0, sentence + diverged)]
    absurd = _absurd(found)
    read = f"Read {READOUTS[str(data['readout'].item())]}"
    if not count:
        sentence = f"Not verified: pass verify=k to rerun without the top k steps. {read}. Do not trust it blindly."
        return [Finding("care", "explanation", "reruns", 0.0, 1.0, sentence + diverged), *absurd]
    calibrated = (
        f"{read}, times {float(data['factor']):.2g}, as {_reruns_of(count)} {'has' if count == 1 else 'have'} it"
    )
    if count == 1:
        sentence = f"{calibrated}: one rerun cannot judge itself, so the error on others is not known.{diverged}"
        return [Finding("care", "explanation", "reruns", 1.0, 2.0, sentence), *absurd]
    held, measured = data["held_out"].values[known.values], data["measured"].values[known.values]
    if not measured.any():
        sentence = (
            f"{read}. None of {count} exact reruns changes the outcome, so that there is no error relative to it."
        )
        return [Finding("care", "explanation", "reruns", float(count), 2.0, sentence + diverged), *absurd]
    error, raw = float(data["held_out_error"]), float(data["raw_error"])
    level = TRUST.level(error)
    word = {"ok": "trust it", "care": "use the sizes with care", "bad": "do not trust the predicted sizes"}[level]
    order = f", their order by rank correlation {float(rank_correlation(held, measured)[0]):.2f}" if count > 2 else ""
    sentence = (
        f"{calibrated}: {word}. Each rerun, predicted with the calibration of the others, is off by {error:.0%} in sum "
        f"({raw:.0%} without), signs are right in {float((held * measured > 0).mean()):.0%}{order}. "
        f"The measured column is the truth.{diverged}"
    )
    quantity = "relative error of reruns held out"
    return [Finding(level, "explanation", quantity, error, TRUST.nrmse, sentence), *absurd]


def _absurd(found: Contributions) -> list[Finding]:
    """Predictions that are of no size."""
    far, none = int(found.off_scale.sum()), int(found.total.isnull().sum())
    sizes = f"{far} predictions are off the scale of the loss: do not trust any size."
    numbers = f"{none} steps have no prediction: on its way back the sweep left the finite numbers."
    return [
        *[Finding("bad", "scale", "off_scale", far, 0, sizes)] * bool(far),
        *[Finding("bad", "scale", "not_finite", none, 0, numbers)] * bool(none),
    ]


def explain(
    path: Path, probe: Any, *, outcome: int | None, change: str, verify: int | Sequence[int], memory: str | int | None
) -> Contributions:
    """See `Path.explain`."""
    watch = _asked(path, probe, outcome, change)
    few, named = _reruns(verify, watch)
    limit = path.memory if memory is None else memory
    plan, _ = _planned(path, watch, change, few, limit)
    if plan is None:
        readings = {"straight": torch.full((watch.last, len(CHANNELS)), torch.nan, dtype=torch.float64)}
        chosen = torch.linspace(0, watch.last - 1, min(few, watch.last)).round().long().tolist()  # along the path
    else:
        readings = _readings(path, watch, change, plan)
        lost = readings["straight"].isnan().any(1).nonzero()[:, 0].tolist()
        for step in lost[-1:]:  # the sweep came back through the next one
            path.check_after(step, min(step + 2, watch.last))
        chosen = _to_rerun(readings[_unverified(readings)].sum(1).abs(), few)
    found = Calibrated.by(readings, _measured(path, watch, change, named or chosen, limit))
    if found.held_out_error > TRUST.careful_nrmse:
        worst = int((found.held_out - found.measured).abs().nan_to_num(-1.0).argmax())
        path.check_after(worst, watch.last)
    return _labelled(path, watch, change, found)


def estimate(
    path: Path, probe: Any, *, outcome: int | None, change: str, verify: int | Sequence[int], memory: str | int | None
) -> Estimate:
    """See `Path.estimate_explain`."""
    watch = _asked(path, probe, outcome, change)
    few, _ = _reruns(verify, watch)
    return _planned(path, watch, change, few, path.memory if memory is None else memory)[1]


def _asked(path: Path, probe: Any, outcome: int | None, change: str) -> Watch:
    """Where the outcome is read, once it is known that it can be explained."""
    if change not in EDITS:
        raise InvalidInput(f"change is one of {', '.join(EDITS)}; got {change!r}")
    watch = path.watch(0, probe)
    if outcome is not None and not 1 <= whole(outcome, "outcome is a state of the path") <= watch.last:
        raise InvalidInput(
            f"outcome is a state after the path's first step, from 1 to {watch.last} with {watch.probe.name} as the "
            f"probe; got {outcome}"
        )
    watch = path.watch(0, probe, outcome)
    if change not in MEASURED_ONLY:
        path.require_linear(watch)
    return watch


def _reruns(verify: int | Sequence[int], watch: Watch) -> tuple[int, list[int]]:
    return reruns(verify, "steps before the outcome", range(watch.last))


def _planned(
    path: Path, watch: Watch, change: str, few: int, memory: str | int | None
) -> tuple[SweepPlan | None, Estimate]:
    """How the sweep is cut to fit, None where there is none, and what it and the reruns cost."""
    steps, few = watch.last, min(few, watch.last)
    gradients = few * (1 + steps / 2 + FORWARD_COST)  # a rerun begins at its step, in the mean half way
    if change in MEASURED_ONLY:
        plan, peak = None, plan_reruns(watch, 1, memory) if few else 0
    else:
        rows = 1 + DIRECTIONS
        plan = with_reruns(lambda: plan_explanation(watch, rows, memory), watch, int(few > 0), memory)
        peak = plan.peak
        gradients += GRAPH_COST * (1 + steps) + PRODUCT_COST * (LANCZOS + rows * steps)
    return plan, Estimate(gradients, gradients * path.trajectory.seconds_per_step, peak, 1)


def _readings(path: Path, watch: Watch, change: str, plan: SweepPlan) -> dict[str, Float[Tensor, "step channel"]]:
    """Contributions by each readout, from one sweep."""
    edits = {change: EDITS[change]}

    def swept(plan: SweepPlan) -> tuple[BentReadout, Float[Tensor, "step row channel layer"]]:
        bent, waiting = BentReadout.of(watch), plan.at_once.waiting
        with progress("adjoint sweep", watch.last) as tick:
            found = displacements(
                path.trajectory, watch.last, bent, lambda step: edits, plan.place, tick=tick, waiting_pairs=waiting
            )
        return bent, found[change]

    bent, parts = in_smaller_pieces(plan, swept, SweepPlan.elsewhere, "the adjoint sweep")
    return {"straight": -bent.straight(parts).sum(-1), "bent": -bent.response(parts).sum(-1)}


def _to_rerun(sizes: Float[Tensor, " step"], few: int) -> list[int]:
    """Which steps are rerun: half of so many the strongest, at least one, the others along the path from its start on.

    The further back a step lies, the less a prediction of it holds. On 96 paths of 16 small models (16 steps, each
    rerun by plain torch) the steps that were not rerun were off by more than 4.7 times the stated error in a tenth of
    all, where the others were spread over the ranking, and 2.6 times with these (three reruns; 4.2 and 2.3 with five).
    """
    top, spread = to_rerun(sizes, few)
    rest = [step for step in range(len(sizes)) if step not in top]
    return [*top, *(rest[len(rest) * i // len(spread)] for i in range(len(spread)))]


def _unverified(readings: Mapping[str, Float[Tensor, "step channel"]]) -> str:
    """The readout without reruns: curvature is a correction only while it is smaller than what it corrects."""
    straight, bent = (readings.get(name, readings["straight"]).sum(1) for name in ("straight", "bent"))
    return "bent" if (bent - straight).abs().sum() < straight.abs().sum() and "bent" in readings else "straight"


def _measured(
    path: Path, watch: Watch, change: str, steps: Sequence[int], memory: str | int | None
) -> Float[Tensor, " step"]:
    """The outcome less that of an exact run with the change at each of some steps."""
    measured = torch.full((watch.last,), torch.nan, dtype=torch.float64)
    for step in steps:
        read = path.watch(step, watch.probe, watch.last - step)
        rerun = Change(path, step, change, (EDITS[change],)).numbers(read, memory=memory)
        measured[step] = -rerun[0, -1]
    return measured


@dataclass(frozen=True)
class Calibrated:
    """Contributions by the readout, and times the factor, that the reruns choose."""

    contribution: Float[Tensor, "step channel"]
    predicted: Float[Tensor, " step"]  # before the factor
    measured: Float[Tensor, " step"]
    held_out: Float[Tensor, " step"]  # at each rerun, by the readout and factor that the others choose
    readout: str
    factor: float

    @classmethod
    def by(cls, readings: Mapping[str, Float[Tensor, "step channel"]], measured: Float[Tensor, " step"]) -> Calibrated:
        known = measured.isfinite().nonzero()[:, 0]
        totals = {name: reading.sum(1) for name, reading in readings.items()}
        held_out = torch.full_like(measured, torch.nan)
        for step in known.tolist():
            others = known[known != step]
            if len(others):
                name, factor = _chosen(totals, measured, others)
                held_out[step] = factor * totals[name][step]
        readout, factor = _chosen(totals, measured, known) if len(known) else (_unverified(readings), 1.0)
        return cls(factor * readings[readout], totals[readout], measured, held_out, readout, factor)

    @property
    def held_out_error(self) -> float:
        """Relative error of reruns, in sum, each by the calibration of the others; NaN for fewer than two, and where
        nothing is predicted."""
        judged = self.measured.isfinite().sum() > 1 and not self.predicted.isnan().all()
        return relative_error(self.held_out, self.measured) if judged else math.nan

    @property
    def raw_error(self) -> float:
        return math.nan if self.predicted.isnan().all() else relative_error(self.predicted, self.measured)


def _chosen(
    totals: Mapping[str, Float[Tensor, " step"]], measured: Float[Tensor, " step"], known: Int64[Tensor, " rerun"]
) -> tuple[str, float]:
    """The readout that comes closest to the known reruns, and its factor."""
    factors = {name: common_factor(total[known], measured[known])[0] for name, total in totals.items()}
    miss = {name: float((factors[name] * totals[name] - measured)[known].abs().sum()) for name in totals}
    best = min(totals, key=lambda name: miss[name])
    return best, factors[best]


def _labelled(path: Path, watch: Watch, change: str, found: Calibrated) -> Contributions:
    import xarray as xr

    time, trajectory = watch.last, path.trajectory
    state = trajectory.state(time)
    data = xr.Dataset(
        {
            "contribution": (("step", "channel"), found.contribution.numpy()),
            "predicted": ("step", found.predicted.numpy()),
            "measured": ("step", found.measured.numpy()),
            "held_out": ("step", found.held_out.numpy()),
            "held_out_error": found.held_out_error,
            "raw_error": found.raw_error,
            "readout": found.readout,
            "factor": found.factor,
            "outcome": time,
            "value": float(watch.probe.value(trajectory, time, state.theta, state)),
            "change": change,
            "probe": watch.probe.name,
            "check": "" if change in MEASURED_ONLY else str(path.check()),
            "other_masks": 0.0 if change in MEASURED_ONLY else path.check().other_masks,
            "slope_error": 0.0 if change in MEASURED_ONLY else watch.slope_error(),
        },
        coords={"step": list(range(time)), "channel": list(CHANNELS)},
        attrs=provenance(trajectory),
    )
    return Contributions(data)
