"""An explained flight as one self-contained page, and in short for a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..recorder.event import BARS
from ..recorder.explanation import UNTRUSTED, shown_size
from ..recorder.other_runs import OtherRun, idle_in_words, other_runs, untried_in_words, with_an_effect
from ..recorder.stability import Sharpness
from ..recorder.verdict import CALM, less_own, near, right
from ..recorder.words import LESS_OWN, SO_FAR, plus_minus, share
from . import flight_figures as figures
from . import flight_steps as steps
from . import inside_figures as inside
from .shell import WORDS, findings, number, opening, plot, provenance_table, section, write_page

if TYPE_CHECKING:
    from ..recorder.explanation import Culprit, FlightExplanation

ROWS = 30  # steps in the page's table
LAYERS = 8  # in the table of the update's size
COMPARED = {
    "replace": "against the mean of the ordinary batches around it",
    "skip": "against no step",
}
STYLE = """
header .certificate li { padding: 6px 12px; margin-bottom: 4px; font-size: 14px; }
header .certificate strong { line-height: 1.5; flex-basis: 78px; }
header h2 { font-size: 15px; margin-bottom: 8px; }
.runs { width: 100%; font-variant-numeric: tabular-nums; margin-bottom: 20px; }
.runs thead th { border-bottom: 2px solid var(--edge); }
.runs td + td, .runs th { white-space: nowrap; }
.runs tr.prevents td:nth-child(2) { color: var(--good); font-weight: 600; }
.runs tr.chosen { background: var(--good-wash); }
.instruments dt { font-weight: 600; } .instruments dd { margin: 0 0 10px; max-width: 60em; }
.sortable tr.tried td.number { color: var(--ink); font-weight: 500; }
@media (max-width: 600px) { header .certificate strong { flex-basis: auto; }
  th, td { padding: 5px 6px; } .runs { font-size: 13px; } .runs th, .runs td + td { white-space: normal; } }
"""


def write_flight_page(found: FlightExplanation, path: str | Path, *, title: str | None = None) -> Path:
    """Write verdict and trust, the run's course, treatments, suspects and placebos, instruments as one HTML file."""
    title = _title(found) if title is None else title
    culprits = found.culprits
    sections = [
        f"<header>{opening(title, found.verdict)}\n{_which(found)}"
        f"<h2>How far to trust this</h2>\n{findings(found.certificate)}</header>",
        _course(found),
        *_treatments(found),
        *_trials(found, culprits),
        *steps.step_list(found, culprits),
        *_inside(found, culprits),
        *_instruments(found),
        *_numbers(found, culprits),
        section(
            "Where this comes from",
            provenance_table({key: _short(value) for key, value in _made_of(found).items()}),
        ),
    ]
    style = STYLE + steps.STYLE
    return write_page(Path(path), title, sections, style=style, script=steps.SCRIPT)


def notebook_view(found: FlightExplanation) -> str:
    """Verdict, trust and treatments as a piece of HTML."""
    trust = "".join(
        f"<li><b>{WORDS[finding.level]}</b>: {escape(finding.sentence)}</li>" for finding in found.certificate.findings
    )
    return (
        f"<div><p style='font-size: 1.15em'><b>{escape(found.verdict)}</b></p>\n<ul>{trust}</ul>\n{_runs(found)}</div>"
    )


def _which(found: FlightExplanation) -> str:
    which = found.facts.recording.which
    return f"<p class='story'>{escape(which)}</p>\n" if which else ""


def _title(found: FlightExplanation) -> str:
    event = found.facts.event
    if found.kind == "not a number":
        return f"What is not a number at step {event.asked}"
    spike = "spike" if found.quantity == "loss" else f"spike of the {found.quantity}"
    return f"The {found.quantity if found.kind == 'no spike' else spike} at step {event.explained}"


def _made_of(found: FlightExplanation) -> dict[str, object]:
    """The run, what was asked of it, and what made the result."""
    event, recording = found.facts.event, found.facts.recording
    return {
        "run": recording.run,
        "kept because": recording.reason,
        "step": event.explained,
        event.quantity: event.value,
        f"usual {event.quantity}": event.usual,
        "robust σ": event.sigma,
        "compared with": found.facts.blame.ranked_by,
        **found.data.attrs,
    }


# --- the page's parts


