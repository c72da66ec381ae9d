"""Where the tangent's error comes from, for all changes of a step at once (paper, section 3.6, appendix D).

`remainder.decompose` splits one exact pair in every detail. Here many pairs share each step's linearization, and of
each only what a study reports is kept: the shares of the three sources, and how well they sum to the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.changes import names_of
from ..core.gates import Pattern, recording, replaying
from ..core.memory import in_chunks
from ..core.operators import WriteIn
from ..core.planning import at_once
from ..core.probe import Watch
from ..core.reductions import paired, products
from ..core.rollout import Moment, Rows, rollout
from ..core.row_costs import Load
from ..core.state import CHANNELS, JointState, Tangent, difference
from ..errors import InvalidInput
from ..results.provenance import asked, provenance
from .remainder import PARTS, ROWS, minus
from .switching import SmoothExtension, require_same_loss, start_pair

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change


# predicted rows that a change carries: the five of `ROWS`, and as much for its smooth step
CARRIED = 6


def error_shares(change: Change, probe: Any, *, scale: float = 1.0, memory: str | int | None = None) -> xr.Dataset:
    """Shares of the tangent's error by source, `[change, horizon]`, along the exact pair of every change.

    `state_share_*` are ⟨part, e⟩/‖e‖² of the joint state's error e (eq:exact_multistep_error). `output_error` is
    the error of the response, `output_from_*` its parts, signed, with the probe's own curvature under smooth and
    its own switched gates under switching. Either kind sums to its whole; `identity_residual` is ‖e − Σ parts‖.
    Costs 2 g and five Hessian products per change and step, and two forward passes per change and horizon.

    change: replaced batches or perturbations, which have a ξ. probe, scale, memory: as in `change.response`.

    >>> found = theory.error_shares(change, probe).sel(change="replace 1", horizon=4)
    >>> {part: round(float(found[f"state_share_{part}"]), 2) for part in ("write_in", "smooth", "switching")}
    {'write_in': 1.18, 'smooth': -0.18, 'switching': 0.0}
    """
    import xarray as xr

    watch = change.path.watch(change.at, probe)
    limit = change.path.memory if memory is None else memory
    size = at_once(watch.trajectory, len(change), _rows, limit, _held, "splitting the error of one change")
    parts = in_chunks(len(change), size, lambda some: _shares(watch, change, scale, some), "splitting errors")
    values = {name: torch.cat([part[name] for part in parts]).double().cpu().numpy() for name in parts[0]}
    return xr.Dataset(
        {
            **{name: (("change", "horizon"), value) for name, value in values.items()},
            "scale": scale,
            **asked(change.kind, watch.at, watch.probe),
        },
        {"change": names_of(change.edits), "horizon": watch.range},
        provenance(watch.trajectory),
    )


def _rows(changes: int) -> Load:
    return Load(exact=changes, linear=CARRIED * changes, gates=True)


def _held(changes: int) -> float:
    """The smooth step of each while its shares are read; of one, linearizing the step takes as much, as measured."""
    return 3 * (changes - 1)


def _shares(watch: Watch, change: Change, scale: float, some: range) -> dict[str, Float[Tensor, "change horizon"]]:
    """Of some of the changes, which travel together."""
    shocked, rows = _starts(change, scale, some)
    tables: list[dict[str, Tensor]] = []
    smooth_after: list[JointState] = []
    carried = Rows(shocked, linear=rows, gates=True, owned=True)
    for moment in rollout(watch.trajectory, watch.first, carried, watch.last):
        if smooth_after:
            _add_remainders_(rows, moment, smooth_after)
        tables.append(_state_shares(rows) | _output_parts(watch, moment, rows))
        if not moment.last:
            smooth_after = _smooth_steps(moment)
    return {name: torch.stack([table[name] for table in tables], dim=1) for name in tables[0]}


def _starts(change: Change, scale: float, some: range) -> tuple[list[JointState], Tangent]:
    """The shocked states after the changes, and the rows of `ROWS`: the last two begin with zeros."""
    layout, count, shocked = change.path.point.loss.layout, len(some), list[JointState]()
    rows = Tangent(*(layout.zeros(len(ROWS) * count) for _ in CHANNELS))
    for i, index in enumerate(some):
        control, shock, end = start_pair(change, scale, index)
        if shock.xi is None:
            raise InvalidInput(f"a {change.kind} has no ξ and no linear write-in; replace batches or perturb")
        deviation, tangent = difference(end, control.after), WriteIn(control.linear).mv(shock.xi) * scale
        for place, dx in enumerate((deviation, tangent, minus(deviation, tangent))):
            for name in CHANNELS:
                getattr(rows, name)[place * count + i] = getattr(dx, name)
        shocked.append(end)
    return shocked, rows


def _smooth_steps(moment: Moment) -> list[JointState]:
    """f̃(x^s) of every row: the step with the control's gates. 1 g each."""
    step, gates = moment.trajectory.steps[moment.time], moment.gates
    require_same_loss(step, gates.loss)
    extension = SmoothExtension(moment.trajectory.dynamics, step, gates.control)
    return [extension(state) for state in moment.states]


