"""The paper's tables with our numbers beside them, a verdict per cell, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from ..results.files import write_whole
from .cifar.measures import cifar_measures
from .language.conditions import conditions, described
from .language.measures import language_measures
from .paper import TABLES, Quote
from .quadratic.measures import quadratic_measures
from .verdicts import RULES, TRIVIAL, Measure, Spread, judge, spread

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from .study import Study

MEASURES = {"quadratic": quadratic_measures, "cifar": cifar_measures, "language": language_measures}
UNITS = {"language": "candidates"}  # what medians are over, where it is not systems
MARKS = {True: "✓", False: "✗", None: ""}
UNEXPLAINED = "not known why"
# What was seen about a disagreement, by table, beginning of the row, and column.
OBSERVED = {
    ("tab:app_exp1_fidelity", "Anisotropic", "NRMSE"): "from one root seed to another this median moves by a fifth to "
    "either side, and three of them gave less than the paper's",
}


@dataclass(frozen=True)
class Cell:
    """One number: ours with its quartiles over systems, the paper's, whether they agree and by which rule.

    paper is None where the paper has none (`ours_only`) or prints "--"; agrees is None where nothing can be said.
    known: whether the paper's protocol for this number is known. The texts are the numbers as a table shows them.
    """

    table: str
    row: str
    column: str
    ours: float
    iqr_low: float
    iqr_high: float
    paper: float | None
    agrees: bool | None
    rule: str
    known: bool
    note: str
    systems: int
    ours_only: bool
    ours_text: str
    paper_text: str

    @property
    def counted(self) -> bool:
        """Whether the cell is one of the numbers that the share of agreement is about."""
        return self.agrees is not None and self.rule not in TRIVIAL


def build(study_name: str, results: Mapping[str, xr.Dataset], seed: int = 0) -> list[Cell]:
    """Every cell that these results can fill, in the paper's order; seed: of the bootstrap."""
    import numpy as np

    if study_name not in MEASURES:
        raise InvalidInput(f"there are no tables for the study {study_name!r}; choose from {', '.join(MEASURES)}")
    order = {label: i for i, label in enumerate(TABLES)}
    quotes = {label: table.quotes() for label, table in TABLES.items()}
    measures = sorted(MEASURES[study_name](results), key=lambda m: order[m.table])
    return [_cell(m, quotes[m.table].get((m.row, m.column)), np.random.default_rng(seed)) for m in measures]


def _cell(measure: Measure, quote: Quote | None, generator: np.random.Generator) -> Cell:
    ours = spread(measure)
    agrees, rule = (None, "") if quote is None else judge(measure, quote, generator)
    return Cell(
        table=measure.table,
        row=measure.row,
        column=measure.column,
        ours=ours.middle,
        iqr_low=ours.low,
        iqr_high=ours.high,
        paper=None if quote is None else quote.value,
        agrees=agrees,
        rule=rule,
        known=measure.known,
        note=_note(measure, quote, ours, agrees),
        systems=measure.systems,
        ours_only=quote is None,
        ours_text=_ours_text(measure, quote, ours),
        paper_text="" if quote is None else quote.text,
    )


def _note(measure: Measure, quote: Quote | None, ours: Spread, agrees: bool | None) -> str:
    """What is special about the cell; of a disagreement, its size and why, or that nobody knows."""
    if agrees is not False or quote is None:
        return measure.note
    parts = [measure.note] if measure.note else []
    if quote.kind == "value" and not math.isnan(ours.middle):
        parts.append(_distance(ours.middle, float(quote.value or 0.0)))
    if quote.kind == "value" and quote.low is not None and quote.high is not None:
        inside = quote.low <= ours.middle <= quote.high
        parts.append(f"our median lies {'inside' if inside else 'outside'} the paper's own quartiles")
    parts += [text for (table, row, column), text in OBSERVED.items() if _fits(measure, table, row, column)]
    if measure.known:
        parts.append(UNEXPLAINED)
    return "; ".join(parts)


def _fits(measure: Measure, table: str, row: str, column: str) -> bool:
    return measure.table == table and measure.row.startswith(row) and measure.column == column


# --- words for numbers


def _distance(ours: float, paper: float) -> str:
    """A ratio where it tells something; correlations near zero have none."""
    if ours * paper > 0 and 0.2 <= ours / paper <= 5:
        return f"ours is {ours / paper:.2f} times the paper's"
    return f"ours less the paper's is {number(ours - paper)}"


def number(value: float) -> str:
    """Four digits, as the paper prints its numbers; "--" where there is none."""
    if math.isnan(value):
        return "--"
    if value == 0:
        return "0"
    if 0.999 <= value < 1:  # a cosine: what matters is how far it is from 1
        return f"{value:.5f}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}" if abs(value) >= 1 else f"{value:.4f}"
    return f"{value:.2e}"


def _ours_text(measure: Measure, quote: Quote | None, ours: Spread) -> str:
    if measure.kind == "count":
        return f"{ours.middle:.0f} of {len(measure.values)}"
    if quote is not None and quote.kind == "statement":
        return "yes" if ours.middle else "no"
    if math.isnan(ours.low):
        return number(ours.middle)
    return f"{number(ours.middle)} [{number(ours.low)}, {number(ours.high)}]"


# --- the whole


