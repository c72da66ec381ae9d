"""Bounds on the tangent's error: the write-in's, the theorem's, and the recursive envelope (appendices A and D).

A bound needs constants that no pass over a large network can prove. On dense systems (up to `DENSE` joint
coordinates) operator norms are exact (SVD) and Lipschitz constants are the largest found on the segment;
elsewhere norms come from power iteration and constants are the smallest that the pair allows. Variables
that end in `_by` say which: "exact", "sampled" or "estimate".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.adamw import Run
from ..core.changes import ControlStep, Shock
from ..core.operators import LinearOperator, Propagator, Transition, WriteIn
from ..core.probe import Probe
from ..core.randomness import Randomness, generator_of
from ..core.reductions import count, largest, norms
from ..core.state import Cotangent, JointState, Tangent, difference
from ..results.provenance import provenance
from .remainder import decompose, joint, minus
from .switching import PairStep, joint_norm, margin_of, paired_steps, start_pair

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change

DENSE = 600  # joint coordinates 3d up to which norms are taken from dense matrices
SEGMENT = (0.1, 0.4, 0.7, 1.0)  # where on a segment Lipschitz quotients are taken
PIECES = 64  # of the gradient's segment, on each of which the curvature is enclosed
ROUNDING = 1e-10  # relative: far above the rounding of the few operations in an enclosure


# --- the write-in


def curvature_bound(
    run: Run,
    m: Float[Tensor, " param"],
    v: Float[Tensor, " param"],
    start: Float[Tensor, " param"],
    stop: Float[Tensor, " param"],
    pieces: int = PIECES,
) -> Float[Tensor, " param"]:
    """sup |χ_i| on the segment of gradients from `start` to `stop`, never below it (appendix A).

    χ = 4 a1 a2 g q_mv + 4 a2² g² q_vv + 2 a2 V is ψ''(g), coordinate by coordinate; m and v are the moments
    before the step. Interval arithmetic on `pieces` parts of the segment: an enclosure, and exact as they
    shrink. Infinite where v̂ reaches 0, where ψ has no second derivative.

    >>> run, m, v, g = path.control(0).linear.runs[0], *torch.tensor([[0.1], [0.01], [0.1]])
    >>> bool(theory.curvature_bound(run, m, v, g, g + 0.2) > theory.curvature_bound(run, m, v, g, g + 0.1))
    True
    """
    out = torch.zeros_like(start)
    a1, a2 = 1 - run.beta1, 1 - run.beta2
    for k in range(pieces):
        ends = torch.stack([start + (stop - start) * (k / pieces), start + (stop - start) * ((k + 1) / pieces)])
        low, high = ends.amin(0), ends.amax(0)
        large = torch.maximum(low.abs(), high.abs())
        small = torch.where(low * high <= 0, 0.0, torch.minimum(low.abs(), high.abs()))
        m_hat = [(run.beta1 * m + a1 * g) / run.bias1 for g in (low, high)]
        roots = [((run.beta2 * v + a2 * g * g) / run.bias2).sqrt() for g in (small, large)]
        # both fall with √v̂, so that their ends swap
        inverse = [1 / (s * (s + run.eps) ** 2) for s in reversed(roots)]
        steep = [(3 * s + run.eps) / (s * (s + run.eps)) ** 3 for s in reversed(roots)]
        crossed = _times([low, high], inverse)
        bent = [
            inverse[0] - (a2 / run.bias2) * large**2 * steep[1],
            inverse[1] - (a2 / run.bias2) * small**2 * steep[0],
        ]
        along = _times(m_hat, bent)
        slope = 2 * a1 * a2 * run.lr / (run.bias1 * run.bias2)
        curve = a2 * run.lr / run.bias2
        total = [slope * x + curve * y for x, y in zip(crossed, along)]
        size = torch.maximum(total[0].abs(), total[1].abs()).nan_to_num(nan=math.inf)
        out = torch.maximum(out, size)
    return out * (1 + ROUNDING)


def _times(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """The product of two intervals."""
    products = torch.stack([x * y for x in a for y in b])
    return [products.amin(0), products.amax(0)]


def write_in_bound(change: Change, *, scale: float = 1.0, index: int = 0) -> xr.Dataset:
    """‖r_θ‖ ≤ κ_θ/2 ‖ξ‖² and ‖r_B‖ ≤ (κ_θ/2 + 1−β2) ‖ξ‖² (eq:app_writein_quadratic_bound), beside the truth.

    κ_θ = max_i sup |χ_i| on the segment g^c … g^c + ξ, enclosed rigorously (`curvature_bound`);
    `coordinate_bound` keeps the coordinates apart, ‖(sup |χ_i| ξ_i²)_i‖/2, and is much sharper. NaN with a
    `reason` where ψ does not describe the step: no ξ, clipping that binds, a parameter with a gradient on one
    side only. No gradient beyond the change's own.

    index: which of the changes, at `scale`.

    >>> found = theory.write_in_bound(change, index=1)
    >>> bool(found["remainder"] <= found["coordinate_bound"] <= found["bound"])
    True
    """
    import xarray as xr

    control, shock, shocked = start_pair(change, scale, index)
    names = ("kappa", "xi_norm", "remainder", "bound", "coordinate_bound", "joint_remainder", "joint_bound")
    values = dict.fromkeys(names, math.nan)
    reason = _no_curvature(change, control, shock, scale, index)
    if shock.xi is not None and not reason:
        linear, before = control.linear, control.before
        u, chi = linear.gradient_variation(shock.xi * scale), torch.zeros_like(shock.xi)
        for run in linear.runs:
            if run.active:
                w = run.where
                chi[w] = curvature_bound(run, before.m[w], before.v[w], linear.g[w], linear.g[w] + u[w])
        chi = torch.where(u != 0, chi, 0.0)
        rest = minus(difference(shocked, control.after), WriteIn(linear).mv(shock.xi) * scale)
        kappa, size = largest(chi), float(norms(u))
        memory = max(1 - run.beta2 for run in linear.runs)
        bounds = (kappa / 2 * size**2, float(norms(chi * u * u)) / 2, (kappa / 2 + memory) * size**2)
        found = (kappa, size, float(norms(rest.theta)), *bounds[:2], joint_norm(rest), bounds[2])
        values = dict(zip(names, found))
    found_by = "" if reason else "enclosed by interval arithmetic"
    return xr.Dataset({**values, "kappa_by": found_by, "reason": reason}, attrs=provenance(change.path.trajectory))


def _no_curvature(change: Change, control: ControlStep, shock: Shock, scale: float, index: int) -> str:
    if shock.xi is None:
        return f"a {change.edits[index].name} has no ξ"
    if control.linear.clip.binds or shock.endpoint(scale)[1].binds:
        return "clipping binds, and ψ is not coordinatewise there"
    if any(count(shock.xi[run.where] != 0) for run in control.linear.runs if not run.active):
        return "a parameter gets a gradient on one side only"
    return ""


# --- norms and constants


def operator_norm(operator: LinearOperator, iterations: int = 12, generator: Randomness = 0) -> tuple[float, str]:
    """‖A‖ or ‖Φ‖ and how it was found: "exact" by SVD of a small system, else a power-iteration "estimate".

    The estimate approaches the norm from below: `iterations` products with the operator and its transpose.

    generator: draws the first vector; or an integer seed.

    >>> size, how = theory.operator_norm(path.transition(1))
    >>> size > 1, how
    (True, 'exact')
    """
    layout, draw = operator.layout, generator_of(generator)
    if 3 * layout.size <= DENSE:
        return _spectral(operator.as_matrix()), "exact"
    noise = torch.randn(3, layout.size, generator=draw, dtype=torch.float64, device=draw.device).to(layout.device)
    dx, found = Tangent(*(layout.expand(row) for row in noise)), 0.0
    for _ in range(iterations):
        dx = dx * (1 / joint_norm(dx))
        image = operator.mv(dx)
        found = joint_norm(image)
        if found == 0:
            break
        back = operator.rmv(Cotangent(image.theta, image.m, image.v))
        dx = Tangent(back.theta, back.m, back.v)
    return found, "estimate"


def _spectral(matrix: Float[Tensor, "out in"]) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def smooth_constant(pair: PairStep, transition: Float[Tensor, "out in"]) -> float:
    """L_s: how fast D f̃_s turns along the segment x^c … x^c + δx (eq:app_smooth_remainder_bound).

    The largest ‖D f̃(x^c + τ δx) − A‖ / (τ ‖δx‖) over `SEGMENT`, with `transition` the dense A. Small systems.

    >>> from aftershock.theory.switching import pair_at
    >>> pair = pair_at(change, 1, index=1)
    >>> theory.smooth_constant(pair, path.transition(1).as_matrix()) > 0
    True
    """
    deviation = pair.deviation
    size = joint_norm(deviation)
    if size == 0:
        return 0.0
    quotients = []
    for tau in SEGMENT:
        there = Transition(pair.extension.linearize(moved(pair.control, deviation, tau))).as_matrix()
        quotients.append(float(torch.linalg.matrix_norm(there - transition, 2)) / (tau * size))
    return max(quotients)


def moved(state: JointState, dx: Tangent, tau: float) -> JointState:
    """x + τ δx, with the buffers of x."""
    return replace(state, theta=state.theta + tau * dx.theta, m=state.m + tau * dx.m, v=state.v + tau * dx.v)


def probe_constant(change: Change, probe: Probe, outcome: int, control: JointState, shocked: JointState) -> float:
    """L_F: the largest ‖∇F(θ^c + τ δθ) − ∇F(θ^c)‖ / (τ ‖δθ‖) over `SEGMENT`, F read at state `outcome`. 6 g.

    >>> from dataclasses import replace
    >>> control = path.control(0).after
    >>> shocked = replace(control, theta=control.theta + change.difference()[1].theta)
    >>> theory.probe_constant(change, ak.Probe(batch=probe), 1, control, shocked) > 0
    True
    """
    trajectory = change.path.trajectory
    layout, deviation = trajectory.dynamics.layout, difference(shocked, control)
    size = float(norms(deviation.theta))
    if size == 0:
        return 0.0

    def slope(tau: float) -> Tensor:
        return layout.join(probe.gradient(trajectory, outcome, moved(control, deviation, tau)).grads)

    here = slope(0.0)
    return max(float(norms(slope(tau) - here)) / (tau * size) for tau in SEGMENT)


# --- the theorem and the envelope


def error_bounds(
    change: Change, *, scale: float = 1.0, index: int = 0, horizon: int | None = None, probe: Any = None
) -> xr.Dataset:
    """Every bound on the tangent's error at each horizon, beside the error itself.

    state_bound          ‖Φ‖ ‖r_B‖ + Σ_j ‖Φ‖ (L_j/2 ‖δx_j‖² + ‖r^sw_j‖)         (eq:multistep_state_error_bound)
    envelope             ε' = ‖A‖ ε + L/2 (‖δx̂‖ + ε)² + ‖r^sw‖                   (eq:app_epsilon_recursion)
    quadratic_envelope   ε' = ‖A‖ ε + (L/2 + C^sw) (‖δx̂‖ + ε)²          (eq:app_quadratic_epsilon_recursion)
    output_bound         ‖c‖ ‖e‖ + L_F/2 ‖δθ‖², with a probe                   (eq:multistep_output_error_bound)

    C^sw is ρ L̄_a of `activation_margin` on dense systems, else ‖r^sw‖/‖δx‖². Costs about 20·d products a step
    where dense, and 24·H³/6 elsewhere: choose a short horizon.

    index: which of the changes, at `scale`.

    >>> found = theory.error_bounds(change, index=1, horizon=2, probe=probe)
    >>> bool((abs(found["output_error"]) <= found["output_bound"]).all())
    True
    >>> bool((found["state_bound"] <= found["envelope"] * (1 + 1e-9)).all()), found["norms_by"].item()
    (True, 'exact')
    """
    import xarray as xr

    parts = decompose(change, scale=scale, index=index, horizon=horizon, probe=probe).data
    count = parts.sizes["horizon"]
    dense = 3 * change.path.trajectory.dynamics.layout.size <= DENSE
    shocked = start_pair(change, scale, index)[2]
    found = _Constants(change, parts, dense)
    for pair in paired_steps(change, shocked, count):
        found.step(pair)
    data = xr.Dataset(
        {
            "state_error": joint(parts["state_error"]),
            "state_bound": ("horizon", found.state_bound()),
            "envelope": ("horizon", found.envelope(quadratic=False)),
            "quadratic_envelope": ("horizon", found.envelope(quadratic=True)),
            "transition_norm": ("step", found.transition_norms),
            "smooth_constant": ("step", found.smooth),
            "switching_constant": ("step", found.switching),
            "scale": scale,
            "norms_by": "exact" if dense else "estimate (power iteration, from below)",
            "smooth_constant_by": "sampled on the segment" if dense else "estimate: the smallest that this pair allows",
            "switching_constant_by": "; ".join(found.how) or "no step",
        },
        coords={"step": parts["step"]},
        attrs=provenance(change.path.trajectory),
    )
    if probe is not None:
        data["output_error"] = parts["output_error"]
        data["probe_constant"] = ("horizon", found.probe_constants(Probe.of(probe), shocked))
        curved = data["probe_constant"] / 2 * parts["deviation"].sel(channel="theta", drop=True) ** 2
        data["output_bound"] = parts["readout_norm"] * data["state_error"] + curved
        data["probe_constant_by"] = "sampled on the segment"
    return data


class _Constants:
    """The constants of every step of one pair, and the bounds that they make."""

    def __init__(self, change: Change, parts: xr.Dataset, dense: bool) -> None:
        self.change, self.parts, self.dense = change, parts, dense
        self.pairs: list[PairStep] = []
        self.matrices: list[Tensor] = []
        self.transition_norms: list[float] = []
        self.smooth: list[float] = []
        self.switching: list[float] = []
        self.how: list[str] = []
        self.defects = joint(parts["switching_defect"]).values
        self.remainders = joint(parts["smooth_remainder"]).values
        self.deviations, self.tangents = joint(parts["deviation"]).values, joint(parts["tangent"]).values

    def step(self, pair: PairStep) -> None:
        i, size = len(self.pairs), float(self.deviations[len(self.pairs)])
        transition = Transition(self.change.path.trajectory.linearize(pair.step, pair.control))
        # the smallest constants that this pair allows
        smooth, constant = (
            (2 * float(self.remainders[i]) / size**2, float(self.defects[i]) / size**2) if size else (0, 0)
        )
        how = "estimate: the smallest that this pair allows"
        if self.dense:
            self.matrices.append(transition.as_matrix())
            norm, smooth = _spectral(self.matrices[-1]), smooth_constant(pair, self.matrices[-1])
            margin = float(margin_of(pair)["switching_constant"])
            if not math.isnan(margin):
                constant, how = margin, "ρ L̄ of the activation margins"
        else:
            norm = operator_norm(transition)[0]
        self.transition_norms.append(norm)
        self.smooth.append(smooth)
        self.switching.append(constant)
        self.how += [how] if how not in self.how else []
        self.pairs.append(pair)

    def propagator_norm(self, start: int, stop: int) -> float:
        """‖Φ‖ from horizon `start` to horizon `stop`."""
        if start == stop:
            return 1.0
        if not self.dense:
            at = self.change.at
            return operator_norm(Propagator(self.change.path.trajectory, at + start, at + stop))[0]
        matrix = self.matrices[start - 1]
        for i in range(start, stop - 1):
            matrix = self.matrices[i] @ matrix
        return _spectral(matrix)

    def state_bound(self) -> list[float]:
        first = float(joint(self.parts["write_in_remainder"]))
        bounds = []
        for h in range(1, self.parts.sizes["horizon"] + 1):
            total = self.propagator_norm(1, h) * first
            for j in range(h - 1):
                born = self.smooth[j] / 2 * self.deviations[j] ** 2 + self.defects[j]
                total += self.propagator_norm(j + 2, h) * float(born)
            bounds.append(total)
        return bounds

    def envelope(self, quadratic: bool) -> list[float]:
        values = [float(joint(self.parts["write_in_remainder"]))]
        for i in range(len(self.pairs)):
            reach = float(self.tangents[i]) + values[-1]
            curved = self.smooth[i] / 2 * reach**2
            switched = self.switching[i] * reach**2 if quadratic else float(self.defects[i])
            values.append(self.transition_norms[i] * values[-1] + curved + switched)
        return values

    def probe_constants(self, probe: Probe, shocked: JointState) -> list[float]:
        at = self.change.at
        states = [(self.change.path.trajectory.state(at + 1), shocked)]
        states += [(pair.control_after, pair.shocked_after) for pair in self.pairs]
        return [probe_constant(self.change, probe, at + h, *both) for h, both in enumerate(states, 1)]