def _course(found: FlightExplanation) -> str:
    event = found.facts.event
    caption = (
        f"Grey: what was usual (median ± {BARS.gone:g} robust σ of what was before it). The ring is the "
        f"{found.quantity} of step {event.explained}.{_uprights(found, 'each value')}"
    )
    if found.kind not in CALM:
        low, high = figures.USUAL_UPDATE
        caption += (
            f" Red: the event, steps {event.onset}–{event.end}. Last: the update's size against its "
            f"memory, grey where ordinary steps are ({low:g}–{high:g})."
        )
    if found.blamed:
        caption += " Dashed: what the verdict blames."
    return section(
        "The course of the run",
        plot(
            figures.course_figure(found),
            "course",
            caption,
            f"Loss, gradient norm, learning rate and update size by step. {found.verdict}",
        ),
    )


def _uprights(found: FlightExplanation, of: str) -> str:
    return f" Upright lines: the ± of {of}." if found.facts.replay.replays else ""


def _treatments(found: FlightExplanation) -> list[str]:
    runs = other_runs(found)
    if not runs:
        return []
    drawn = [run for run in runs if run.values and (run.chosen or run.prevents)]
    parts = [f"<div class='wide'>{_runs(found)}</div>"]
    if drawn:
        parts.append(
            plot(
                figures.treatment_figure(found, drawn),
                "treatments",
                "Real runs, from the same state with the same batches. Those that do not prevent it are in the table."
                + _uprights(found, "the run as it was"),
                f"The {found.quantity} as it was and in the runs that are spared the event.",
            )
        )
    elif not any(run.prevents for run in runs):
        parts.append("<p class='story'>None of those that were tried prevents it.</p>")
    return [section("What would have prevented it", *parts)]


