"""Why a live run's gradient is not its path's: hypotheses, from the sharpest to the last resort.

Each returns a `Cause` where it explains the difference, else `None`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import torch

from .calls import in_mode
from .dynamics import Dynamics
from .evidence import Cause, Evidence, Quantity, fit
from .reductions import apart, equal, finite, largest, norms

SCALES = [2.0**k for k in range(16, 5, -1)]  # of a GradScaler: it begins with the first, and halves it
DRIFT = 0.3  # how far a mean of several steps' gradients may be from a multiple of the path's, clipped step by step
UNRECORDED = Cause(
    "gradient",
    "an unrecorded generator: loss_fn gives another result when it is called again (numpy, random, a torch.Generator "
    "of its own), or kernels are nondeterministic",
    "draw from torch's global generator; torch.use_deterministic_algorithms(True)",
)
EDITED = Cause(
    "gradient",
    "the loop edits gradients in place between backward() and optimizer.step() (clipping by value, noise, "
    "projection, a hook)",
    "leave the edit out, or make it in loss_fn; clipping by the global norm is clip=, by value it is not modelled",
)


def not_finite(e: Evidence) -> Cause | None:
    bad = [name for name in ("m", "v", "theta") if not finite(getattr(e.live, name))]
    if not bad:
        return None
    quantity: Quantity = "weights" if bad == ["theta"] else "gradient"
    return Cause(quantity, "the live run is not finite", "look for the first NaN or infinity in the loop")


def rounding(e: Evidence) -> Cause | None:
    size = apart(e.g_live, e.g_path)
    if size > e.tolerance or not e.sharp:
        return None
    return Cause(
        "gradient",
        f"rounding: gradients agree to {size:.0e}, as other kernels give them (torch.compile, another attention "
        "backend, number of threads or memory format)",
        "run loss_fn and the loop with the same kernels to be equal to the bit",
        rounding=True,
    )


def zeroed(e: Evidence) -> Cause | None:
    if not e.sharp or bool(norms(e.g_live) > e.tolerance * norms(e.g_path)):
        return None
    return Cause(
        "gradient",
        "the loop steps with gradients of zero: zero_grad() stands between backward() and optimizer.step()",
        "call zero_grad() before backward(), or after the step",
    )


def scaled(e: Evidence) -> Cause | None:
    """One factor for the whole gradient: clipping, or a scaled loss."""
    factor, misfit = fit(e.g_live, e.g_path)
    if misfit > (e.tolerance if e.sharp else DRIFT) or abs(factor - 1) <= (e.tolerance if e.sharp else DRIFT):
        return None
    if e.step.clip.binds and abs(factor * e.step.clip.factor - 1) <= max(e.tolerance, 1e-3):
        text = f"the loop does not clip, and the path does (clip={e.step.max_norm:g})"
        return Cause("gradient", text, "leave out clip=")
    return scaled_by(factor, float(norms(e.g_live)) if e.sharp else None, e.step.max_norm)


def scaled_by(factor: float, norm: float | None, told: float | None) -> Cause:
    """Every gradient is `factor` times the path's. norm: the live one's, where it is that of one step."""
    share = 1 / factor if 0 < factor < 1 else math.inf
    if whole(share) and not (norm and chosen(norm)):
        return Cause(
            "gradient",
            f"the loop divides the loss by {round(share)}, as gradient accumulation does, and loss_fn does not",
            "divide in loss_fn too, or give the micro-batches of a step as ak.accumulate([...])",
        )
    if 0 < factor < 1:
        return other_clip(told, norm, f"every gradient is {factor:.4g} times the path's")
    return Cause(
        "gradient",
        f"the loop's loss is multiplied by {factor:.5g}: a GradScaler without unscale_(), or a sum for a mean",
        "call scaler.unscale_(optimizer) before clipping and stepping, or scale the loss in loss_fn too",
    )


def other_clip(told: float | None, norm: float | None, seen: str) -> Cause:
    """The loop clips, and it was not told, or told otherwise."""
    limit = "max_norm" if norm is None else f"{norm:.4g}"
    text = f"a missing clip={limit}" if told is None else f"clip={told:g}, where the loop clips at {limit}"
    return Cause(
        "gradient",
        f"{text}: {seen}, as clip_grad_norm_ or a scaled loss makes it",
        f"tell follow() and the recorder clip={limit}",
        clip=None if norm is None else float(limit),
    )


def whole(share: float) -> bool:
    """Is this a number that somebody would divide a loss by?"""
    return 1.5 < share < 2e4 and abs(share - round(share)) <= 1e-4 * share


def chosen(norm: float) -> bool:
    """Is this a number that somebody would choose as max_norm? By chance it is one time in a hundred."""
    return abs(norm - float(f"{norm:.1e}")) <= 1e-4 * norm


def clipped_by_value(e: Evidence) -> Cause | None:
    limit = largest(e.g_live)
    if not e.sharp or limit >= largest(e.g_path) or fit(e.g_live, e.g_path.clamp(-limit, limit))[1] > e.tolerance:
        return None
    return Cause(
        "gradient",
        f"gradients are clipped by value (clip_grad_value_ at {limit:.4g})",
        "clip by the global norm (clip_grad_norm_ and clip=); clipping by value is not modelled",
    )


NOT_ZEROED = Cause(
    "gradient",
    "the gradients of the step before were still there: zero_grad() is missing",
    "call optimizer.zero_grad() in every step, or give the micro-batches of a step as ak.accumulate([...])",
)


def accumulated_before(e: Evidence) -> Cause | None:
    """The gradient of the step before was not cleared."""
    if not e.sharp or e.made < 2:
        return None
    earlier = e.gradient(e.before, e.trajectory.state(e.made - 2))
    factor, misfit = fit(e.g_live - e.g_path, earlier)
    if misfit > max(10 * e.tolerance, 1e-3) or abs(factor - 1) > max(10 * e.tolerance, 1e-3):
        return None
    return NOT_ZEROED


def penalized(e: Evidence) -> Cause | None:
    """A multiple of the weights in the gradient: an L2 penalty."""
    factor, misfit = fit(e.g_live - e.g_path, e.before.theta.double() * (e.g_live != 0))
    if not e.sharp or misfit > max(10 * e.tolerance, 1e-2):
        return None
    return Cause(
        "gradient",
        f"the loop adds {factor:.3g} · θ to the gradient: weight decay by an L2 penalty, or coupled",
        "put the penalty into loss_fn, or use the optimizer's weight_decay",
    )


def single_parameters(e: Evidence) -> Cause | None:
    """Some parameters' gradients are other ones, the rest are the path's."""
    touched = e.moved(e.g_live, e.g_path)
    pairs = [fit(e.layout.views(e.g_live)[i].flatten(), e.layout.views(e.g_path)[i].flatten()) for i in touched]
    proportional = all(misfit <= e.tolerance for _, misfit in pairs)
    if not e.sharp or not (proportional or len(touched) < len(e.layout.names)):
        return None
    names = ", ".join(f"{e.layout.names[i]!r}" for i in touched[:3]) + ("…" if len(touched) > 3 else "")
    factor = f" ({pairs[0][0]:.4g} times the path's)" if proportional else ""
    return Cause(
        "gradient",
        f"the gradients of {names} alone are edited in place{factor}: p.grad.mul_(), a hook, or clipping of a part",
        "make the same change in loss_fn (scale a part of the loss), or leave it out; clip= covers all parameters",
    )


def other_mode(e: Evidence) -> Cause | None:
    loss = e.trajectory.dynamics.loss
    training = not loss.model.training
    if not e.gives(e.tried(Dynamics(loss.within(lambda model: in_mode(model, training))))):
        return None
    now, then = ("train", "eval") if training else ("eval", "train")
    return Cause(
        "gradient",
        f"the loop runs the model in {now} mode, and it was captured in {then} mode",
        f"call model.{now}() before capture, or model.{then}() in the loop (after a validation, say)",
    )


def autocast(e: Evidence) -> Cause | None:
    loss, kind = e.trajectory.dynamics.loss, e.layout.device.type
    if loss.autocast.enabled:
        full = loss.within(lambda model: torch.autocast(kind, enabled=False))
        if not e.gives(e.tried(Dynamics(full))):
            return None
        return Cause("gradient", "captured inside an autocast that the loop does not use", "capture outside of it")
    for dtype in (torch.bfloat16, torch.float16):
        if e.gives(e.tried(Dynamics(loss.within(lambda model, d=dtype: torch.autocast(kind, d))))):  # type: ignore[misc]
            name = str(dtype).removeprefix("torch.")
            return Cause(
                "gradient",
                f"the loop runs under autocast to {name}, and loss_fn does not",
                "put the autocast into loss_fn, or capture inside it",
            )
    return None


def loss_scaled(e: Evidence) -> Cause | None:
    """A GradScaler's factor, which keeps what float16 loses; where all is computed more finely it changes nothing."""
    loss = e.trajectory.dynamics.loss.within(lambda model: contextlib.nullcontext())
    if loss.autocast.scale != 1.0:
        return None
    for scale in SCALES:
        loss.autocast = replace(loss.autocast, scale=scale)
        found = e.tried(Dynamics(loss))
        if e.gives(found):
            return Cause(
                "gradient",
                f"the loop's gradients are those of a loss that is multiplied by {scale:g}, as a GradScaler does: "
                "float16 loses small ones without it",
                "say capture(…, loss_scale=scaler.get_scale())",
            )
        if found is None or equal(found.m, e.path.m):
            return None
    return None


