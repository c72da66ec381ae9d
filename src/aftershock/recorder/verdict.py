"""The words of an explanation: what happened."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .alarm import ALARM, robust_z, usual
from .event import BARS
from .facts import BlameFacts, EventFacts, Facts, InstrumentFacts
from .unrecorded import risen, short
from .words import LESS_OWN, at_least, percent, plus_minus, share, share_spread

if TYPE_CHECKING:
    from .explanation import Culprit, FlightExplanation


@dataclass(frozen=True)
class Inside:
    """The numbers that decide what of a culprit's inside is worth telling."""

    few: int = 3  # examples that are worth naming
    beside: float = 0.5  # of the largest share: an example with less of it does not stand out as that one does
    notable: float = 0.5  # of a batch's share, which few examples must carry to be named
    against: float = 0.1  # of the sum: a channel that takes away more of it leaves no share that is part of something


INSIDE = Inside()
CALM = ("no spike", "not a number")  # kinds in which no event was looked into
NAMES = {"theta": "θ", "m": "m", "v": "v"}


def verdict(found: FlightExplanation) -> str:
    """One paragraph: the kind of event, who did it, what the runs without show, what would have prevented it; and over
    which steps it was measured."""
    facts, said = found.facts, SAID[found.kind](found)
    event = facts.event.kind not in CALM and facts.event.value > _level(facts.event)
    span = f"The event is {_spike(facts.event)}." if event and _span(facts.event) not in said else ""
    blamed = [c for c in found.culprits if c.step in facts.blame.blamed]
    shares = LESS_OWN if "%" in said and less_own(found, blamed) else ""
    parts = (_opening(found), said, _condition(facts), shares, span, _apart(facts.event), _closing(found))
    return " ".join(part for part in parts if part)


def _apart(event: EventFacts) -> str:
    """Later steps that are looked at by themselves."""
    if event.kind in CALM or not event.apart:
        return ""
    several = len(event.apart) > 1
    return (
        f"{_steps(event.apart)} after it {'are events of their own' if several else 'is an event of its own'}, whose "
        f"{'batches are' if several else 'batch is'} bad by {'themselves' if several else 'itself'}: ask for "
        f"{'them' if several else 'that one'}, too."
    )


def _level(event: EventFacts) -> float:
    """Above it a value is not usual."""
    return event.usual + BARS.gone * event.sigma


def _opening(found: FlightExplanation) -> str:
    """What the reader must know before anything else."""
    facts, parts = found.facts, []
    event, recording, replay = facts.event, facts.recording, facts.replay
    if event.rise is not None:
        parts.append(f"{recording.reason[0].upper()}{recording.reason[1:]}.")
    if event.kind not in CALM and recording.nothing_seen:
        parts.append(f"{recording.nothing_seen} What follows is about the last step, {event.explained}.")
    if _about_norm(event) and event.quantity != "loss":
        parts.append(f"{_norm_first(found)}: what follows is about the norm, before clipping.")
    if replay.lost_in_scatter:
        parts.append(
            f"Replays of this run that start a rounding away differ by {event.value_spread:.3g} in the "
            f"{event.quantity} of step {event.explained}, and the spike is {event.size:.3g}: nothing that is changed "
            "can be told from luck. Next time record a run that repeats itself "
            "(torch.use_deterministic_algorithms(True), every random number from a seed)."
        )
    if event.kind not in CALM and replay.replays_with_it < replay.replays:
        parts.append(f"The spike is there in {replay.replays_with_it} of {replay.replays} replays of this run.")
    if recording.missing:
        parts.append(f"{len(recording.missing)} recorded step(s) are lost ({recording.missing[0]} …).")
    if event.kind != "not a number":
        parts += short(found)
    return " ".join(parts)


def _closing(found: FlightExplanation) -> str:
    """What else there is to ask about."""
    event, first, parts = found.facts.event, found.facts.recording.not_finite, []
    if first is not None and event.kind != "not a number":
        parts.append(
            f"The loss or gradient of step {first} is not finite: step={first} (--step {first}) explains that."
        )
    if _about_norm(event) and event.quantity == "loss":
        parts.append(f'{_norm_first(found)}: this was about the loss (of="norm", --of norm, explains the norm).')
    return " ".join(parts)


