"""Equal first effects, so that what differs is the future: candidates of equal one-step response, and moments
of equal first displacement under other β."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.adamw import Run, runs_of
from ..core.changes import ControlStep, Perturb, names_of, scales_of
from ..core.dynamics import Step
from ..core.memory import in_chunks
from ..core.operators import WriteIn, readout
from ..core.planning import at_once
from ..core.probe import Reader, Watch
from ..core.reductions import count, finite, norms, products
from ..core.rollout import Rows, rollout
from ..core.row_costs import Load
from ..core.state import JointState, difference
from ..errors import InvalidInput
from ..results.labelled import LabelledResult
from ..results.provenance import asked, provenance
from ..results.summaries import summarize

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change
    from ..api.path import Path

TARGET = 0.25  # μ1 as a share of the median first-step response
NULLSPACE = 4.0  # ‖z̃‖ / ‖b‖
LARGEST_GAMMA = 64.0
BISECTIONS = 64
ACCEPTED = 5e-8  # residual over μ1
CONTROLS = 2  # vectors of the control's steps beside hybrids, as measured
ROUNDING = 64  # of ‖z‖, in units of eps ‖r‖, below which z is zero


class Matched(LabelledResult):
    """Perturbations of equal exact |d_1|, and how well each was matched.

    `xi[change]` is γ_i ξ̃_i as `path.perturb` takes it, NaN where no γ was found. `data` has it too, and by change
    `gamma`, `first_step` (the signed exact d_1), `accepted` and `reason` (empty where accepted); μ1 is `target`.

    >>> matched = theory.match_first_step(path, theory.residuals(change), probe)
    >>> matched.accepted.values.tolist(), matched.gamma.isnull().values.tolist(), matched.xi.shape
    ([True, False], [False, True], torch.Size([2, 22]))
    >>> float(matched.first_step[0]) > 0, round(matched.cv, 6), round(matched.target, 6)
    (True, 0.0, 0.000283)
    """

    kind = "match"
    wanted = ("xi", "gamma", "first_step", "accepted", "reason", "target")

    @property
    def xi(self) -> Float[Tensor, "change d"]:
        """On the CPU, whatever device the path is on: a copy, which may be written to."""
        return torch.tensor(self.data["xi"].values)

    @property
    def target(self) -> float:
        """μ1, the size of the first response that all were matched to."""
        return float(self.data["target"])

    @property
    def gamma(self) -> xr.DataArray:
        return self.data["gamma"]

    @property
    def first_step(self) -> xr.DataArray:
        """The exact signed one-step response reached; its magnitude is the target where accepted."""
        return self.data["first_step"]

    @property
    def accepted(self) -> xr.DataArray:
        return self.data["accepted"]

    @property
    def cv(self) -> float:
        """Coefficient of variation of |d_1| over the accepted candidates (ddof = 0); NaN without any."""
        size = abs(self.first_step.where(self.accepted, drop=True))
        return float(size.std(ddof=0) / size.mean()) if size.size else math.nan

    def __str__(self) -> str:
        data, count = self.data, int(self.accepted.sum())
        lines = [
            f"{count} of {data.sizes['change']} candidates at step {int(data['at'])} have a first response of "
            f"±{self.target:.4g} on {data['probe'].item()} (spread: {self.cv:.1g} of it):",
            f"{'change':>6}  {'γ':>10}  {'first step':>11}",
        ]
        rows = zip(*(data[name].values for name in ("change", "gamma", "first_step", "reason")))
        lines += [f"{row[0]:>6}  {row[1]:>10.4g}  {row[2]:>11.4g}  {row[3]}".rstrip() for row in rows]
        return "\n".join(lines)


def residuals(change: Change) -> Float[Tensor, "change d"]:
    """ξ_i = g_i − ḡ of every change, without padding: 1 g each for replaced batches.

    >>> theory.residuals(change).shape
    torch.Size([2, 22])
    """
    control = change.path.control(change.at)
    found = [edit.shock(control).xi for edit in change.edits]
    if any(xi is None for xi in found):
        raise InvalidInput(f"a {change.kind} is not a difference of gradients: it has no ξ; replace batches or perturb")
    return control.dynamics.layout.compact(torch.stack([xi for xi in found if xi is not None]))


def match_first_step(
    path: Path, xis: Any, probe: Any, at: int = 0, *, target: float = TARGET, tolerance: float = ACCEPTED
) -> Matched:
    """Candidates from residuals r_i whose exact first responses are ±μ1, by eq:app_exact_matching.

    With a = Bᵀc̄_1: b_i = s_i μ1 a/‖a‖², s_i = (−1)^i, z_i the part of r_i orthogonal to a, and
    ξ̃_i = b_i + 4‖b_i‖ z_i/‖z_i‖, so that aᵀξ̃_i = s_i μ1, μ1 = `target`·median_j |aᵀr_j|. Then γ_i ≥ 0 solves
    F(Θ⁺(x, ḡ + γ ξ̃_i)) − F(Θ⁺(x, ḡ)) = s_i μ1: the upper end of [0, 1] doubles up to 64, 64 bisections
    follow, and a residual up to `tolerance`·μ1 is accepted. Nothing later than h = 1 is used.

    Singular where a = 0 or every aᵀr_j = 0. Costs 2 g, then up to 71 forward passes a candidate.

    xis: rows of d coordinates, or any form that `path.perturb` takes; `residuals(change)` gives them.

    >>> matched = theory.match_first_step(path, theory.residuals(change), probe)
    >>> first = path.perturb(matched.xi[0]).response(probe, horizon=1).exact
    >>> abs(first.item() - matched.target) < 1e-9
    True
    """
    import xarray as xr

    watch = path.watch(at, probe, 1)
    control = path.control(watch.at)
    natural = control.dynamics.layout.vectors(xis)
    slopes = watch.slopes()
    candidates, signs, mu = first_step_candidates(WriteIn(control.linear).rmv(readout(slopes))[0], natural, target)
    shocks = [Perturb(xi).shock(control) for xi in candidates]
    reader = Reader(path.trajectory, watch.probe)

    def values(states: Sequence[JointState]) -> Float[Tensor, " row"]:
        return reader.values(watch.first, torch.stack([x.theta for x in states]), [x.buffers for x in states])

    base = float(values([control.after]))

    def excess(gamma: Float[Tensor, " change"]) -> Float[Tensor, " change"]:
        """s_i d_i(γ_i) − μ1: negative at γ = 0, zero at the match; NaN where γ is."""
        asked = (~gamma.isnan()).nonzero()[:, 0].tolist()
        out = torch.full(gamma.shape, math.nan, dtype=torch.float64)
        if asked:
            ends = [shocks[i].endpoint(float(gamma[i]))[0] for i in asked]
            out[asked] = signs[asked].cpu().double() * (values(ends) - base) - mu
        return out

    gamma = calibrate(excess, len(shocks))
    left = excess(gamma)
    reasons = [_reason(residual, mu, tolerance) for residual in left.tolist()]
    scaled = control.dynamics.layout.compact(candidates * gamma.to(candidates)[:, None]).cpu()
    data = xr.Dataset(
        {
            "xi": (("change", "coordinate"), scaled.numpy()),
            "gamma": ("change", gamma.numpy()),
            "first_step": ("change", (signs.cpu().double() * (mu + left)).numpy()),
            "accepted": ("change", [not reason for reason in reasons]),
            "reason": ("change", reasons),
            "target": mu,
            "tolerance": tolerance,
            **asked("perturb", watch.at, watch.probe),
        },
        coords={"change": list(range(len(gamma)))},
        attrs=provenance(path.trajectory),
    )
    return Matched(data)


def first_step_candidates(
    a: Float[Tensor, " param"], natural: Float[Tensor, "change param"], target: float
) -> tuple[Float[Tensor, "change param"], Float[Tensor, " change"], float]:
    """ξ̃_i, s_i and μ1."""
    if not (math.isfinite(target) and target > 0):
        raise InvalidInput(f"target is a positive share of the median first-step response; got {target}")
    if not finite(natural):
        raise InvalidInput("the candidates' residuals are not finite")
    along = products(natural, a)
    mu = target * float(along.abs().double().quantile(0.5))
    if mu == 0 or not math.isfinite(mu):
        raise InvalidInput(
            "the probe does not feel these candidates at the first step (the median of |aᵀξ| is zero or not a number): "
            "there is no first response to match"
        )
    squared = products(a, a)
    signs = torch.ones_like(along)
    signs[1::2] = -1.0
    common = mu * a / squared
    free = natural - along[:, None] * a / squared
    sizes = norms(free)[:, None]
    # of a residual along a, rounding leaves a z in some direction: scaled up it would be a candidate of noise
    real = sizes > ROUNDING * torch.finfo(a.dtype).eps * norms(natural)[:, None]
    free = torch.where(real, NULLSPACE * norms(common) * free / sizes, torch.zeros_like(free))
    return signs[:, None] * common + free, signs, mu


def calibrate(
    excess: Callable[[Float[Tensor, " change"]], Float[Tensor, " change"]], count: int
) -> Float[Tensor, " change"]:
    """γ_i ≥ 0 with excess_i(γ_i) = 0, to the last bit that 64 halvings give; NaN where none of 1, 2, 4 … 64 reaches it.

    Candidates that are done, or that no γ reaches, are asked with γ = NaN and may answer NaN.
    """
    low, high = torch.zeros(count, dtype=torch.float64), torch.full((count,), math.nan, dtype=torch.float64)
    gamma = 1.0
    while gamma <= LARGEST_GAMMA:
        open_ = high.isnan()
        reached = excess(torch.where(open_, gamma, math.nan)) >= 0
        high[open_ & reached] = gamma
        gamma *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        middle[(middle == low) | (middle == high)] = math.nan  # no number is left between
        if middle.isnan().all():
            break
        above = excess(middle) >= 0
        found = ~middle.isnan()
        high = torch.where(found & above, middle, high)
        low = torch.where(found & ~above, middle, low)
    return (low + high) / 2


def _reason(residual: float, mu: float, tolerance: float) -> str:
    if math.isnan(residual):
        return f"the target is not reached at any γ = 1, 2, 4 … {LARGEST_GAMMA:g}"
    if abs(residual) > tolerance * mu:
        return f"the residual is {abs(residual) / mu:.1e} of the target, above {tolerance:g}"
    return ""


def persistence(
    change: Change,
    probe: Any,
    *,
    beta1: Sequence[float] | None = None,
    beta2: Sequence[float] | None = None,
    scale: float = 0.25,
    horizon: int | None = None,
    memory: str | int | None = None,
) -> xr.Dataset:
    """How long a change acts through m (or v) under another β1 (or β2), with an equal first displacement.

    For each `beta` control and hybrid run on exactly from the state after the change with that β at
    every later step. The hybrid carries Δm alone, rescaled so that the first future displacement, ∝ β1 Δm/ρ1,
    is the one at the path's own β1; or Δv alone. The paper does not say how it matches v: here each
    coordinate's Δv is solved for exactly the same displacement through v, η m̂ (1/d − 1/d'); `unmatched`
    counts the coordinates where no v ≥ 0 gives it, which take the nearest v, or Δv as it is. Ratios are to
    the smallest β. (N+1)·H g per β, and H more for each further piece that the changes are cut into. Paper: Table
    "matched-first-displacement persistence sweep".

    beta1, beta2: the values to try, of one of them. probe, scale, horizon, memory: as in `change.response`.

    >>> found = theory.persistence(change, probe, beta1=[0.5, 0.9])
    >>> found["peak_ratio"].sel(change="replace 1").values.round(2).tolist()
    [1.0, 1.54]
    """
    import xarray as xr

    name, channel, betas = _decays(beta1, beta2)
    scales_of(change.edits, [scale])
    watch = change.path.watch(change.at, probe, horizon)
    if watch.horizons < 2:
        raise InvalidInput("a moment moves θ one step after the change: persistence() needs two horizons or more")
    limit, trajectory = change.path.memory if memory is None else memory, change.path.trajectory

    def rows(changes: int) -> Load:
        return Load(exact=len(betas) * (1 + changes))

    def held(changes: int) -> float:
        return CONTROLS + (3 + len(betas)) * changes

    def hybrids(some: range) -> dict[str, Tensor]:
        control, following = change.path.control(change.at), change.path.control(change.at + 1)
        ends = [change.edits[i].shock(control).endpoint(scale)[0] for i in some]
        del control
        starts = [row for beta in betas for row in _with_decay(following, ends, name, channel, beta)]
        found = {key: torch.stack([getattr(x, key) for x in starts]) for key in FOUND}
        found["response"] = _along(watch, following.before, starts, len(ends))
        return {key: values.unflatten(0, (len(betas), len(ends))) for key, values in found.items()}

    size = at_once(trajectory, len(change), rows, limit, held, f"one change under {len(betas)} values of {name}")
    parts = in_chunks(len(change), size, hybrids, "hybrids under other β")
    found = {key: torch.cat([part[key] for part in parts], dim=1).numpy() for key in parts[0]}
    dims = ("beta", "change")
    data = xr.Dataset(
        {
            "response": ((*dims, "horizon"), found["response"]),
            "first_displacement": (dims, found["displacement"]),
            "unmatched": (dims, found["unmatched"]),
            "scale": scale,
            "channel": channel,
            **asked(change.kind, watch.at, watch.probe),
        },
        coords={
            "beta": betas,
            "change": names_of(change.edits),
            "horizon": watch.range,
        },
        attrs=provenance(watch.trajectory),
    )
    data = data.merge(summarize(data["response"]))
    smallest = data[["peak", "total_abs"]].isel(beta=0, drop=True)
    return data.assign({f"{key}_ratio": data[key] / smallest[key] for key in ("peak", "total_abs")})


def _decays(beta1: Sequence[float] | None, beta2: Sequence[float] | None) -> tuple[str, str, list[float]]:
    if (beta1 is None) == (beta2 is None):
        raise InvalidInput("persistence() takes beta1=[…] or beta2=[…]")
    name, channel, values = ("beta1", "m", beta1) if beta1 is not None else ("beta2", "v", beta2)
    betas = sorted(float(beta) for beta in values or ())
    if not betas or not all(0 < beta < 1 for beta in betas) or len(set(betas)) < len(betas):
        raise InvalidInput(f"{name} needs different numbers between 0 and 1; got {values}")
    return name, channel, betas


@dataclass(frozen=True)
class _Start:
    """A hybrid under another β: its state, its β as a change of every step, and how its moment was matched."""

    state: JointState
    settings: dict[str, float]
    displacement: Tensor
    unmatched: Tensor

    def steps(self, path: Sequence[Step]) -> list[Step]:
        return [replace(s, hypers=tuple(replace(h, **self.settings) for h in s.hypers)) for s in path]  # type: ignore[arg-type]


FOUND = ("displacement", "unmatched")


def _with_decay(
    following: ControlStep, ends: Sequence[JointState], name: str, channel: str, beta: float
) -> Iterator[_Start]:
    """Every change's hybrid under another β."""
    now = following
    first = replace(now.step, hypers=tuple(replace(h, **{name: beta}) for h in now.step.hypers))  # type: ignore[arg-type]
    control, _ = now.dynamics.apply(first, now.before, now.raw, now.present)
    for end in ends:
        start, unmatched = _match_moment(now, first, end, channel)
        # θ is the control's, so is the gradient: the first displacement needs no other
        moved = difference(now.dynamics.apply(first, start, now.raw, now.present)[0], control).theta
        yield _Start(start, {name: beta}, norms(moved).double().cpu(), unmatched)


