"""The words of an explanation: what happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .event import BARS, percent
from .triggers import robust_z, usual
from .unrecorded import risen, short

if TYPE_CHECKING:
    import xarray as xr

    from .explanation import Culprit, FlightExplanation

FEW = 3  # examples that are worth naming
NOTABLE = 0.5  # of a batch's share, which few examples must carry to be named
CALM = ("no spike", "not a number")  # kinds in which no event was looked into
NAMES = {"theta": "θ", "m": "m", "v": "v"}


def verdict(found: FlightExplanation) -> str:
    """One paragraph: the kind of event, who did it, what the runs without show, what would have prevented it; and over
    which steps it was measured."""
    said = SAID[found.kind](found)
    event = found.kind not in CALM and found.data.attrs["value"] > _level(found)
    span = f"The event is {_spike(found)}." if event and _span(found) not in said else ""
    return " ".join(part for part in (_opening(found), said, _condition(found), span, _closing(found)) if part)


def _level(found: FlightExplanation) -> float:
    """Above it a value is not usual."""
    attrs = found.data.attrs
    return float(attrs["usual"] + BARS.gone * attrs["sigma"])


def _opening(found: FlightExplanation) -> str:
    """What the reader must know before anything else."""
    attrs, parts = found.data.attrs, []
    if attrs["rise"] is not None:
        parts.append(f"{attrs['reason'][0].upper()}{attrs['reason'][1:]}.")
    if found.kind not in CALM and attrs["nothing_seen"]:
        parts.append(f"{attrs['nothing_seen']} What follows is about the last step, {attrs['step']}.")
    if _about_norm(found) and found.quantity != "loss":
        parts.append(f"{_norm_first(found)}: what follows is about the norm, before clipping.")
    if attrs["lost_in_scatter"]:
        parts.append(
            f"Replays of this run that start a rounding away differ by {attrs['scatter']:.3g} in the {found.quantity} "
            f"of step {attrs['step']}, and the spike is {found.size:.3g}: nothing that is changed can be told from "
            "luck. Next time record a run that repeats itself (torch.use_deterministic_algorithms(True), every random "
            "number from a seed)."
        )
    if found.kind not in CALM and attrs["repeats"] and attrs["repeats"][0] < attrs["repeats"][1]:
        parts.append(f"The spike is there in {attrs['repeats'][0]} of {attrs['repeats'][1]} replays of this run.")
    if attrs["missing"]:
        parts.append(f"{len(attrs['missing'])} recorded step(s) are lost ({attrs['missing'][0]} …).")
    if found.kind != "not a number":
        parts += short(found)
    return " ".join(parts)


def _closing(found: FlightExplanation) -> str:
    """What else there is to ask about."""
    first, parts = found.data.attrs["not_finite"], []
    if first is not None and found.kind != "not a number":
        parts.append(
            f"The loss or gradient of step {first} is not finite: step={first} (--step {first}) explains that."
        )
    if _about_norm(found) and found.quantity == "loss":
        parts.append(f'{_norm_first(found)}: this was about the loss (of="norm", --of norm, explains the norm).')
    return " ".join(parts)


def _about_norm(found: FlightExplanation) -> bool:
    return found.kind != "not a number" and bool(found.data.attrs["norm_first"])


def _spike(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    noun = "spike" if attrs["rise"] is None else "rise"
    return f"the {noun} of {attrs['peak']:.3g} ({_span(found)}, usual {found.quantity} {attrs['usual']:.3g})"


def _span(found: FlightExplanation) -> str:
    first, last = found.data.attrs["stretch"]
    return f"steps {first}–{last}"


def _batch(found: FlightExplanation) -> str:
    attrs, best = found.data.attrs, found.culprits[0]
    said = f"Step {best.step} did it: {_without(found, best.left)} without it, {_placebos(attrs)}."
    part = f"of {found.size:.3g}" if best.measured <= found.size else f"(the spike is {found.size:.3g} above the usual)"
    raised = (
        f"It raised the {found.quantity} at step {attrs['step']} by {best.measured:.3g} {part}{_waited(found, best)}."
    )
    by_itself = [raised] if best.left <= BARS.half else []  # else a batch like its own did what none does not
    return " ".join([_replaced(found) if attrs["replaced"] else said, *by_itself, *_inside(found, best)])


def _replaced(found: FlightExplanation) -> str:
    """Where leaving a step out is not enough, because a batch that is left out teaches nothing."""
    attrs, left = found.data.attrs, {c.step: c.left for c in found.culprits}
    each = [
        f"with batches like its own in place of step {step}'s, {_without(found, attrs['replaced'][str(step)])} "
        f"({left[step]:.0%} without any batch there)"
        for step in found.blamed
        if str(step) in attrs["replaced"]
    ]
    each += [
        f"without step {step}, {_without(found, left[step])}"
        for step in found.blamed
        if str(step) not in attrs["replaced"]
    ]
    count, other = attrs["replaced_placebos"], attrs["replaced_placebos_change"]
    others = f"with such batches in place of those of {count - other} of {count} other steps"
    if attrs["replaced_kin"]:
        others += f" of the same kind of data, {_placebos(attrs)}"
    return f"{_steps(found.blamed)} did it: {'; '.join(each)}; and it stays {others}.{_cleared(found)}"


def _cleared(found: FlightExplanation) -> str:
    """Steps without which the event is gone as well, and whose batches are sound."""
    steps = found.data.attrs["cleared"]
    if not steps:
        return ""
    whose = "its own in place of it" if len(steps) == 1 else "their own in place of any of them"
    return (
        f" Without {_steps(steps).lower()} half of it would be gone, too, but not with batches like {whose}: what is "
        "missed there is the kind of data, and the batch is sound."
    )


def _steps(steps: Sequence[int]) -> str:
    return f"Step{'s' if len(steps) > 1 else ''} {_listed(steps)}"


def _listed(steps: Sequence[int]) -> str:
    return " and ".join(part for part in (", ".join(map(str, steps[:-1])), str(steps[-1])) if part)


def _without(found: FlightExplanation, left: float) -> str:
    if left <= found.data.attrs["gone"]:
        return "there is no spike"
    return f"{percent(left)} of the spike is left"


def _placebos(attrs: dict[str, object]) -> str:
    count, other = int(attrs["placebos"]), int(attrs["placebos_change"])  # type: ignore[call-overload]
    if other == 0:
        return f"and without any of {count} other steps it stays"
    return f"and without {count - other} of {count} other steps it stays"


def _group(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    names = _listed(found.blamed)
    if attrs["replaced"]:
        return _replaced(found)
    if attrs["group"]:
        others = f"{attrs['group_placebos']} other groups of {len(found.blamed)} steps"
        kept = attrs["group_placebos"] - attrs["group_placebos_change"]
        if attrs["group_replaced"]:
            return (
                f"Steps {names} did it together: with batches like their own in place of theirs "
                f"{attrs['group_left']:.0%} of {_spike(found)} is left, the own batch of each of them adds to it, and "
                f"it stays with such batches in place of those of {kept} of {others}."
            )
        kind = " of the same kind of data" if attrs["replaced_kin"] else ""
        return (
            f"Steps {names} did it together: without them {percent(attrs['group_left'])} of {_spike(found)} is left, "
            f"with any one of them back at least {percent(attrs['group_back'])}, and it stays without {kept} of "
            f"{others}{kind}."
        )
    left = [c.left for c in found.culprits[: len(found.blamed)]]
    return (
        f"Steps {names} did it, and each was needed: without any one of them at most {max(left):.0%} of "
        f"{_spike(found)} is left, {_placebos(attrs)}."
    )


def _own(found: FlightExplanation) -> str:
    attrs, several = found.data.attrs, len(found.blamed) > 1
    opening = f"The batch of step {attrs['step']} itself is the spike"
    if several:
        opening = f"The batches of steps {_listed(found.blamed)} themselves are the spike; that of step {attrs['step']}"
    without = _without(found, attrs["group_left"] if several else attrs["own_left"])
    left = f"{without.capitalize()} without {'them' if several else 'it'}"
    return f"{opening}: {attrs['data']}. {left}, {_placebos(attrs)}."


def _shift(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    return f"The data changed at step {attrs['step']}: {attrs['data']}. No batch is to blame."


def _hyperparameter(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    left = _without(found, attrs["hyperparameter_left"])
    said = f"{attrs['hyperparameter_said']}; with the former value {left} (replayed)"
    return f"A hyperparameter did it: {said}. No batch is to blame."


def _condition(found: FlightExplanation) -> str:
    """A change that lasts, without which the blamed batch would not have done it."""
    attrs = found.data.attrs
    if not found.blamed or attrs["hyperparameter_said"] is None:
        return ""
    said, left = attrs["hyperparameter_said"], attrs["hyperparameter_left"]
    return f"In this window, {said}; with the former value, too, {_without(found, left)} (replayed)."


def _instability(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    parts = ["No batch did this." if attrs["placebos"] else "No batch is known to have done this."]
    many = attrs["placebos_change"] > BARS.unspecific * attrs["placebos"]
    meaning = "a small change makes another run of it" if many else "a step without which it is gone is nothing special"
    if attrs["placebos_change"] > BARS.specific * attrs["placebos"]:
        parts.append(
            f"Leaving out {attrs['placebos_change']} of {attrs['placebos']} steps that nobody suspects removes the "
            f"spike, doubles it or moves it: {meaning}."
        )
    parts.append(several(attrs))
    parts += [f"{text[0].upper()}{text[1:]}." for text in _instruments(attrs)]
    parts.append(treated(found))
    return " ".join(part for part in parts if part)


def several(attrs: dict[str, Any]) -> str:
    """Where each of several steps removes it and none is blamed, because as many others do, too."""
    if not attrs["several_acquitted"]:
        return ""
    return (
        "Each of several steps removes it alone, and as many other steps left out at once remove it, double it or move "
        f"it, too, in {attrs['several_change']} of {attrs['several']} cases: none of them is special."
    )


def _instruments(attrs: dict[str, object]) -> list[str]:
    """Those that speak for instability."""
    said = []
    if attrs["update_large"]:
        said.append(str(attrs["update"]))
    if not attrs["linear_ok"]:
        said.append(str(attrs["growth"]).partition(":")[0])
    if "above" in str(attrs["sharpness"]):
        said.append(str(attrs["sharpness"]))
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
    attrs = found.data.attrs
    tried = found.tried
    if attrs["lost_in_scatter"]:
        return f"What caused {_spike(found)} is not known."
    if attrs["rose_before"]:
        return risen(found)
    if not attrs["value"] > _level(found):
        return f"Whether the {found.quantity} {attrs['value']:.4g} of step {attrs['step']} is a spike is not known."
    if not tried:
        said = f"Nothing was run again without a step, so no cause of {_spike(found)} is proved: pass verify=k."
        return f"{said} {treated(found)}".strip()
    least = min((c for c in found.culprits if c.role == "suspect"), key=lambda c: c.left)
    each = (
        f"each of the {tried} most suspected steps at least" if tried > 1 else f"step {least.step}, the most suspected,"
    )
    seen = f"without {each} {least.left:.0%} of it stays"
    if least.left <= BARS.half:
        seen = f"without step {least.step} {least.left:.0%} of it stays, and nothing shows that this is special"
        if attrs["cleared"]:
            seen = f"no batch is bad by itself.{_cleared(found).removesuffix('.')}"
    higher = attrs["highest"] != attrs["step"]  # another event may have come after the one that is explained
    parts = [f"What caused {_spike(found)} is not known: {seen}.", several(attrs), treated(found)]
    if higher:
        parts.append(f"Its largest {found.quantity} is that of step {attrs['highest']}: ask for that one, too.")
    return " ".join(part for part in parts if part)


def _not_a_number(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    opening = (
        f"The loss or gradient of step {attrs['asked']} is not finite; step {attrs['step']} is the last finite one"
    )
    if attrs["asked"] == attrs["step"]:
        opening = (
            f"The loss or gradient of step {attrs['asked']} is not finite, and it is the first recorded step, so that "
            "no step before it can be asked: "
        ) + (
            "next time start the recorder earlier, from weights whose loss is finite"
            if attrs["asked"]
            else "the run begins with it, so that the cause lies in the weights, the data or the loss itself"
        )
    said = attrs["not_a_number"]
    parts = [f"{opening}."] + ([f"{said[0].upper()}{said[1:]}."] if said else [])
    for change, finite in zip(attrs["changes"], attrs["finite_with"]):
        now = "is finite" if finite else "is not finite either"
        parts.append(f"Before it, {change}: with the former value step {attrs['asked']} {now} (replayed).")
    return " ".join(parts)


def _no_spike(found: FlightExplanation) -> str:
    attrs = found.data.attrs
    if attrs["nothing_seen"] and found.quantity == "loss":
        return str(attrs["nothing_seen"])
    return (
        f"Step {attrs['step']} is no spike: its {found.quantity} {attrs['value']:.4g} lies within the usual spread "
        f"(median {attrs['usual']:.4g}, σ {attrs['sigma']:.2g})."
    )


def _norm_first(found: FlightExplanation) -> str:
    """The gradient norm stands out, and the loss less or not at all."""
    attrs, at = found.data.attrs, found.data["place"].values.tolist().index(found.data.attrs["step"])
    norms, (middle, sigma) = found.data["norm"].values[: at + 1].tolist(), attrs["loss_usual"]
    z, sigmas = robust_z(norms[-1], norms[:-1]), (float(found.data["loss"][at]) - middle) / max(sigma, 1e-300)
    far = f"{z:.0f}" if z < 1000 else "more than 1000"
    loss, side = ("less", "above") if sigmas > 0 else ("falls", "below")
    loss = "does not" if abs(sigmas) <= BARS.gone else loss
    return (
        f"The gradient norm of step {attrs['step']} stands out, {norms[-1]:.4g}, {far} robust σ above its median "
        f"{usual(norms[:-1])[0]:.4g}, and the loss {loss}, {abs(sigmas):.1f} robust σ {side} its usual {middle:.4g}"
    )


SAID = {
    "batch": _batch,
    "group": _group,
    "own batch": _own,
    "shift": _shift,
    "hyperparameter": _hyperparameter,
    "instability": _instability,
    "unknown": _unknown,
    "not a number": _not_a_number,
    "no spike": _no_spike,
}


def right(found: FlightExplanation, best: Culprit) -> bool:
    """Was the step predicted well enough to speak of the parts of the prediction?"""
    return found.data.attrs["linear_ok"] and abs(best.predicted - best.measured) <= BARS.half * abs(best.measured)


def _waited(found: FlightExplanation, best: Culprit) -> str:
    """Where the write waited, where the predicted parts have one sign and so are parts of something."""
    total = sum(best.channels.values())
    if not right(found, best) or not total > 0 or min(best.channels.values()) < -0.1 * total:
        return ""
    name, part = max(best.channels.items(), key=lambda item: item[1])
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


def outcome(data: xr.Dataset, i: int) -> str:
    """What became of the event under a treatment."""
    if bool(data["treatment_prevents"][i]):
        return "prevents it"
    if bool(data["treatment_blows_up"][i]):
        return "blows up"
    left = float(data["treatment_left"][i])
    if bool(data["treatment_delays"][i]):
        return "delays it"
    if bool(data["treatment_lucky"][i]):
        return f"prevents it, and leaves {percent(left)} from one rounding away"
    so_far = " so far" if math.isnan(float(data["treatment_after"][i])) else ""  # half was there, and the run ended
    return f"leaves {percent(left)}{so_far}" if left < 10 else "makes it worse"
