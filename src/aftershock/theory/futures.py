"""Unknown futures: what of a response belongs to the change, and what to the batches that come after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.batches import Batch
from ..core.changes import names_of
from ..core.operators import Transition, WriteIn, readout
from ..core.probe import Probe
from ..core.randomness import Randomness
from ..core.state import Tangent, pair, stack
from ..errors import InvalidInput
from ..results.provenance import provenance
from ..results.statistics import FEWEST, spearman
from ..results.summaries import summarize
from .samplers import Sampler, sample_futures
from .write_paths import gradient_difference, probe_slope

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change
    from ..api.path import Path
    from ..api.point import TrainingPoint

Candidates = Sequence[Batch] | Callable[["Path"], "Change"]


def repeated_futures(
    point: TrainingPoint,
    control_batch: Batch,
    candidates: Candidates,
    futures: Sequence[Sequence[Batch]],
    probe: Any,
    *,
    answers: Sequence[str] = ("exact",),
    scale: float = 1.0,
    **follow: Any,
) -> xr.Dataset:
    """Responses to the same changes under each of K futures, which control and shock share. `app:exp2_predictability`.

    candidates: batches that replace `control_batch`, or a function that makes the change on each branch's
        path, such as `lambda path: path.perturb(xi)`.
    futures: K lists of H−1 batches.
    follow: options of `point.follow`, such as `lr` and `clip`.
    Gives `response[answer, change, future, horizon]`, its mean over futures, and the control's losses.
    Costs K times a path's response: N·H·K gradients for the exact one.

    >>> futures = [batches[1:3], batches[2:4]]
    >>> found = theory.repeated_futures(point, batches[0], batches[4:], futures, probe)
    >>> dict(found["response"].sizes)
    {'answer': 1, 'change': 2, 'future': 2, 'horizon': 3}
    """
    import xarray as xr

    lengths = {len(future) for future in futures}
    if len(lengths) != 1:
        raise InvalidInput(f"futures must be lists of one length; got {len(futures)} of lengths {sorted(lengths)}")
    branches = []
    for future in futures:
        change = _branch(point, control_batch, future, candidates, follow)
        found = change.response(probe, scales=[scale], answers=answers).data.isel(scale=0)
        branches.append(found[["response", "control", "noise_floor", "clip_switched"]])
    data = xr.concat(branches, dim="future", combine_attrs="override")
    data = data.assign_coords(future=list(range(len(futures)))).transpose("answer", "change", "future", "horizon")
    return data.assign(mean_response=data["response"].mean("future"))


def _branch(
    point: TrainingPoint, control_batch: Batch, future: Sequence[Batch], candidates: Candidates, follow: dict[str, Any]
) -> Change:
    path = point.follow([control_batch, *future], **follow)
    return candidates(path) if callable(candidates) else path.replace(list(candidates), 0)


# --- what repeated futures say


def prospective_structure(response: xr.DataArray, by: str = "peak") -> xr.Dataset:
    """Whether candidates keep their order when the future is drawn anew, for one summary R of the response.

    mean[change]          μ = mean of R over futures, the target of every present-time score
    between, within       Var_i(μ_i) and E_i Var_k(R_ik), population variances
    prospective_ratio     Π_H = between / (between + within). `eq:app_predictability_ratio`
    branch_correlation    median over futures of Spearman(R_·k, μ); NaN where either is constant

    response: of `repeated_futures`, one answer, for three changes and two futures or more. by: the summary R.

    >>> import xarray as xr
    >>> peaks = [[[0.1], [0.2]], [[0.5], [0.6]], [[0.9], [0.8]]]  # three changes in two futures
    >>> curves = xr.DataArray(peaks, {"horizon": [1]}, ("change", "future", "horizon"))
    >>> round(float(theory.prospective_structure(curves)["prospective_ratio"]), 3)
    0.97
    """
    import xarray as xr

    values = summary_of(response, by)
    for dim, fewest in (("change", FEWEST), ("future", 2)):
        if values.sizes.get(dim, 1) < fewest:
            raise InvalidInput(f"prospective structure needs {fewest} of {dim}; got {values.sizes.get(dim, 1)}")
    mean = values.mean("future")
    return xr.Dataset(
        {
            "mean": mean,
            "between": mean.var("change"),
            "within": values.var("future").mean("change"),
            "prospective_ratio": prospective_ratio(values),
            "branch_correlation": spearman(values, mean)["rho"].median("future", skipna=False),
            "summary": by,
        },
    )


def prospective_ratio(values: xr.DataArray) -> xr.DataArray:
    """Π_H = Var_i(μ_i) / (Var_i(μ_i) + E_i[Var_k(R_ik)]) over `change` i and `future` k, ddof = 0.

    `eq:app_predictability_ratio`. A ratio of variances under one protocol, not a share of information.
    NaN where nothing varies.

    >>> import xarray as xr
    >>> float(theory.prospective_ratio(xr.DataArray([[1.0, 1.0], [2.0, 2.0]], dims=("change", "future"))))
    1.0
    >>> float(theory.prospective_ratio(xr.DataArray([[1.0, 2.0], [2.0, 1.0]], dims=("change", "future"))))
    0.0
    """
    between, within = values.mean("future").var("change"), values.var("future").mean("change")
    total = between + within
    return (between / total.where(total > 0)).rename("prospective_ratio")


def summary_of(response: xr.DataArray, by: str) -> xr.DataArray:
    """One of the summaries over horizons, by its name."""
    summaries = summarize(response)
    if by not in summaries:
        raise InvalidInput(f"{by!r} is not a summary; choose from {', '.join(map(str, summaries))}")
    return summaries[by]


# --- scores at the time of the change, blind to the real future


def present_frozen(
    point: TrainingPoint,
    control_batch: Batch,
    candidates: Candidates,
    probe: Any,
    *,
    horizon: int,
    by: str = "peak",
    **follow: Any,
) -> xr.Dataset:
    """c̄_1ᵀ P_θ Ā^{h−1} B ξ: one Jacobian applied again and again, the first readout frozen.

    `eq:app_present_frozen_iso`. Ā is the transition of the control batch (the reference mean, where that is
    `accumulate(references)`) at the first state after it. Gives `response[change, horizon]` and its summary
    `score[change]`. Costs a path of two steps and a Hessian product per change and horizon.

    candidates, follow: as in `repeated_futures`. by: the summary that is the score.

    >>> found = theory.present_frozen(point, batches[0], batches[4:], probe, horizon=3)
    >>> found["score"].idxmax("change").item()
    'replace 1'
    """
    import xarray as xr

    _require_horizon(horizon)
    change = _branch(point, control_batch, [control_batch] * min(horizon - 1, 1), candidates, follow)
    trajectory, control = change.path.trajectory, change.path.control(change.at)
    slope = readout(probe_slope(change, Probe.of(probe), control)[None])
    dx = stack([WriteIn(control.linear).mv(gradient_difference(e.shock(control).xi, e)) for e in change.edits])
    powers: Iterable[Tangent] = [dx]
    if horizon > 1:
        powers = Transition(trajectory.linearize(trajectory.steps[1], control.after)).powers(dx)
    curve = [pair(slope, power)[0] for power in itertools.islice(powers, horizon)]
    values = torch.stack(curve, dim=1).double().cpu().numpy()
    response = xr.DataArray(
        values, dims=("change", "horizon"), coords={"change": names_of(change.edits), "horizon": range(1, horizon + 1)}
    )
    return xr.Dataset(
        {"response": response, "score": summary_of(response, by), "summary": by}, attrs=provenance(trajectory)
    )


def reference_surrogate(
    point: TrainingPoint,
    control_batch: Batch,
    candidates: Candidates,
    probe: Any,
    *,
    horizon: int,
    references: Sequence[Batch] | None = None,
    answer: str = "tangent",
    by: str = "peak",
    **follow: Any,
) -> xr.Dataset:
    """The response along a future that repeats the references. `app:exp2_predictability`.

    references: run through in turn; default: the control batch alone, their mean. answer: of `change.response`; the
    paper's is the tangent. Others: as in `present_frozen`. Costs a path and its response.

    >>> found = theory.reference_surrogate(point, batches[0], batches[4:], probe, horizon=3)
    >>> found["score"].idxmax("change").item()
    'replace 1'
    """
    _require_horizon(horizon)
    surrogate = itertools.islice(itertools.cycle(references or [control_batch]), horizon - 1)
    return _scored(point, control_batch, candidates, [list(surrogate)], probe, answer, by, follow)


def sampled_future(
    point: TrainingPoint,
    control_batch: Batch,
    candidates: Candidates,
    sampler: Sampler,
    probe: Any,
    *,
    horizon: int,
    samples: int = 8,
    answer: str = "semilinear",
    by: str = "peak",
    generator: Randomness = 0,
    **follow: Any,
) -> xr.Dataset:
    """The mean over sampled futures of a summary of the predicted response: an estimate of μ from the present.

    eq:sampled_future.

    sampler: where futures come from, see `sample_futures`. generator: draws them; or an integer seed.
    answer: of `change.response`. Tangents misrank at full scale: median ρ with μ on six GELU networks 0.76, against
        1.00 (semilinear), on six correlated quadratics 0.92 and 0.98; semilinear also stays bounded where v is small.
    Gives `response[change, future, horizon]` and `score[change]`; costs `samples` times a path's response.

    >>> found = theory.sampled_future(point, batches[0], batches[4:], batches[:4], probe, horizon=3, samples=2)
    >>> found["score"].idxmax("change").item(), found["response"].sizes["future"]
    ('replace 1', 2)
    """
    _require_horizon(horizon)
    futures = sample_futures(sampler, samples, horizon - 1, generator)
    return _scored(point, control_batch, candidates, futures, probe, answer, by, follow)


def _scored(
    point: TrainingPoint,
    control_batch: Batch,
    candidates: Candidates,
    futures: Sequence[Sequence[Batch]],
    probe: Any,
    answer: str,
    by: str,
    follow: dict[str, Any],
) -> xr.Dataset:
    data = repeated_futures(point, control_batch, candidates, futures, probe, answers=(answer,), **follow)
    data = data.isel({"answer": 0})
    return data.assign(score=summary_of(data["response"], by).mean("future"), summary=by)


def _require_horizon(horizon: int) -> None:
    if horizon < 1:
        raise InvalidInput(f"horizon counts the states after the change, from 1; got {horizon}")
