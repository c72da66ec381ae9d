"""One number of a table: ours, the paper's, whether it replicates, and the words for it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .quotes import Quote
from .replication import COUNT, LOWER, UPPER, Replication, replications, sparse
from .verdicts import AGREEMENT, LOST, NOT_RUN, TRIVIAL, Measure, Spread, judge, replicable, spread

if TYPE_CHECKING:
    import numpy as np

SEED = 0  # of the bootstrap of the weaker rule
UNEXPLAINED = "not known why"


@dataclass(frozen=True)
class Cell:
    """One number: ours with its quartiles over systems, the paper's, whether they agree and by which rule.

    replications: the verdict on the paper's median, and on its quartiles where it prints them; none where the number
    is no median of systems. agrees: by the weaker rule named in `rule`; None where nothing can be said.
    paper is None where the paper has none (`ours_only`) or prints "--".
    known: whether the paper's protocol for this number is known. The texts are the numbers as a table shows them.
    values: what the number is made of, one per system.
    """

    table: str
    row: str
    column: str
    ours: float
    iqr_low: float
    iqr_high: float
    paper: float | None
    replications: tuple[Replication, ...]
    agrees: bool | None
    rule: str
    known: bool
    note: str
    systems: int
    ours_only: bool
    ours_text: str
    paper_text: str
    values: tuple[float, ...] = field(repr=False)

    @property
    def counted(self) -> bool:
        """Whether the cell is one of the numbers that the share of agreement is about."""
        return self.agrees is not None and self.rule not in TRIVIAL and not self.saturated

    @property
    def unjudged(self) -> bool:
        """Whether the paper has a number of which nothing can be said."""
        return self.holds is None and not self.ours_only

    @property
    def saturated(self) -> bool:
        """Whether nothing varies, or nothing could, so that nothing was tested."""
        return any(one.saturated for one in self.replications[:1])

    @property
    def holds(self) -> bool | None:
        """The verdict that comes first: whether the number replicates, and where it is no median, whether it agrees."""
        return all(one.holds for one in self.replications) if self.replications else self.agrees


def cell_of(measure: Measure, quote: Quote | None) -> Cell:
    """Our number judged by the paper's, where it has one."""
    import numpy as np

    ours, generator = spread(measure), np.random.default_rng(SEED)
    agrees, rule = (None, "") if quote is None else judge(measure, quote, generator)
    judged = quote is not None and replicable(measure, quote)
    numbers = replications(measure.values, quote, measure.kind) if quote and judged else ()
    return Cell(
        table=measure.table,
        row=measure.row,
        column=measure.column,
        ours=ours.middle,
        iqr_low=ours.low,
        iqr_high=ours.high,
        paper=None if quote is None else quote.value,
        replications=numbers,
        agrees=agrees,
        rule=rule,
        known=measure.known,
        note=_note(measure, quote, ours, agrees, numbers),
        systems=measure.systems,
        ours_only=quote is None,
        ours_text=_ours_text(measure, quote, ours),
        paper_text="" if quote is None else minus(quote.text),
        values=tuple(measure.values.astype(float).tolist()),
    )


def lone_cell(table: str, row: str, column: str, quote: Quote) -> Cell:
    """A number of the paper that nothing of ours stands beside."""
    return Cell(
        table=table,
        row=row,
        column=column,
        ours=math.nan,
        iqr_low=math.nan,
        iqr_high=math.nan,
        paper=quote.value,
        replications=(),
        agrees=None,
        rule=NOT_RUN,
        known=True,
        note="",
        systems=0,
        ours_only=False,
        ours_text="–",
        paper_text=minus(quote.text),
        values=(),
    )


def _note(
    measure: Measure, quote: Quote | None, ours: Spread, agrees: bool | None, replicated: Sequence[Replication]
) -> str:
    """What is special about the cell; of a disagreement, first what differs and how far, last why, or that nobody
    knows."""
    wrong = [one for one in replicated if not one.holds]
    if quote is None or not (agrees is False or wrong):
        return measure.note
    ends = {LOWER: (ours.low, quote.low), UPPER: (ours.high, quote.high)}
    parts = [_missed(one, *ends[one.number]) for one in wrong if one.number in ends and replicated[1:]]
    middle = [one for one in wrong if one is replicated[0]]
    if quote.kind == "value" and not math.isnan(ours.middle) and (middle or not wrong):
        parts.append(_distance(ours.middle, float(quote.value or 0.0)))
    parts += [_missed(one) for one in middle]
    if middle and quote.kind == "value" and quote.low is not None and quote.high is not None:
        inside = quote.low <= ours.middle <= quote.high
        parts.append(f"our median lies {'inside' if inside else 'outside'} the paper's own quartiles")
    parts += [measure.note] if measure.note else []
    if measure.known:
        parts.append(_why(measure, quote.systems))
    return "; ".join(parts)


def _why(measure: Measure, papers: int | None) -> str:
    if papers is not None and sparse(measure.systems, papers):
        return f"{measure.systems} systems beside the paper's {papers} are too few to ask why"
    return measure.reason or UNEXPLAINED


# --- words for numbers


def _distance(ours: float, paper: float) -> str:
    """A ratio where it tells something; correlations near zero have none."""
    if ours * paper > 0 and 0.2 <= ours / paper <= 5:
        return f"ours is {ours / paper:.2f} times the paper's"
    return f"ours less the paper's is {number(ours - paper)}"


def _missed(one: Replication, ours: float = math.nan, paper: float | None = None) -> str:
    """The failing number, with both values where the entry itself does not begin with them."""
    word = "share" if one.number == COUNT else one.number
    reach = f"is between {number(one.low)} and {number(one.high)}"
    if paper is None:
        return f"the {word}, ours less the paper's, {reach}"
    return f"the {word} is {number(ours)}, the paper's {number(paper)}: ours less the paper's {reach}"


def number(value: float) -> str:
    """Four digits, as the paper prints its numbers; "--" where there is none."""
    if math.isnan(value):
        return "--"
    if value == 0:
        return "0"
    if abs(value - 1) <= 1e-12:  # what only rounding keeps from 1
        return "1"
    if 0.999 <= value < 1:  # a cosine: what matters is how far it is from 1
        return f"{value:.5f}"
    if 1e-3 <= abs(value) < 1e4:
        return minus(f"{value:.4g}" if abs(value) >= 1 else f"{value:.4f}")
    return minus(f"{value:.2e}")


def minus(text: str) -> str:
    """A number's sign as it is printed; an exponent keeps the one that programs read."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", text)


def _ours_text(measure: Measure, quote: Quote | None, ours: Spread) -> str:
    if math.isnan(ours.middle):
        return LOST if measure.unjudged == LOST else number(ours.middle)
    if measure.kind == "count":
        return f"{ours.middle:.0f} of {len(measure.values)}"
    if quote is not None and quote.kind == "statement":
        return ("yes" if ours.middle else "no") + _of_draws(measure, measure.values == 1, "yes in ")
    if measure.kind == "p":
        level = AGREEMENT.level
        return number(ours.middle) + _of_draws(measure, measure.values < level, f"p < {level:g} in ")
    if math.isnan(ours.low):
        return number(ours.middle)
    return f"{number(ours.middle)} [{number(ours.low)}, {number(ours.high)}]"


def _of_draws(measure: Measure, holds: np.ndarray, words: str) -> str:
    """Beside what all systems say: how many draws of as many as the paper's say so too."""
    return "" if math.isnan(measure.whole) else f" ({words}{holds.mean():.0%} of draws of {measure.drawn})"
