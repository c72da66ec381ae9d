"""The paper's scores side by side: Full ISO (the tangent response), its ablations, and static norms.

Every score of the table comes from one sweep; the readout permutations need nothing but its products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.changes import ControlStep, Shock, first_tangent, names_of, tangent_lag
from ..core.dynamics import Linearized
from ..core.footprint import Curvature, Footprint
from ..core.graphs import GradientGraph
from ..core.memory import in_chunks, in_one_piece
from ..core.operators import Transition
from ..core.planning import at_once
from ..core.probe import Reader, Watch
from ..core.randomness import Randomness, generator_of
from ..core.reductions import norms, paired
from ..core.rollout import Moment, Rows, rollout
from ..core.row_costs import Load
from ..core.state import Cotangent, Tangent, difference, lag_of, pair, stack
from ..core.sweeps import recount_, recount_exactly_, transit_with_
from ..errors import InvalidInput
from ..results.provenance import asked, provenance
from ..results.statistics import rank_correlation

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from ..api.change import Change

TRAJECTORIES = (
    "full_iso",
    "no_propagation",
    "initial_theta",
    "clamped_theta",
    "frozen_dynamics",
    "frozen_readout",
    "norm_product",
    "endpoint",
    "semilinear",
)
STATIC = ("exact_one_step", "gradient_norm", "write_norm", "curvature")
SCORES = (*TRAJECTORIES, *STATIC)
STARTED = 5  # vectors of each change beside its rows, as measured: its ξ, its start and its exact end
LINEAR = 5  # rows a change carries beside the semilinear one, the frozen one among them


def scores(change: Change, probe: Any, *, horizon: int | None = None, memory: str | int | None = None) -> xr.Dataset:
    """One variable per score, over changes, such as `full_iso[change]`; and where the score is max_h |r_h|, its
    trajectory, such as `full_iso_response[change, horizon]`.

    With δx_1 = B ξ and c̄_h = ∇F(θ^c_{t+h}) (eq:app_full_iso, eq:app_temporal_ablations, eq:app_scalar_baselines):

    full_iso         c̄_hᵀ P_θ Φ(t+h, t+1) δx_1             no_propagation   c̄_hᵀ δθ_1
    initial_theta    c̄_hᵀ P_θ Φ(t+h, t+1) P_θᵀ δθ_1        frozen_dynamics  c̄_hᵀ P_θ A_{t+1}^{h−1} δx_1
    clamped_theta    c̄_hᵀ (∏ [A_s]_θθ) δθ_1                frozen_readout   c̄_1ᵀ δθ_h
    norm_product     ‖c̄_h‖ ‖δθ_h‖                          exact_one_step   |d_1|, by a second step
    gradient_norm    ‖ξ‖                                   write_norm       ‖δθ_1‖
    curvature        |ξᵀ H_ref ξ|, H_ref the Hessian of the control's batch: the mean over its micro-batches
    endpoint         tangents from the exact δx_1, read by the real probe; semilinear: the engine's own answer

    A change without ξ starts from its exact difference; its gradient_norm and curvature are NaN and `reason` says why.
    After a skip, whose counts are behind, Φ of full_iso is of steps with its own bias corrections, and each
    step adds what those do at the control's moments (`core.sweeps.recount_`), which is no part of δx: so do `endpoint`
    and what is made of full_iso's δθ_h. initial_theta, clamped_theta and frozen_dynamics know A alone.

    `alignment[change, horizon, readout_horizon]` is c̄ᵀ at `readout_horizon` with δθ at `horizon`: its diagonal is Full
    ISO, and `readout_null` permutes it. `readout_cosine[horizon]` is cos(c̄_1, c̄_h).

    Costs 6·N·(H−1) − 3·N Hessian products in all, through one graph per step: less than 1.2 × those of the five
    distinct propagations (full, initial θ, clamped θ, frozen, endpoint); N + H gradients; 2·N·H forward passes.
    Keeps H readouts in memory.

    probe, horizon, memory: as in `change.response`.

    >>> table = theory.scores(change, probe)
    >>> [float(f"{size:.2g}") for size in table["full_iso"].values]
    [0.00099, 0.0064]
    >>> [float(f"{size:.2g}") for size in table["gradient_norm"].values]
    [0.27, 1.1]
    """
    watch = change.path.watch(change.at, probe, horizon)
    change.path.require_linear(watch)
    path, control = change.path, change.path.control(change.at)
    limit = path.memory if memory is None else memory
    size = at_once(path.trajectory, len(change), _rows, limit, _held(watch), "scoring one change")
    slopes = in_one_piece(watch.slopes, "the slopes of the probe")
    reference = in_one_piece(
        lambda: path.trajectory.linearize(control.step, control.before).graph, "the control's graph"
    )

    def table(some: range) -> dict[str, Tensor]:
        return _Sweep(watch, control, [change.edits[i].shock(control) for i in some], slopes).table(reference)

    return _labelled(watch, change, in_chunks(len(change), size, table, "scoring changes"), slopes)


def _rows(changes: int) -> Load:
    return Load(semilinear=changes, linear=LINEAR * changes)


def _held(watch: Watch) -> Callable[[int], float]:
    """The readouts and the reference's graph, and what each change holds beside its rows."""
    f, graph = Footprint.of(watch.trajectory), Curvature.of(watch.trajectory).graph
    return lambda changes: watch.horizons + graph / f.vector + STARTED * changes