def _runs(found: FlightExplanation) -> str:
    """Each run that differs: what becomes of the event, and what it costs."""
    runs, event, name = other_runs(found), found.facts.event, found.quantity
    if not runs:
        return ""
    heads = ("done otherwise", "the event", f"{name} after", "change")
    head = "".join(f'<th scope="col"{" class=number" if i > 1 else ""}>{text}</th>' for i, text in enumerate(heads))
    telling, idle = with_an_effect(runs)
    rows = "\n".join(_run(run, event.tail) for run in telling) + _idle(idle, runs)
    if untried := untried_in_words(found):
        rows += f"\n<tr><td colspan=4>{escape(untried)}.</td></tr>"
    control = f"{event.tail:.4g}{plus_minus(event.tail_spread)}"
    ended = f" {SO_FAR}" if any(run.ended for run in runs) else ""
    return (
        "<table class='runs'>\n<caption>Each was run again, until half of the event was there or it was "
        f"over. {name.capitalize()} after: the mean of the last of the window; change: against {control}, that of "
        f"the run as it was.{ended}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    )


def _idle(idle: Sequence[OtherRun], runs: Sequence[OtherRun]) -> str:
    if not idle:
        return ""
    names = "<br>".join(escape(run.name) for run in idle)
    words = escape(idle_in_words(idle, runs))
    return f"\n<tr><td colspan=4><details class='idle'><summary>{words}</summary>{names}</details></td></tr>"


def _run(run: OtherRun, control: float) -> str:
    marks = " ".join(word for word, is_so in (("prevents", run.prevents), ("chosen", run.chosen)) if is_so)
    known = math.isfinite(run.after)
    spread = plus_minus(run.after_spread)
    after = f"{run.after:.4g}{spread}" if known else "" if math.isnan(run.after) else "not finite"
    against = f"{run.after - control:+.3g}{spread}" if known else ""
    cells = [escape(run.name), escape(run.word)]
    numbers = "".join(f"<td class='number'>{text}</td>" for text in (after, against))
    return f"<tr class='{marks}'>{''.join(f'<td>{cell}</td>' for cell in cells)}{numbers}</tr>"


def _trials(found: FlightExplanation, culprits: Sequence[Culprit]) -> list[str]:
    facts = found.facts
    if found.kind in CALM:
        return []
    predicted = [c for c in culprits if not math.isnan(c.predicted)]
    drawn = figures.drawable(found, predicted) if facts.instruments.linear_ok else []
    if not drawn and not any(c.role for c in culprits):
        return []
    words = ["Above: what is left of the event in the run without each step; placebos are steps that nobody suspects."]
    words += [
        f"Below: what each step added to the {found.quantity} of step {facts.event.explained}, "
        f"{COMPARED[facts.blame.ranked_by]}: measured"
    ]
    words[-1] += ", and behind it, lighter, predicted." if drawn else "."
    words += [f"Arrows, {SO_FAR}"] if any(c.left_so_far for c in culprits) else []
    words += [LESS_OWN] if less_own(found, culprits) else []
    words += ["Upright lines: the ± of each."] if facts.replay.replays else []
    if not any(c.role for c in culprits):
        words = ["Nothing was run again without a step: these are predictions, not proofs."]
    if predicted and not facts.instruments.linear_ok:
        words.append("Predictions are not drawn: the run amplifies too fast for them to mean anything.")
    elif not found.sizes_hold:
        words.append(UNTRUSTED)
    elif len(drawn) < len(predicted):
        words.append(f"Predictions that are off the scale, and not drawn: {len(predicted) - len(drawn)}.")
    words.append("Click a step to open it.")
    return [
        section(
            "Who did it, and the placebo" if found.blamed else "Was it a batch? Suspects and placebos",
            plot(
                figures.trial_figure(found, culprits, drawn),
                "trials",
                " ".join(words),
                f"What is left of the event without each suspect and each placebo. {found.verdict}",
            ),
        )
    ]


def _inside(found: FlightExplanation, culprits: Sequence[Culprit]) -> list[str]:
    """When, where and through what the blamed step acted, where its prediction was right and others are, too."""
    blamed = [c for c in culprits if c.step in found.blamed]
    if not blamed:
        return []
    known = next((c for c in blamed if right(found, c)), None)
    if known is None:
        why = "its prediction was wrong, and the parts of it would be too."
        if not found.facts.instruments.linear_ok:
            why = "the run amplifies too fast for predictions, and for their parts, to mean anything."
        elif math.isnan(blamed[0].predicted):
            why = "nothing could be predicted here."
        elif near(blamed[0]):
            why = "its prediction was right, and those of other steps are not to be trusted."
        told = f"Where step {blamed[0].step} waited, and which layers and examples carried it, is not shown: {why}"
        return [section(f"Inside step {blamed[0].step}", f"<p class='story'>{told}</p>")]
    step = known.step
    return [
        section(
            f"When step {step} did harm",
            plot(
                inside.emergence_figure(found, step),
                "emergence",
                f"The {found.quantity} as it was, less that of the run without the step: measured at every later step.",
                f"What step {step} added to each later {found.quantity}.",
            ),
        ),
        section(
            f"Where step {step} waited",
            plot(
                inside.channel_figure(found, known),
                "channels",
                "Its predicted part by where it lay right after it: in the weights at once, or in AdamW's moments.",
                f"Bars of the part of step {step} in θ, m and v.",
            ),
            plot(
                inside.layer_figure(found, step),
                "layers",
                "The same by the layer whose weights and moments carried it.",
                f"Bars of the part of step {step} by layer.",
            ),
        ),
        _examples(found, known),
    ]


def _examples(found: FlightExplanation, culprit: Culprit) -> str:
    heading = f"Inside the batch of step {culprit.step}"
    note = str(found.data["example_note"].sel({"step": culprit.step}).item())
    if not culprit.examples:
        reason = note or "they were not looked at"
        return section(heading, f"<p class='story'>The examples were not ranked: {escape(reason)}.</p>")
    return section(
        heading,
        plot(
            inside.example_figure(found, culprit),
            "examples",
            f"Each example's share of the predicted part ({note}).",
            f"Bars of the shares of {len(culprit.examples)} examples.",
        ),
    )


def _instruments(found: FlightExplanation) -> list[str]:
    seen, update = found.facts.instruments, found.facts.instruments.update_said
    sharp = Sharpness(seen.sharpness, seen.sharpness_bar)
    told = {
        "What is not a number": seen.not_a_number_said,
        "The data": seen.data_said,
        "The update against its memory": update and f"Right before the event, at step {_before(found)}: {update}",
        "How fast the run amplifies": "" if seen.amplification is None else seen.amplification.sentence,
        "How sharp the loss is": "" if math.isnan(seen.sharpness_bar) else sharp.sentence,
    }
    if found.kind not in CALM:
        told["Hyperparameters"] = "; ".join(found.facts.settings.settings) or "none changed in the window"
    rows = "\n".join(
        f"<dt>{name}</dt><dd>{escape(text[0].upper() + text[1:])}.</dd>" for name, text in told.items() if text
    )
    if not rows:
        return []
    return [section("The instruments", f"<dl class='instruments'>\n{rows}\n</dl>", *_layers(found))]


def _layers(found: FlightExplanation) -> list[str]:
    """The update's size against its memory by layer, right before the event."""
    sizes, step = found.data["layer_update_size"], _before(found)
    at = sizes.sel(place=step).values
    known = np.flatnonzero(np.isfinite(at))
    if len(known) < 2:
        return []
    earlier = sizes.sel(place=sizes["place"] < step).values
    usual = [np.nanmedian(column) if np.isfinite(column).any() else math.nan for column in earlier.T]
    shown = known[np.argsort(-at[known])][:LAYERS]
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(sizes["layer"].values[i]))}</th>'
        f"{number(usual[i], _rms(usual[i]))}{number(at[i], _rms(at[i]))}</tr>"
        for i in shown
    )
    which = "The update against its memory by layer" + (", the largest" if len(shown) < len(known) else "")
    return [
        f"<div class='wide'><table class='by-layer'><caption>{which}: RMS of g/√v̂.</caption>\n"
        '<thead><tr><th scope="col">layer</th><th scope="col" class="number">usual (median before)</th>'
        f'<th scope="col" class="number">step {step}</th></tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    ]


def _before(found: FlightExplanation) -> int:
    """The step right before the event."""
    return max(found.facts.event.onset - 1, int(found.data["place"][0]))


def _rms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _numbers(found: FlightExplanation, culprits: Sequence[Culprit]) -> list[str]:
    """The steps of which there is a number to show."""
    known = [c for c in culprits if c.role or not math.isnan(shown_size(c.predicted, found))]
    return [section("Every step, in numbers", _table(found, known))] if known else []


def _table(found: FlightExplanation, culprits: Sequence[Culprit]) -> str:
    facts = found.facts
    tried = any(c.role for c in culprits)
    predicted = any(not math.isnan(shown_size(c.predicted, found)) for c in culprits)
    columns = ["step", "delay", "batch", *(["role", "left", "measured"] if tried else [])]
    # parts of what means nothing, or was refuted, or not tried, would mean nothing either
    channels = [name for name in inside.CHANNELS if any(right(found, c) for c in culprits[:ROWS])]
    columns += [*(["predicted"] if predicted else []), *(f"in {inside.CHANNELS[name][0]}" for name in channels)]
    heads = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in columns)
    rows = "\n".join(_row(found, culprit, tried, predicted, channels) for culprit in culprits[:ROWS])
    order = ["The blamed first, then by what is left of the event"] if tried else []
    order += ["then as predicted" if tried else "As predicted"] if predicted else []
    ended = f" {SO_FAR}" if any(c.left_so_far for c in culprits[:ROWS]) else ""
    ended += f" {LESS_OWN}" if less_own(found, culprits[:ROWS]) else ""
    return (
        "<div class='wide'><table class='sortable'>\n<caption>"
        f"What each step added to the {found.quantity} of step {facts.event.explained}, "
        f"{COMPARED[facts.blame.ranked_by]}; positive numbers raised it. {', '.join(order)}.{ended} Click a column to "
        "sort.</caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _row(found: FlightExplanation, culprit: Culprit, tried: bool, predicted: bool, channels: Iterable[str]) -> str:
    link = f'<a href="#step-{culprit.step}">{culprit.step}</a>'
    cells = [f'<td data-value="{culprit.step}" class="number">{link}</td>', number(culprit.delay, str(culprit.delay))]
    cells.append(number(culprit.batches[0], ", ".join(map(str, culprit.batches[:4]))))
    if tried:
        cells.append(f'<td data-value="{culprit.role or "~"}">{culprit.role}</td>')
        cells.append(number(culprit.left, _share(culprit)))
        cells.append(_number(culprit.measured, culprit.measured_spread))
    cells += [_number(shown_size(culprit.predicted, found))] if predicted else []
    parts = culprit.channels if right(found, culprit) else dict.fromkeys(culprit.channels, math.nan)
    cells += [_number(shown_size(parts[name], found)) for name in channels]
    return f"<tr class='{'tried' if culprit.role else 'predicted'}'>{''.join(cells)}</tr>"


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _number(value: float, spread: float = math.nan) -> str:
    if not math.isfinite(value):
        return number(value, "" if math.isnan(value) else "off scale")
    return number(value, f"{value:+.3g}{plus_minus(spread)}" if spread > 0 else None)


def _share(culprit: Culprit) -> str:
    if math.isnan(culprit.left):
        return ""
    told = share(culprit.left, culprit.left_spread, so_far=culprit.left_so_far)
    return told if culprit.left < 10 else "> 10×"
