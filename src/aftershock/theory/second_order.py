"""The one-step response to second order in the scale: the probe's curvature and the bend of the write-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.changes import ControlStep, Shock, names_of, scales_of
from ..core.clipping import TORCH_EPSILON, Clip
from ..core.graphs import GradientGraph
from ..core.operators import WriteIn, readout
from ..core.probe import Probe
from ..core.reductions import count, products
from ..core.state import pair
from ..errors import InvalidInput
from ..results.provenance import asked, provenance
from .write_paths import gradient_difference, require_first_horizon, touched, without_derivative

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change


def d2theta_dg2(control: ControlStep) -> Float[Tensor, " param"]:
    """χ, the diagonal of D²ψ at the gradient that reaches the moments. Appendix `app:second_order_writein`.

    With s = √v̂, d = s + ε and r = ∂s/∂g = (1−β2) g / (ρ2 s), the paper's sum of q_mv, q_vv and V is

        χ = η/d² · ( 2 (1−β1)/ρ1 · r  −  2 m̂ r²/d  +  m̂ ((1−β2)/ρ2 − r²)/s )

    (eq:write_in_curvature), in which nothing overflows where s is small. Does not exist at v̂ = 0, where 0 is given: see
    `second_order`, which counts such coordinates. One elementwise pass.
    """
    linear, chi = control.linear, control.dynamics.layout.zeros()
    for run in linear.runs:
        if not run.active:
            continue
        w = run.where
        m_hat, s = control.after.m[w] / run.bias1, (control.after.v[w] / run.bias2).sqrt()
        d, weight = s + run.eps, (1 - run.beta2) / run.bias2
        r = weight * linear.g[w] / s
        bend = 2 * (1 - run.beta1) / run.bias1 * r - 2 * m_hat * r**2 / d + m_hat * (weight - r**2) / s
        chi[w] = torch.where(s > 0, run.lr / d**2 * bend, 0.0)
    return chi


def clip_curvature(
    clip: Clip, raw: Float[Tensor, " param"], xi: Float[Tensor, " param"]
) -> Float[Tensor, " param"] | None:
    """The second derivative of global-norm clipping at ĝ along ξ; None where it does not bind.

    With n = ‖ĝ‖, e = 1e-6, c = max_norm/(n+e), a = ⟨ĝ,ξ⟩/n and b = ∂²n = (‖ξ‖² − a²)/n:

        c · ( (2a²/(n+e)² − b/(n+e)) ĝ  −  2a/(n+e) ξ )        (eq:clip_curvature)
    """
    if not clip.binds:
        return None
    n, shifted = clip.norm, clip.norm + TORCH_EPSILON
    a = products(xi, raw) / n
    b = (products(xi, xi) - a * a) / n
    return clip.factor * ((2 * a * a / shifted**2 - b / shifted) * raw - (2 * a / shifted) * xi)


def write_curvature(control: ControlStep, xi: Float[Tensor, " param"]) -> Float[Tensor, " param"]:
    """𝒬[ξ, ξ] = χ ⊙ (Jξ)² + Γ D²clip[ξ, ξ]: twice the quadratic part of δθ. `eq:app_second_order_theta`.

    The second term is 0 where clipping does not bind, which is the paper's case.
    """
    linear = control.linear
    bend = d2theta_dg2(control) * linear.gradient_variation(xi) ** 2
    clipping = clip_curvature(linear.clip, linear.raw, xi)
    if clipping is not None:
        clipped = linear.raw * linear.clip.factor
        past_the_clip = WriteIn(replace(linear, raw=clipped, clip=Clip(linear.clip.norm, 1.0)))
        bend += past_the_clip.mv(clipping).theta
    return bend


def second_order(change: Change, probe: Any, *, scales: Sequence[float] = (1.0,)) -> xr.Dataset:
    """δF_{t+1}(α) = α·linear + α²/2·quadratic + O(α³). `eq:app_complete_one_step`.

    linear      ∇Fᵀ Γξ, the tangent response at h = 1
    curvature   (Γξ)ᵀ H_F (Γξ), the probe's curvature under the linear write
    write_in    ∇Fᵀ 𝒬[ξ, ξ], the bend of AdamW's own write (and of clipping where it binds)
    quadratic   Q = curvature + write_in
    predicted, exact   the expansion and the true response at each of `scales`; clip_switched: clipping
                bound on one side only, a kink that the expansion does not know
    no_derivative, no_second_derivative   how many coordinates that the change touches have none: the first
                makes every term NaN, the second (v̂ = 0: the step bends as |g| there) write_in and what it enters

    Costs a gradient for the control and each replaced batch, a graph of the probe, then a Hessian product
    per change and a forward pass per change and scale.

    change: replaced batches or perturbations, which have a ξ. scales: α, nonzero numbers.

    >>> found = theory.second_order(change, probe, scales=[0.1]).sel(change="replace 1")
    >>> bool(abs(found["predicted"] - found["exact"]) < abs(0.1 * found["linear"] - found["exact"]))
    True
    """
    import xarray as xr

    found = Probe.of(probe)
    scales = scales_of(change.edits, scales)
    if found.evaluating:
        raise InvalidInput("the curvature of a probe in eval mode is not available; probe in the modes of training")
    control, trajectory = change.path.control(change.at), change.path.trajectory
    require_first_horizon(change, found, control)
    loss, batch, random, where = found.arguments(trajectory, change.at + 1)
    graph = GradientGraph(loss, control.after.theta, control.after.buffers, batch, random, where)
    rows = []
    for edit in change.edits:  # one at a time: ξ of a large model is as large as the model
        shock = edit.shock(control)
        terms = _terms(control, gradient_difference(shock.xi, edit), graph)
        rows.append({**terms, **_exact(change, control, shock, found, scales)})
    dims = dict.fromkeys(("exact", "clip_switched"), ("change", "scale"))
    data = xr.Dataset(
        {name: (dims.get(name, ("change",)), [row[name] for row in rows]) for name in rows[0]}
        | asked(change.kind, change.at, found),
        coords={"change": names_of(change.edits), "scale": scales},
        attrs=provenance(change.path.trajectory),
    )
    data["quadratic"] = data["curvature"] + data["write_in"]
    data["predicted"] = data["linear"] * data["scale"] + data["quadratic"] * data["scale"] ** 2 / 2
    return data


def _terms(control: ControlStep, xi: Float[Tensor, " param"], graph: GradientGraph) -> dict[str, Any]:
    linear = control.linear
    dx, undefined = WriteIn(linear).mv(xi[None]), without_derivative(linear)
    none = count(touched(undefined, linear, xi))
    none_second = count(touched(undefined | linear.zero_v, linear, xi))
    terms = {
        "linear": float(pair(readout(graph.raw[None]), dx)),
        "curvature": float(pair(readout(graph.products(dx.theta)), dx)),
        "write_in": float("nan") if none_second else float(products(graph.raw, write_curvature(control, xi))),
    }
    if none:
        terms = dict.fromkeys(terms, float("nan"))
    return {**terms, "no_derivative": none, "no_second_derivative": none_second}


def _exact(
    change: Change, control: ControlStep, shock: Shock, probe: Probe, scales: Sequence[float]
) -> dict[str, list[Any]]:
    """F(θ^s(α)) − F(θ^c) right after the change, and whether clipping switched: a forward pass per scale."""
    trajectory, time = change.path.trajectory, change.at + 1
    reference = float(probe.value(trajectory, time, control.after.theta, control.after))
    ends = [shock.endpoint(float(scale)) for scale in scales]
    return {
        "exact": [float(probe.value(trajectory, time, end.theta, end)) - reference for end, _ in ends],
        "clip_switched": [clip.binds != control.linear.clip.binds for _, clip in ends],
    }