def _about_norm(event: EventFacts) -> bool:
    return event.kind != "not a number" and event.norm_first


def _spike(event: EventFacts) -> str:
    noun = "spike" if event.rise is None else "rise"
    size = f"{event.peak:.3g}{plus_minus(event.peak_spread)}"
    return f"the {noun} of {size} ({_span(event)}, usual {event.quantity} {event.usual:.3g})"


def _value(event: EventFacts) -> str:
    return f"{event.value:.4g}{plus_minus(event.value_spread)}"


def _span(event: EventFacts) -> str:
    return f"steps {event.onset}–{event.end}"


def _batch(found: FlightExplanation) -> str:
    event, blame, best = found.facts.event, found.facts.blame, found.culprits[0]
    without = _without(event, best.left, best.left_spread)
    said = f"Step {best.step} did it: {without} without it, {_placebos(blame)}."
    size = f"{event.size:.3g}{plus_minus(event.value_spread)}"
    part = f"of {size}" if best.measured <= event.size else f"(the spike is {size} above the usual)"
    raised = (
        f"It raised the {event.quantity} at step {event.explained} by {best.measured:.3g}"
        f"{plus_minus(best.measured_spread)} {part}{_waited(found, best)}."
    )
    by_itself = [raised] if best.left <= BARS.half else []  # else a batch like its own did what none does not
    done = _replaced(found) if blame.replaced else said + _cleared(blame)
    return " ".join([done, *by_itself, *_rest(found, best.left), *_inside(found, best)])


def _rest(found: FlightExplanation, left: float) -> list[str]:
    """Where much is left without the blamed, and far less without the explained step: what its own batch is like."""
    event, own = found.facts.event, found.facts.blame.own_left
    if not (left > BARS.several and own <= BARS.half * left):  # not known of every batch
        return []
    said = found.facts.instruments.data_said
    return [f"Without step {event.explained} itself {own:.0%} is left; its batch beside others: {said}."]


def _replaced(found: FlightExplanation) -> str:
    """Where leaving a step out is not enough, because a batch that is left out teaches nothing."""
    event, blame = found.facts.event, found.facts.blame
    own = {c.step: c for c in found.culprits}
    instead = dict(zip(blame.replaced, zip(blame.replaced_left, blame.replaced_left_spread)))
    each = [
        f"with batches like its own in place of step {step}'s, {_without(event, *instead[step])} "
        f"({share(own[step].left, own[step].left_spread, so_far=own[step].left_so_far)} without any batch there)"
        for step in blame.blamed
        if step in instead
    ]
    each += [
        f"without step {step}, {_without(event, own[step].left, own[step].left_spread)}"
        for step in blame.blamed
        if step not in instead
    ]
    count, other = blame.replaced_placebos, blame.replaced_placebos_change
    others = f"with such batches in place of those of {count - other} of {count} other steps"
    if blame.kin:
        others += f" of the same kind of data, {_placebos(blame)}"
    return f"{_steps(blame.blamed)} did it: {'; '.join(each)}; and it stays {others}.{_cleared(blame)}"


def _cleared(blame: BlameFacts) -> str:
    """Steps without which the event is gone as well, and whose batches are sound."""
    if not blame.cleared:
        return ""
    said = _missed(blame, "half of it would be gone, too")
    return f" {said[0].upper()}{said[1:]}."


def _missed(blame: BlameFacts, gone: str) -> str:
    """What is missed without these steps."""
    whose = "its own in place of it" if len(blame.cleared) == 1 else "their own in place of any of them"
    missed = "the kind of data" if blame.kin else "a step, or its kind of data"
    sound = "the batch is sound" if len(blame.cleared) == 1 else "the batches are sound"
    return (
        f"without {_steps(blame.cleared).lower()} {gone}, but not with batches like {whose}: what is missed there is "
        f"{missed}, and {sound}"
    )


def _steps(steps: Sequence[int]) -> str:
    return f"Step{'s' if len(steps) > 1 else ''} {_listed(steps)}"


def _listed(steps: Sequence[int]) -> str:
    return " and ".join(part for part in (", ".join(map(str, steps[:-1])), str(steps[-1])) if part)


def _without(event: EventFacts, left: float, spread: float) -> str:
    return "there is no spike" if left <= event.gone else f"{percent(left, spread)} of the spike is left"


