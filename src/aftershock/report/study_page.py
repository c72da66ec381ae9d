"""A study's page: the verdict, every table with its marks, where it disagrees and why, and figures to look into."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..studies.cells import Cell, number
from ..studies.language.conditions import conditions
from ..studies.paper import TABLES
from ..studies.replication import CALIBRATION
from ..studies.tables import (
    NOTHING_JUDGED,
    NOWHERE,
    SHOWN,
    agreement,
    by_table,
    entry_words,
    judged,
    mark,
    provenance,
    signs,
    table_line,
    verdict,
)
from ..studies.verdicts import RULES
from .drawing import Drawing
from .language_figures import language_drawings
from .language_page import language_sections
from .shell import opening, plot, provenance_table, section, write_page
from .study_figures import drawings

if TYPE_CHECKING:
    import xarray as xr

    from ..studies.study import Study

WORDS = {"agrees": "replicates", "differs": "does not replicate", "none": "not counted", "ours": "ours only"}


def write_study_page(
    study: Study,
    results: Mapping[str, xr.Dataset],
    cells: Sequence[Cell],
    path: Path,
    *,
    library: Path | None = None,
) -> Path:
    """Write the page as one HTML file, whole or not at all.

    library: a file of the plotting library that several pages share; without it the page carries the library.
    """
    made, tables = provenance(study, results), by_table(cells)
    title = _title(study.name, results)
    sections = [
        f"<header>{opening(title, verdict(cells))}",
        f"{_facts(cells, made)}</header>",
        *language_sections(results),
        *(_drawing(one) for one in language_drawings(results)),
        section("Where they do not agree", _disagreements(cells)),
        *(_drawing(one) for one in drawings(results)),
        section(
            "The paper's tables",
            _legend(study.name, cells),
            *(_table(label, some, judged(cells)) for label, some in tables.items()),
        ),
        section("The rules", _rules(cells)),
        section("Where this comes from", provenance_table(made)),
    ]
    return write_page(path, title, sections, style=STYLE, script=SCRIPT, library=library)


def _title(name: str, results: Mapping[str, xr.Dataset]) -> str:
    """Where no system is the paper's, nothing of it was reproduced."""
    other = "language" in results and not any(one.from_paper for one in conditions(results["language"]))
    return f"The paper's {name} study, {'on other models' if other else 'reproduced'}"


def _facts(cells: Sequence[Cell], made: Mapping[str, object]) -> str:
    """Partial runs, the machine and the seed, in a line."""
    found = agreement(cells)
    parts = [f"{made['systems']} systems ({made['systems_of_each']})", f"seeds {made['seeds']}"]
    machines = made.get("machines")
    if isinstance(machines, list):
        names = {str(m.get("gpu") or m.get("processor") or m.get("machine")) for m in machines}
        parts.append("on " + ", ".join(sorted(names)))
    if made.get("quick"):
        parts.append("a small version of the study (--quick)")
    saturated = sum(found[key]["saturated"] for key in ("replication", "replication_protocol_not_known"))
    parts.append(f"{found['by_definition']} numbers that hold by definition and {saturated} saturated are not counted")
    return f"<p class='facts'>{escape('; '.join(part for part in parts if part))}.</p>"


# --- tables


def _table(label: str, cells: Sequence[Cell], any_judged: bool) -> str:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    found = {(cell.row, cell.column): cell for cell in cells}
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    rows = []
    for row in dict.fromkeys(cell.row for cell in cells):
        entries = "".join(_entry(found.get((row, column))) for column in columns)
        rows.append(f'<tr><th scope="row">{escape(row)}</th>{entries}</tr>')
    table = TABLES[label]
    names = ", ".join((label, *table.also))
    return (
        f"<div class='wide'><table class='paper' id='{escape(label)}'>\n"
        f"<caption><strong>{escape(table.title)}</strong> <code>{escape(names)}</code><br>"
        f"{escape(table_line(cells) if any_judged else SHOWN.get(label, ''))}</caption>\n"
        f"<thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table></div>"
    )


