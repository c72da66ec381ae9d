"""The steps of an explained flight, one by one, folded up: what was measured, the batch, its examples, its layers."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import median
from typing import TYPE_CHECKING

from ..recorder.explanation import batches_of, shown_size
from ..recorder.facts import BlameFacts
from ..recorder.verdict import right
from ..recorder.words import plus_minus, share
from .inside_figures import CHANNELS
from .shell import section

if TYPE_CHECKING:
    from ..recorder.explanation import Culprit, FlightExplanation
    from .shell import Section

LAYERS, EXAMPLES = 6, 6  # of a step, the largest

STYLE = """
.step { border-bottom: 1px solid var(--rule); }
.step > summary { padding: 7px 4px; cursor: pointer; }
.step[open] > summary { font-weight: 600; }
.step > summary em { color: var(--faint); font-style: normal; font-weight: 400; }
.step .blamed { color: var(--bad); font-weight: 600; }
.step > div { padding: 4px 4px 18px 20px; }
.step h3, .step caption { margin: 16px 0 4px; font-size: 14px; font-weight: 600; color: var(--ink); padding: 0; }
.step p { margin: 6px 0 8px; max-width: 60em; }
.step table { font-variant-numeric: tabular-nums; }
.step pre { margin: 4px 0; max-height: 24em; overflow: auto; }
.step img { display: block; min-width: min(100%, 256px); max-width: 100%; image-rendering: pixelated; }
.bars { display: grid; grid-template-columns: minmax(3em, max-content) minmax(60px, 16em) auto; gap: 2px 12px;
  align-items: center; font-size: 13px; max-width: 44em; }
