"""One self-contained page from a response: no server, no network, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import figures
from .shell import plot, provenance_table, section, write_page

if TYPE_CHECKING:
    from ..api.response import Response

SHOWN_CHANGES = 300  # rows of the table are sorted in the browser, which thousands would slow down
COLUMNS = (
    "change",
    "scale",
    "answer",
    "peak",
    "at h",
    "delayed",
    "largest increase",
    "largest decrease",
    "total |δF|",
)
LEVELS = (
    # The certificate speaks in these words; the first that a sentence holds decides its colour.
    ("do not trust", "bad", "do not trust"),
    ("use it with care", "care", "with care"),
    ("cross a kink", "care", "with care"),
    ("trust it.", "good", "trust"),
    ("exact: every number", "good", "trust"),
)


def write_response_page(
    response: Response,
    path: str | Path,
    *,
    title: str = "What the change did to the run",
    story: Sequence[str] | str | None = None,
) -> Path:
    """Write verdict, curves, summaries, certificate and provenance as one HTML file, whole or not at all.

    story: paragraphs to show under the verdict; one that has line breaks is shown as it stands.
    """
    told = [story] if isinstance(story, str) else list(story or [])
    sections = [
        f"<header><h1>{escape(title)}</h1>\n<p class='verdict'>{escape(response.verdict)}</p></header>",
        *(_paragraph(text) for text in told),
        *_curves(response),
        section("Summary", _summary_table(response)),
        section("How far to trust it", _certificate(response), *_error_plots(response)),
        section("Where this comes from", provenance_table(response.data.attrs)),
    ]
    return write_page(Path(path), title, sections)


def _paragraph(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if "\n" in text else f"<p class='story'>{escape(text)}</p>"


# --- figures


def _curves(response: Response) -> list[str]:
    name = figures.strongest(response)[0]
    best = response.best_answer
    predicted = "" if best == "exact" else f", as the {best} predicts it"
    return [
        section(
            "Response by horizon",
            plot(
                figures.response_figure(response),
                "response",
                "Above zero a change raised the loss, below zero it lowered it. "
                "A ring marks a change's largest effect.",
                f"Curves of the change of the probe's loss by horizon. {response.verdict}",
            ),
        ),
        section(
            "The loss with and without it",
            plot(
                figures.loss_figure(response),
                "loss",
                f"The probe's loss as it was, and with the strongest change, {name}{predicted}.",
                f"Two loss curves by horizon: the control, and the run with {name}. {response.verdict}",
            ),
        ),
    ]


def _error_plots(response: Response) -> list[str]:
    errors = response.certificate.errors
    if errors is None:
        return []
    words = str(response.certificate).splitlines()
    plots = [
        plot(
            figures.error_figure(response),
            "error",
            "Symmetric error |d − d̂| / (|d| + |d̂|) against the exact response: 0 % is equal, 100 % is the "
            "wrong sign. Faint lines are single changes.",
            f"Curves of each approximate answer's error by horizon. {words[0]}",
        )
    ]
    if errors.sizes["scale"] > 1:
        plots.append(
            plot(
                figures.scale_figure(response),
                "scales",
                "How the error grows with the size of the change.",
                f"Curves of each approximate answer's error by scale. {words[0]}",
            )
        )
    return plots


# --- tables and words


def _summary_table(response: Response) -> str:
    """One row per change, scale and answer; the first sort is by peak."""
    names = figures.strongest(response)
    scales = [float(scale) for scale in response.data["scale"].values]
    columns = [name for name in COLUMNS if name != "scale" or len(scales) > 1]
    rows = [
        _summary_row(response, name, scale, str(answer), columns)
        for name in names[:SHOWN_CHANGES]
        for scale in sorted(scales, reverse=True)
        for answer in response.data["answer"].values
    ]
    heads = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in columns)
    hidden = len(names) - SHOWN_CHANGES
    note = f" The {hidden} changes with the smallest peaks are left out." if hidden > 0 else ""
    return (
        "<div class='wide'><table class='sortable'>\n<caption>Positive numbers raise the loss. A delayed change "
        "has its largest effect later than in the first state after it. Click a column to sort."
        f"{note}</caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table></div>"
    )


def _summary_row(response: Response, name: str, scale: float, answer: str, columns: Sequence[str]) -> str:
    row = response.summary.sel({"change": name, "scale": scale, "answer": answer})
    peak = float(row["peak_sign"] * row["peak"])
    cells: dict[str, tuple[str, str | float]] = {
        "change": (name, name),
        "scale": (f"{scale:g}", scale),
        "answer": (answer, answer),
        "peak": (f"{peak:+.3g}", peak),
        "at h": (str(int(row["peak_horizon"])), int(row["peak_horizon"])),
        "delayed": ("yes" if row["delayed"] else "no", int(row["delayed"])),
        "largest increase": _number(row["max_increase"]),
        "largest decrease": _number(row["max_decrease"]),
        "total |δF|": _number(row["total_abs"]),
    }
    tags = []
    for column in columns:
        text, value = cells[column]
        kind = "" if isinstance(value, str) else " class='number'"
        tags.append(f'<td data-value="{escape(str(value))}"{kind}>{escape(text)}</td>')
    return f"<tr class='{escape(answer)}'>" + "".join(tags) + "</tr>"


def _number(value: Any) -> tuple[str, float]:
    return f"{float(value):.3g}", float(value)


def _certificate(response: Response) -> str:
    items = []
    for line in str(response.certificate).splitlines():
        level, word = trust_level(line)
        items.append(f"<li class='{level}'><strong>{word}</strong><span>{escape(line)}</span></li>")
    return "<ul class='certificate'>\n" + "\n".join(items) + "\n</ul>"


def trust_level(line: str) -> tuple[str, str]:
    """The colour and the word for one sentence of a certificate."""
    spoken = line.lower()
    return next(((level, word) for phrase, level, word in LEVELS if phrase in spoken), ("note", "note"))
