"""Γ and its two paths: how a gradient difference reaches the parameters through m and through v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.changes import ControlStep, Edit, names_of
from ..core.guards import hidden_buffers
from ..core.linear_step import LinearStep
from ..core.operators import WriteIn
from ..core.probe import Probe
from ..core.reductions import count, norms, paired
from ..core.state import difference
from ..errors import HiddenState, InvalidInput
from ..results.provenance import asked, provenance

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change

PATHS = ("m", "v")


def split_write(linear: LinearStep, xi: Float[Tensor, " param"]) -> Float[Tensor, "path param"]:
    """δθ = Γ ξ as its two terms, (1−β1) M Jξ (g→m→θ) and 2(1−β2) V g⊙Jξ (g→v→θ). `eq:app_Gamma`.

    No gradient, one elementwise pass. At v̂ = 0 = m̂ the second term is 0, as it is in `WriteIn`.

    linear: of a step, such as `path.control(at).linear`. xi: as long as its padded vectors.

    >>> linear = path.control(0).linear
    >>> theory.split_write(linear, torch.ones_like(linear.g)).shape[0]
    2
    """
    dx = WriteIn(linear).mv(xi)
    return torch.stack([linear.dq_dm * dx.m, linear.dq_dv * dx.v])


def write_paths(change: Change, probe: Any = None) -> xr.Dataset:
    """How much of each change's first parameter write comes through m and how much through v.

    write_norm           ‖δθ‖ of each path (channel "m": g→m→θ, "v": g→v→θ); total_norm: of their sum
    alignment            cosine of the two paths: −1 where they cancel, NaN where one of them is zero
    linear_error         ‖exact δθ − Γξ‖ / ‖exact δθ‖: what the split, which is linear, leaves out
    layer_norm, layer_total_norm   the same norms for each parameter by its name
    response             with a probe, ⟨∇F, δθ⟩ of each path at h = 1, positive where the loss goes up;
    layer_response       its share by parameter. Both sum to the tangent response.
    no_derivative        coordinates at which the change has no first derivative; where there are any, all
                         of the above is NaN: v̂ = 0 with m̂ ≠ 0, or a parameter that the control's batch skips

    Costs one gradient for the control, one per replaced batch, and one for a probe.

    >>> found = theory.write_paths(change, probe)
    >>> (found["alignment"] < 0).values.tolist()  # the two paths work against each other
    [True, True]
    """
    import xarray as xr

    control, layout = change.path.control(change.at), change.path.point.loss.layout
    slope = None if probe is None else probe_slope(change, Probe.of(probe), control)
    rows = [_path_row(control, edit, slope) for edit in change.edits]
    dims = {
        **dict.fromkeys(("write_norm", "response"), ("change", "channel")),
        **dict.fromkeys(("layer_norm", "layer_response"), ("change", "channel", "layer")),
        "layer_total_norm": ("change", "layer"),
    }
    values = {
        name: (dims.get(name, ("change",)), torch.stack([row[name] for row in rows]).cpu().numpy()) for name in rows[0]
    }
    return xr.Dataset(
        {**values, **asked(change.kind, change.at, None if probe is None else Probe.of(probe))},
        coords={"change": names_of(change.edits), "channel": list(PATHS), "layer": list(layout.names)},
        attrs=provenance(change.path.trajectory),
    )


def _path_row(control: ControlStep, edit: Edit, slope: Float[Tensor, " param"] | None) -> dict[str, Tensor]:
    layout, shock = control.dynamics.layout, edit.shock(control)
    xi = gradient_difference(shock.xi, edit)
    paths = split_write(control.linear, xi).double()
    total, exact = paths.sum(0), difference(shock.endpoint(1.0)[0], control.after).theta.double()

    def by_layer(values: Float[Tensor, "*rows param"]) -> tuple[Tensor, ...]:
        return layout.compact(values).split(layout.sizes, dim=-1)

    row = {
        "write_norm": norms(paths),
        "total_norm": norms(total),
        "alignment": paired(*paths) / norms(paths).prod(),
        "linear_error": norms(exact - total) / norms(exact),
        "layer_norm": torch.stack([norms(part) for part in by_layer(paths)], dim=-1),
        "layer_total_norm": torch.stack([norms(part) for part in by_layer(total)]),
    }
    if slope is not None:
        shares = torch.stack([part.sum(-1) for part in by_layer(paths * slope.double())], dim=-1)
        row |= {"response": shares.sum(-1), "layer_response": shares}
    none = count(touched(without_derivative(control.linear), control.linear, xi))
    if none:
        row = {name: torch.full_like(values, torch.nan) for name, values in row.items()}
    return {**row, "no_derivative": torch.tensor(none)}


# --- shared with the second order


def gradient_difference(xi: Float[Tensor, " param"] | None, edit: Edit) -> Float[Tensor, " param"]:
    """ξ of a change, refused where the change is not a difference of gradients."""
    if xi is None:
        raise InvalidInput(
            f"a {edit.name!r} is not a difference of gradients, so it has no ξ to write in; "
            "use replace, perturb or zero, or read its exact difference from change.difference()"
        )
    return xi


def without_derivative(linear: LinearStep) -> Bool[Tensor, " param"]:
    """Where the step has no derivative in the gradient: v̂ = 0 with m̂ ≠ 0, and parameters without a gradient.

    A gradient where the control had none starts the parameter's decay and step count: a jump at ξ = 0.
    """
    mask = linear.broken.clone()
    for run in linear.runs:
        mask[run.where] |= not run.active
    return mask


def touched(mask: Bool[Tensor, " param"], linear: LinearStep, xi: Float[Tensor, " param"]) -> Bool[Tensor, " param"]:
    """Those of the marked coordinates that ξ reaches, directly or through the norm that clipping divides by."""
    return mask & ((xi != 0) | (linear.gradient_variation(xi) != 0))


def probe_slope(change: Change, probe: Probe, control: ControlStep) -> Float[Tensor, " param"]:
    """∇F at the first state after the change: 1 g. Refused where F depends on moving buffers."""
    require_first_horizon(change, probe, control)
    trajectory = change.path.trajectory
    return trajectory.dynamics.layout.join(probe.gradient(trajectory, change.at + 1, control.after).grads)


def require_first_horizon(change: Change, probe: Probe, control: ControlStep) -> None:
    """The probe is defined at h = 1, and (θ, m, v) is all that it depends on there."""
    trajectory, time = change.path.trajectory, change.at + 1
    if time > probe.last_time(trajectory):
        raise InvalidInput(f"{probe.name} is not defined after the last step; follow one more batch")
    loss, batch, random, _ = probe.arguments(trajectory, time)
    before = control.before.buffers
    moved = {name: b for name, b in control.after.buffers.items() if not torch.equal(b, before[name])}
    hidden = change.path.check().hidden or hidden_buffers(
        loss, control.before, moved, batch, random, evaluating=probe.evaluating
    )
    if hidden:
        raise HiddenState(
            f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), which "
            "are state outside (θ, m, v), so its derivatives would be wrong; probe in training mode"
        )
