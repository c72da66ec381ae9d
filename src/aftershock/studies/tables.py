"""The paper's tables with our numbers beside them: how many replicate, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from ..results.files import write_whole
from .cells import Cell, cell_of, lone_cell
from .cifar.measures import cifar_measures
from .language.conditions import conditions, described
from .language.measures import NOTES, language_measures
from .language.paper import LANGUAGE
from .paper import TABLES
from .quadratic.measures import quadratic_measures
from .replication import CALIBRATION, Replication
from .results import systems_in
from .verdicts import RULES, TRIVIAL

if TYPE_CHECKING:
    import xarray as xr

    from .study import Study

MEASURES = {"quadratic": quadratic_measures, "cifar": cifar_measures, "language": language_measures}
ENTRIES = {
    "language": "Each entry is our median over all candidates of the systems that a row names [quartiles], of rank "
    "correlations and seconds over the systems, or a share or count of candidates; then the paper's number."
}
SIGNS = {
    "≈": "a number that replicates: zero lies in the 95 % interval of the difference of two medians, ours and the "
    "paper's, each of its own number of systems",
    "≠": "one that does not",
    "×1.3": "the smallest factor, up or down, by which the number could be wrong and would have been caught in four "
    "cases of five (±0.1: a difference, where it may be zero)",
    "[≈, ≠]": "the quartiles that the paper prints, judged too",
    "✓, ✗": "the weaker rule: the paper's median lies inside our quartiles or the bootstrap interval of our median, or "
    "it does not",
    "ours": "the paper has no such number; – where nothing of ours stands",
    "◦": "a number whose protocol the paper leaves open",
    "?": "one that is not judged",
    "=": "one that is saturated or true by definition, and not counted",
    "in 90% of draws": "a test of more systems than the paper's is judged by draws of as many: the entry says what all "
    "of ours give, and how many draws say yes",
}
MARKS = {True: "✓", False: "✗", None: "?"}
UNJUDGED = ("ours", "◦", "?")  # the signs of results of which nothing is judged
NOTHING_JUDGED, NOWHERE = "Nothing could be judged.", "Nowhere: every number that could be judged agrees."
ALONE = {"language": LANGUAGE}  # tables of systems that may not be at hand: their numbers stand there all the same
SHOWN_SEEDS = 4
# What a table shows: its numbers and order, or what is shown where the paper leaves its protocol open.
SHOWN = {
    **NOTES,
    "tab:app_exp1_state_interventions": "Which candidates the paper selected is not known; all 16 are shown.",
    "tab:app_exp1_persistence": "Shown: a quarter of the shock, all 16 candidates; v moved coordinate by coordinate to "
    "the same first displacement.",
}


def build(study_name: str, results: Mapping[str, xr.Dataset]) -> list[Cell]:
    """Every cell that these results can fill, in the paper's order."""
    if study_name not in MEASURES:
        raise InvalidInput(f"there are no tables for the study {study_name!r}; choose from {', '.join(MEASURES)}")
    order = {label: i for i, label in enumerate(TABLES)}
    quotes = {label: table.quotes() for label, table in TABLES.items()}
    cells = [cell_of(m, quotes[m.table].get((m.row, m.column))) for m in MEASURES[study_name](results)]
    return sorted([*cells, *without_ours(study_name, cells)], key=lambda c: order[c.table])


def without_ours(study_name: str, cells: Sequence[Cell]) -> list[Cell]:
    """The paper's numbers of systems that were not run, so that every number of a section stands in its tables."""
    there = {(cell.table, cell.row, cell.column) for cell in cells}
    return [
        lone_cell(table.label, *place, quote)
        for table in (ALONE.get(study_name, ()) if cells else ())
        for place, quote in table.quotes().items()
        if (table.label, *place) not in there
    ]


def agreement(cells: Sequence[Cell]) -> dict[str, Any]:
    """How many numbers replicate, and by the weaker rule agree: those whose protocol is known, and the rest.

    Not counted, and why: what nothing was tested by (`saturated`), what is true by definition, too few systems.
    """
    counted = [cell for cell in cells if cell.counted]
    return {
        "replication": replicated([cell for cell in cells if cell.known]),
        "replication_protocol_not_known": replicated([cell for cell in cells if not cell.known]),
        **_share([bool(cell.agrees) for cell in counted if cell.known]),
        "protocol_not_known": _share([bool(cell.agrees) for cell in counted if not cell.known]),
        "by_definition": sum(cell.rule in TRIVIAL for cell in cells),
        "no_verdict": sum(cell.unjudged for cell in cells),
        "ours_only": sum(cell.ours_only for cell in cells),
    }


