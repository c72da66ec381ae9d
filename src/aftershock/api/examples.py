"""`rank_examples`: one adjoint sweep and one forward-mode pass, then every single example of a pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..core.batches import Batch, example_count, merged_examples, take_examples
from ..core.changes import ControlStep, Edit, Perturb
from ..core.examples import EXAMPLES_AT_ONCE, SPREAD, example_scores, example_weight
from ..core.memory import in_smaller_pieces
from ..core.probe import Watch
from ..core.scores import SAMPLE, adjoint, example_direction
from ..core.sweep_plans import ExampleFootprint, SweepPlan, examples_at_once, left_for_reruns, plan_examples
from ..results.certificate import TRUST, Certificate, Finding
from ..results.labelled import LabelledResult
from ..results.provenance import provenance
from .change import FORWARD_COST, GRAPH_COST, PRODUCT_COST, Change
from .progress import Estimate, progress
from .ranking import SHOWN, prepared
from .reruns import common_factor, judging_in_words, relative_error, reruns, to_rerun

if TYPE_CHECKING:
    import xarray as xr

    from .path import Path


class ExampleRanking(LabelledResult):
    """Every example's share of its batch's predicted response at one outcome, strongest first.

    `data` has by example: `share` (calibrated by a common factor), `predicted`, `measured` where the example's part of
    the gradient was added in an exact rerun, and where the example stands: `batch`, `index`. `held_out_error` is that
    of the reruns that judge (`judging`): those spread over the ranking, or all where the user named them (`named`);
    in sum, each predicted with the factor of all others.

    >>> ranking = path.rank_examples(batches, probe, verify=2)
    >>> int(ranking.data["batch"][0]), ranking.certificate.findings[0].subject
    (5, 'examples')
    """

    kind = "example ranking"
    wanted = ("share", "predicted", "measured", "batch", "index", "judging", "named", "held_out_error")

    @property
    def certificate(self) -> Certificate:
        """How far the shares may be trusted: reruns spread over them are compared with what the others predict."""
        known = self.data.where(self.data["measured"].notnull(), drop=True)
        count = known.sizes["example"]
        if not count:
            sentence = "Not verified: pass verify=k to add k examples' gradients in exact reruns."
            return Certificate((Finding("care", "examples", "reruns", 0.0, 1.0, sentence),))
        error = float(self.data["held_out_error"])
        if count == 1:
            sentence = "Calibrated with one exact rerun, which cannot judge itself."
            return Certificate((Finding("care", "examples", "reruns", 1.0, 2.0, sentence),))
        which, left = judging_in_words(self.data)
        if math.isnan(error):
            sentence = (
                f"Calibrated with {count} exact reruns: none of those {which} stayed finite and "
                "changed anything, so the error on others is not known."
            )
            return Certificate((Finding("care", "examples", "reruns", float(count), 2.0, sentence),))
        level = TRUST.level(error)
        sentence = (
            f"Calibrated with {count} exact reruns. Those {which}, each predicted with the calibration of the "
            f"others, are off by {error:.0%} in sum. The measured column is the truth.{left}"
        )
        return Certificate((Finding(level, "examples", "error of reruns held out", error, TRUST.nrmse, sentence),))

    def __str__(self) -> str:
        lines = [
            f"{self.data.sizes['example']} examples ordered by the size of their share of the response at horizon "
            f"{int(self.data['horizon'])} (one forward-mode pass), largest first:",
            f"{'rank':>4}  {'batch':>6}  {'example':>8}  {'share':>12}  {'measured':>12}",
        ]
        known = self.data["measured"].notnull().values
        for i in (i for i in range(len(known)) if i < SHOWN or known[i]):
            row = self.data.isel(example=i)
            real = f"{float(row['measured']):>+12.4g}" if known[i] else ""
            lines.append(
                f"{i + 1:>4}  {int(row['batch']):>6}  {int(row['index']):>8}  {float(row['share']):>+12.4g}  {real}"
            )
        return "\n".join([*lines, str(self.certificate)])


def rank_examples(
    path: Path,
    pool: Iterable[Batch],
    probe: Any,
    *,
    at: int,
    horizon: int | None,
    verify: int | Sequence[int],
    memory: str | int | None,
) -> ExampleRanking:
    """See `Path.rank_examples`."""
    batches, watch = prepared(path, pool, probe, at, horizon)
    few, named = _reruns(verify, batches)
    limit = path.memory if memory is None else memory
    sample = _sample(batches)
    plan, size, _ = _planned(path, watch, batches, few, limit)
    control = path.control(watch.at)
    weight = example_weight(control, max(batches, key=example_count))
    direction = _direction(watch, control, sample, plan)
    shares = _shares(control, direction, batches, weight, size)
    del direction
    share = torch.cat(shares)
    path.check_lost(watch.at, share[:, None], [watch.horizons])
    order = share.abs().argsort(descending=True, stable=True)
    batch_of = torch.cat([torch.full((len(s),), i) for i, s in enumerate(shares)])[order]
    index_of = torch.cat([torch.arange(len(s)) for s in shares])[order]
    measured = torch.full_like(share, torch.nan)
    top, judging = ([], order.argsort()[named].tolist()) if named else to_rerun(share[order].abs(), few)
    rerun = [*top, *judging]
    chosen = [(int(batch_of[k]), int(index_of[k])) for k in rerun]
    measured[rerun] = _measure_examples(
        path, control, batches, watch, chosen, weight, left_for_reruns(path.trajectory, len(chosen), limit)
    )
    data = _examples(path, watch, share[order], measured, judging, batch_of, index_of)
    return ExampleRanking(data.assign(named=bool(named)))


def estimate(
    path: Path,
    pool: Iterable[Batch],
    probe: Any,
    *,
    at: int,
    horizon: int | None,
    verify: int | Sequence[int],
    memory: str | int | None,
) -> Estimate:
    """See `Path.estimate_rank_examples`."""
    batches, watch = prepared(path, pool, probe, at, horizon)
    few, _ = _reruns(verify, batches)
    return _planned(path, watch, batches, few, path.memory if memory is None else memory)[2]


def _reruns(verify: int | Sequence[int], batches: Sequence[Batch]) -> tuple[int, list[int]]:
    return reruns(verify, "examples of the pool", range(sum(map(example_count, batches))))


def _sample(batches: Sequence[Batch]) -> Sequence[Batch]:
    return batches[:: max(1, len(batches) // SAMPLE)][:SAMPLE]


def _planned(
    path: Path, watch: Watch, batches: Sequence[Batch], wanted: int, memory: str | int | None
) -> tuple[SweepPlan, int, Estimate]:
    """How the sweep and the pool are cut to fit, how many examples go in one pass, and what all of it costs."""
    trajectory, steps, sample = path.trajectory, watch.horizons, len(_sample(batches))
    examples = sum(map(example_count, batches))
    few = min(wanted, examples)
    plan = plan_examples(watch, sample, few, memory)
    each = ExampleFootprint.of(trajectory, max(batches, key=example_count))
    size = examples_at_once(trajectory, each, examples, memory)
    gradients = 2 + (GRAPH_COST + PRODUCT_COST) * steps + sample + 3 * FORWARD_COST * len(batches)
    gradients += few * (1 + steps + FORWARD_COST)
    seconds, peak = gradients * trajectory.seconds_per_step, max(plan.peak, each.nbytes(size))
    return plan, size, Estimate(gradients, seconds, peak, math.ceil(examples / size))


def _shares(
    control: ControlStep, direction: Float[Tensor, " param"], batches: Sequence[Batch], weight: float | None, size: int
) -> list[Float[Tensor, " example"]]:
    """Of every batch's examples, in forward-mode passes of at most `size` of them."""
    shares, fits = list[Tensor](), size

    def scored(merged: Batch, chunk: int) -> Float[Tensor, " example"]:
        nonlocal fits  # what was too much for one pass is not tried with the next
        fits = chunk
        few = SPREAD * math.ceil(example_count(merged) / EXAMPLES_AT_ONCE)
        tested, where = few if shares else EXAMPLES_AT_ONCE, f"batch {len(shares)} and on"
        return example_scores(control, direction, merged, where, chunk, weight=weight, tested=tested)

    with progress("ranking examples", len(batches)) as tick:
        for merged, counts in merged_examples(batches, size):
            slope = in_smaller_pieces(
                fits, partial(scored, merged), lambda chunk: chunk // 2 or None, "a forward pass of single examples"
            )
            for part in slope.double().cpu().split(counts):
                shares.append(part * (weight or 1 / len(part)))
                tick()
    return shares


