"""One self-contained page from a response: no server, no network, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.tensorfile import write_whole
from . import figures

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..api.response import Response

SHOWN_CHANGES = 300  # rows of the table are sorted in the browser, which thousands would slow down
COLUMNS = (
    "change",
    "scale",
    "method",
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
    from plotly.offline import get_plotlyjs

    told = [story] if isinstance(story, str) else list(story or [])
    sections = [
        f"<header><h1>{escape(title)}</h1>\n<p class='verdict'>{escape(response.verdict)}</p></header>",
        *(_paragraph(text) for text in told),
        *_curves(response),
        _section("Summary", _summary_table(response)),
        _section("How far to trust it", _certificate(response), *_error_plots(response)),
        _section("Where this comes from", _provenance(response)),
    ]
    page = PAGE.format(title=escape(title), style=STYLE, plotly=get_plotlyjs(), script=SCRIPT, body="\n".join(sections))

    def write(part: str) -> None:
        Path(part).write_text(page, encoding="utf-8")

    path = Path(path)
    write_whole(path, write)
    return path


def _section(heading: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _paragraph(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if "\n" in text else f"<p class='story'>{escape(text)}</p>"


# --- figures


def _curves(response: Response) -> list[str]:
    name = figures.strongest(response)[0]
    best = response.best_method
    predicted = "" if best == "exact" else f", as the {best} predicts it"
    return [
        _section(
            "Response by horizon",
            _plot(
                figures.response_figure(response),
                "response",
                "Above zero a change raised the loss, below zero it lowered it. "
                "A ring marks a change's largest effect.",
                f"Curves of the change of the probe's loss by horizon. {response.verdict}",
            ),
        ),
        _section(
            "The loss with and without it",
            _plot(
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
        _plot(
            figures.error_figure(response),
            "error",
            "Symmetric error |d − d̂| / (|d| + |d̂|) against the exact response: 0 % is equal, 100 % is the "
            "wrong sign. Faint lines are single changes.",
            f"Curves of each approximate method's error by horizon. {words[0]}",
        )
    ]
    if errors.sizes["scale"] > 1:
        plots.append(
            _plot(
                figures.scale_figure(response),
                "scales",
                "How the error grows with the size of the change.",
                f"Curves of each approximate method's error by scale. {words[0]}",
            )
        )
    return plots


def _plot(figure: Figure, name: str, caption: str, alternative: str) -> str:
    """A figure whose data is in the page, with words for those who cannot see it."""
    drawing = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"plot-{name}",
        default_width="100%",
        config={"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
    )
    return (
        f'<figure>\n<div role="img" aria-label="{escape(alternative)}">{drawing}</div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


# --- tables and words


def _summary_table(response: Response) -> str:
    """One row per change, scale and method; the first sort is by peak."""
    names = figures.strongest(response)
    scales = [float(scale) for scale in response.data["scale"].values]
    columns = [name for name in COLUMNS if name != "scale" or len(scales) > 1]
    rows = [
        _summary_row(response, name, scale, str(method), columns)
        for name in names[:SHOWN_CHANGES]
        for scale in sorted(scales, reverse=True)
        for method in response.data["method"].values
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


def _summary_row(response: Response, name: str, scale: float, method: str, columns: Sequence[str]) -> str:
    row = response.summary.sel({"change": name, "scale": scale, "method": method})
    peak = float(row["peak_sign"] * row["peak"])
    cells: dict[str, tuple[str, str | float]] = {
        "change": (name, name),
        "scale": (f"{scale:g}", scale),
        "method": (method, method),
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
    return f"<tr class='{escape(method)}'>" + "".join(tags) + "</tr>"


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


def _provenance(response: Response) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(key).replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in response.data.attrs.items()
        if str(value)
    )
    return f"<table class='provenance'>\n<caption>What made this result.</caption>\n<tbody>\n{rows}\n</tbody>\n</table>"


# --- the page around them

STYLE = """
:root { color-scheme: light; --ink: #24292f; --faint: #5f6773; --rule: #e4e7eb; --wash: #f7f8f9; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 32px 64px; }
h1 { margin: 0 0 12px; font-size: 17px; font-weight: 600; color: var(--faint); }
h2 { margin: 0 0 12px; font-size: 20px; font-weight: 600; }
.verdict { margin: 0 0 28px; font-size: 27px; line-height: 1.35; font-weight: 500; text-wrap: pretty; }
.story { max-width: 46em; margin: 0 0 14px; }
section { margin-top: 44px; }
figure { margin: 0 0 20px; }
figcaption { margin-top: 6px; }
figcaption, caption { color: var(--faint); font-size: 14px; text-align: left; max-width: 60em; }
caption { padding-bottom: 8px; }
pre { margin: 16px 0; padding: 14px 16px; overflow-x: auto; background: var(--wash); border-radius: 6px;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
.sortable { width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
.sortable thead th { padding: 0; border-bottom: 2px solid #c9ced6; white-space: nowrap; }
.sortable button { width: 100%; padding: 8px 10px; border: 0; background: none;
  font: inherit; font-weight: 600; color: inherit; text-align: inherit; cursor: pointer; }
.sortable button:hover { background: var(--wash); }
th[aria-sort=ascending] button::after { content: " ▲"; font-size: 10px; }
th[aria-sort=descending] button::after { content: " ▼"; font-size: 10px; }
.number, th.number { text-align: right; }
tbody tr:not(.exact) td.number { color: var(--faint); }
.certificate { list-style: none; margin: 0 0 28px; padding: 0; }
.certificate li { display: flex; gap: 14px; padding: 9px 14px; margin-bottom: 6px; background: var(--wash);
  border-left: 4px solid #b6bcc6; border-radius: 3px; }
.certificate strong { flex: 0 0 104px; font-size: 14px; line-height: 1.75; color: var(--faint); }
.certificate .good { border-color: #2e8b6f; background: #eff8f4; } .good strong { color: #1f6b54; }
.certificate .care { border-color: #d39a1e; background: #fdf7e8; } .care strong { color: #8a5f06; }
.certificate .bad { border-color: #c8432b; background: #fdf1ee; } .bad strong { color: #a5301a; }
.provenance { font-size: 13px; color: var(--faint); }
.provenance th { font-weight: 500; white-space: nowrap; }
.provenance th, .provenance td { padding: 3px 10px; }
@media print {
  @page { margin: 14mm; }
  body { font-size: 11pt; }
  main { max-width: none; padding: 0; }
  .verdict { font-size: 17pt; }
  section { margin-top: 22pt; }
  h2, caption { break-after: avoid; }
  figure, table, tr, .certificate li, pre { break-inside: avoid; }
  .wide { overflow: visible; }
  .sortable { font-size: 8.5pt; }
  .sortable thead th { white-space: normal; }
  .modebar-container { display: none; }
  .certificate li { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => {
    const numeric = table.tBodies[0].rows[0].cells[i].className === "number";
    head.classList.toggle("number", numeric);
    head.addEventListener("click", () => {
      const first = numeric ? "descending" : "ascending", other = numeric ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      const sign = order === "ascending" ? 1 : -1, value = (row) => row.cells[i].dataset.value;
      const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b, undefined, {numeric: true});
      const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(value(a), value(b)));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      table.tBodies[0].append(...rows);
    });
  });
}
const plots = [...document.querySelectorAll(".js-plotly-plot")];
// A drawing keeps the width of the screen, which is wider than paper.
const fit = (layout) => () => plots.forEach((plot) => Plotly.relayout(plot, layout));
window.addEventListener("beforeprint", fit({width: 680}));
window.addEventListener("afterprint", fit({width: null, autosize: true}));
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{style}</style>
<script>{plotly}</script>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""