def _add_remainders_(rows: Tangent, moment: Moment, smooth_after: list[JointState]) -> None:
    """r^sm and r^sw of the step just taken onto their parts; the deviation becomes the exact one."""
    count = len(smooth_after)
    for i, (smooth, state) in enumerate(zip(smooth_after, moment.states)):
        deviation, own, switched = rows[i], rows[3 * count + i], rows[4 * count + i]
        for name in CHANNELS:
            held, exact = (getattr(x, name) - getattr(moment.control, name) for x in (smooth, state))
            getattr(own, name).add_(held - getattr(deviation, name))  # held − A δx
            getattr(switched, name).add_(exact - held)
            getattr(deviation, name).copy_(exact)


def _state_shares(rows: Tangent) -> dict[str, Float[Tensor, " change"]]:
    deviation, tangent, *parts = _split(rows)
    error = minus(deviation, tangent)
    size, rest = _dot(error, error), error
    found = {}
    for name, part in zip(PARTS, parts):
        found[f"state_share_{name}"] = _dot(part, error) / size
        rest = minus(rest, part)
    return found | {"identity_residual": _dot(rest, rest).sqrt()}


def _output_parts(watch: Watch, moment: Moment, rows: Tangent) -> dict[str, Float[Tensor, " change"]]:
    """The error of the response and its parts, as `remainder.read_output` has them for one pair."""
    probe, trajectory, control = watch.probe, moment.trajectory, moment.control
    loss, batch, random, where = probe.arguments(trajectory, moment.time)
    pattern, evaluating = Pattern(), probe.evaluating
    found = loss.within(recording(pattern)).gradient(
        control.theta, control.buffers, batch, random, where, evaluating=evaluating
    )
    read = [products(part.theta, trajectory.dynamics.layout.join(found.grads)) for part in _split(rows)]
    base, held_loss = float(found.loss), loss.within(replaying(pattern))
    truth, held = torch.empty_like(read[0]), torch.empty_like(read[0])
    for i, state in enumerate(moment.states):
        arguments = (state.theta, state.buffers, batch, random, where)
        held[i] = held_loss.value(*arguments, evaluating=evaluating).loss
        truth[i] = probe.value(trajectory, moment.time, state.theta, state)
    return {
        "output_error": truth - base - read[1],
        "output_from_write_in": read[2],
        "output_from_smooth": read[3] + (held - base - read[0]),
        "output_from_switching": read[4] + (truth - held),
    }


# --- batches of tangents


def _split(rows: Tangent) -> list[Tangent]:
    """The rows of each of `ROWS`."""
    count = rows.rows // len(ROWS)
    return [rows[i * count : (i + 1) * count] for i in range(len(ROWS))]


def _joined(tangents: list[Tangent]) -> Tangent:
    return Tangent(*(torch.cat([getattr(t, name) for t in tangents]) for name in CHANNELS))


def _dot(a: Tangent, b: Tangent) -> Float[Tensor, " change"]:
    """⟨a, b⟩ of the joint states, row by row."""
    return torch.stack([paired(getattr(a, name), getattr(b, name)) for name in CHANNELS]).sum(0)