.bars i { height: 10px; border-radius: 2px; min-width: 1px; background: var(--link); }
.bars i.raises { background: var(--bad-edge); }
.more > summary { padding: 9px 4px; cursor: pointer; color: var(--faint); }
"""

# A click on a step in a figure opens it. A finger's click comes after plotly's: the page must not have moved by then.
SCRIPT = """
for (const name of ["course", "trials"]) {
  document.getElementById(`plot-${name}`)?.on("plotly_click", ({points}) => {
    setTimeout(() => show(`step-${points[0].x}`), 100);
  });
}
"""


def step_list(found: FlightExplanation, culprits: Sequence[Culprit]) -> list[Section]:
    """Every step that can be opened: the explained one, those that were run again without, then the others."""
    own = [_own(found)] if found.facts.event.explained in found.blamed or _seen(found) in found.descriptions else []
    tried = [_earlier(found, c, culprits) for c in culprits if c.role]
    rest = [_earlier(found, c, culprits) for c in culprits if not c.role]
    parts = [*own, *tried]
    if rest:
        which = "without which nothing was run again" if tried else "before it: nothing was run again without any"
        count = f"The {len(rest)} steps" if len(rest) > 1 else "The step"
        rest = [f"<details class='more'><summary>{count} {which}</summary>\n{_lines(rest)}\n</details>"]
    return [section("Step by step", _lines([*parts, *rest]))] if parts or rest else []


def _seen(found: FlightExplanation) -> int:
    """The step that was asked about: the explained one, or the one after it that is not a number."""
    return found.facts.event.asked


def _own(found: FlightExplanation) -> str:
    blame, step = found.facts.blame, _seen(found)
    word = "blamed" if step in found.blamed else ""
    says = "the step that is explained" if step == found.facts.event.explained else "the step that is not a number"
    left = share(blame.own_left, blame.own_left_spread, so_far=blame.own_left_so_far)
    measured = [] if math.isnan(blame.own_left) else [f"<p>Without it {left} of the event is left.</p>"]
    return _details(step, word, says, [*measured, _itself(found, step), _batch(found, step)])


def _earlier(found: FlightExplanation, culprit: Culprit, culprits: Sequence[Culprit]) -> str:
    step = culprit.step
    word = "blamed" if step in found.blamed else culprit.role
    if culprit.role:
        left = _share(culprit.left, culprit.left_spread, so_far=culprit.left_so_far)
        says = f"without it {left} of the event is left"
        measured = _trial(found, culprit, culprits)
    else:
        says = _foretold(found, culprit)
        measured = f"<p>It was not run again without. {_prediction(found, culprit)}</p>"
    parts = [measured, _itself(found, step), _batch(found, step), *_inside(found, culprit)]
    return _details(step, word, says, parts)


def _foretold(found: FlightExplanation, culprit: Culprit) -> str:
    """Of a step that was not run without, in the line that is seen while it is folded up."""
    if math.isnan(culprit.predicted):
        return "nothing predicted"
    size = shown_size(culprit.predicted, found)
    return "not run again without" if math.isnan(size) else f"predicted {_signed(size)}"


def _details(step: int, word: str, says: str, parts: Iterable[str]) -> str:
    role = f", <span class='{escape(word)}'>{escape(word)}</span>" if word else ""
    unfolded = " open" if word == "blamed" else ""
    return (
        f"<details class='step' id='step-{step}'{unfolded}>"
        f"<summary>Step {step}{role}: <em>{escape(says)}</em></summary>\n"
        f"<div>{_lines(part for part in parts if part)}</div></details>"
    )


# --- what was measured


def _trial(found: FlightExplanation, culprit: Culprit, culprits: Sequence[Culprit]) -> str:
    """The run as it was, the run without the step, and the runs without placebos, side by side."""
    event, blame = found.facts.event, found.facts.blame
    value, others = event.value, [c for c in culprits if c.role == "placebo" and c.step != culprit.step]
    rows = [("as it was", _value(value, event.value_spread), "100%")]
    without = _value(value - culprit.measured, culprit.measured_spread)
    left = _share(culprit.left, culprit.left_spread, so_far=culprit.left_so_far)
    rows.append((f"without step {culprit.step}", without, left))
    if culprit.step in blame.group:
        rows.append((_together(blame), "", _share(blame.group_left, blame.group_left_spread)))
    if others:
        name = f"without a placebo (median of {len(others)}; all of them)"
        rows.append(
            (name, _spread([value - c.measured for c in others], _value), _spread([c.left for c in others], _share))
        )
    body = "\n".join(
        f'<tr><th scope="row">{name}</th><td class="number">{value}</td><td class="number">{left}</td></tr>'
        for name, value, left in rows
    )
    added = (
        f"So it added {_signed(culprit.measured)}{plus_minus(culprit.measured_spread)}."
        if math.isfinite(culprit.measured)
        else "Without it the run diverges."
    )
    return (
        "<div class='wide'><table><caption>Measured, in real runs</caption>\n"
        f'<thead><tr><th></th><th scope="col" class="number">{found.quantity} of step {event.explained}</th>'
        f'<th scope="col" class="number">left of the event</th></tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'
        f"<p>{added} {_prediction(found, culprit)}</p>"
    )


def _together(blame: BlameFacts) -> str:
    """What was done to the steps of a group."""
    names = ", ".join(map(str, blame.group))
    if blame.group_replaced:
        return f"batches like their own in place of those of steps {names}"
    return f"without steps {names} together"


def _prediction(found: FlightExplanation, culprit: Culprit) -> str:
    if not found.facts.instruments.linear_ok:
        return "Nothing was predicted: the run amplifies too fast."
    if math.isnan(culprit.predicted):
        return "Nothing was predicted."
    size = shown_size(culprit.predicted, found)
    if math.isnan(size):
        return ""  # why is said once, beside the pictures
    if math.isinf(size):
        return "Its prediction is off the scale."
    return f"Predicted to add {_signed(size)} to the {found.quantity} of step {found.facts.event.explained}."


def _spread(values: Sequence[float], word: Callable[[float], str]) -> str:
    return f"{word(median(values))} ({word(min(values))} to {word(max(values))})"


# --- the step itself


def _itself(found: FlightExplanation, step: int) -> str:
    data = found.data
    if step not in data["place"].values:
        return ""
    row = data.sel(place=step)
    said = [f"loss {float(row['loss']):.4g}", f"gradient norm {float(row['norm']):.4g}", f"lr {float(row['lr']):.4g}"]
    if math.isfinite(float(row["update_size"])):
        said.append(f"RMS of g/√v̂ {float(row['update_size']):.3g}")
    return f"<h3>The step itself</h3>\n<p>{', '.join(said)}.</p>"


def _batch(found: FlightExplanation, step: int) -> str:
    """Where it lies in the data, and what it looks like where that was asked for."""
    indices = ", ".join(map(str, batches_of(found, step)))
    seen = found.descriptions.get(step)
    text = f"<h3>Its batch</h3>\n<p>Index in the data: {indices}.</p>"
    if isinstance(seen, bytes):
        source = base64.b64encode(seen).decode()
        return text + f'<img alt="the batch of step {step}" src="data:image/png;base64,{source}">'
    return text + (f'<pre tabindex="0">{escape(seen)}</pre>' if seen else "")


def _inside(found: FlightExplanation, culprit: Culprit) -> list[str]:
    """Its examples, memories and layers as predicted, where that was seen to be right."""
    if not right(found, culprit):
        if not culprit.role or math.isnan(shown_size(culprit.predicted, found)):
            return []
        return ["<p>Its examples, memories and layers are not shown: the prediction of the step was wrong.</p>"]
    layers = found.data["layer_contribution"].sel({"change": found.facts.blame.ranked_by, "step": culprit.step})
    by_layer = sorted(zip(map(str, layers["layer"].values), layers.values.tolist()), key=lambda part: -abs(part[1]))
    channels = [(CHANNELS[name][0], shown_size(part, found)) for name, part in culprit.channels.items()]
    carried = [(name, shown_size(part, found)) for name, part in by_layer[:LAYERS]]
    parts = [("Where it waited (predicted)", channels), ("Its layers (predicted)", carried)]
    examples = [(f"example {i}", shown_size(share, found)) for i, share in culprit.examples[:EXAMPLES]]
    if examples:
        parts.append(("Its examples (predicted)", examples))
    return [f"<h3>{heading}</h3>\n{_bars(rows)}" for heading, rows in parts]


def _bars(rows: Sequence[tuple[str, float]]) -> str:
    largest = max((abs(value) for _, value in rows if math.isfinite(value)), default=0.0) or 1.0
    cells = (
        f"<span>{escape(name)}</span><i class='{'raises' if value > 0 else 'lowers'}' "
        f"style='width: {100 * abs(value) / largest if math.isfinite(value) else 0:.0f}%'></i>"
        f"<span>{_signed(value)}</span>"
        for name, value in rows
    )
    return f"<div class='bars'>{_lines(cells)}</div>"


# --- words


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)


def _value(value: float, spread: float = math.nan) -> str:
    return f"{value:.4g}{plus_minus(spread)}" if math.isfinite(value) else "not finite"


def _signed(value: float) -> str:
    return f"{value:+.3g}" if math.isfinite(value) else "off the scale"


def _share(left: float, spread: float = math.nan, *, so_far: bool = False) -> str:
    return share(left, spread, so_far=so_far) if left < 10 else "more than 10 times"