def kind_of(cell: Cell) -> str:
    """The colour of a cell: its class in the page."""
    if cell.ours_only:
        return "ours"
    numbers = cell.replications or (cell,)
    if cell.holds is None or not any(number.counted for number in numbers):
        return "none"
    return "agrees" if cell.holds else "differs"


def _entry(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    kind = kind_of(cell)
    middle, _, quartiles = cell.ours_text.partition(" [")
    spread = f" <small>[{escape(quartiles)}</small>" if quartiles else ""
    paper = "" if cell.ours_only else f"<span class='theirs'>{escape(cell.paper_text)} <b>{mark(cell)}</b></span>"
    known = "" if cell.known else " The paper's protocol for this number is not known."
    words = f"{WORDS[kind].capitalize()}. {_tested(cell)}{RULES[cell.rule].capitalize()}.{known}"
    if cell.note:
        words += f" {cell.note[:1].upper()}{cell.note[1:]}."
    return (
        f"<td class='{kind}'><details><summary>{escape(middle)}{spread}{paper}</summary>"
        f"<p>{escape(words)}</p></details></td>"
    )


def _tested(cell: Cell) -> str:
    """The replication verdicts of a cell in words."""
    parts = []
    for one in [one for one in cell.replications if one.counted]:
        low, high = number(one.low), number(one.high)
        reach = f"The {one.number}, ours less the paper's, is between {low} and {high}"
        factor, shift = f"a factor of {one.catches:.2f}", f"a difference of {one.catches_difference:.2g}"
        caught = "no factor" if math.isinf(one.catches) else factor if one.catches > 0 else shift
        parts.append(f"{reach}; {caught} would have been caught. ")
    return "".join(parts)


def _legend(study_name: str, cells: Sequence[Cell]) -> str:
    meanings = "\n".join(f"<dt>{escape(sign)}</dt><dd>{escape(meaning)}</dd>" for sign, meaning in signs(cells).items())
    trust = (
        "\n<details><summary class='more'>How far the verdict can be trusted</summary>"
        f"<p class='story'>{escape(CALIBRATION)}</p></details>"
    )
    return (
        f"<p class='story'>{escape(entry_words(study_name))} Click an entry for its rule.</p>\n"
        f"<dl class='signs'>\n{meanings}\n</dl>\n"
        "<p class='story'><span class='key agrees'>replicates</span> <span class='key differs'>does not</span> "
        "<span class='key ours'>ours only</span> "
        "<span class='key none'>saturated, by definition, or not judged</span></p>"
        f"{trust if judged(cells) else ''}"
    )


def _disagreements(cells: Sequence[Cell]) -> str:
    wrong = [cell for cell in cells if cell.holds is False]
    if not judged(cells):
        return f"<p class='story'>{NOTHING_JUDGED}</p>"
    if not wrong:
        return f"<p class='story'>{NOWHERE}</p>"
    known, unknown = ([cell for cell in wrong if cell.known is side] for side in (True, False))
    text = _list(known, "bad", "differs") if known else "<p class='story'>Nowhere where the protocol is known.</p>"
    if unknown:
        words = f"{len(unknown)} more numbers whose protocol the paper leaves open"
        text += (
            f"<details><summary class='more'>{words}</summary>{_list(unknown, 'care', 'protocol not known')}</details>"
        )
    return text


def _list(cells: Sequence[Cell], level: str, word: str) -> str:
    items = []
    for c in cells:
        where = f"{TABLES[c.table].title}: {c.row}, {c.column}"
        items.append(
            f"<li class='{level}'><strong>{word}</strong><span><b>{escape(where)}</b>. Ours {escape(c.ours_text)}, "
            f"the paper's {escape(c.paper_text)}. {escape(c.note[:1].upper() + c.note[1:])}.</span></li>"
        )
    return "<ul class='certificate'>\n" + "\n".join(items) + "\n</ul>"


def _rules(cells: Sequence[Cell]) -> str:
    used = dict.fromkeys(cell.rule for cell in cells if cell.rule)
    items = "\n".join(f"<li><b>{escape(rule)}</b>: {escape(RULES[rule])}.</li>" for rule in used)
    return f"<ul class='rules'>\n{items}\n</ul>"


# --- figures


def _drawing(drawing: Drawing) -> str:
    body = plot(drawing.figure, drawing.name, drawing.caption, f"{drawing.heading}. {drawing.caption}")
    if not drawing.choices:
        return section(drawing.heading, body)
    selects = "".join(
        f"<label>{escape(name)} <select name='{escape(name)}'></select></label>" for name in drawing.choices
    )
    frames = json.dumps(drawing.frames, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = frames.replace("</", "<\\/")  # what ends a script must not appear inside it
    return section(
        drawing.heading,
        f"<div class='chooser'><div class='choices'>{selects}</div>\n{body}\n"
        f"<script type='application/json'>{data}</script></div>",
    )


STYLE = """
.facts { margin: -14px 0 0; color: var(--faint); font-size: 14px; }
.choices { display: flex; flex-wrap: wrap; gap: 8px 18px; margin-bottom: 8px; }
.choices label { font-size: 14px; color: var(--faint); }
.choices select { font: inherit; color: var(--ink); padding: 4px 6px; border: 1px solid var(--edge); border-radius: 4px;
  background: var(--paper); max-width: 100%; }
.paper { width: 100%; margin: 26px 0 10px; font-variant-numeric: tabular-nums; }
.paper caption code { font-size: 12px; color: var(--faint); }
.paper caption strong { color: var(--ink); font-size: 15px; }
.paper thead th { border-bottom: 2px solid var(--edge); vertical-align: bottom; }
.paper tbody th { font-weight: 500; min-width: 92px; max-width: 210px; }
.signs { display: grid; grid-template-columns: max-content 1fr; gap: 3px 14px; font-size: 14px; margin: 0 0 14px; }
.signs dt { font-weight: 600; } .signs dd { margin: 0; max-width: 62em; }
.more { cursor: pointer; color: var(--faint); margin: 0 0 10px; }
.paper td { min-width: 76px; border-left: 3px solid var(--paper); }
.paper small { color: var(--faint); }
.paper summary { list-style: none; cursor: pointer; }
.paper summary::-webkit-details-marker { display: none; }
.paper details p { margin: 6px 0 0; font-size: 12.5px; line-height: 1.4; max-width: 22em; }
.theirs { display: block; color: var(--faint); font-size: 13px; }
td.agrees, .key.agrees { background: var(--good-wash); } .agrees b { color: var(--good); }
td.differs, .key.differs { background: var(--bad-wash); } .differs b { color: var(--bad); }
td.ours, .key.ours { background: var(--ours-wash); } td.none, .key.none { background: var(--wash); }
.key { padding: 2px 8px; border-radius: 3px; white-space: nowrap; }
.rules { padding-left: 20px; font-size: 14px; }
@media (max-width: 600px) {
  .paper tbody th { white-space: normal; min-width: 96px; }
}
@media print {
  .choices select { appearance: none; border: 0; padding: 0; }
  .paper { font-size: 8pt; }
  section:has(> .chooser), section:has(> figure) { break-inside: avoid; }
  figure { margin: 0; }
  .paper td { min-width: 0; padding: 3px 5px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .paper small { white-space: normal; }
  .paper thead { display: table-header-group; }
  .theirs { font-size: 7.5pt; }
}
"""

SCRIPT = """
for (const box of document.querySelectorAll(".chooser")) {
  const frames = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const keys = Object.keys(frames).map((key) => key.split("|"));
  const selects = [...box.querySelectorAll("select")], plot = box.querySelector(".js-plotly-plot");
  // What may be chosen depends on what was chosen before it: networks have their own systems.
  const fill = () => {
    let rest = keys;
    selects.forEach((select, i) => {
      const options = [...new Set(rest.map((key) => key[i]))];
      const chosen = options.includes(select.value) ? select.value : options[0];
      select.replaceChildren(...options.map((text) => new Option(text, text, false, text === chosen)));
      rest = rest.filter((key) => key[i] === chosen);
    });
  };
  fill();
  selects.forEach((select) => select.addEventListener("change", () => {
    fill();
    Plotly.restyle(plot, frames[selects.map((one) => one.value).join("|")]);
  }));
}
"""
