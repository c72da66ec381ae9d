"""Where exponents and validity are not what a smooth response gives: finite differences, float noise, or real?

An error of the derivative itself grows as α and pulls a fitted exponent from 2 towards 1; float noise of the two exact
runs does not depend on α and pulls it towards 0. The exact tangent has no error of the first kind, so that putting it
in the place of the finite differences tells the two apart from what is left, which is real.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...results.certificate import TRUST, Finding
from ...results.statistics import across_candidates
from .candidates import FD, Candidates
from .finite_differences import IDENTIFIABLE, selected_error, step_curve, step_error

if TYPE_CHECKING:
    import xarray as xr

Cause = Literal[
    "none", "chance", "finite differences", "opposite sides", "float noise", "real", "exact tangent only", "undefined"
]

SMOOTH = 2.0
NEAR = 0.25  # the paper calls 1.878 near quadratic, and its two deviations are 0.9 and 1.3 away
HALF_WAY = 0.5  # to a slope of −1, or of 2
# The noise is known to a factor of a few (TRUST.noise_margin), so that what is measured may be this much more: an error
# below five times the noise cannot be told from it, and its exponent says nothing.
CLEAR = 1 / TRUST.noise_margin
LEVEL = 0.05
PAPER_CANDIDATES, PAPER_VALID = 72, (67, 70)  # valid at α = 1/16 and 1/8: 0.931 and 0.972
# Of an error by float noise (1/ε) the next step shows half, of one by truncation (ε²) three times as much. Steps that
# show less of it do not converge to the derivative.
SHOWN = 0.5
LITTLE = 0.1  # of the tangent's error: what semilinear is left with where AdamW's arithmetic makes it


@dataclass(frozen=True)
class Deviation:
    """One system's error exponents with finite differences and with the exact tangent, and what sets them apart.

    noise: float noise of the exact response over the tangent's error at the smallest scale.
    """

    name: str
    fd: float
    tangent: float
    noise: float
    cause: Cause


@dataclass(frozen=True)
class Validity:
    """The share of valid candidates by scale with each derivative, and why it rises somewhere if it does.

    chance: how likely as clear a rise is where no candidate's validity depends on the scale, with each derivative; NaN
    where the share does not rise.
    """

    scales: tuple[float, ...]
    fd: tuple[float, ...]
    tangent: tuple[float, ...]
    chance: tuple[float, float]
    noise: float
    cause: Cause


def exponent_deviations(found: Candidates) -> list[Deviation]:
    """One per system, in the order of the data."""
    middle = across_candidates(found.exponents)
    pairs = zip(middle.sel({"answer": FD}).values, middle.sel({"answer": "tangent"}).values, found.noise.values)
    return [
        Deviation(condition.name, float(fd), float(tangent), float(noise), _cause(fd, tangent, noise))
        for condition, (fd, tangent, noise) in zip(found.conditions, pairs)
    ]


def _cause(fd: float, tangent: float, noise: float) -> Cause:
    if math.isnan(fd) or math.isnan(tangent):
        return "undefined"
    bent, exact_bent = abs(fd - SMOOTH) > NEAR, abs(tangent - SMOOTH) > NEAR
    if not bent:
        return "exact tangent only" if exact_bent else "none"
    if not exact_bent:
        return "finite differences"
    if (fd > SMOOTH) != (tangent > SMOOTH):
        return "opposite sides"
    return "real" if noise <= CLEAR else "float noise"


def validity(found: Candidates) -> Validity:
    """Does the valid share fall with every larger scale, as it does for a smooth response?"""
    share = found.errors["valid"].mean(["system", "change"])
    fd, tangent = (tuple(map(float, share.sel({"answer": answer}).values)) for answer in (FD, "tangent"))
    chance = (_rise(found, FD), _rise(found, "tangent"))
    # noise that is a fifth of the response can break the bar of a fifth by itself
    noise = float(found.noise_share.sel(scale=float(found.exact["scale"].min())).median())
    scales = tuple(map(float, share["scale"].values))
    return Validity(scales, fd, tangent, chance, noise, _why_it_rises(*chance, noise))


def _why_it_rises(fd: float, tangent: float, noise: float) -> Cause:
    """By how likely each rise is by chance; NaN where there is none."""
    if math.isnan(fd) and math.isnan(tangent):
        return "none"
    first, last = fd < LEVEL, tangent < LEVEL
    if not first and not last:
        return "chance"
    if first and last:
        return "real" if noise <= TRUST.symmetric_error * CLEAR else "float noise"
    return "finite differences" if first else "exact tangent only"


def _rise(found: Candidates, answer: str) -> float:
    """The smallest p of the exact sign test over neighbouring scales where the share of valid candidates rises.

    Candidates that are valid at both scales, or at neither, say nothing; of the others half would gain by chance.
    """
    from scipy import stats

    valid = found.errors["valid"].sel({"answer": answer})
    below: xr.DataArray = valid.isel(scale=slice(None, -1)).drop_vars("scale")
    above: xr.DataArray = valid.isel(scale=slice(1, None)).drop_vars("scale")
    gained, fallen = (side.sum(["system", "change"]).values for side in (above > below, above < below))
    tests = [stats.binomtest(int(a), int(a + b)).pvalue for a, b in zip(gained, fallen) if a > b]
    return float(min(tests, default=math.nan))


def paper_rise() -> tuple[float, float]:
    """p of the paper's rise, 67 to 70 of 72: by the exact sign test where no candidate fell, and by Fisher's test.

    Which candidates are valid the paper does not say. That none became invalid is the clearest that the rise can be.
    """
    from scipy import stats

    first, second = PAPER_VALID
    table = [[first, PAPER_CANDIDATES - first], [second, PAPER_CANDIDATES - second]]
    return float(stats.binomtest(second - first, second - first).pvalue), float(stats.fisher_exact(table).pvalue)


# --- words


def findings(found: Candidates) -> tuple[Finding, ...]:
    """What the finite differences did to the paper's numbers, as data and in words, for this run's systems."""
    return (
        _steps(found),
        _noise(found),
        *_exponents(exponent_deviations(found)),
        _validity(validity(found)),
        _paper_validity(),
        *_paper(found),
    )


def _noise(found: Candidates) -> Finding:
    """Float noise over the exact response by scale, and which scales it leaves."""
    share, scales = found.noise_share.median(["system", "change"]), found.exact["scale"].values
    listed = ", ".join(f"{_percent(float(share.sel(scale=s)))} at α = {s:g}" for s in scales)
    lost = {f"{s:g}": int(found.lost.sel(scale=s).sum()) for s in scales}
    counts = ", ".join(f"{count} at α = {s}" for s, count in lost.items() if count)
    words = f"lost in noise (below {TRUST.noise_margin:g} times it at most horizons) are {counts}" if counts else ""
    words = words or "no candidate is lost in it"
    blank = " Scales at which half of a system's candidates are lost are left out." if bool(found.drowned.any()) else ""
    sentence = (
        f"Rounding alone moves the probe's loss by {listed} of the exact response (medians); of "
        f"{found.magnitude.size} candidates, {words}.{blank}"
    )
    level = "care" if blank else "note" if counts else "ok"
    return Finding(level, "noise", "float noise over the response", float(share.max()), CLEAR, sentence)  # type: ignore[arg-type]


def _steps(found: Candidates) -> Finding:
    """The error of the selected step, and which of noise, truncation and bending inside the step makes it."""
    curve, selection = step_curve(found.data), found.selection
    errors = selected_error(found.data, selection)
    error = float(errors.median())
    gap, seen = float(selection["consistency"].median()), float((selection["consistency"] / errors).median())
    best = float(step_error(found.data).min("fd_step").median())
    falling, rising = float(curve["falling"].median()), float(curve["rising"].median())
    sentence = (
        f"Against the exact tangent, the finite-difference step that the paper's rule selects is off by {error:.2%} "
        f"(median over candidates), the best step by {best:.2%}; the rule itself sees {gap:.2%} ({seen:.3g} of a "
        "candidate's own error). In log–log "
        f"the error has slope {_signed(falling)} at the smallest steps, where float noise has −1 "
        f"({'it rules' if falling < -HALF_WAY else 'it does not rule'}), and {_signed(rising)} at the largest, "
        f"where truncation has 2 ({'it rules' if abs(rising - SMOOTH) <= HALF_WAY else 'it does not rule'})."
    )
    level = TRUST.level(error)
    if seen < SHOWN and falling >= -HALF_WAY:
        level = "care" if level == "ok" else level
        sentence += " " + _secant(found)
    return Finding(level, "steps", "error of the selected step", error, TRUST.nrmse, sentence)


def _percent(share: float) -> str:
    """Three digits, since noise may be a hundredth of a percent."""
    return f"{100 * share:.3g}%"


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _secant(found: Candidates) -> str:
    """Semilinear keeps AdamW's arithmetic and linearizes the network alone: it says which of the two bends."""
    far = step_error(found.data).min("fd_step") > IDENTIFIABLE
    lost = f" For {int(far.sum())} of {far.size} candidates no step comes within a quarter of it." if far.any() else ""
    ours = found.errors["nrmse"].sel({"answer": ["tangent", "semilinear"]})
    at = ours.median(["system", "change"]).dropna("scale").isel(scale=0)  # the smallest that is not lost in noise
    tangent, semilinear = (float(at.sel({"answer": answer})) for answer in ("tangent", "semilinear"))
    whose = "AdamW's own arithmetic" if semilinear < LITTLE * tangent else "not AdamW's arithmetic alone"
    return (
        "Neighbouring steps agree with each other better than with the derivative: the response bends below the "
        "smallest step, and finite differences measure a secant over their own size, not the tangent."
        f"{lost} What bends is {whose}: "
        f"at α = {float(at['scale']):g} the exact tangent misses {tangent:.2%} of the response, and semilinear, "
        f"which linearizes the network alone, {semilinear:.2%}."
    )


