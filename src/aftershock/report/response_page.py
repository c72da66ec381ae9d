"""One page from a response: no server, no network, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.response import signed_peak
from . import figures
from .shell import findings, number, opening, plot, provenance_table, section, write_page

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
        f"<header>{opening(title, response.verdict)}</header>",
        *(_paragraph(text) for text in told),
        *_curves(response),
        section("Summary", _summary_table(response)),
        section("How far to trust it", findings(response.certificate), *_error_plots(response)),
        section("Where this comes from", _provenance(response)),
    ]
    return write_page(Path(path), title, sections)


def _paragraph(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if "\n" in text else f"<p class='story'>{escape(text)}</p>"


# --- figures


def _curves(response: Response) -> list[str]:
    name = response.order[0]
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
    words = response.certificate.findings[0].sentence
    plots = [
        plot(
            figures.error_figure(response),
            "error",
            "Symmetric error |d − d̂| / (|d| + |d̂|) against the exact response: 0 % is equal, 100 % is the "
            "wrong sign, or a prediction that ran away. Faint lines are single changes.",
            f"Curves of each approximate answer's error by horizon. {words}",
        )
    ]
    if errors.sizes["scale"] > 1:
        plots.append(
            plot(
                figures.scale_figure(response),
                "scales",
                "How the error grows with the size of the change.",
                f"Curves of each approximate answer's error by scale. {words}",
            )
        )
    return plots


# --- tables and words


def _summary_table(response: Response) -> str:
    """One row per change, scale and answer, in the order that the caption names."""
    names = response.order
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
        "<div class='wide'><table class='sortable'>\n<caption>Changes by the size of their "
        f"{escape(response.best_answer)} peak at scale {response.largest_scale:g}, largest first. Positive numbers "
        "raise the loss; totals have no sign, and ± marks a peak that cannot be told from rounding. A delayed change "
        f"has its largest effect later than in the first state after it. Click a column to sort.{note}</caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table></div>"
    )


def _summary_row(response: Response, name: str, scale: float, answer: str, columns: Sequence[str]) -> str:
    row = response.summary.sel({"change": name, "scale": scale, "answer": answer})
    horizon, delayed, total = int(row["peak_horizon"]), bool(row["delayed"]), float(row["total_abs"])
    cells = {
        "change": _label(name),
        "scale": number(scale, f"{scale:g}"),
        "answer": _label(answer),
        "peak": number(float(row["peak_sign"] * row["peak"]), signed_peak(row)),
        "at h": number(horizon, str(horizon)),
        "delayed": number(int(delayed), "yes" if delayed else "no"),
        "largest increase": number(float(row["max_increase"])),
        "largest decrease": number(0.0 - float(row["max_decrease"])),
        "total |δF|": number(total, f"{total:.3g}"),
    }
    return f"<tr class='{escape(answer)}'>" + "".join(cells[column] for column in columns) + "</tr>"


def _label(text: str) -> str:
    return f'<td data-value="{escape(text)}">{escape(text)}</td>'


def _provenance(response: Response) -> str:
    """What was asked, and what made the answer."""
    asked = {name: response.data[name].item() for name in ("kind", "at", "probe")}
    proved = {"check": response.data["check"].item()} if "check" in response.data else {}
    return provenance_table({**asked, **response.data.attrs, **proved})