class _Sweep:
    """The propagations of some changes, and what is read from them. All in float64 on the CPU."""

    def __init__(
        self,
        watch: Watch,
        control: ControlStep,
        shocks: Sequence[Shock],
        slopes: Float[Tensor, "horizon param"],
    ) -> None:
        self.watch, self.shocks = watch, shocks
        self.readouts = Cotangent(slopes, slopes[:, :0], slopes[:, :0])
        ends = [shock.endpoint(1.0)[0] for shock in shocks]
        self.start = stack([first_tangent(control, shock) for shock in shocks])
        self.exact = stack([difference(end, control.after) for end in ends])
        self.lags = [lag_of(end, control.after) for end in ends]
        self.start_lags = [tangent_lag(control, shock, end) for shock, end in zip(shocks, ends)]
        count, horizons = len(shocks), watch.horizons
        self.alignment = torch.zeros(count, horizons, horizons, dtype=torch.float64)
        self.norms = torch.zeros(count, horizons, dtype=torch.float64)
        self.found = {name: torch.zeros(count, horizons, dtype=torch.float64) for name in TRAJECTORIES}

    def table(self, reference: GradientGraph) -> dict[str, Tensor]:
        """Trajectories `[change, horizon]`, static scores `[change]` and the alignment, by name; of changes without ξ
        without those that are made of it."""
        self.run()
        found, slopes = self.found, self.readouts.theta
        found["full_iso"] = self.alignment.diagonal(dim1=1, dim2=2)
        found["frozen_dynamics"][:, 0] = self.alignment[:, 0, 0]
        found["no_propagation"] = self.alignment[:, 0, :]
        found["frozen_readout"] = self.alignment[:, :, 0]
        found["norm_product"] = norms(slopes).double().cpu() * self.norms
        found["exact_one_step"] = found["endpoint"][:, 0].abs()
        found["write_norm"] = self.norms[:, 0]
        xis = [shock.xi for shock in self.shocks if shock.xi is not None]
        if len(xis) == len(self.shocks):
            xi = torch.stack(xis)
            found["gradient_norm"] = norms(xi).double().cpu()
            found["curvature"] = paired(xi, reference.products(xi)).abs().double().cpu()
        return {**found, "alignment": self.alignment}

    def run(self) -> None:
        """All rows of a step go through its one gradient graph."""
        count, none = len(self.shocks), torch.zeros_like(self.start.theta)
        alone = Tangent(self.start.theta, none, none)
        linear = _joined([self.start, alone, alone, self.exact])
        full, initial, clamped, endpoint = (linear[k * count : (k + 1) * count] for k in range(4))
        nothing = [(0,) * len(lag) for lag in self.lags]  # θ alone is at the control's counts
        lags = [*self.start_lags, *nothing, *nothing, *self.lags]
        rows = Rows(semilinear=self.exact.clone(), linear=linear, semilinear_lags=self.lags, linear_lags=lags)
        reader = Reader(self.watch.trajectory, self.watch.probe)
        for moment in self._moments(rows):
            h = moment.time - self.watch.first
            c = self.readouts[h : h + 1]
            self.alignment[:, h, :] = pair(self.readouts, _seen(full)).mT
            self.norms[:, h] = norms(full.theta)
            self.found["initial_theta"][:, h] = pair(c, _seen(initial))[0]
            self.found["clamped_theta"][:, h] = pair(c, _seen(clamped))[0]
            self.found["semilinear"][:, h] = reader.semilinear(moment)
            # the same reading of another row: endpoint-exact propagates linearly and reads the real probe
            self.found["endpoint"][:, h] = reader.semilinear(replace(moment, semilinear=endpoint))
            clamped.m.zero_()
            clamped.v.zero_()

    def _moments(self, rows: Rows) -> Iterator[Moment]:
        """The rows at every state. Five of six kinds start at one of two displacements, so that their first step takes
        two products a change; the frozen kind goes on through that step's graph. The rollout knows neither of the two,
        and takes every later step."""
        trajectory, begin, count = self.watch.trajectory, self.watch.first, len(self.shocks)
        assert rows.linear is not None
        assert rows.semilinear is not None
        moment = next(rollout(trajectory, begin, rows, begin))
        yield moment
        if begin == self.watch.last:
            return
        at = trajectory.linearize(trajectory.steps[begin], moment.control)
        kinds = [rows.linear[k * count : (k + 1) * count] for k in range(4)]
        linear = at.graph.products(self.start.theta)
        for dx in kinds[:3]:
            transit_with_(at, dx, linear.clone())
        del linear
        self._freeze(at, kinds[0])  # A alone, before a row behind in its counts takes its own bias corrections
        exact = at.graph.products(self.exact.theta)
        transit_with_(at, kinds[3], exact.clone())
        recount_(at, rows.linear, rows.linear_lags)
        at.linear.absorb_exactly_(rows.semilinear, exact, at.step.max_norm)
        recount_exactly_(at, rows.semilinear, rows.semilinear_lags)
        del at, moment, exact
        yield from rollout(trajectory, begin + 1, rows, self.watch.last)

    def _freeze(self, at: Linearized, dx: Tangent) -> None:
        """A_{t+1}^{h−1} δx_1, from A_{t+1} δx_1 on, through one graph."""
        for h, power in enumerate(itertools.islice(Transition(at).powers(dx), self.watch.horizons - 1), 1):
            self.found["frozen_dynamics"][:, h] = pair(self.readouts[h : h + 1], _seen(power))[0]


