"""How often do the verdicts accept a perfect replication, and values that are wrong? Measured on independent systems.

Systems of the quadratic study are split into "paper" and "ours", over and over; the "paper" prints its medians, and
the quartiles that the paper prints, with the paper's digits. Run it on the six root seeds:
`python -m benchmarks.replication reproduction/quadratic`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from aftershock.studies.paper import TABLES, Quote
from aftershock.studies.replication import LOWER, MEDIAN, QUANTILES, UPPER, bounds, draws_of, saturated
from aftershock.studies.results import load_results
from aftershock.studies.tables import MEASURES
from aftershock.studies.verdicts import Measure, judge

FACTORS = (1.0, 1.3, 1.5)


@dataclass
class Shares:
    """Of every factor, how many numbers were judged and accepted, and for factor 1 the misses of each split."""

    accepted: dict[float, int]
    judged: dict[float, int]
    misses: list[float]

    def share(self, factor: float) -> float:
        return self.accepted[factor] / self.judged[factor]


def calibrate(numbers: list[tuple[Measure, Quote]], ours: int, splits: int, seed: int = 0) -> tuple[Shares, Shares]:
    """The replication verdict and today's rule: random systems, as many as the paper has, judged by `ours` others."""
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
            _judge_old(old, measure, mine, _printed(theirs, quote), rng)
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
        low, high = bounds(*draws_of(known, QUANTILES[name], quote, seed=0), quote.half_unit)
        for factor in FACTORS:
            for wrong in {factor, 1 / factor}:
                shares.judged[factor] += 1
                shares.accepted[factor] += low <= paper * wrong - middle <= high


def _judge_old(shares: Shares, measure: Measure, mine: np.ndarray, quote: Quote, rng: np.random.Generator) -> None:
    assert quote.value is not None
    for factor in FACTORS:
        for wrong in {factor, 1 / factor}:
            agrees, _ = judge(replace(measure, values=mine), replace(quote, value=quote.value * wrong), rng)
            shares.judged[factor] += 1
            shares.accepted[factor] += bool(agrees)


def numbers_of(results: Path) -> list[tuple[Measure, Quote]]:
    """The medians over systems of the quadratic study's tables, those that vary."""
    _, found = load_results(results)
    quotes = {label: table.quotes() for label, table in TABLES.items()}
    pairs = [(m, quotes[m.table].get((m.row, m.column))) for m in MEASURES["quadratic"](found)]
    return [(m, q) for m, q in pairs if q and q.kind == "value" and m.kind == "systems" and np.nanstd(m.values) > 0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replication", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--splits", type=int, default=100)
    options = parser.parse_args()
    numbers = numbers_of(options.results)
    table = Table("ours", "verdict", *(f"accepted at ×{f:g}" for f in FACTORS), "numbers missed: mean, 95 % of splits")
    for ours in (32, len(numbers[0][0].values) - 32):
        new, old = calibrate(numbers, ours, options.splits)
        spread = f"{np.mean(new.misses):.1%}, up to {np.quantile(new.misses, 0.95):.1%}"
        table.add_row(f"{ours} systems", "replication", *(f"{new.share(f):.1%}" for f in FACTORS), spread)
        table.add_row("", "inside our quartiles", *(f"{old.share(f):.1%}" for f in FACTORS), "")
    Console(width=140).print(f"{len(numbers)} numbers, {options.splits} splits", table)


if __name__ == "__main__":
    main()
