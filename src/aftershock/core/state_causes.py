"""Why a live run's step counts, moments or weights are not its path's: hypotheses, as for the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .adamw import Hyper
from .evidence import Cause, Evidence, fit
from .reductions import apart, equal, fitted, largest, norms

HYPERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
WRITTEN = Cause(
    "weights",
    "something else than the optimizer writes to the weights: an average swapped in (EMA, Lookahead), a constraint, "
    "another optimizer wrapper or a patched step",
    "leave it out; it is not modelled",
)
MOST_STATES = 16  # of earlier weights that an average is looked for in


def settings(e: Evidence) -> Cause | None:
    """The path's step with the live run's own hyperparameters gives the live state."""
    names = differing(e.hypers, e.step.hypers)
    if not names:
        return None
    found = e.tried(e.trajectory.dynamics, lambda step: replace(step, hypers=e.hypers))
    if found is None or not all(equal(getattr(found, c), getattr(e.live, c)) for c in ("theta", "m", "v")):
        return None
    return changed_settings(names)


def moved_settings(e: Evidence) -> Cause | None:
    """Over several steps: the live run's hyperparameters as they stand are those of no step of the path."""
    names = [differing(e.hypers, step.hypers) for step in e.trajectory.steps]
    return changed_settings(names[e.made - 1]) if not e.sharp and all(names) else None


def changed_settings(names: Sequence[tuple[int, str, float, float]]) -> Cause:
    listed = ", ".join(
        f"{name} of group {group} is {now:g}, not the path's {told:g}" for group, name, now, told in names[:3]
    )
    moved = {name for _, name, _, _ in names}
    return Cause(
        "decay" if moved == {"weight_decay"} else "hyperparameter",
        f"{listed}: a scheduler or the loop itself moves {' and '.join(sorted(moved))} otherwise than the path",
        "give follow(lr=scheduler), and the doctor scheduler=" if "lr" in moved else "give follow() the same schedule",
    )


def differing(live: Sequence[Hyper], told: Sequence[Hyper]) -> list[tuple[int, str, float, float]]:
    """(group, name, live value, the path's) of every hyperparameter that is another one."""
    return [
        (i, name, float(getattr(a, name)), float(getattr(b, name)))
        for i, (a, b) in enumerate(zip(live, told))
        for name in HYPERS
        if float(getattr(a, name)) != float(getattr(b, name))
    ]


def other_betas(e: Evidence) -> Cause | None:
    """m' = β1 m + (1−β1) g for another β1, or v' for another β2."""
    if not e.sharp:
        return None
    hyper, g = e.step.hypers[0], e.g_path + e.coupled_decay(e.before)
    for name, now, then, inflow in (
        ("beta1", e.live.m, e.before.m, g),
        ("beta2", e.live.v, e.before.v, g.square()),
    ):
        beta, misfit = fit(now.double() - inflow, then.double() - inflow)
        told = getattr(hyper, name)
        if misfit <= e.tolerance and abs(beta - told) > 10 * e.tolerance * (1 - told) and 0 <= beta < 1:
            return Cause(
                "hyperparameter",
                f"{name} was {beta:.6g} and not {told:g}: a scheduler, or the loop itself, moves {name}",
                "give follow(lr=scheduler), and the doctor scheduler=",
            )
    return None


def reset(e: Evidence) -> Cause | None:
    for channels in (("m",), ("v",), ("m", "v")) if e.sharp else ():
        empty = {name: torch.zeros_like(e.before.m) for name in channels}
        found = e.tried(e.trajectory.dynamics, before=replace(e.before, **empty))  # type: ignore[arg-type]
        if found is not None and equal(found.m, e.live.m) and equal(found.v, e.live.v):
            return Cause(
                "moments",
                f"the loop resets {' and '.join(channels)} before this step",
                "begin the path after the reset",
            )
    return None


def other_optimizer(e: Evidence) -> Cause:
    return Cause(
        "moments",
        "no gradient gives these moments: another optimizer or a wrapper around it writes to them",
        "give capture() the torch.optim.AdamW or Adam that makes the steps, without a wrapper",
    )


def other_decay(e: Evidence) -> Cause | None:
    """θ differs by a multiple of θ, as it was before the step or after it."""
    factors, misfit = min((_by_group(e, theta) for theta in (e.before.theta, e.path.theta)), key=lambda found: found[1])
    if misfit > _weight_tolerance(e):
        return None
    group = max(range(len(factors)), key=lambda i: abs(factors[i]))
    hyper = e.step.hypers[group]
    implied = hyper.weight_decay - factors[group] / max(float(hyper.lr), 1e-300)
    return Cause(
        "decay",
        f"the weights are scaled by {1 + factors[group]:.7g} on top of the path's step, as if weight_decay were "
        f"{implied:.4g} and not {hyper.weight_decay:g}: the loop, or a schedule, changes the weight decay",
        "let the optimizer's own weight_decay be the only decay; give follow() its schedule",
    )


