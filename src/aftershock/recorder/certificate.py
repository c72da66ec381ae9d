"""How far an explanation can be trusted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..results.certificate import TRUST, Certificate, Finding
from .unrecorded import after

if TYPE_CHECKING:
    from .explanation import FlightExplanation


def certificate(found: FlightExplanation) -> Certificate:
    """The replay, the Hessian, how fast the run amplifies, and predicted beside measured."""
    attrs = found.data.attrs
    deviation = float(found.data["replay_deviation"])
    exact = deviation == 0 and attrs["replayed"] > 0
    findings = [Finding("ok" if exact else "care", "replay", "replay_deviation", deviation, 0.0, attrs["replay"])]
    if attrs["scatter"]:
        sentence = (
            f"From replay to replay the {found.quantity} of step {attrs['step']} is ± {attrs['scatter']:.2g}; later "
            "steps, and runs with something changed, may scatter more."
        )
        findings.append(Finding("care", "scatter", found.quantity, attrs["scatter"], 0.0, sentence))
    if attrs["event"] not in ("no spike", "not a number") and (sentence := after(attrs)):
        findings.append(Finding("care", "event", "steps after it", attrs["after"], attrs["after_wanted"], sentence))
    if attrs["linear_ok"] and not attrs["predicted"]:
        sentence = f"Nothing is predicted: {attrs['check']}"
        return Certificate((*findings, Finding("care", "prediction", "answers", None, None, sentence)))
    findings.append(Finding("ok", "Hessian products", "check", None, None, attrs["check"]))
    if not attrs["linear_ok"]:
        growth = attrs["growth"]
        said = f"{growth[0].upper()}{growth[1:]}, and none is predicted. Measured numbers are of real runs."
        return Certificate((*findings, Finding("care", "growth", "per step", None, None, said)))
    return Certificate((*findings, *_predictions(found)))


def _predictions(found: FlightExplanation) -> list[Finding]:
    tried = [c for c in found.culprits if math.isfinite(c.measured)]
    if not tried:
        sentence = "Nothing was run again without a step: predicted parts are not proved."
        return [Finding("care", "prediction", "verified", 0, 1, sentence)]
    total = sum(abs(c.measured) for c in tried)
    off = sum(abs(c.predicted - c.measured) for c in tried) / max(total, 1e-300)
    signs = sum((c.predicted > 0) == (c.measured > 0) for c in tried)
    level = TRUST.level(off)
    size = f"{off:.0%}" if off < 10 else "more than ten times"
    sentence = (
        f"Predicted parts of the {len(tried)} steps that were run without are off by {size} in sum, "
        f"{signs} have the right sign. Measured numbers are differences of two real runs."
    )
    return [Finding(level, "prediction", "relative_error", off, TRUST.nrmse, sentence)]
