"""Many runs of AdamW at once: rows of (θ, m, v) that take the same batches, and the responses read from them.

A study's exact answers are thousands of short runs that differ in their first state only. As rows of one tensor they
cost one gradient call a step, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim.adam import adam

from ...core.adamw import Hyper, LinearStep, Run
from ...core.clipping import Clip
from ...core.layout import Layout
from ...core.state import CHANNELS, Cotangent, JointState, Tangent, difference
from ...theory.matching import ACCEPTED, TARGET, calibrate, first_step_candidates, matched_moment

# which of (Δθ, Δm, Δv) a hybrid state keeps
HYBRIDS = ("000", "100", "010", "001", "110", "101", "011", "111")


class Loss(Protocol):
    """A batch, seen as a function of rows of parameters."""

    def value(self, theta: Float[Tensor, "*batch row d"]) -> Float[Tensor, "*batch row"]: ...

    def gradient(self, theta: Float[Tensor, "*batch row d"]) -> Float[Tensor, "*batch row d"]: ...


class Readout(Protocol):
    """A probe, as a function of rows of parameters."""

    def value(self, theta: Float[Tensor, "*batch row d"]) -> Float[Tensor, "*batch row"]: ...


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
    count = torch.tensor(float(state.counts[0]), device=state.theta.device)
    adam(
        [state.theta], [grads], [state.m], [state.v], [], [count], fused=True,
        decoupled_weight_decay=hyper.decoupled, amsgrad=False, beta1=hyper.beta1, beta2=hyper.beta2, lr=hyper.lr,
        weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=hyper.maximize,
    )  # fmt: skip
    return JointState(state.theta, state.m, state.v, (state.counts[0] + 1,), {})


# --- the step at which rows part


@dataclass(frozen=True)
class ShockStep:
    """x_t, the control's gradient ḡ and the hyperparameters: every row takes this step with its own ḡ + ξ."""

    state: JointState  # one row
    mean_gradient: Float[Tensor, "1 d"]
    hyper: Hyper

    def after(self, xi: Float[Tensor, "row d"]) -> JointState:
        """The state after the step, exact, row by row."""
        return step_(rows_of(self.state, len(xi)), self.mean_gradient + xi, self.hyper)

    @cached_property
    def control(self) -> JointState:
        """The state after the step with ḡ."""
        return self.after(torch.zeros_like(self.mean_gradient))

    @cached_property
    def write_in(self) -> LinearStep:
        return linear_step(self.state, self.mean_gradient, self.hyper)

    def written(self, xi: Float[Tensor, "row d"]) -> Tangent:
        """B ξ."""
        dx = Tangent(*(torch.zeros_like(xi) for _ in range(3)))
        self.write_in.absorb_(dx, xi)
        return dx

    def matched(self, xi: Float[Tensor, "row d"], probe: Loss) -> MatchedRows:
        """Candidates γ_i ξ̃_i of equal exact first responses. `eq:app_exact_matching`"""
        readout = probe.gradient(self.control.theta)
        nothing = torch.zeros_like(readout)
        functional = self.write_in.absorb_transposed_(Cotangent(readout, nothing, nothing.clone()))[0]
        candidates, signs, target = first_step_candidates(functional, xi, TARGET)
        base = probe.value(self.control.theta)

        def excess(gamma: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
            moved = self.after(gamma.to(xi)[:, None] * candidates).theta
            return (signs * (probe.value(moved) - base) - target).cpu()

        gamma = calibrate(excess, len(candidates))
        left = excess(gamma)
        first_step = signs.cpu() * (target + left)
        return MatchedRows(gamma.to(xi)[:, None] * candidates, first_step, left.abs() <= ACCEPTED * target)


@dataclass(frozen=True)
class MatchedRows:
    """Perturbations of equal exact |d_1|, the d_1 that each reached, and whether that is the target."""

    xi: Float[Tensor, "row d"]
    first_step: Float[Tensor, " row"]
    accepted: Bool[Tensor, " row"]


def linear_step(state: JointState, grads: Float[Tensor, "*batch row d"], hyper: Hyper) -> LinearStep:
    """The derivative of AdamW at the step that takes `state` with `grads`."""
    d, dtype = state.theta.shape[-1], state.theta.dtype
    layout = Layout(("theta",), (torch.Size([d]),), ((1,),), (dtype,), (0,), (0,), state.theta.device)
    return LinearStep.at(layout, state, grads, (True,), Clip(0.0, 1.0), (hyper,))


# --- runs


def rollout(start: JointState, batches: Iterable[Loss], hyper: Hyper) -> Iterator[JointState]:
    """Exact states from `start` on, which is written to: each is the last one overwritten."""
    yield start
    for batch in batches:
        start = step_(start, batch.gradient(start.theta), hyper)
        yield start


def path_of(control: JointState, batches: Iterable[Loss], hyper: Hyper) -> list[JointState]:
    """The control at h = 1 … H, every state kept."""
    return [rows_of(state, *state.theta.shape[:-1]) for state in rollout(rows_of(control, 1), batches, hyper)]


def responses(
    start: JointState, batches: Iterable[Loss], probes: Sequence[Readout], hyper: Hyper
) -> Float[Tensor, "probe *batch row horizon"]:
    """F of every row less that of the first row, the control, at every horizon, for each probe: one run."""
    values = [torch.stack([p.value(state.theta) for p in probes]) for state in rollout(start, batches, hyper)]
    found = torch.stack(values, dim=-1)
    return found[..., 1:, :] - found[..., :1, :]


def hybrid_responses(
    control: JointState, shocked: JointState, batches: Iterable[Loss], probes: Sequence[Readout], hyper: Hyper
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
    batches: Sequence[Loss],
    probes: Sequence[Readout],
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
