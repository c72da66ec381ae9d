"""The words of an explanation: what happened, and how far to trust it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..results.certificate import TRUST, Certificate, Finding

if TYPE_CHECKING:
    from .explanation import Culprit, FlightExplanation

HALF = 0.5  # of the spike: what removes less does not explain it
GONE = 3.0  # robust σ above the usual loss, below which there is no spike
LITTLE = 0.2  # of the spike: what may be left of one that is gone
LARGE_JUMP = 2.0  # times the learning rate before
FEW = 3  # examples that are worth naming
NOTABLE = 0.5  # of a batch's share, which few examples must carry to be named
NAMES = {"theta": "θ", "m": "m", "v": "v"}


def verdict(found: FlightExplanation) -> str:
    """One paragraph: the culprit, how long it waited and where, what a run without it shows."""
    attrs = found.data.attrs
    opening = ""
    if attrs["asked"] != attrs["step"]:
        opening = f"The loss of step {attrs['asked']} is not finite; step {attrs['step']} is the last finite one. "
        if attrs["not_a_number_in_batch"]:
            return f"{opening}The batch of step {attrs['asked']} itself holds values that are not finite."
    if found.size <= GONE * attrs["sigma"]:
        return opening + _no_spike(found)
    best = culprit(found)
    if best is not None:
        return opening + " ".join([_guilty(found, best), *_inside(found, best)])
    if _own(found):
        return (
            f"{opening}The batch of step {attrs['step']} itself raises its loss: other batches have a loss of "
            f"{attrs['others']:.3g} on the same weights, {attrs['loss'] - attrs['others']:.3g} less (of a spike of "
            f"{found.size:.3g})."
        )
    return opening + _nobody(found)


def culprit(found: FlightExplanation) -> Culprit | None:
    """The verified step without which at least half of the spike is gone, where there is one.

    A learning rate that rose makes every step's part larger, and a run that it made unstable changes with any step:
    where the old rate removes more than the best step, that step is the culprit only if the rise was small and no
    spike is left without it.
    """
    attrs = found.data.attrs
    if not attrs["order"] or found.size <= GONE * attrs["sigma"]:
        return None
    best = found.culprits[0]
    if best.measured < HALF * found.size:
        return None
    small = attrs["jump"].get("ratio", 1.0) < LARGE_JUMP and _gone(found, best)
    return best if best.measured >= _jumped(found) or small else None


def guilty_batches(found: FlightExplanation) -> list[int]:
    """What to skip: the culprit's batches; the step's own where they are the cause; nothing where nobody is."""
    attrs, best = found.data.attrs, culprit(found)
    if attrs["not_a_number_in_batch"]:
        return list(attrs["batches"][str(attrs["asked"])])
    if best is not None:
        return list(best.batches)
    return list(attrs["batches"][str(attrs["step"])]) if _own(found) else []


def _own(found: FlightExplanation) -> bool:
    """Do other batches have an ordinary loss on the same weights?"""
    attrs = found.data.attrs
    high = found.size > GONE * attrs["sigma"]
    return high and attrs["loss"] - attrs["others"] >= HALF * found.size and _jumped(found) < HALF * found.size


def _jumped(found: FlightExplanation) -> float:
    """How much of the loss is gone with the learning rate before its largest rise."""
    measured = found.data.attrs["jump"].get("measured", math.nan)
    return measured if math.isfinite(measured) else 0.0


def _gone(found: FlightExplanation, best: Culprit) -> bool:
    attrs = found.data.attrs
    return attrs["loss"] - best.measured <= attrs["baseline"] + max(GONE * attrs["sigma"], LITTLE * found.size)


def _guilty(found: FlightExplanation, best: Culprit) -> str:
    attrs = found.data.attrs
    left = attrs["loss"] - best.measured
    if math.isinf(best.measured):
        without = "the run without it diverges (replayed)"
    elif _gone(found, best):
        without = "without it there is no spike (replayed)"
    else:
        without = f"without it the loss is {left:.3g} (replayed; usual {attrs['baseline']:.3g})"
    return (
        f"Step {best.step} raised the loss at step {attrs['step']} by {best.measured:.3g}"
        f"{_of(best.measured, found.size)}{_waited(best)}; {without}."
    )


def _of(measured: float, size: float) -> str:
    """A batch may do more than the spike shows, where the loss would else have been below the usual."""
    return f" of {size:.3g}" if measured <= size else f", more than the spike of {size:.3g}"


def _waited(best: Culprit) -> str:
    """Where the write waited, where the predicted parts have one sign and so are parts of something."""
    total = sum(best.channels.values())
    name, part = max(best.channels.items(), key=lambda item: item[1])
    if total <= 0 or min(best.channels.values()) < -0.1 * total:
        return f"; right after it most of the effect lay in {NAMES[name]}" if part > 0 else ""
    if name == "theta":
        return f"; {min(part / total, 1):.0%} of it was in θ at once"
    return f"; {min(part / total, 1):.0%} of it waited in {NAMES[name]}"


def _inside(found: FlightExplanation, best: Culprit) -> list[str]:
    shares = [share for _, share in best.examples]
    if not shares:
        note = found.data.attrs["examples"].get(str(best.step), "")
        return [f"Its examples were not ranked: {note}."] if note else []
    total = sum(abs(share) for share in shares)
    few = [(i, share) for i, share in best.examples[:FEW] if share > 0.5 * shares[0] > 0]
    carried = sum(share for _, share in few) / total if total else 0.0
    if len(shares) <= FEW or carried < NOTABLE:
        return ["Inside it no few examples stand out."]
    names = " and ".join(str(i) for i, _ in sorted(few))
    return [
        f"Inside it, example{'s' if len(few) > 1 else ''} {names} carr{'y' if len(few) > 1 else 'ies'} {carried:.0%}."
    ]


def _no_spike(found: FlightExplanation) -> str:
    attrs, first = found.data.attrs, found.culprits[0]
    known, proof = (first.measured, "replayed") if attrs["order"] else (first.predicted, "predicted")
    return (
        f"Step {attrs['step']} is no spike: its loss {attrs['loss']:.4g} lies within the usual spread (median "
        f"{attrs['baseline']:.4g}, σ {attrs['sigma']:.2g}). The largest part of it is step {first.step}, {known:+.3g} "
        f"({proof})."
    )


def _nobody(found: FlightExplanation) -> str:
    attrs, jump = found.data.attrs, found.data.attrs["jump"]
    text = f"No single batch explains this spike of {found.size:.3g}"
    if not attrs["order"]:
        return f"{text}: nothing was verified, or no step raised it. Pass verify=k to run again without the top k."
    best = found.culprits[0]
    if _jumped(found) >= HALF * found.size:
        return (
            f"{text}; the largest part is the learning-rate change at {jump['step']} ({jump['from']:.3g} to "
            f"{jump['to']:.3g}): {jump['measured']:.3g} of it is gone with the old rate (replayed), and the largest "
            f"single step is {best.step} with {best.measured:.3g}."
        )
    return f"{text}; the largest part is step {best.step}, {best.measured:.3g} of it (replayed)."


def certificate(found: FlightExplanation) -> Certificate:
    """The replay, the Hessian, and predicted beside measured."""
    data, attrs = found.data, found.data.attrs
    deviation, error = float(data["replay_deviation"]), float(data["hessian_error"])
    findings = [
        Finding("care" if deviation else "ok", "replay", "replay_deviation", deviation, 0.0, attrs["replay"]),
        Finding("ok", "Hessian products", "hessian_error", error, None, attrs["check"]),
    ]
    verified = [c for c in found.culprits if math.isfinite(c.measured)]
    if not verified:
        sentence = "Nothing was run again without a step: the order is predicted, not proved."
        return Certificate((*findings, Finding("care", "proof", "verified", 0, 1, sentence)))
    errors = [abs(c.predicted - c.measured) / max(abs(c.measured), 1e-300) for c in verified]
    good = [c.delay for c, error in zip(verified, errors) if error <= TRUST.nrmse]
    bar = f"{100 * TRUST.nrmse:g} %"
    signs = sum((c.predicted > 0) == (c.measured > 0) for c in verified)
    sentence = (
        f"Of the top {len(verified)} steps, run again without: the prediction for the largest is off by "
        f"{errors[0]:.0%}, {signs} of {len(verified)} have the predicted sign"
        + (f", and it holds within {bar} up to a delay of {max(good)}." if good else f", and none is within {bar}.")
    )
    findings.append(
        Finding("ok" if good else "care", "prediction", "relative_error", min(errors), TRUST.nrmse, sentence)
    )
    sentence = "Measured numbers are differences of two real runs; predicted ones are linear."
    return Certificate((*findings, Finding("note", "proof", "verified", len(verified), 1, sentence)))
