"""How far an explanation can be trusted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..results.certificate import TRUST, Certificate, Finding
from .event import BARS
from .facts import Facts
from .stability import GROWTH
from .unrecorded import after, few_others, others
from .verdict import CALM

if TYPE_CHECKING:
    from .explanation import FlightExplanation


def certificate(found: FlightExplanation) -> Certificate:
    """The replay, the Hessian, how fast the run amplifies, and predicted beside measured."""
    facts = found.facts
    findings = [_replay(facts), *_scatter(facts), *_after(facts), *_medians(facts), *_placebos(found)]
    instruments = facts.instruments
    if instruments.refused and instruments.linear_ok:
        sentence = f"Nothing is predicted: {instruments.refused}"
        return Certificate((*findings, Finding("care", "prediction", "answers", None, None, sentence)))
    error, tolerance = instruments.check_error, instruments.check_tolerance
    findings.append(Finding("ok", "Hessian products", "check_error", error, tolerance, instruments.check))
    if instruments.amplification is not None and not instruments.linear_ok:
        growth = instruments.amplification
        said = f"{growth.sentence[0].upper()}{growth.sentence[1:]}, and none is predicted. "
        said += "Measured numbers are of real runs."
        return Certificate((*findings, Finding("care", "growth", "per step", growth.per_step, GROWTH.too_fast, said)))
    return Certificate((*findings, *_predictions(found)))


def _replay(facts: Facts) -> Finding:
    deviation = facts.replay.replay_deviation
    exact = deviation == 0 and facts.replay.replayed > 0
    return Finding("ok" if exact else "care", "replay", "replay_deviation", deviation, 0.0, facts.replay.replay)


def _scatter(facts: Facts) -> list[Finding]:
    """What the ± is of."""
    event, spread = facts.event, facts.event.value_spread
    if not spread > 0:
        return []
    sentence = (
        f"± is how far apart the recording and {facts.replay.replays} replays of the unchanged run are in the same "
        f"number (the {event.quantity} of step {event.explained}: {spread:.2g})."
    )
    if event.kind not in CALM:
        sentence += (
            " A run with something changed was made once, and is taken to scatter as much. What the verdict names was "
            "run twice, from starts a rounding apart, and holds in both: its ± is no less than these two are apart."
        )
    return [Finding("care", "scatter", event.quantity, spread, 0.0, sentence)]


def _after(facts: Facts) -> list[Finding]:
    recording = facts.recording
    sentence = after(recording)
    if facts.event.kind in CALM or not sentence:
        return []
    return [Finding("care", "event", "steps after it", recording.after, recording.after_wanted, sentence)]


def _medians(facts: Facts) -> list[Finding]:
    """That single values are not what runs are compared by, and why."""
    event = facts.event
    if event.over == 1 or event.kind in CALM:
        return []
    height, far = event.peak / event.sigma, BARS.gone / BARS.noisy
    sentence = (
        f"The spike is {height:.1f} robust σ high at its peak, and single values scatter by {BARS.gone:.0f}: what "
        f"other runs leave of it is told by the running medians of {event.over} values."
    )
    return [Finding("note", "measure", "peak_over_sigma", height, far, sentence)]


def _placebos(found: FlightExplanation) -> list[Finding]:
    """Where steps were run without beside fewer others than tell chance apart: no more were asked for, or are there."""
    blame = found.facts.blame
    if found.kind in CALM or not (found.tried or math.isfinite(blame.own_left)):
        return []
    if blame.placebos_asked < BARS.enough:
        asked = blame.placebos_asked
        sentence = (
            f"Only {asked} placebo{' was' if asked == 1 else 's were'} asked for: a step is blamed for what others do "
            f"not do, of which so few cannot tell; pass placebos={BARS.enough} or more."
        )
        return [Finding("care", "placebos", "asked for", asked, BARS.enough, sentence)]
    count, which = _compared(found)
    if count >= BARS.enough:
        return []
    sentence = f"Only {count} {which}: so few cannot tell what others do."
    return [Finding("care", "placebos", "compared with", count, BARS.enough, sentence)]


def _compared(found: FlightExplanation) -> tuple[float, str]:
    """How many others a verdict rests on, and what they are; no end of them where it rests on none."""
    blame = found.facts.blame
    if found.kind == "group" and blame.group:
        return blame.group_placebos, f"other groups of {len(blame.blamed)} steps are compared with what is blamed"
    if blame.blamed and blame.replaced and not blame.kin:
        return blame.replaced_placebos, "other steps were given batches like their own in place of them"
    there = others(found) if few_others(found) else math.inf
    return there, "step(s) that nobody suspects lie before the event"


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