def _along(watch: Watch, control: JointState, starts: Sequence[_Start], changes: int) -> Float[Tensor, "row horizon"]:
    """Exact runs of all hybrids and of the control under each β, in one rollout; each less its own control."""
    groups = [starts[i : i + changes] for i in range(0, len(starts), changes)]
    rows = [(state, group[0]) for group in groups for state in (control, *(start.state for start in group))]
    steps = [start.steps(watch.trajectory.steps) for _, start in rows]
    reader, out = Reader(watch.trajectory, watch.probe), []
    for moment in rollout(watch.trajectory, watch.first, Rows([x for x, _ in rows], steps=steps), watch.last):
        found = reader.exact(moment).view(len(groups), 1 + changes)
        out.append((found[:, 1:] - found[:, :1]).reshape(-1))
    return torch.stack(out, dim=1)


def _match_moment(following: ControlStep, step: Step, end: JointState, channel: str) -> tuple[JointState, Tensor]:
    """The control with one moment moved so that `step` displaces θ as the path's own step would."""
    before, layout = following.before, following.dynamics.layout
    moment = getattr(before, channel).clone()
    missed = torch.zeros_like(moment, dtype=torch.bool)
    pairs = [runs_of(layout, s.hypers, before.counts, following.present) for s in (following.step, step)]
    for own, new in zip(*pairs):
        moment[own.where], missed[own.where] = matched_moment(own, new, before, end, following.linear.g, channel)
    return replace(before, **{channel: moment}), torch.tensor(count(missed))