def _direction(watch: Watch, control: ControlStep, sample: Sequence[Batch], plan: SweepPlan) -> Float[Tensor, " param"]:
    """Along which an example's loss is differentiated; the sweep is gone with this call.

    The probe's slope is the control's: a share of an example moves the run by little, not half way to another batch's.
    """
    swept = in_smaller_pieces(
        plan,
        lambda plan: adjoint(watch, watch.slope, [watch.horizons], plan.place),
        SweepPlan.elsewhere,
        "the adjoint sweep",
    )
    return in_smaller_pieces(
        plan,
        lambda plan: example_direction(control, swept, watch.trajectory, sample, plan.at_once.waiting),
        SweepPlan.smaller,
        "the slopes of examples",
    )


def _examples(
    path: Path,
    watch: Watch,
    share: Float[Tensor, " example"],
    measured: Float[Tensor, " example"],
    judging: Sequence[int],
    batch_of: Int64[Tensor, " example"],
    index_of: Int64[Tensor, " example"],
) -> xr.Dataset:
    """Shares are small, so that what curvature adds is common to them as a factor: the reruns' median one."""
    import xarray as xr

    known, judged = measured.isfinite(), torch.zeros_like(measured, dtype=torch.bool)
    judged[list(judging)] = True
    factor, held = common_factor(share[known], measured[known])
    judges = judged[known] & (measured[known] != 0) & (len(held) > 1)
    return xr.Dataset(
        {
            "share": ("example", (factor * share).numpy()),
            "predicted": ("example", share.numpy()),
            "measured": ("example", measured.numpy()),
            "batch": ("example", batch_of.numpy()),
            "index": ("example", index_of.numpy()),
            "judging": ("example", judged.numpy()),
            "held_out_error": relative_error(held[judges], measured[known][judges]),
            "at": watch.at,
            "horizon": watch.horizons,
            "probe": watch.probe.name,
            "check": str(path.check()),
        },
        attrs=provenance(path.trajectory),
    )


def _measure_examples(
    path: Path,
    control: ControlStep,
    batches: Sequence[Batch],
    watch: Watch,
    chosen: Sequence[tuple[int, int]],
    weight: float | None,
    memory: str | int | None,
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
    return Change(path, watch.at, "example", tuple(edits)).numbers(last, memory=memory)[:, -1]
