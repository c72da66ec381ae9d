"""Many runs of AdamW at once: rows of (θ, m, v) that take the same batches, and the responses read from them.

The study's exact answers are thousands of short runs that differ in their first state only. A quadratic of 512
parameters is so small that calls are all it costs: as rows of one tensor the runs cost one gradient call a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adam import adam

from ...core.adamw import Hyper, Run
from ...core.clipping import Clip
from ...core.layout import Layout
from ...core.linear_step import LinearStep
from ...core.state import CHANNELS, JointState, Tangent, difference
from ...theory.matching import matched_moment
from .family import Probe, Quadratic

# which of (Δθ, Δm, Δv) a hybrid state keeps
HYBRIDS = ("000", "100", "010", "001", "110", "101", "011", "111")


# --- states


def by_channel(f: Callable[..., Tensor], first: JointState, *others: JointState | Tangent) -> JointState:
    """f of θ, of m and of v, with the counts of the first."""
    parts = ([getattr(x, channel) for x in (first, *others)] for channel in CHANNELS)
    theta, m, v = (f(*part) for part in parts)
    return JointState(theta, m, v, first.counts, {})


def rows_of(state: JointState, *shape: int) -> JointState:
    """Fresh copies of a state's rows, broadcast to `[*shape, d]`."""
    return by_channel(lambda x: x.expand(*shape, x.shape[-1]).clone(), state)


def with_control(control: JointState, rows: JointState) -> JointState:
    """The control as the first row."""
    return by_channel(lambda first, rest: torch.cat([first, rest]), control, rows)


def step_(state: JointState, grads: Float[Tensor, "*batch row d"], hyper: Hyper) -> JointState:
    """Torch's own step on every row. The tensors are written to; the state with its new count is returned."""
    count = torch.tensor(float(state.counts[0]))
    adam(
        [state.theta], [grads], [state.m], [state.v], [], [count], fused=True,
        decoupled_weight_decay=hyper.decoupled, amsgrad=False, beta1=hyper.beta1, beta2=hyper.beta2, lr=hyper.lr,
        weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=hyper.maximize,
    )  # fmt: skip
    return JointState(state.theta, state.m, state.v, (state.counts[0] + 1,), {})


def linear_step(state: JointState, grads: Float[Tensor, "*batch row d"], hyper: Hyper) -> LinearStep:
    """The derivative of AdamW at the step that takes `state` with `grads`."""
    d, dtype = state.theta.shape[-1], state.theta.dtype
    layout = Layout(("theta",), (torch.Size([d]),), ((1,),), (dtype,), (0,), (0,), torch.device("cpu"))
    return LinearStep.at(layout, state, grads, (True,), Clip(0.0, 1.0), (hyper,))


# --- runs


def rollout(start: JointState, batches: Iterable[Quadratic], hyper: Hyper) -> Iterator[JointState]:
    """Exact states from `start` on, which is written to: each is the last one overwritten."""
    yield start
    for batch in batches:
        start = step_(start, batch.gradient(start.theta), hyper)
        yield start


def path_of(control: JointState, batches: Iterable[Quadratic], hyper: Hyper) -> list[JointState]:
    """The control at h = 1 … H, every state kept."""
    return [rows_of(state, *state.theta.shape[:-1]) for state in rollout(rows_of(control, 1), batches, hyper)]


def responses(
    start: JointState, batches: Iterable[Quadratic], probes: Sequence[Probe], hyper: Hyper
) -> Float[Tensor, "probe *batch row horizon"]:
    """F of every row less that of the first row, the control, at every horizon, for each probe: one run."""
    values = [torch.stack([p.value(state.theta) for p in probes]) for state in rollout(start, batches, hyper)]
    found = torch.stack(values, dim=-1)
    return found[..., 1:, :] - found[..., :1, :]


def hybrid_responses(
    control: JointState, shocked: JointState, batches: Iterable[Quadratic], probes: Sequence[Probe], hyper: Hyper
) -> Float[Tensor, "probe hybrid change horizon"]:
    """x^c + (a Δθ, b Δm, c Δv) run on exactly, for all eight (a, b, c) of `HYBRIDS`."""
    dx = difference(shocked, control)
    kept = torch.tensor([[float(bit) for bit in hybrid] for hybrid in HYBRIDS]).to(dx.theta)
    parts = [kept[:, i, None, None] * part for i, part in enumerate((dx.theta, dx.m, dx.v))]
    rows = by_channel(torch.add, control, Tangent(*(part.flatten(0, 1) for part in parts)))
    rows.v.clamp_(min=0)  # v + Δv is the shocked v but for rounding, which may fall below zero
    found = responses(with_control(control, rows), batches, probes, hyper)
    return found.unflatten(1, (len(HYBRIDS), -1))


def persistent_responses(
    control: JointState,
    shocked: JointState,
    batches: Sequence[Quadratic],
    probes: Sequence[Probe],
    hyper: Hyper,
    channel: str,
    decays: Sequence[float],
) -> Float[Tensor, "probe decay change horizon"]:
    """Δm (or Δv) alone under other decays, moved to the same first displacement, the control rerun with each."""
    fresh = batches[0].gradient(control.theta)
    curves = []
    for decay in decays:
        other = replace(hyper, beta1=decay) if channel == "m" else replace(hyper, beta2=decay)
        own, new = (Run.at(h, control.counts[0] + 1) for h in (hyper, other))
        moment, _ = matched_moment(own, new, control, shocked, fresh, channel)
        rows = rows_of(control, len(moment))
        rows = replace(rows, m=moment) if channel == "m" else replace(rows, v=moment)
        curves.append(responses(with_control(control, rows), batches, probes, other))
    return torch.stack(curves, dim=1)
