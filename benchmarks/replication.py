"""How often do the verdicts accept a perfect replication, and values that are wrong? Measured on independent systems.

Systems of the quadratic study are split into "paper" and "ours", over and over; the "paper" prints its medians, and
the quartiles that the paper prints, with the paper's digits. Run it on the six root seeds:
`python -m benchmarks.replication docs/results/quadratic/values.json`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from aftershock.studies.paper import TABLES
from aftershock.studies.quotes import Quote
from aftershock.studies.replication import LOWER, MEDIAN, QUANTILES, UPPER, bounds, laws_of, quantile_law, saturated
from aftershock.studies.verdicts import Measure

FACTORS = (1.0, 1.3, 1.5)
ROUNDING = 1e-9
# tables of numbers without an upper end; correlations and shares near one cannot be wrong by a factor unnoticed
MAGNITUDES = (
    "tab:app_exp1_fidelity",
    "tab:app_exp1_matching",
    "tab:app_exp1_state_interventions",
    "tab:app_exp1_persistence",
    "tab:app_exp2_variance_components",
)


@dataclass
class Shares:
    """Of every factor, how many numbers were judged and accepted, and for factor 1 the misses of each split."""

    accepted: dict[float, int]
    judged: dict[float, int]
    misses: list[float]

    def share(self, factor: float) -> float:
        return self.accepted[factor] / self.judged[factor]


def calibrate(numbers: list[tuple[Measure, Quote]], ours: int, splits: int, seed: int = 0) -> tuple[Shares, Shares]:
    """The replication verdict and the weaker rule: random systems, as many as the paper has, judged by `ours` more."""
    rng = np.random.default_rng(seed)
    new, old = (Shares(dict.fromkeys(FACTORS, 0), dict.fromkeys(FACTORS, 0), []) for _ in range(2))
    systems = len(numbers[0][0].values)
    for _ in range(splits):
        order = rng.permutation(systems)
        before = new.judged[1.0] - new.accepted[1.0], new.judged[1.0]
        for measure, quote in numbers:
            assert quote.systems is not None
            theirs, mine = (measure.values[order[part]] for part in _parts(quote.systems, ours))
            _judge_new(new, mine, _printed(theirs, quote))
            _judge_old(old, mine, _printed(theirs, quote))
        missed = new.judged[1.0] - new.accepted[1.0] - before[0]
        new.misses.append(missed / (new.judged[1.0] - before[1]))
    return new, old


def _parts(theirs: int, ours: int) -> tuple[slice, slice]:
    return slice(0, theirs), slice(theirs, theirs + ours)


def _printed(values: np.ndarray, quote: Quote) -> Quote:
    """What the paper would have printed of these systems: as many digits, and quartiles where it prints them."""
    low, middle, high = (float(x) for x in np.nanquantile(values, [0.25, 0.5, 0.75]))
    digits = abs(quote.value or 1.0) / (2 * quote.half_unit)  # significant: magnitudes may differ
    unit = 2 * quote.half_unit if not middle or "e" not in quote.text else abs(middle) / digits
    shown = [round(x / unit) * unit for x in (low, middle, high)]
    return replace(
        quote,
        value=shown[1],
        low=None if quote.low is None else shown[0],
        high=None if quote.high is None else shown[2],
        half_unit=unit / 2,
    )


def _judge_new(shares: Shares, mine: np.ndarray, quote: Quote) -> None:
    known = np.sort(mine[~np.isnan(mine)])
    if saturated(known, quote):
        return
    for name, paper in ((MEDIAN, quote.value), (LOWER, quote.low), (UPPER, quote.high)):
        if paper is None:
            continue
        middle = float(np.quantile(known, QUANTILES[name]))
        low, high = bounds(*laws_of(known, QUANTILES[name], quote), quote.half_unit)
        for factor in FACTORS:
            for wrong in {factor, 1 / factor}:
                shares.judged[factor] += 1
                shares.accepted[factor] += low <= paper * wrong - middle <= high


def _judge_old(shares: Shares, mine: np.ndarray, quote: Quote) -> None:
    """`verdicts.judge` on a median: inside our quartiles, or inside the bootstrap interval of our median."""
    assert quote.value is not None
    ordered = np.sort(mine)
    resampled = quantile_law(ordered, len(ordered), 0.5)
    ends = np.quantile(ordered, [0.25, 0.75]), (resampled.quantile(0.025), resampled.quantile(0.975))
    low, high = min(end[0] for end in ends) - quote.half_unit, max(end[1] for end in ends) + quote.half_unit
    for factor in FACTORS:
        for wrong in {factor, 1 / factor}:
            shares.judged[factor] += 1
            shares.accepted[factor] += bool(low <= quote.value * wrong <= high)


def numbers_of(file: Path) -> list[tuple[Measure, Quote]]:
    """The medians over systems of a study's `values.json`: those that vary, and not at rounding."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    quotes = {label: table.quotes() for label, table in TABLES.items()}
    systems = max(len(cell["values"]) for cell in cells)
    found = []
    for cell in cells:
        place, values = (cell["row"], cell["column"]), np.array(cell["values"], dtype=float)
        quote = quotes[cell["table"]].get(place)
        whole = len(values) == systems and np.isfinite(values).all()
        if quote is not None and quote.kind == "value" and whole and values.std() > ROUNDING * abs(np.median(values)):
            found.append((Measure(cell["table"], *place, values, systems), quote))
    return [(measure, quote) for measure, quote in found if measure.column != "CV of |d1|" != measure.row]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replication", description=__doc__)
    parser.add_argument("values", type=Path, help="values.json of a study of several root seeds")
    parser.add_argument("--splits", type=int, default=100)
    options = parser.parse_args()
    every = numbers_of(options.values)
    magnitudes = [(measure, quote) for measure, quote in every if measure.table in MAGNITUDES]
    table = Table("numbers", "ours", "verdict", *(f"×{f:g} accepted" for f in FACTORS), "missed: mean, 95 % of splits")
    for name, numbers in ((f"all {len(every)}", every), (f"{len(magnitudes)} magnitudes", magnitudes)):
        for ours in (32, len(every[0][0].values) - 32):
            new, old = calibrate(numbers, ours, options.splits)
            spread = f"{np.mean(new.misses):.1%}, up to {np.quantile(new.misses, 0.95):.1%}"
            table.add_row(name, f"{ours}", "replication", *(f"{new.share(f):.1%}" for f in FACTORS), spread)
            table.add_row("", "", "inside our quartiles", *(f"{old.share(f):.1%}" for f in FACTORS), "")
    Console(width=140).print(f"{options.splits} splits of {len(every[0][0].values)} systems; 32 are the paper's", table)


if __name__ == "__main__":
    main()