def replicated(cells: Sequence[Cell]) -> dict[str, Any]:
    """How many numbers of these cells replicate, quartiles counted as numbers of their own."""
    numbers = [one for cell in cells for one in cell.replications]
    counted = [one for one in numbers if one.counted]
    # a number that may be zero has no factor, and too few systems would catch none: neither was caught
    caught = [math.inf if math.isnan(one.catches) else one.catches for one in counted]
    typical = median(caught) if caught else math.inf
    return {
        **_share([one.holds for one in counted]),
        "expected_misses": sum(one.missed for one in counted),
        "saturated": len(numbers) - len(counted),
        "typical_factor_caught": typical if math.isfinite(typical) else None,
    }


def _share(verdicts: Sequence[bool]) -> dict[str, Any]:
    agree = sum(verdicts)
    return {"agree": agree, "judged": len(verdicts), "share": agree / len(verdicts) if verdicts else None}


def verdict(cells: Sequence[Cell]) -> str:
    """The agreement in a few sentences, the replication first."""
    found = agreement(cells)
    first, other = found["replication"], found["replication_protocol_not_known"]
    if not found["judged"] and any(cell.rule == "other model" for cell in cells):
        return (
            "No verdict: the models, weights or texts are not the paper's; its numbers stand beside ours. Not judged: "
            f"{unjudged_words(cells)}."
        )
    if not found["judged"]:
        return "No verdict: too few systems were run to judge any number."
    text = f"{replication_words(first)}."
    if first["typical_factor_caught"]:
        text += f" Half of these verdicts would have caught a factor of {first['typical_factor_caught']:.2f}."
    if other["judged"]:
        text += f" Of {other['judged']} more, whose protocol the paper leaves open, {other['agree']} replicate."
    if found["no_verdict"]:
        text += f" Not judged: {unjudged_words(cells)}."
    rest, weaker = found["protocol_not_known"], f"{found['agree']} of {found['judged']} agree"
    if rest["judged"]:
        weaker += f", and {rest['agree']} of {rest['judged']} more"
    return f"{text} By the weaker rule, the paper's median inside our quartiles, {weaker}."


def unjudged_words(cells: Sequence[Cell]) -> str:
    """How many numbers of the paper are not judged, by the rule that says why."""
    counts = Counter(cell.rule for cell in cells if cell.unjudged)
    return ", ".join(f"{count} ({rule})" for rule, count in counts.items())


def replication_words(found: Mapping[str, Any]) -> str:
    """How many replicate, and how many of so many a perfect replication would miss."""
    if not found["judged"]:
        return "no number can be judged by replication"
    share = f"{found['agree']} of {found['judged']} numbers replicate ({found['share']:.0%})"
    return f"{share}; a perfect replication would miss {found['expected_misses']:.1f}"


def provenance(study: Study, results: Mapping[str, xr.Dataset]) -> dict[str, Any]:
    """What made the results: the study, its attributes, and the machine as the results' own attributes name it."""
    attrs = {str(key): value for data in results.values() for key, value in data.attrs.items()}
    systems = set(systems_in(results))
    seeds = sorted({name.rsplit("-", 2)[1] for name in systems})
    shown = ", ".join(seeds) if len(seeds) <= SHOWN_SEEDS else f"{seeds[0]} … {seeds[-1]} ({len(seeds)})"
    counts = Counter(name.rsplit("-", 2)[0] for name in sorted(systems))
    each = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    models = {"models": described(conditions(results["language"]))} if "language" in results else {}
    named = {"study": study.name, "systems": len(systems), "systems_of_each": each, "seeds": shown}
    return {**named, **models, **dict(study.attrs), **attrs, "systems_in_study": len(study.systems)}


def write(cells: Sequence[Cell], out: Path, results: Mapping[str, xr.Dataset], study: Study) -> None:
    """Write `tables.json`, `tables.md` and `values.json`, every system's numbers, each whole or not at all."""
    made = provenance(study, results)
    contents = {
        "tables.json": _tables(cells, made),
        "tables.md": markdown(cells, made),
        "values.json": _values(cells, systems_in(results)),
    }
    for name, content in contents.items():
        write_whole(out / name, partial(_write_text, content))


def _write_text(content: str, part: str) -> None:
    Path(part).write_text(content, encoding="utf-8")


def _tables(cells: Sequence[Cell], made: Mapping[str, Any]) -> str:
    """One line a cell."""
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, default=str, separators=(",", ":"))
    lines = ",\n".join(dumps(_plain(cell)) for cell in cells)
    return f'{{"cells": [\n{lines}\n],\n"agreement": {dumps(agreement(cells))},\n"machine": {dumps(made)}}}\n'


