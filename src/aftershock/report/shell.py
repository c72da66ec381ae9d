"""The page that every report shares: its look, its behaviour, and the parts it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results.files import write_whole

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..results.certificate import Certificate

WORDS = {"ok": "good", "care": "with care", "bad": "beware", "note": "note"}  # for those who see no colours


def write_page(path: Path, title: str, sections: Sequence[str], *, style: str = "", script: str = "") -> Path:
    """Write the sections as one HTML file with plotly inside it, whole or not at all.

    style, script: what this kind of page adds to the shared ones.
    """
    from plotly.offline import get_plotlyjs

    page = PAGE.format(
        title=escape(title),
        style=STYLE + style,
        plotly=get_plotlyjs(),
        script=script + SCRIPT,
        body="\n".join(sections),
    )

    def write(part: str) -> None:
        Path(part).write_text(page, encoding="utf-8")

    write_whole(path, write)
    return path


def section(heading: str, *parts: str) -> str:
    """A heading and what stands under it."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def plot(figure: Figure, name: str, caption: str, alternative: str) -> str:
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


def findings(certificate: Certificate) -> str:
    """The sentences of a certificate, each in the colour of its level."""
    items = "\n".join(
        f"<li class='{found.level}'><strong>{WORDS[found.level]}</strong><span>{escape(found.sentence)}</span></li>"
        for found in certificate.findings
    )
    return f"<ul class='certificate'>\n{items}\n</ul>"


def number(value: float, text: str | None = None) -> str:
    """A cell of a sortable table; text: what is shown, where that is not the signed number itself."""
    shown = text if text is not None else f"{value:+.3g}" if value else "0"
    # what is not a number sorts last, and the script's infinity has a name of its own
    key = str(-math.inf if math.isnan(value) else value).replace("inf", "Infinity")
    return f'<td data-value="{key}" class="number">{escape(shown)}</td>'


def provenance_table(attrs: Mapping[Any, Any]) -> str:
    """What made a result, from its attributes."""
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(key).replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in attrs.items()
        if str(value)
    )
    return f"<table class='provenance'>\n<caption>What made this result.</caption>\n<tbody>\n{rows}\n</tbody>\n</table>"


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
.certificate .ok { border-color: #2e8b6f; background: #eff8f4; } .ok strong { color: #1f6b54; }
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
