"""How far an explanation can be trusted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..results.certificate import TRUST, Certificate, Finding
from .event import BARS
from .facts import Facts
from .stability import GROWTH
from .unrecorded import after
from .verdict import CALM

if TYPE_CHECKING:
    from .explanation import FlightExplanation


def certificate(found: FlightExplanation) -> Certificate:
    """The replay, the Hessian, how fast the run amplifies, and predicted beside measured."""
    facts = found.facts
    findings, instruments = [_replay(facts), *_scatter(facts), *_after(facts), *_placebos(found)], facts.instruments
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


def _placebos(found: FlightExplanation) -> list[Finding]:
    """Where steps were run without beside fewer others than tell chance apart."""
    facts = found.facts
    asked, (made, others) = facts.blame.placebos_asked, _compared(facts)
    nothing = not found.tried and math.isnan(facts.blame.own_left)  # no step was run without
    enough = asked >= BARS.enough and not (facts.blame.blamed and made < BARS.enough)
    if facts.event.kind in CALM or nothing or enough:
        return []
    if asked >= BARS.enough and others:
        sentence = f"Only {made} {others}: so few cannot tell what others do."
        return [Finding("care", "placebos", "made", made, BARS.enough, sentence)]
    if asked >= BARS.enough:
        sentence = (
            f"Only {made} step{' was' if made == 1 else 's were'} left out that nobody suspects, since there are no "
            "more before the event: so few cannot tell what others do. Record a longer window= next time."
        )
        return [Finding("care", "placebos", "made", made, BARS.enough, sentence)]
    sentence = (
        f"Only {asked} placebo{' was' if asked == 1 else 's were'} asked for: a step is blamed for what others do not "
        f"do, of which so few cannot tell; pass placebos={BARS.enough} or more."
    )
    return [Finding("care", "placebos", "asked for", asked, BARS.enough, sentence)]


def _compared(facts: Facts) -> tuple[int, str]:
    """How many others a blame is compared with, and what was done to them; nothing of single steps, all of which were
    left out that there are where they are fewer than were asked for."""
    blame = facts.blame
    if facts.event.kind == "group" and blame.group:
        others = f"other groups of {len(blame.blamed)} steps are compared with what is blamed"
        return blame.group_placebos, others
    if blame.replaced and not blame.kin:
        return blame.replaced_placebos, "other steps were given batches like their own in place of them"
    return blame.placebos, ""


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