def _placebos(blame: BlameFacts) -> str:
    if blame.placebos_change == 0:
        some = f"any of {blame.placebos} other steps" if blame.placebos != 1 else "the one other step that was left out"
        return f"and without {some} it stays"
    return f"and without {blame.placebos - blame.placebos_change} of {blame.placebos} other steps it stays"


def _group(found: FlightExplanation) -> str:
    event, blame = found.facts.event, found.facts.blame
    names = _listed(blame.blamed)
    if blame.replaced:
        return _replaced(found)
    if blame.group:
        others = f"{blame.group_placebos} other groups of {len(blame.blamed)} steps"
        kept = blame.group_placebos - blame.group_placebos_change
        if blame.group_replaced:
            return (
                f"Steps {names} did it together: with batches like their own in place of theirs "
                f"{blame.group_left:.0%}{share_spread(blame.group_left_spread)} of {_spike(event)} is left, the own "
                f"batch of each of them adds to it, and it stays with such batches in place of those of {kept} of "
                f"{others}."
            )
        kind = " of the same kind of data" if blame.kin else ""
        return (
            f"Steps {names} did it together: without them {percent(blame.group_left, blame.group_left_spread)} of "
            f"{_spike(event)} is left, with any one of them back at least "
            f"{percent(blame.group_back, blame.group_back_spread)}, and it stays without {kept} of {others}{kind}."
            + "".join(f" {sentence}" for sentence in _rest(found, blame.group_left))
        )
    most = max(found.culprits[: len(blame.blamed)], key=lambda c: c.left)
    return (
        f"Steps {names} did it, and each was needed: without any one of them at most "
        f"{most.left:.0%}{share_spread(most.left_spread)} of {_spike(event)} is left, {_placebos(blame)}."
        f"{_cleared(blame)}"
    )


def _own(found: FlightExplanation) -> str:
    event, blame = found.facts.event, found.facts.blame
    several = len(blame.blamed) > 1
    opening = f"The batch of step {event.explained} itself is the spike"
    if several:
        opening = (
            f"The batches of steps {_listed(blame.blamed)} themselves are the spike; that of step {event.explained}"
        )
    left = (blame.group_left, blame.group_left_spread) if several else (blame.own_left, blame.own_left_spread)
    without = f"{_without(event, *left).capitalize()} without {'them' if several else 'it'}"
    unsure = "" if found.facts.recording.after else " (or the first of other data: what follows was not recorded)"
    if not math.isnan(kin := found.facts.instruments.kin_high):
        unsure += (
            f", or all of a kind that is rare here: the earlier batch whose inputs are most like its own had {kin:.3g} "
            "when it came, so that it is on no skip list"
        )
    itself = f"{found.facts.instruments.data_said}: it is this batch{unsure}"
    return f"{opening}: {itself}. {without}, {_others_keep(blame)}."


def _others_keep(blame: BlameFacts) -> str:
    """How high a batch is that is high by itself depends on the weights: what matters is whether it still is."""
    if blame.placebos_remove == blame.placebos_change:
        return _placebos(blame)
    staying = f"{blame.placebos - blame.placebos_remove} of {blame.placebos} other steps"
    raised = blame.placebos_change - blame.placebos_remove
    return f"and without {staying} it stays, if without {raised} of them much higher or elsewhere"


def _shift(found: FlightExplanation) -> str:
    event, said = found.facts.event, found.facts.instruments.data_said
    when = f"at step {event.explained}"
    if event.onset < event.explained:  # slowly, perhaps, and before anything showed it
        when = f"by step {event.explained} (the {event.quantity} is high from step {event.onset} on)"
    elif _high_before(found):
        when = f"by step {event.explained} (most values before it are high, too)"
    return f"The data changed {when}: {said}. No batch is to blame."


def _high_before(found: FlightExplanation) -> bool:
    """Had the data changed before the last value that was usual? Those that scatter may be so now and then."""
    at = found.data["place"].values.tolist().index(found.facts.event.explained)
    before = found.course[max(0, at - ALARM.lasting) : at].tolist()
    return len(before) == ALARM.lasting and statistics.median(before) > _level(found.facts.event)


def _source(found: FlightExplanation) -> str:
    event, said = found.facts.event, found.facts.instruments.data_said
    opening = f"The batch of step {event.explained} is high as others of its kind are: {said}."
    meaning = "A harder source of data keeps coming back: no batch is to blame, and there is nothing to skip."
    return " ".join([opening, meaning, *_higher(event)])