def _exponents(deviations: Sequence[Deviation]) -> Iterator[Finding]:
    words = {
        "none": ("ok", "both within 0.25 of 2, as a quadratic remainder has it"),
        "finite differences": ("care", "the deviation is an error of the finite differences: the exact tangent has 2"),
        "float noise": (
            "care",
            "the deviation stays with the exact tangent, and cannot be told from float noise of the two exact runs, "
            f"which is more than {CLEAR:.0%} of its error at the smallest scale and known to a factor of a few",
        ),
        "opposite sides": (
            "care",
            "both deviate, on opposite sides of 2, so that neither bears out the other; which of them is right these "
            "numbers do not say",
        ),
        "real": (
            "bad",
            "the deviation stays with the exact tangent, on the same side of 2, and the error at the smallest scale is "
            f"more than {TRUST.noise_margin:g} times the float noise: it is real",
        ),
        "exact tangent only": (
            "care",
            "only the exact tangent deviates: a finite step averages over what bends inside it",
        ),
        "undefined": ("note", "an exponent is not defined, or its scales are lost in noise"),
    }
    for cause, (level, meaning) in words.items():
        some = [d for d in deviations if d.cause == cause]
        if some:
            farthest = max(abs(d.fd - SMOOTH) for d in some)
            listed = "; ".join(
                f"{d.name} {_signed(d.fd)} and {_signed(d.tangent)} (noise {_percent(d.noise)})" for d in some
            )
            sentence = (
                f"Error exponent with finite differences and with the exact tangent, in {len(some)} of "
                f"{len(deviations)} systems: {meaning}. {listed}."
            )
            yield Finding(level, f"exponents: {cause}", "distance from 2", farthest, NEAR, sentence)  # type: ignore[arg-type]


