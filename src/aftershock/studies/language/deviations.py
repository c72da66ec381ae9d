"""Where exponents and validity are not what a smooth response gives: finite differences, float noise, or real?

An error of the derivative itself grows as α and pulls a fitted exponent from 2 towards 1; float noise of the two exact
runs does not depend on α and pulls it towards 0. The exact tangent has no error of the first kind, so that putting it
in the place of the finite differences tells the two apart from what is left, which is real. Where float noise of the
exact runs is not small beside that, the same model and text in float64 tells: noise goes there, and what is real stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ...results.certificate import TRUST, Finding
from ...results.statistics import across_candidates
from .candidates import FD, Candidates
from .finite_differences import IDENTIFIABLE, selected_error, step_curve, step_error

if TYPE_CHECKING:
    import xarray as xr

Cause = Literal[
    "none", "chance", "finite differences", "opposite sides", "float noise", "not clear of noise", "real",
    "exact tangent only", "undefined",
]  # fmt: skip

SMOOTH = 2.0


@dataclass(frozen=True)
class Telling:
    """The numbers that decide whether a deviation is noise or real."""

    near: float = 0.25  # the paper calls 1.878 near quadratic, and its two deviations are 0.9 and 1.3 away
    half_way: float = 0.5  # to a slope of −1, or of 2
    # The noise is known to a factor of a few (TRUST.noise_margin), so that what is measured may be this much more: an
    # error below five times the noise cannot be told from it, and its exponent says nothing.
    clear: float = 1 / TRUST.noise_margin
    level: float = 0.05  # of a test: what chance does more seldom is no chance
    # Of an error by float noise (1/ε) the next step shows half, of one by truncation (ε²) three times as much. Steps
    # that show less of it do not converge to the derivative.
    shown: float = 0.5
    little: float = 0.1  # of the tangent's error: what semilinear is left with where AdamW's arithmetic makes it


TELLING = Telling()
PAPER_CANDIDATES, PAPER_VALID = 72, (67, 70)  # valid at α = 1/16 and 1/8: 0.931 and 0.972


@dataclass(frozen=True)
class Deviation:
    """A model and text's error exponents with finite differences and with the exact tangent, and what sets them apart.

    noise: float noise of the exact response over the tangent's error at the smallest scale; semilinear: semilinear's
    own error over it. near: how many of the candidates have 2 with the exact tangent. finer: the same in float64.
    """

    name: str
    dtype: str
    fd: float
    tangent: float
    noise: float
    semilinear: float
    near: int
    candidates: int
    cause: Cause
    finer: Deviation | None = None


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
    """One per model and text, in the order of the data; where float64 was run beside another dtype, it decides."""
    every = [_deviation(found, i) for i in range(len(found.conditions))]
    return [every[i] if k is None else _decided(every[i], every[k]) for i, k in found.pairs]


def _deviation(found: Candidates, i: int) -> Deviation:
    own = found.exponents.isel(system=i)
    middle = across_candidates(own)
    fd, tangent = (float(middle.sel({"answer": answer})) for answer in (FD, "tangent"))
    noise, condition = float(found.noise[i]), found.conditions[i]
    near = int((abs(own.sel({"answer": "tangent"}) - SMOOTH) <= TELLING.near).sum())
    return Deviation(
        condition.name, condition.dtype, fd, tangent, noise, float(found.semilinear_share[i]), near,
        own.sizes["change"], _cause(fd, tangent, noise),
    )  # fmt: skip


def _decided(coarse: Deviation, finer: Deviation) -> Deviation:
    """What is gone in float64 was float noise; what is there is what it is there."""
    gone = finer.cause == "none" and (_deviates(coarse.fd) or _deviates(coarse.tangent))
    cause = coarse.cause if finer.cause == "undefined" else "float noise" if gone else finer.cause
    return replace(coarse, cause=cause, finer=finer)


def _cause(fd: float, tangent: float, noise: float) -> Cause:
    if math.isnan(fd) or math.isnan(tangent):
        return "undefined"
    if noise > TELLING.clear:
        return "not clear of noise"
    if not _deviates(fd):
        return "exact tangent only" if _deviates(tangent) else "none"
    if not _deviates(tangent):
        return "finite differences"
    return "real" if (fd > SMOOTH) == (tangent > SMOOTH) else "opposite sides"


def _deviates(exponent: float) -> bool:
    return abs(exponent - SMOOTH) > TELLING.near


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
    first, last = fd < TELLING.level, tangent < TELLING.level
    if not first and not last:
        return "chance"
    if first and last:
        return "real" if noise <= TRUST.symmetric_error * TELLING.clear else "not clear of noise"
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

EXPONENTS = (
    "An error that a smooth response leaves grows as α². Below stands the exponent of each model and text, the median "
    "over candidates, with finite differences and with the exact tangent; in brackets float noise over the tangent's "
    "error at the smallest scale, and how many candidates have an exponent within "
    f"{TELLING.near:g} of 2 with the tangent."
)


def findings(found: Candidates) -> tuple[Finding, ...]:
    """What the finite differences did to the paper's numbers, as data and in words, for this run's systems.

    Exponents of every dtype that was run; all else is pooled, so of each model and text once.
    """
    deviations, once = exponent_deviations(found), found.once
    return (
        *_exponents(deviations),
        *_paper(once, deviations),
        _validity(validity(once)),
        _paper_validity(),
        _steps(once, _in_float64(found)),
        _noise(once),
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
    return Finding(level, "noise", "float noise over the response", float(share.max()), TELLING.clear, sentence)  # type: ignore[arg-type]


def _steps(found: Candidates, in_finer: str) -> Finding:
    """The error of the selected step, and which of noise, truncation and bending inside the step makes it.

    in_finer: what float64 says of it.
    """
    curve, selection = step_curve(found.data), found.selection
    errors = selected_error(found.data, selection)
    error = float(errors.median())
    gap, seen = float(selection["consistency"].median()), float((selection["consistency"] / errors).median())
    best = float(step_error(found.data).min("fd_step").median())
    falling, rising = float(curve["falling"].median()), float(curve["rising"].median())
    noise = int((curve["falling"] < -TELLING.half_way).sum())
    truncation = int((abs(curve["rising"] - SMOOTH) <= TELLING.half_way).sum())
    systems = len(found.conditions)
    sentence = (
        "Against the exact tangent, the finite-difference step that the paper's rule selects is off by "
        f"{_percent(error)} (median over candidates), the best step by {_percent(best)}; the rule itself sees "
        f"{_percent(gap)} ({seen:.3g} of a candidate's own error). In log–log the error has slope {_signed(falling)} "
        f"at the smallest steps, where float noise has −1 (it rules in {noise} of {systems} systems), and "
        f"{_signed(rising)} at the largest, where truncation has 2 (it rules in {truncation}).{in_finer}"
    )
    level = TRUST.level(error)
    if seen < TELLING.shown and falling >= -TELLING.half_way:
        level = "care" if level == "ok" else level
        sentence += " " + _secant(found)
    return Finding(level, "steps", "error of the selected step", error, TRUST.nrmse, sentence)


def _in_float64(found: Candidates) -> str:
    """The error of the selected step where the same candidates were run in float64, too; "" where none was."""
    both = [(i, k) for i, k in found.pairs if k is not None]
    if not both:
        return ""
    errors = selected_error(found.data, found.selection)
    coarse, finer = (float(errors.isel(system=list(places)).median()) for places in zip(*both))
    return (
        f" Of the {len(both) * errors.sizes['change']} candidates that were run in float64, too, the selected step is "
        f"off by {_percent(coarse)} here and by {_percent(finer)} there: the difference is float noise."
    )


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
    noise = float(found.noise_share.sel(scale=float(at["scale"])).median())
    whose = (
        "AdamW's own arithmetic"
        if semilinear < TELLING.little * tangent
        else "not AdamW's arithmetic alone"
        if noise <= TELLING.clear * semilinear
        else "AdamW's own arithmetic for the most part, and what semilinear misses is not clear of float noise"
        if semilinear < TELLING.half_way * tangent
        else "not known, since what semilinear misses is not clear of float noise"
    )
    return (
        "Neighbouring steps agree with each other better than with the derivative: the response bends below the "
        "smallest step, and finite differences measure a secant over their own size, not the tangent."
        f"{lost} What bends is {whose}: "
        f"at α = {float(at['scale']):g} the exact tangent misses {_percent(tangent)} of the response, and semilinear, "
        f"which linearizes the network alone, {_percent(semilinear)} (medians; float noise is {_percent(noise)})."
    )


def _exponents(deviations: Sequence[Deviation]) -> Iterator[Finding]:
    words = {
        "float noise": ("care", "float noise: in float64 both are within 0.25 of 2"),
        "real": (
            "bad",
            f"real: where float noise is less than {TELLING.clear:.0%} of the tangent's error at the smallest scale, "
            "the deviation stays with the exact tangent, on the same side of 2",
        ),
        "not clear of noise": (
            "care",
            f"not known: float noise of the two exact runs is more than {TELLING.clear:.0%} of the tangent's error at "
            "the smallest scale, and known to a factor of a few, so that these exponents say nothing, near 2 or not; "
            "float64 would tell",
        ),
        "finite differences": ("care", "an error of the finite differences: the exact tangent has 2"),
        "opposite sides": (
            "care",
            "not known: both deviate, on opposite sides of 2, so that neither bears out the other",
        ),
        "exact tangent only": (
            "care",
            "only the exact tangent deviates: a finite step can average over what bends inside it",
        ),
        "none": ("ok", "no deviation: both are within 0.25 of 2, as a quadratic remainder has it"),
        "undefined": ("note", "an exponent is not defined, or its scales are lost in noise"),
    }
    for cause, (level, meaning) in words.items():
        some = [d for d in deviations if d.cause == cause]
        if some:
            farthest = max(abs(d.fd - SMOOTH) for d in some)
            told = f"{meaning[:1].upper()}{meaning[1:]} ({len(some)} of {len(deviations)} models and texts)"
            sentence = f"{told}. {' '.join(_told(d) for d in some)}"
            yield Finding(level, f"exponents: {cause}", "distance from 2", farthest, TELLING.near, sentence)  # type: ignore[arg-type]


def _told(one: Deviation) -> str:
    """A model and text in a sentence: its exponents in each dtype, and where a real deviation lies."""
    runs = [one, one.finer] if one.finer else [one]
    shown = [
        f"{_signed(d.fd)} and {_signed(d.tangent)} in {d.dtype} (noise {_percent(d.noise)}, {d.near} of {d.candidates})"
        for d in runs
    ]
    return f"{one.name}: {', '.join(shown)}{_where(runs[-1]) if one.cause == 'real' else ''}."


def _where(one: Deviation) -> str:
    """Semilinear and the tangent differ by AdamW's arithmetic and the probe's loss, which is smooth."""
    share = f"whose error is {_percent(one.semilinear)} of the tangent's"
    place = (
        f"; it is not in semilinear, {share}, so it lies in AdamW's arithmetic"
        if one.semilinear < TELLING.little
        else f"; semilinear, {share}, does not say whether AdamW's arithmetic or the network makes it"
    )
    farther = abs(one.fd - SMOOTH) - abs(one.tangent - SMOOTH) > TELLING.near
    own = f"; the rest of the way to {_signed(one.fd)} is the finite differences' own error" if farther else ""
    return place + own


def _validity(found: Validity) -> Finding:
    meaning = {
        "none": ("ok", "It rises with neither; in the paper it rises from the first scale to the second."),
        "finite differences": ("care", "It rises only with finite differences: the rise is their error."),
        "chance": ("note", f"It rises, which may well be chance ({_chance(found)})."),
        "not clear of noise": ("care", "It rises with both, and float noise can do that to such small responses."),
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
    return Finding("note", "the paper's validity", "p of the sign test", sign, TELLING.level, sentence)


def _paper(found: Candidates, deviations: Sequence[Deviation]) -> Iterator[Finding]:
    """The paper's own deviations are of weights that may not be here."""
    there = {c.name for c in found.conditions if c.from_paper}
    if {"410M, OpenWebText", "410M, WikiText-103"} <= there:
        return
    causes = [d.cause for d in deviations if d.finer]
    found_here = (
        " Of this run's own, float64 shows that one was noise and another is real, so neither can be presumed."
        if "float noise" in causes and "real" in causes
        else ""
    )
    lowest = min((d.finer.fd for d in deviations if d.finer), default=SMOOTH)
    if lowest < 1:
        found_here += f" Nor is an exponent below 1 noise for certain: {_signed(lowest)} above is without any."
    yield Finding(
        "note", "paper", "", None, None,
        "The paper's deviations (exponents 1.089 and 0.658 of Pythia-410M on OpenWebText and WikiText-103) belong to "
        "weights that were not run here, and the sentences above speak of this run's models alone. Their size does "
        "not decide it: an error of the derivative pulls an exponent towards 1, and so do rows of rare tokens, whose "
        "update saturates below the smallest scale; float noise of the exact runs pulls it towards 0." + found_here,
    )  # fmt: skip