def matched_moment(
    own: Run, new: Run, control: JointState, shocked: JointState, fresh: Float[Tensor, "*rows param"], channel: str
) -> tuple[Float[Tensor, "*rows run"], Bool[Tensor, "*rows run"]]:
    """The moment that gives, at decay β of `new`, the first displacement that the shocked one gives at `own`.

    m: Δm (β1/ρ1)_own / (β1/ρ1)_new. v: each coordinate's 1/d moves by as much as it does at `own`; also says where
    no v ≥ 0 does that. fresh: the gradient of the step, which with equal θ is the control's.
    """
    w = own.where
    moment, moved = getattr(control, channel)[..., w], getattr(shocked, channel)[..., w]
    if channel == "m":
        factor = (own.beta1 / own.bias1) / (new.beta1 / new.bias1)
        return moment + factor * (moved - moment), torch.zeros_like(moved, dtype=torch.bool)
    squared = fresh[..., w] ** 2
    d_own, d_shocked, d_new = (
        ((run.beta2 * v + (1 - run.beta2) * squared) / run.bias2).sqrt() + run.eps
        for run, v in ((own, moment), (own, moved), (new, moment))
    )
    inverse = 1 / d_new + (1 / d_shocked - 1 / d_own)
    root = 1 / inverse - new.eps
    solved = (new.bias2 * root**2 - (1 - new.beta2) * squared) / new.beta2
    changed, real = moved != moment, (inverse > 0) & torch.isfinite(inverse)
    missed = changed & ~(real & (root >= 0) & (solved >= 0))
    return torch.where(changed, torch.where(real, solved.clamp(min=0), moved), moment), missed
