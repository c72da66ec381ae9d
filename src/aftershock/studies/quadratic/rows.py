"""Many runs of AdamW at once: rows of (θ, m, v) that take the same batches, their tangents, and what is read from them.

The study's exact answers are thousands of short runs that differ in their first state only. A quadratic of 512
parameters is so small that calls are all it costs: as rows of one tensor the runs cost one gradient call a step.
All stepping and scoring of the study is here, in the closed form of quadratics; a test compares it with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from ...theory.remainder import minus
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


# --- tangents


def propagated(
    dx: Tangent,
    path: Sequence[JointState],
    batches: Sequence[Quadratic],
    hyper: Hyper,
    *,
    frozen: bool = False,
    clamped: bool = False,
) -> Float[Tensor, "horizon row d"]:
    """δθ at every horizon: by A_s, by the first A again and again (frozen), or by [A_s]_θθ alone (clamped)."""
    dx, seen = dx.clone(), [dx.theta.clone()]
    for state, batch in zip(path, batches):
        if frozen:
            state, batch = path[0], batches[0]
        linear_step(state, batch.gradient(state.theta), hyper).absorb_(dx, batch.products(dx.theta))
        if clamped:
            dx.m.zero_()
            dx.v.zero_()
        seen.append(dx.theta.clone())
    return torch.stack(seen)


def read(probe: Probe, path: Sequence[JointState], moved: Float[Tensor, "horizon row d"]) -> Tensor:
    """c̄_hᵀ δθ_h."""
    return torch.einsum("hd,hrd->rh", _slopes(probe, path), moved)


def read_exactly(probe: Probe, path: Sequence[JointState], moved: Float[Tensor, "horizon row d"]) -> Tensor:
    """F(θ^c + δθ) − F(θ^c)."""
    theta = torch.stack([state.theta for state in path])
    return (probe.value(theta + moved) - probe.value(theta)).mT


def _slopes(probe: Probe, path: Sequence[JointState]) -> Float[Tensor, "horizon d"]:
    return torch.stack([probe.gradient(state.theta)[0] for state in path])


def identity_residual(
    exact: Tangent, tangent: Tangent, path: Sequence[JointState], batches: Sequence[Quadratic], hyper: Hyper
) -> float:
    """max |e_h − (Φ r_B + Σ Φ r_s)| over the rows and the path. `thm:finite_horizon_error`

    e is measured as the exact difference less the tangent; the sum of remainders is propagated by itself.

    exact, tangent: δx right after the shock, and B ξ; the tangent is written to.
    """
    summed = minus(exact, tangent)
    worst = 0.0
    for before, after, batch in zip(path, path[1:], batches):
        linear = linear_step(before, batch.gradient(before.theta), hyper)
        shocked = by_channel(torch.add, before, exact)
        stepped = difference(step_(shocked, batch.gradient(shocked.theta), hyper), after)
        predicted = exact.clone()
        for dx in (predicted, tangent, summed):
            linear.absorb_(dx, batch.products(dx.theta))
        remainder = minus(stepped, predicted)
        for name in CHANNELS:
            getattr(summed, name).add_(getattr(remainder, name))
            error = getattr(stepped, name) - getattr(tangent, name) - getattr(summed, name)
            worst = max(worst, float(error.abs().max()))
        exact = stepped
    return worst


@dataclass(frozen=True)
class Family:
    """Candidates of one kind, and their tangents by each way of propagation: δθ `[horizon, change, d]`."""

    xi: Float[Tensor, "change d"]
    full: Tensor
    initial: Tensor
    clamped: Tensor
    frozen: Tensor
    endpoint: Tensor

    @classmethod
    def of(
        cls,
        xi: Float[Tensor, "change d"],
        written: Tangent,
        exact: Tangent,
        path: Sequence[JointState],
        batches: Sequence[Quadratic],
        hyper: Hyper,
    ) -> Family:
        """written, exact: B ξ, and the exact δx right after the shock."""
        none = torch.zeros_like(written.theta)
        alone = Tangent(written.theta, none, none.clone())
        starts = ((x.theta, x.m, x.v) for x in (written, alone, exact))
        together = Tangent(*(torch.cat(parts) for parts in zip(*starts)))
        full, initial, endpoint = propagated(together, path, batches, hyper).chunk(3, dim=1)
        clamped = propagated(alone, path, batches, hyper, clamped=True)
        frozen = propagated(written, path, batches, hyper, frozen=True)
        return cls(xi, full, initial, clamped, frozen, endpoint)

    def alignment(self, probe: Probe, path: Sequence[JointState]) -> Float[Tensor, "change horizon readout"]:
        """c̄ᵀ at one horizon with δθ at another."""
        return torch.einsum("sd,hrd->rhs", _slopes(probe, path), self.full)

    def scores(
        self, probe: Probe, path: Sequence[JointState], exact: Float[Tensor, "change horizon"], reference: Quadratic
    ) -> dict[str, Float[Tensor, " change"]]:
        """`theory.scores` by name. `eq:app_temporal_ablations`, `eq:app_scalar_baselines`

        exact: the responses. reference: the loss whose curvature is one of the scores.
        """
        alignment = self.alignment(probe, path)
        trajectories = {
            "full_iso": alignment.diagonal(dim1=1, dim2=2),
            "no_propagation": alignment[:, 0, :],
            "initial_theta": read(probe, path, self.initial),
            "clamped_theta": read(probe, path, self.clamped),
            "frozen_dynamics": read(probe, path, self.frozen),
            "frozen_readout": alignment[:, :, 0],
            "norm_product": _slopes(probe, path).norm(dim=1) * self.full.norm(dim=2).mT,
            "endpoint": read_exactly(probe, path, self.endpoint),
        }
        return {name: r.abs().amax(1) for name, r in trajectories.items()} | {
            "exact_one_step": exact[:, 0].abs(),
            "gradient_norm": self.xi.norm(dim=1),
            "write_norm": self.full[0].norm(dim=1),
            "curvature": torch.linalg.vecdot(self.xi, reference.products(self.xi)).abs(),
        }