def _draw(found: FlightExplanation) -> str:
    event, said = found.facts.event, found.facts.instruments.data_said
    opening = f"The random numbers that were drawn at step {event.explained} are the spike: {said}"
    meaning = f"{_placebos(found.facts.blame)}. No batch is to blame, and there is nothing to skip."
    return " ".join([f"{opening}, {meaning}", *_higher(event)])


def _higher(event: EventFacts) -> list[str]:
    """That another event may have come after the one that is explained."""
    if event.highest == event.explained:
        return []
    return [f"Its largest {event.quantity} is that of step {event.highest}: ask for that one, too."]


def _hyperparameter(found: FlightExplanation) -> str:
    settings = found.facts.settings
    left = _without(found.facts.event, settings.condition_left, settings.condition_left_spread)
    if bool((found.data["treatment_held"] & found.data["treatment_prevents"]).any()):
        left = "there is no spike"
    said = f"{settings.condition}; with the former value {left} (replayed)"
    return f"A hyperparameter did it: {said}. No batch is to blame."


def _condition(facts: Facts) -> str:
    """A change that lasts, without which the blamed batch would not have done it."""
    settings = facts.settings
    if not facts.blame.blamed or settings.condition is None:
        return ""
    left = _without(facts.event, settings.condition_left, settings.condition_left_spread)
    return f"In this window, {settings.condition}; with the former value, too, {left} (replayed)."


def _instability(found: FlightExplanation) -> str:
    blame, removing = found.facts.blame, _removing(found)
    changed = blame.placebos_change > BARS.specific * blame.placebos
    nobody = blame.placebos and (changed or len(removing) > BARS.together or blame.several_acquitted)
    parts = ["No batch did this." if nobody else "No batch is known to have done this."]
    if not nobody and found.tried:
        parts = [f"No batch is known to have done this: {_tried(found)}."]
    many = blame.placebos_change > BARS.unspecific * blame.placebos
    meaning = "a small change makes another run of it" if many else "a step without which it is gone is nothing special"
    if changed:
        of = f"{blame.placebos}"
        if blame.placebos < blame.placebos_asked:
            of = f"the {blame.placebos} tried of {blame.placebos_asked}"
        ended = any(c.role == "placebo" and c.left_so_far for c in found.culprits)
        parts.append(
            f"Leaving out {'at least ' * ended}{blame.placebos_change} of {of} steps that nobody suspects removes the "
            f"spike, doubles it or moves it: {meaning}."
        )
    if len(removing) > BARS.together:
        steps = _steps([c.step for c in removing]).lower()
        parts.append(f"Half of it is gone without any one of {steps}: none of them is special.{_cleared(blame)}")
    parts += [several(blame), _lucky(found)]
    parts += [f"{text[0].upper()}{text[1:]}." for text in _instruments(found.facts.instruments)]
    parts.append(treated(found))
    return " ".join(part for part in parts if part)


def _removing(found: FlightExplanation) -> list[Culprit]:
    """Suspects of which each alone removes half of the event."""
    return [c for c in found.culprits if c.role == "suspect" and c.left <= BARS.half]


def several(blame: BlameFacts) -> str:
    """Where each of several steps removes it and none is blamed, because as many others do, too."""
    if not blame.several_acquitted:
        return ""
    return (
        "Each of several steps removes it alone, and as many other steps left out at once remove it, double it or move "
        f"it, too, in {blame.several_change} of {blame.several} cases: none of them is special."
    )


def _lucky(found: FlightExplanation) -> str:
    """Steps without which it was gone in one run, and not in a second one."""
    steps = found.data["step"].values[found.data["lucky"].values].tolist()
    if not steps:
        return ""
    return (
        f"Without {_steps(steps).lower()} half of it was gone in one run, and not in a second one, which began a "
        "rounding away: in this run that is luck."
    )


def _instruments(instruments: InstrumentFacts) -> list[str]:
    """Those that speak for instability."""
    said = [instruments.update_said] if instruments.update_large else []
    if instruments.amplification is not None and not instruments.linear_ok:
        said.append(instruments.amplification.grown)
    if instruments.sharp is not None and instruments.sharp.unstable:
        said.append(instruments.sharp.sentence)
    return said