def other_batch(e: Evidence) -> Cause | None:
    for other in e.trajectory.steps if e.sharp else ():
        found = e.tried(e.trajectory.dynamics, lambda step, batch=other.batch: replace(step, batch=batch))  # type: ignore[misc]
        if other is not e.step and e.gives(found):
            return Cause(
                "gradient",
                f"the loop trained on the batch of step {other.index}: batches are in another order, or a step was "
                "skipped",
                "give follow() the batches in the order in which the loop takes its steps",
            )
    return None


def own_generator(e: Evidence) -> Cause | None:
    """Does loss_fn repeat itself?"""
    tries = [e.tried(e.trajectory.dynamics) for _ in range(3)]
    if all(found is not None and equal(found.m, e.path.m) for found in tries):
        return None
    return UNRECORDED


def other_random(e: Evidence) -> Cause | None:
    if not e.other_random:
        return None
    return Cause(
        "gradient",
        "other random numbers: the loop draws from torch's generator where loss_fn does not (a data loader, "
        "augmentation, noise added to gradients), or draws them at another moment",
        "draw in loss_fn from torch's generator, outside of it from one of your own, or give follow(random=…)",
    )


def edited(e: Evidence) -> Cause:
    same = e.loss is not None and abs(e.loss - e.step.loss) <= 1e-5 * abs(e.step.loss)
    if e.loss is not None and not same:
        return Cause(
            "gradient",
            f"the loop's loss is {e.loss:.6g} and loss_fn's {e.step.loss:.6g}: another loss, batch or unrecorded "
            "generator",
            "let the loop call loss_fn(model, batch) itself, on the batches that the path was given",
        )
    if not e.sharp:
        text = (
            "not told by the end of several steps: a missing clip=, a scheduler, gradients edited in place, weights "
            "that something else writes to, or another loss or batch than loss_fn's"
        )
        return Cause("moments", text, "compare after every step: one step tells which")
    return EDITED if same else replace(EDITED, text=f"{EDITED.text}; or its loss or batch is not that of loss_fn")