def agreement(cells: Sequence[Cell]) -> dict[str, Any]:
    """How many numbers agree: all, those whose protocol is known, and what was not counted and why."""

    def share(some: Sequence[Cell]) -> dict[str, Any]:
        agree = sum(bool(cell.agrees) for cell in some)
        return {"agree": agree, "judged": len(some), "share": agree / len(some) if some else None}

    counted = [cell for cell in cells if cell.counted]
    return {
        **share([cell for cell in counted if cell.known]),
        "protocol_not_known": share([cell for cell in counted if not cell.known]),
        "by_definition": sum(cell.rule in TRIVIAL for cell in cells),
        "no_verdict": sum(cell.agrees is None and not cell.ours_only for cell in cells),
        "ours_only": sum(cell.ours_only for cell in cells),
    }


def verdict(cells: Sequence[Cell]) -> str:
    """The agreement in one sentence."""
    found = agreement(cells)
    if not found["judged"] and any(cell.rule == "other model" for cell in cells):
        return "No verdict: the models, weights or texts are not the paper's; its numbers stand beside ours."
    if not found["judged"]:
        return "No verdict: too few systems were run to judge any number."
    text = f"{found['agree']} of {found['judged']} numbers agree with the paper ({found['share']:.0%})"
    other = found["protocol_not_known"]
    if other["judged"]:
        text += f"; of {other['judged']} more, whose protocol the paper leaves open, {other['agree']} do"
    return text + "."


def provenance(study: Study, results: Mapping[str, xr.Dataset]) -> dict[str, Any]:
    """What made the results: the study, its attributes, and the machine as the results' own attributes name it."""
    attrs = {str(key): value for data in results.values() for key, value in data.attrs.items()}
    systems = sorted({str(name) for data in results.values() for name in data["system"].values})
    models = {"models": described(conditions(results["language"]))} if "language" in results else {}
    return {"study": study.name, "systems": len(systems), **models, **dict(study.attrs), **attrs}


def write(cells: Sequence[Cell], out: Path, results: Mapping[str, xr.Dataset], study: Study) -> None:
    """Write `tables.json` and `tables.md` into the folder, each whole or not at all."""
    made = provenance(study, results)
    page = {"cells": [_plain(cell) for cell in cells], "agreement": agreement(cells), "machine": made}
    text = json.dumps(page, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    for name, content in (("tables.json", text + "\n"), ("tables.md", markdown(cells, made))):
        write_whole(out / name, partial(_write_text, content))


def _write_text(content: str, part: str) -> None:
    Path(part).write_text(content, encoding="utf-8")


def _plain(cell: Cell) -> dict[str, Any]:
    """JSON has no NaN."""
    values = asdict(cell)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


# --- Markdown


def markdown(cells: Sequence[Cell], made: Mapping[str, Any]) -> str:
    """The tables as the paper has them, ours beside its numbers, and every disagreement with its reason."""
    parts = [
        f"# {str(made['study']).capitalize()}: our numbers beside the paper's",
        verdict(cells),
        *([made["models"]] if "models" in made else []),
        f"Each entry is our median over {UNITS.get(str(made['study']), 'systems')} [quartiles], then the paper's "
        "number, ✓ where they agree and ✗ where they do not. Entries marked *ours* have no counterpart in the paper, "
        "◦ marks a number whose protocol the paper leaves open, and = one that is true by definition and not counted.",
    ]
    for label, some in by_table(cells).items():
        parts += [f"## {heading(label)}", _markdown_table(some)]
    parts += ["## Where they do not agree", _disagreements(cells)]
    used = dict.fromkeys(cell.rule for cell in cells)
    parts += ["## Rules", "\n".join(f"- **{rule or 'ours'}**: {RULES[rule]}" for rule in used)]
    parts += ["## What made them", "\n".join(f"- {key}: {value}" for key, value in made.items())]
    return "\n\n".join(parts) + "\n"


def heading(label: str) -> str:
    """What the table shows, with the paper's labels."""
    table = TABLES[label]
    return f"{table.title} ({', '.join((label, *table.also))})"


def by_table(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.table, []).append(cell)
    return found


def mark(cell: Cell) -> str:
    """One sign: agrees, does not, not counted, or protocol not known."""
    if cell.rule in TRIVIAL:
        return "="
    return MARKS[cell.agrees] + ("" if cell.known or cell.ours_only else "◦")


def _markdown_table(cells: Sequence[Cell]) -> str:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    found = {(cell.row, cell.column): cell for cell in cells}
    lines = [_line(["", *columns]), _line(["---"] * (len(columns) + 1))]
    for row in rows:
        lines.append(_line([row, *(_entry(found.get((row, column))) for column in columns)]))
    return "\n".join(lines)


def _entry(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.ours_only:
        return f"{cell.ours_text} *ours*"
    return f"{cell.ours_text} / {cell.paper_text} {mark(cell)}".rstrip()


def _line(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entry.replace("|", "\\|") for entry in entries) + " |"


def _disagreements(cells: Sequence[Cell]) -> str:
    wrong = [cell for cell in cells if cell.agrees is False]
    if not wrong:
        return "Nowhere."
    return "\n".join(
        f"- {TABLES[c.table].title}, {c.row}, {c.column}: ours {c.ours_text}, the paper's {c.paper_text}. "
        f"Rule: {c.rule}. {c.note[:1].upper()}{c.note[1:]}."
        for c in wrong
    )
