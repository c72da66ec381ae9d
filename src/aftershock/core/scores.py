"""Adjoint scores: one sweep back from an outcome, then one dot product per batch, example or past step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ExamplesCouple
from .batches import Batch, example_count, take_examples
from .changes import ControlStep, Edit
from .dynamics import Linearized
from .operators import readout
from .state import Cotangent, JointState, difference, pair, pair_channels, stack
from .sweeps import adjoint_sweep
from .trajectory import Trajectory

SAMPLE = 8  # examples on which independence is tested
EXAMPLES_AT_ONCE = 512


def horizon_adjoints(
    trajectory: Trajectory,
    at: int,
    horizons: Sequence[int],
    readout_at: Callable[[int], Float[Tensor, " param"]],
    rows_at_once: int,
    tick: Callable[[], None] = lambda: None,
) -> Cotangent:
    """Φ(t+h, t+1)ᵀ c_{t+h} for every horizon, as rows at the state after step `at`.

    Outcomes join the sweep when their time comes, so that H horizons cost H²/2 Hessian products; more
    rows than `rows_at_once` take several sweeps.
    """
    found: list[Cotangent] = []
    for first in range(0, len(horizons), rows_at_once):
        some = sorted(horizons[first : first + rows_at_once], reverse=True)

        def inject(time: int, c: Cotangent, some: Sequence[int] = some) -> int:
            if time - at in some:
                c.theta[some.index(time - at)] = readout_at(time - at)
            tick()
            return sum(h >= time - at for h in some)

        c = readout(trajectory.dynamics.layout.zeros(len(some)))
        c = adjoint_sweep(trajectory, at + some[0], at + 1, c, inject)
        found.append(c[[some.index(h) for h in sorted(some)]])
    return Cotangent(*(torch.cat([getattr(c, name) for c in found]) for name in ("theta", "m", "v")))


def batch_scores(
    control: ControlStep,
    adjoints: Cotangent,
    gradients: Float[Tensor, "outcome param"],
    pool: Iterable[Batch],
    at_once: int,
    *,
    exact_write: bool,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Float[Tensor, "change outcome"], Float[Tensor, "change outcome"] | None, Float[Tensor, " change"]]]:
    """Predicted responses to each batch of the pool in the place of the control's: 1 g each.

    Yields, for `at_once` batches at a time: the tangent scores G ξ; with `exact_write`, the exact one-step
    difference paired with the adjoint; and ‖ξ‖. `gradients` is Bᵀ of `adjoints`, one row per outcome.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    rows = loss.layout.zeros(at_once)  # one buffer for all: fresh memory for each gradient costs as much as it
    ends: list[JointState] = []
    norms: list[Tensor] = []

    # G ξ = G g_i − G ĝ, and ‖ξ‖² from ⟨g_i, ĝ⟩: the gradients themselves are read once and not written again
    against = torch.cat([gradients, control.raw[None]])
    base, own = gradients @ control.raw, control.raw @ control.raw

    def flush(count: int) -> tuple[Tensor, Tensor | None, Tensor]:
        products = rows[:count] @ against.mT
        sizes = torch.stack(norms).to(own).square() - 2 * products[:, -1] + own
        written = None
        if exact_write:
            written = pair(adjoints, stack([difference(end, control.after) for end in ends])).mT
        ends.clear()
        norms.clear()
        return products[:, :-1] - base, written, sizes.clamp_(min=0).sqrt_()

    count = 0
    for i, batch in enumerate(pool):
        found = loss.gradient(before.theta, before.buffers, batch, step.random, f"batch {i} of the pool")
        row, present = rows[count], tuple(g is not None for g in found.grads)
        if not all(present):
            row.zero_()
        loss.layout.write(row, found.grads)
        norms.append(found.norm)
        if exact_write:
            ends.append(control.apply(row, present)[0])
        count += 1
        tick()
        if count == at_once:
            yield flush(count)
            count = 0
    if count:
        yield flush(count)


def example_scores(
    control: ControlStep,
    direction: Float[Tensor, " param"],
    batch: Batch,
    where: str,
) -> Float[Tensor, " example"]:
    """Each example's share of its batch's score ⟨Bᵀλ, g⟩, without per-example gradients.

    The shares of a batch sum to the score of its gradient. About three forward passes.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    _, slopes = loss.example_derivatives(
        before.theta, before.buffers, batch, step.random, direction, where, EXAMPLES_AT_ONCE
    )
    return slopes


def example_weight(control: ControlStep, batch: Batch) -> float | None:
    """1 where a batch's loss is the sum of its examples' losses, None where it is their mean.

    Raises `ExamplesCouple` where it is neither.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    some = take_examples(batch, slice(0, SAMPLE))
    zero = loss.layout.zeros()
    losses, _ = loss.example_derivatives(before.theta, before.buffers, some, step.random, zero, "the pool")
    whole = loss.value(before.theta, before.buffers, some, step.random, "the pool").loss
    close = 1e-3 if whole.dtype != torch.float64 else 1e-9
    if torch.isclose(losses.mean(), whole, rtol=close):
        return None
    if torch.isclose(losses.sum(), whole, rtol=close):
        return 1.0
    raise ExamplesCouple(
        f"the loss of {example_count(some)} examples together ({float(whole):.4g}) is neither the mean nor the sum "
        f"of their losses alone ({float(losses.mean()):.4g}, {float(losses.sum()):.4g}): the examples of a batch "
        "depend on each other (batch normalization in training mode, contrastive losses, token-weighted means); "
        "rank whole batches"
    )


def contributions(
    trajectory: Trajectory,
    time: int,
    gradient: Float[Tensor, " param"],
    edit: Callable[[int], Edit],
    tick: Callable[[], None] = lambda: None,
) -> Float[Tensor, "step channel"]:
    """What each step before state `time` adds to an outcome there, split by where the write waits (θ, m, v).

    The contribution of a step is the outcome as it is, less the outcome with `edit(step)` made: the exact
    one-step difference paired with the adjoint. One sweep, 2–3 g per step.
    """
    out = torch.zeros(time, 3, dtype=torch.float64)

    def visit(at: Linearized, before: JointState, c: Cotangent) -> None:
        control = ControlStep.linearized(trajectory.dynamics, at, before)
        end, _ = edit(at.step.index).shock(control).endpoint(1.0)
        dx = stack([difference(end, control.after)])
        out[at.step.index] = -pair_channels(c, dx)[:, 0, 0].double().cpu()
        tick()

    adjoint_sweep(trajectory, time, 0, readout(gradient[None].clone()), visit=visit)
    return out