def treated(found: FlightExplanation) -> str:
    if found.treatment is not None:
        return f"It would not have happened with {found.treatment} (replayed)."
    if lucky := int(found.data["treatment_lucky"].sum()):
        return (
            f"{lucky} of the {found.data.sizes['treatment']} treatments that were tried "
            f"prevent{'s' if lucky == 1 else ''} it, and none does so too from a start that differs by one rounding: "
            "in this run that is luck."
        )
    if found.data.sizes["treatment"]:
        return "None of the treatments that were tried prevents it."
    return ""


def _unknown(found: FlightExplanation) -> str:
    event, blame = found.facts.event, found.facts.blame
    if found.facts.replay.lost_in_scatter:
        return f"What caused {_spike(event)} is not known."
    if event.rose_before:
        return risen(found)
    if not event.value > _level(event):
        return f"Whether the {event.quantity} {_value(event)} of step {event.explained} is a spike is not known."
    if not found.tried:
        said = f"Nothing was run again without a step, so no cause of {_spike(event)} is proved: pass verify=k."
        return f"{said} {treated(found)}".strip()
    parts = [f"What caused {_spike(event)} is not known: {_tried(found)}.", several(blame), _lucky(found)]
    parts += [f"{text[0].upper()}{text[1:]}." for text in _instruments(found.facts.instruments)]
    parts += [treated(found), *_higher(event)]
    if found.facts.instruments.data_said:
        parts.append(f"The batch of step {event.explained} beside others: {found.facts.instruments.data_said}.")
    return " ".join(part for part in parts if part)


def _tried(found: FlightExplanation) -> str:
    """What the runs without suspects leave, where that blames nobody."""
    tried, blame = found.tried, found.facts.blame
    least = min((c for c in found.culprits if c.role == "suspect"), key=lambda c: c.left)
    each = f"each of the {tried} most suspected steps" if tried > 1 else f"step {least.step}, the most suspected,"
    left = share(least.left, least.left_spread, so_far=False)
    seen = f"without {each} {left} of it stays"
    if tried > 1 or least.left_so_far:
        seen = f"without {each} at least {at_least(least.left, least.left_spread)} of it stays"
    if least.left <= BARS.half:
        seen = f"without step {least.step} {left} of it stays, {_not_special(found, least)}"
        if blame.cleared:
            seen = _missed(blame, "half of it would be gone")
    return seen


def _not_special(found: FlightExplanation, suspect: Culprit) -> str:
    """Why a step without which half is gone is not blamed."""
    blame = found.facts.blame
    if suspect.step in blame.gone_with_others:
        changing, whose = blame.replaced_placebos_change, " of its kind of data" if blame.kin else ""
        others = f"such batches at {changing} of {blame.replaced_placebos} other steps{whose} change it as well"
        if not changing:
            others = f"more is left than half of what such batches leave at another step{whose}"
        return (
            f"and with batches like its own in its place half is gone, too, but {others}, so that it is not clear that "
            "the step is special"
        )
    placebos = [c for c in found.culprits if c.role == "placebo"]
    mild = min(placebos, key=lambda c: c.left, default=None)
    if mild is not None and suspect.left > BARS.clear * mild.left:
        return f"and without step {mild.step}, which nobody suspects, {percent(mild.left, so_far=mild.left_so_far)}"
    return "and nothing shows that this is special"


def _not_a_number(found: FlightExplanation) -> str:
    event, settings, overflows = found.facts.event, found.facts.settings, found.facts.instruments.overflows
    what = "The gradient norm of step {} overflows" if overflows else "The loss or gradient of step {} is not finite"
    opening = f"{what.format(event.asked)}; step {event.explained} is the last finite one"
    if event.asked == event.explained:
        opening = (
            f"{what.format(event.asked)}, and it is the first recorded step, so that no step before it can be asked: "
        ) + (
            "next time start the recorder earlier, from weights whose loss is finite"
            if event.asked
            else "the run begins with it, so that the cause lies in the weights, the data or the loss itself"
        )
    said = found.facts.instruments.not_a_number_said
    parts = [f"{opening}."] + ([f"{said[0].upper()}{said[1:]}."] if said else [])
    for change, finite in zip(settings.settings, settings.setting_finite):
        now = "is finite" if finite else "is not finite either"
        which = f"the norm of step {event.asked}" if overflows else f"step {event.asked}"
        parts.append(f"Before it, {change}: with the former value {which} {now} (replayed).")
    return " ".join(parts)


