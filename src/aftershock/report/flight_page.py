"""An explained flight as one self-contained page, and the same in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from . import flight_figures as figures
from .shell import findings, number, plot, provenance_table, section, write_page

if TYPE_CHECKING:
    from ..recorder.explanation import Culprit, FlightExplanation

ROWS = 30  # steps in the page's table
LINES = 8  # layers and examples in the terminal
HIDDEN = ("batches", "examples", "order", "jump", "kind", "replay", "check", "not_a_number_in_batch")
COLUMNS = ("step", "delay", "batch", "predicted", "measured", "in θ", "in m", "in v")
STYLE = """
.sortable tr.verified td.number { color: var(--ink); font-weight: 500; }
"""


def write_flight_page(found: FlightExplanation, path: str | Path, *, title: str | None = None) -> Path:
    """Write verdict, loss, contributions, emergence, memory, layers, examples and certificate as one HTML file."""
    step = found.data.attrs["step"]
    title = f"What raised the loss at step {step}" if title is None else title
    sections = [
        f"<header><h1>{escape(title)}</h1>\n<p class='verdict'>{escape(found.verdict)}</p></header>",
        *_pictures(found),
        section("Every step, in numbers", _table(found)),
        section("How far to trust it", findings(found.certificate)),
        section(
            "Where this comes from",
            provenance_table({key: value for key, value in found.data.attrs.items() if key not in HIDDEN}),
        ),
    ]
    return write_page(Path(path), title, sections, style=STYLE)


def flight_text(found: FlightExplanation) -> str:
    """The page in words: verdict, table and certificate, then layers, examples and other runs of the first step."""
    first = found.culprits[0]
    blocks = [str(found)]
    layers = found.data["layer_contribution"].sel({"change": found.data.attrs["ranked_by"], "step": first.step})
    order = sorted(zip(layers.values, layers["layer"].values), key=lambda pair: -abs(pair[0]))[:LINES]
    blocks.append(_listed(f"Step {first.step} acted through:", [(str(name), value) for value, name in order]))
    if first.examples:
        shares = [(f"example {place}", value) for place, value in first.examples[:LINES]]
        blocks.append(_listed(f"Inside step {first.step}:", shares))
    if others := _other_runs(found, first):
        blocks.append(_listed(f"Step {first.step} in other runs (measured):", others))
    return "\n\n".join(blocks)


def _listed(heading: str, rows: Sequence[tuple[str, float]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([heading, *(f"  {name:<{width}}  {value:+.3g}" for name, value in rows)])


def _other_runs(found: FlightExplanation, culprit: Culprit) -> list[tuple[str, float]]:
    """The culprit skipped, and m or v emptied right after it: what each takes from the loss."""
    measured = found.data["measured"]
    runs = [("skipped", "skip", culprit.step)]
    runs += [(f"{name} emptied right after it", f"reset {name}", culprit.step + 1) for name in ("m", "v")]
    steps = set(measured["step"].values.tolist())
    rows = [(label, float(measured.sel({"change": change, "step": at}))) for label, change, at in runs if at in steps]
    return [(label, value) for label, value in rows if not math.isnan(value)]


# --- the page's parts


def _pictures(found: FlightExplanation) -> list[str]:
    attrs = found.data.attrs
    first = found.culprits[0]
    main = figures.KINDS[attrs["ranked_by"]]
    parts = [
        section(
            "The loss",
            plot(
                figures.loss_figure(found, first if attrs["order"] else None),
                "loss",
                f"The window before step {attrs['step']}. The band is what was usual (median ± 3 robust σ); the ring "
                "is the loss that is explained.",
                f"The loss by step. {found.verdict}",
            ),
        ),
        section(
            "What each step added to it",
            plot(
                figures.contribution_figure(found),
                "contribution",
                "Predicted by one sweep back from the loss; red raised it, blue lowered it. Diamonds are measured by "
                "running again. The menu says against what a step is compared: at first the mean of the ordinary "
                "steps around it.",
                f"Bars of each step's contribution, {main}.",
            ),
        ),
    ]
    if attrs["order"]:
        parts.append(
            section(
                "When it arrived",
                plot(
                    figures.emergence_figure(found),
                    "emergence",
                    "The loss as it was, less the loss of the run without the step: measured at every step on the "
                    "way. Double-click to see curves that leave the frame.",
                    "Curves of the measured effect of each verified step on the losses after it.",
                ),
            )
        )
    parts.append(
        section(
            "Where it waited",
            plot(
                figures.channel_figure(found),
                "channels",
                f"The predicted contribution ({main}) by where it lay right after the step: in the weights at once, or "
                "in AdamW's moments m and v.",
                "Bars of the contribution of the top steps, split by θ, m and v.",
            ),
        )
    )
    parts.append(
        section(
            f"Through which layers step {first.step} acted",
            plot(
                figures.layer_figure(found, first.step),
                "layers",
                "The predicted contribution by the layer whose weights and moments carried it.",
                f"Bars of the contribution of step {first.step} by layer.",
            ),
        )
    )
    return [*parts, _examples(found, first)]


def _examples(found: FlightExplanation, first: Culprit) -> str:
    heading, note = f"Inside the batch of step {first.step}", found.data.attrs["examples"].get(str(first.step), "")
    if not first.examples:
        reason = note or "its examples were not looked at: nothing was verified"
        return section(heading, f"<p class='story'>The examples were not ranked: {escape(reason)}.</p>")
    return section(
        heading,
        plot(
            figures.example_figure(first),
            "examples",
            f"Each example's share of the predicted contribution ({note}).",
            f"Bars of the shares of {len(first.examples)} examples.",
        ),
    )


def _table(found: FlightExplanation) -> str:
    heads = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in COLUMNS)
    rows = "\n".join(_row(culprit) for culprit in found.culprits[:ROWS])
    others = "; ".join(f"{label}: {value:+.3g}" for label, value in _other_runs(found, found.culprits[0]))
    told = f" Step {found.culprits[0].step} in other runs, measured: {escape(others)}." if others else ""
    return (
        "<div class='wide'><table class='sortable'>\n<caption>Positive numbers raised the loss. Measured: by running "
        f"again with the step changed.{told} Click a column to sort.</caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _row(culprit: Culprit) -> str:
    numbers = [culprit.predicted, culprit.measured, *(culprit.channels[name] for name in figures.CHANNELS)]
    cells = [number(culprit.step, str(culprit.step)), number(culprit.delay, str(culprit.delay))]
    cells.append(number(culprit.batches[0], ", ".join(map(str, culprit.batches[:4]))))
    cells += [number(value, "" if math.isnan(value) else None) for value in numbers]
    tags = "".join(cells)
    return f"<tr class='{'verified' if math.isfinite(culprit.measured) else 'predicted'}'>{tags}</tr>"