def other_rate(e: Evidence) -> Cause | None:
    """θ differs by a multiple of the update."""
    factors, misfit = _by_group(e, e.path.theta.double() - e.before.theta.double())
    if misfit > _weight_tolerance(e):
        return None
    group = max(range(len(factors)), key=lambda i: abs(factors[i]))
    told = float(e.step.hypers[group].lr)
    average = ", or the weights were averaged with earlier ones (Lookahead, EMA)" if -1 <= factors[group] < 0 else ""
    return Cause(
        "hyperparameter",
        f"lr of group {group} was {told * (1 + factors[group]):.4g} and not {told:.4g}: a scheduler that the path was "
        f"not told{average}",
        "give follow(lr=scheduler), and the doctor scheduler=",
    )


def averaged(e: Evidence) -> Cause | None:
    """The live weights are a combination of the path's own earlier ones."""
    if e.made < 2:
        return None
    times = range(max(0, e.made - MOST_STATES), e.made)
    earlier = [e.trajectory.state(time).theta.double() for time in times]
    basis = torch.stack([theta - e.path.theta.double() for theta in earlier])
    difference = e.live.theta.double() - e.path.theta.double()
    if not apart(fitted(basis, difference), difference) <= _weight_tolerance(e):  # NaN: no fit
        return None
    return Cause(
        "weights",
        "the weights are an average of earlier ones: an EMA swapped in, or a wrapper such as Lookahead",
        "keep averages outside the model that trains; Lookahead is not modelled",
    )


def clamped(e: Evidence) -> Cause | None:
    moved = (e.live.theta - e.path.theta).abs() > e.tolerance * e.path.theta.abs()
    values = e.live.theta[moved]
    if values.numel() < 2 or float(values.abs().max() - values.abs().min()) > 0:
        return None
    return Cause(
        "weights",
        f"weights are clamped at {largest(values):.4g} after the step",
        "the constraint is not modelled; train without it, or write it into the model (a parametrization)",
    )


def written(e: Evidence) -> Cause:
    return WRITTEN


def _by_group(e: Evidence, direction: Tensor) -> tuple[list[float], float]:
    """θ_live − θ_path as one multiple of `direction` per parameter group: factors and misfit."""
    difference = e.live.theta.double() - e.path.theta.double()
    of_group = e.spread([float(group) for group in e.layout.groups])
    factors, left = [], difference.clone()
    for group in range(len(e.step.hypers)):
        inside = of_group == group
        factor, _ = fit(difference * inside, direction.double() * inside)
        factors.append(factor)
        left -= factor * direction.double() * inside
    return factors, float(norms(left) / norms(difference).clamp(min=1e-300))


def _weight_tolerance(e: Evidence) -> float:
    """θ is rounded, and the difference may be few roundings large."""
    difference = norms(e.live.theta.double() - e.path.theta.double()).clamp(min=1e-300)
    eps = max(torch.finfo(dtype).eps for dtype in e.layout.dtypes)
    return min(0.02 + eps * float(norms(e.path.theta.double()) / difference), 0.3)


def counted(e: Evidence) -> Cause:
    start = e.trajectory.state(0).counts
    live, path = ([now - then for now, then in zip(s.counts, start)] for s in (e.live, e.path))
    if min(live) < 0:
        return Cause("count", "the optimizer's state was reset or replaced: its counts begin anew", "capture after it")
    if max(live) < e.made:
        return Cause(
            "count",
            f"the optimizer made {max(live)} of {e.made} steps: one was skipped (GradScaler at an infinite gradient, a "
            "guard against NaN), or gradients are accumulated over several calls",
            "one call is one optimizer step: give micro-batches as ak.accumulate([...]), and leave skipped steps out",
        )
    if min(live) > e.made or max(live) > e.made:
        return Cause("count", f"the optimizer made {max(live)} steps in {e.made} calls", "one call is one step")
    if any(a > b for a, b in zip(live, path)):
        return Cause(
            "count",
            "parameters that the loss does not use are stepped: zero_grad(set_to_none=False) leaves them a gradient of "
            "zero, with which moments and weights decay",
            "use zero_grad() as it is, with set_to_none=True",
        )
    return Cause(
        "count",
        "parameters that the loss uses are not stepped: the loop freezes them, or clears their gradients",
        "capture after they are frozen; leave gradients as backward() made them",
    )
