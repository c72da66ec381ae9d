"""What was not recorded, and what to do about it next time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .event import BARS
from .facts import RecordingFacts
from .words import percent

if TYPE_CHECKING:
    from .explanation import FlightExplanation

PLACEBOS_DECIDE = (
    "batch",
    "group",
    "own batch",
    "draw",
    "instability",
    "unknown",
)  # kinds that rest on what other steps do


def short(found: FlightExplanation) -> list[str]:
    """Where too little was recorded before it, and what to do next time."""
    event, recording = found.facts.event, found.facts.recording
    places = found.data["place"].values.tolist()
    if event.rose_before:
        return []
    before = places.index(event.onset)
    remedy = "the run had only begun"
    if recording.more_recorded:
        remedy = "more is recorded, pass a larger window="
    elif places[0]:
        remedy = "start the recorder earlier" if recording.starts_here else "record with a larger window="
        remedy += " next time"
    if before < BARS.fewest:
        return [f"Only {before} step(s) before it are recorded, too few to know what is usual: {remedy}."]
    if few_others(found):
        return [
            f"The window is short: only {others(found)} step(s) that nobody suspects lie before it, and a step is "
            f"blamed for what others do not do; {remedy}."
        ]
    return []


def few_others(found: FlightExplanation) -> bool:
    """Does the verdict rest on what other steps do, of which too few lie before the event?"""
    return found.kind in PLACEBOS_DECIDE and found.tried > 0 and others(found) < BARS.enough


def others(found: FlightExplanation) -> int:
    """How many steps before the event nobody suspects."""
    onset = found.facts.event.onset
    suspects = sum(c.role == "suspect" and c.step < onset for c in found.culprits)
    return int((found.data["place"] < onset).sum()) - suspects


def risen(found: FlightExplanation) -> str:
    """A slow rise that began before the window: what changed in the window, and what to record next time."""
    event, settings, first = found.facts.event, found.facts.settings, int(found.data["place"][0])
    lowest = f"its lowest running median {event.rise:.4g}"
    parts = [
        f"What began this is not known: the window's first losses, from step {first} on, lie above {lowest} already."
    ]
    numbers = zip(settings.setting_left, settings.setting_left_spread, settings.setting_left_so_far)
    for change, (left, spread, so_far) in zip(settings.settings, numbers):
        stays = percent(left, spread, so_far=so_far)
        parts.append(f"In the window {change}; with the former value {stays} of the rise is left (replayed).")
    parts.append(
        f"Next time record with a window= that reaches back to where the loss was lowest, more than "
        f"{event.explained - first} steps."
    )
    return " ".join(parts)


def after(recording: RecordingFacts) -> str:
    """Where fewer steps after the spike are known than the recorder was to keep, and why."""
    count, wanted = recording.after, recording.after_wanted
    if count >= wanted:
        return ""
    known = f"{count} of {wanted} steps after the spike"
    how = {
        "not finite": f"{known} are known: the next is not finite",
        "other forward": f"{known} are replayed: the next ran in another mode (model.eval() or autocast)",
        "closed": f"{known} are recorded: the window closed then",
        "open": f"{known} are recorded so far",
    }[recording.after_ends]
    return f"{how}. A treatment that only moves it further would not be seen."