def _plain(cell: Cell) -> dict[str, Any]:
    values = asdict(replace(cell, values=()))
    del values["values"]
    return _without_nan(values | {"replications": [_without_nan(one) for one in values["replications"]]})


def _values(cells: Sequence[Cell], systems: Sequence[str]) -> str:
    """One line a cell, five digits a number, whole ones as such, so that anybody can judge, pool or calibrate again.

    Values of one kind of system are in the order of that kind's names.
    """
    lines = [
        json.dumps(
            {"table": c.table, "row": c.row, "column": c.column, "values": [_short(x) for x in c.values]},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for c in cells
        if c.values
    ]
    return f'{{"systems": {json.dumps(systems)},\n"cells": [\n' + ",\n".join(lines) + "\n]}\n"


def _five(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _short(value: float) -> float | None:
    """1 and not 1.0: a quarter of the values are whole."""
    digits = _five(value)
    return digits if digits is None or not digits.is_integer() else int(digits)


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN; five digits are what a number of systems knows."""
    return {k: _five(v) if isinstance(v, float) else v for k, v in values.items()}


# --- Markdown


def markdown(cells: Sequence[Cell], made: Mapping[str, Any]) -> str:
    """The tables as the paper has them, ours beside its numbers, and every disagreement with its reason."""
    parts = [
        f"# {str(made['study']).capitalize()}: our numbers beside the paper's",
        verdict(cells),
        *([str(made["models"])] if "models" in made else []),
        entry_words(str(made["study"])),
        "\n".join(f"- {sign}: {meaning}." for sign, meaning in signs(cells).items()),
        *([CALIBRATION] if judged(cells) else []),
    ]
    for label, some in by_table(cells).items():
        line = table_line(some) if judged(cells) else SHOWN.get(label, "")
        parts += [f"## {heading(label)}", *([line] if line else []), _markdown_table(some)]
    parts += ["## Where they do not agree", _disagreements(cells)]
    used = dict.fromkeys(cell.rule for cell in cells)
    parts += ["## Rules", "\n".join(f"- **{rule or 'ours'}**: {RULES[rule]}" for rule in used)]
    parts += ["## What made them", "\n".join(f"- {key}: {value}" for key, value in made.items() if key != "models")]
    return "\n\n".join(parts) + "\n"


def judged(cells: Sequence[Cell]) -> bool:
    """Whether anything is: where nothing is, the verdict says so once."""
    return any(cell.counted or cell.replications for cell in cells)


def signs(cells: Sequence[Cell]) -> dict[str, str]:
    """What the signs in the tables mean."""
    return {sign: meaning for sign, meaning in SIGNS.items() if judged(cells) or sign in UNJUDGED}


def entry_words(study_name: str) -> str:
    """What an entry is."""
    return ENTRIES.get(study_name, "Each entry is our median over systems [quartiles], then the paper's number.")


def heading(label: str) -> str:
    """What the table shows, with the paper's labels."""
    table = TABLES[label]
    return f"{table.title} ({', '.join((label, *table.also))})"


def by_table(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.table, []).append(cell)
    return found


def table_line(cells: Sequence[Cell]) -> str:
    """A table's count, how many a perfect replication would miss, and what is shown where its protocol is open."""
    words = replication_words(replicated(cells))
    return f"{words[:1].upper()}{words[1:]}. {SHOWN.get(cells[0].table, '')}".rstrip()


def mark(cell: Cell) -> str:
    """Signs: does it replicate and what would have been caught, its quartiles; agrees; not counted; not known."""
    if cell.rule in TRIVIAL or cell.saturated:
        return "="
    signs = [_sign(one) for one in cell.replications]
    first = [signs[0] + _power(cell.replications[0])] if signs else []
    quartiles = [f"[{', '.join(signs[1:])}]"] if signs[1:] else []
    known = "" if cell.known or cell.ours_only else "◦"
    weaker = "" if cell.agrees is None and signs else MARKS[cell.agrees]
    return " ".join([*first, *quartiles, weaker + known]).rstrip()


def _sign(one: Replication) -> str:
    return "=" if one.saturated else "≈" if one.holds else "≠"


def _power(one: Replication) -> str:
    if one.saturated:
        return ""
    if math.isnan(one.catches):
        return f"±{one.catches_difference:.2g}"
    return f"×{one.catches:.2f}" if math.isfinite(one.catches) else ""


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
    wrong = [cell for cell in cells if cell.holds is False]
    if not judged(cells):
        return NOTHING_JUDGED
    if not wrong:
        return NOWHERE
    return "\n".join(
        f"- {TABLES[c.table].title}, {c.row}, {c.column}: ours {c.ours_text}, the paper's {c.paper_text}. "
        f"{c.note[:1].upper()}{c.note[1:]}."
        for c in wrong
    )