def _seen(dx: Tangent) -> Tangent:
    """P_θ δx: the blocks that a readout of θ pairs with zeros, left out, so that they cost nothing."""
    return Tangent(dx.theta, dx.m[:, :0], dx.v[:, :0])


def _joined(parts: Sequence[Tangent]) -> Tangent:
    return Tangent(*(torch.cat([getattr(dx, name) for dx in parts]) for name in ("theta", "m", "v")))


def _labelled(watch: Watch, change: Change, tables: Sequence[dict[str, Tensor]], slopes: Tensor) -> xr.Dataset:
    import xarray as xr

    values = {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
    responses = {name: values[name] for name in TRAJECTORIES}
    sizes = values | {name: response.abs().amax(1) for name, response in responses.items()}
    cosine = torch.nn.functional.cosine_similarity(slopes[:1], slopes, dim=1).double().cpu()
    missing = [name for name in SCORES if name not in values]
    sizes |= dict.fromkeys(missing, torch.full((len(change),), torch.nan, dtype=torch.float64))
    reason = f"a {change.kind} is not a difference of gradients: it has no ξ, and no {' and no '.join(missing)}"
    return xr.Dataset(
        {
            **{name: ("change", sizes[name].numpy()) for name in SCORES},
            **{f"{name}_response": (("change", "horizon"), values.numpy()) for name, values in responses.items()},
            "alignment": (("change", "horizon", "readout_horizon"), values["alignment"].numpy()),
            "readout_cosine": ("horizon", cosine.numpy()),
            "reason": reason if missing else "",
            **asked(change.kind, watch.at, watch.probe),
        },
        coords={"change": names_of(change.edits), "horizon": watch.range, "readout_horizon": watch.range},
        attrs=provenance(watch.trajectory),
    )


def readout_null(
    table: xr.Dataset,
    magnitude: xr.DataArray | np.ndarray | None = None,
    *,
    generator: Randomness = 0,
    permutations: int = 100,
) -> xr.Dataset:
    """How Full ISO ranks when the readouts come in a shuffled order: S_{i,π} = max_h |c̄_{π(h)}ᵀ δθ_{i,h}|.

    One permutation π is shared by all changes; `spearman[permutation]` is the rank correlation
    of the shuffled scores with `magnitude` (the exact M of every change; default: the table's own Full ISO
    score), `true_spearman` that of Full ISO itself, `percentile` the share of the null at or below it, in
    percent. Costs no gradient. Paper: "Readout controls", "Scalar baselines".

    table: of `scores`, for three changes or more. generator: draws the permutations; or an integer seed.

    >>> table = theory.scores(path.replace(batches[1:]), probe)
    >>> null = theory.readout_null(table, permutations=20)
    >>> null.sizes["permutation"], round(float(null["true_spearman"]), 6)
    (20, 1.0)
    """
    import numpy as np
    import xarray as xr

    horizons, changes = table.sizes["horizon"], table.sizes["change"]
    if horizons < 2:
        raise InvalidInput("a permutation of the readouts needs two of them or more; score with a longer horizon")
    if changes < 2 or permutations < 1:
        raise InvalidInput(f"a null of rank correlations needs two changes and a permutation; got {changes} change(s)")
    full = table["full_iso"].values
    target = full if magnitude is None else np.asarray(magnitude, dtype=float)
    if target.shape != (changes,):
        raise InvalidInput(f"magnitude needs one number per change ({changes}); got shape {target.shape}")
    draw = generator_of(generator)
    drawn = (torch.randperm(horizons, generator=draw, device=draw.device) for _ in range(permutations))
    orders = np.stack([order.cpu().numpy() for order in drawn])
    alignment = table["alignment"].values
    shuffled = np.abs(alignment[:, np.arange(horizons), orders]).max(axis=2).T
    null = rank_correlation(shuffled, target)[0]
    true = float(rank_correlation(full, target)[0])
    return xr.Dataset(
        {
            "spearman": ("permutation", null),
            "score": (("permutation", "change"), shuffled),
            "order": (("permutation", "horizon"), orders + 1),
            "true_spearman": true,
            "percentile": 100 * float(np.mean(null <= true)) if np.isfinite(null).all() else np.nan,
        },
        coords={"permutation": np.arange(permutations), "change": table["change"], "horizon": table["horizon"]},
        attrs=dict(table.attrs),
    )