def _no_spike(found: FlightExplanation) -> str:
    event, recording = found.facts.event, found.facts.recording
    if recording.nothing_seen and event.quantity == "loss":
        return recording.nothing_seen
    return (
        f"Step {event.explained} is no spike: its {event.quantity} {_value(event)} lies within the usual spread "
        f"(median {event.usual:.4g}, σ {event.sigma:.2g})."
    )


def _norm_first(found: FlightExplanation) -> str:
    """The gradient norm stands out, and the loss less or not at all."""
    event = found.facts.event
    at, middle = found.data["place"].values.tolist().index(event.explained), event.loss_usual
    norms = found.data["norm"].values[: at + 1].tolist()
    z = robust_z(norms[-1], norms[:-1])
    sigmas = (float(found.data["loss"][at]) - middle) / max(event.loss_sigma, 1e-300)
    far = f"{z:.0f}" if z < 1000 else "more than 1000"
    loss, side = ("less", "above") if sigmas > 0 else ("falls", "below")
    loss = "does not" if abs(sigmas) <= BARS.gone else loss
    return (
        f"The gradient norm of step {event.explained} stands out, {norms[-1]:.4g}, {far} robust σ above its median "
        f"{usual(norms[:-1])[0]:.4g}, and the loss {loss}, {abs(sigmas):.1f} robust σ {side} its usual {middle:.4g}"
    )


SAID = {
    "batch": _batch,
    "group": _group,
    "own batch": _own,
    "shift": _shift,
    "source": _source,
    "draw": _draw,
    "hyperparameter": _hyperparameter,
    "instability": _instability,
    "unknown": _unknown,
    "not a number": _not_a_number,
    "no spike": _no_spike,
}


def less_own(found: FlightExplanation, some: Iterable[Culprit]) -> bool:
    """Is what one of these leaves a share of the event less its own value? It is a step of the event itself, and
    something is left."""
    event = found.facts.event
    return any(c.role and c.step >= event.onset and c.left > event.gone for c in some)


def near(best: Culprit) -> bool:
    """Was the step run without, and its prediction right?"""
    return math.isfinite(best.measured) and abs(best.predicted - best.measured) <= BARS.near * abs(best.measured)


def right(found: FlightExplanation, best: Culprit) -> bool:
    """May channels, layers and examples of a step be told? Its prediction was right, and others are, too."""
    return found.facts.instruments.linear_ok and found.sizes_hold and near(best)


def _waited(found: FlightExplanation, best: Culprit) -> str:
    """Where the write waited, where the predicted parts have one sign and so are parts of something."""
    total = sum(best.channels.values())
    if not right(found, best) or not total > 0 or min(best.channels.values()) < -INSIDE.against * total:
        return ""
    name, part = max(best.channels.items(), key=lambda item: item[1])
    if name == "theta":
        return f"; {min(part / total, 1):.0%} of it was in θ at once"
    return f"; {min(part / total, 1):.0%} of it waited in {NAMES[name]}"


def _inside(found: FlightExplanation, best: Culprit) -> list[str]:
    if best.examples and not right(found, best):
        why = "its prediction was right, and those of other steps are not to be trusted"
        return [f"Its examples are not told: {why if near(best) else 'its prediction was wrong'}."]
    shares = [share for _, share in best.examples]
    if not shares:
        note = str(found.data["example_note"].sel({"step": best.step}).item())
        return [f"Its examples were not ranked: {note}."] if note else []
    total = sum(abs(share) for share in shares)
    few = [(i, share) for i, share in best.examples[: INSIDE.few] if share > INSIDE.beside * shares[0] > 0]
    carried = sum(share for _, share in few) / total if total else 0.0
    if len(shares) <= INSIDE.few or carried < INSIDE.notable:
        return ["Inside it no few examples stand out."]
    names = " and ".join(str(i) for i, _ in sorted(few))
    return [
        f"Inside it, example{'s' if len(few) > 1 else ''} {names} carr{'y' if len(few) > 1 else 'ies'} {carried:.0%}."
    ]