def _validity(found: Validity) -> Finding:
    meaning = {
        "none": ("ok", "It rises with neither; in the paper it rises from the first scale to the second."),
        "finite differences": ("care", "It rises only with finite differences: the rise is their error."),
        "chance": ("note", f"It rises, which may well be chance ({_chance(found)})."),
        "float noise": ("care", "It rises with both, and float noise can do that to such small responses."),
        "real": (
            "bad",
            f"It rises with both, more than by chance ({_chance(found)}) and above float noise: it is real.",
        ),
        "exact tangent only": ("care", "It rises only with the exact tangent."),
    }
    level, words = meaning[found.cause]
    fd, tangent = (
        ", ".join("lost in noise" if math.isnan(share) else f"{share:.1%}" for share in shares)
        for shares in (found.fd, found.tangent)
    )
    scales = ", ".join(f"{scale:g}" for scale in found.scales)
    sentence = (
        f"Share of valid candidates at α = {scales}: {fd} with finite differences, {tangent} with the exact tangent. "
        f"{words}"
    )
    return Finding(level, "validity", "float noise over the response", found.noise, None, sentence)  # type: ignore[arg-type]


def _chance(found: Validity) -> str:
    known = [p for p in found.chance if not math.isnan(p)]
    return f"exact sign test, p = {', '.join(f'{p:.2g}' for p in known)}"


def _paper_validity() -> Finding:
    sign, fisher = paper_rise()
    first, second = PAPER_VALID
    sentence = (
        f"The paper's own rise, from {first} to {second} of {PAPER_CANDIDATES} valid candidates, may well "
        f"be chance: even if no candidate became invalid an exact sign test of the {second - first} that changed gives "
        f"p = {sign:.2g}, and Fisher's test of the two shares p = {fisher:.2g}."
    )
    return Finding("note", "the paper's validity", "p of the sign test", sign, LEVEL, sentence)


def _paper(found: Candidates) -> Iterator[Finding]:
    """The paper's own deviations are of weights that may not be here."""
    there = {c.name for c in found.conditions if c.from_paper}
    if {"410M, OpenWebText", "410M, WikiText-103"} <= there:
        return
    yield Finding(
        "note", "paper", "", None, None,
        "The paper's deviations (exponents 1.089 and 0.658 of Pythia-410M on OpenWebText and WikiText-103) belong to "
        "weights that were not run here, and the sentences above speak of this run's models alone. Their size does "
        "not decide it: an error of the derivative pulls an exponent towards 1, and so do rows of rare tokens, whose "
        "update saturates below the smallest scale; float noise of the exact runs pulls it towards 0.",
    )  # fmt: skip
