"""Where exponents and validity are not what a smooth response gives: finite differences, float noise, or real?

An error of the derivative itself grows as α and pulls a fitted exponent from 2 towards 1; float noise of the two exact
runs does not depend on α and pulls it towards 0. The exact tangent has no error of the first kind, so that putting it
in the place of the finite differences tells the two apart from what is left, which is real.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ...results.certificate import TRUST, Finding
from ...results.statistics import across_candidates
from .candidates import FD, Candidates
from .finite_differences import IDENTIFIABLE, selected_error, step_curve, step_error

Cause = Literal["none", "finite differences", "float noise", "real", "exact tangent only", "undefined"]

SMOOTH = 2.0
NEAR = 0.25  # the paper calls 1.878 near quadratic, and its two deviations are 0.9 and 1.3 away
NOISY = 0.5  # half of an error is float noise; half way to a slope of −1
HIDDEN = 0.1  # steps that agree with each other ten times better than with the truth do not converge to it


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
    """The share of valid candidates by scale with each derivative, and why it rises somewhere if it does."""

    scales: tuple[float, ...]
    fd: tuple[float, ...]
    tangent: tuple[float, ...]
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
    return "float noise" if noise >= NOISY else "real"


def validity(found: Candidates) -> Validity:
    """Does the valid share fall with every larger scale, as it does for a smooth response?"""
    share = found.errors["valid"].mean(["system", "change"])
    fd, tangent = (tuple(map(float, share.sel({"answer": answer}).values)) for answer in (FD, "tangent"))
    first, last = _rises(fd), _rises(tangent)
    smallest = float(found.exact["scale"].min())
    size = abs(found.exact.sel(scale=smallest))
    # noise that is a fifth of the response can break the bar of a fifth by itself
    noise = float((found.data["noise_floor"] / size.where(size > 0)).median())
    cause: Cause = "none"
    if first and not last:
        cause = "finite differences"
    elif last and not first:
        cause = "exact tangent only"
    elif first:
        cause = "float noise" if noise >= TRUST.symmetric_error * NOISY else "real"
    return Validity(tuple(map(float, share["scale"].values)), fd, tangent, noise, cause)


def _rises(shares: Sequence[float]) -> bool:
    return any(b > a for a, b in pairwise(shares))


# --- words


def findings(found: Candidates) -> tuple[Finding, ...]:
    """What the finite differences did to the paper's numbers, as data and in words, for this run's systems."""
    return (_steps(found), *_exponents(exponent_deviations(found)), _validity(validity(found)), *_paper(found))


def _steps(found: Candidates) -> Finding:
    """The error of the selected step, and which of noise, truncation and bending inside the step makes it."""
    curve, selection = step_curve(found.data), found.selection
    error = float(selected_error(found.data, selection).median())
    gap, best = float(selection["consistency"].median()), float(step_error(found.data).min("fd_step").median())
    falling, rising = float(curve["falling"].median()), float(curve["rising"].median())
    sentence = (
        f"Against the exact tangent, the finite-difference step that the paper's rule selects is off by {error:.2%} "
        f"(median over candidates), the best step by {best:.2%}; the rule itself sees {gap:.2%}. In log–log "
        f"the error has slope {_signed(falling)} at the smallest steps, where float noise has −1 "
        f"({'it rules' if falling < -NOISY else 'it does not rule'}), and {_signed(rising)} at the largest, "
        f"where truncation has 2 ({'it rules' if abs(rising - SMOOTH) <= NOISY else 'it does not rule'})."
    )
    level = TRUST.level(error)
    if gap < HIDDEN * error and falling >= -NOISY:
        level = "care" if level == "ok" else level
        sentence += " " + _secant(found)
    return Finding(level, "steps", "error of the selected step", error, TRUST.nrmse, sentence)


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _secant(found: Candidates) -> str:
    """Semilinear keeps AdamW's arithmetic and linearizes the network alone: it says which of the two bends."""
    far = step_error(found.data).min("fd_step") > IDENTIFIABLE
    lost = f" For {int(far.sum())} of {far.size} candidates no step comes within a quarter of it." if far.any() else ""
    at = found.errors["nrmse"].sel(scale=float(found.errors["scale"].min())).median(["system", "change"])
    tangent, semilinear = (float(at.sel({"answer": answer})) for answer in ("tangent", "semilinear"))
    whose = "AdamW's own arithmetic" if semilinear < HIDDEN * tangent else "not AdamW's arithmetic alone"
    return (
        "Neighbouring steps agree with each other far better than with the derivative: the response bends below the "
        "smallest step, and finite differences measure a secant over their own size, not the tangent."
        f"{lost} What bends is "
        f"{whose}: at the smallest scale the exact tangent misses {tangent:.2%} of the response, and semilinear, which "
        f"linearizes the network alone, {semilinear:.2%}."
    )


def _exponents(deviations: Sequence[Deviation]) -> Iterator[Finding]:
    words = {
        "none": ("ok", "both within 0.25 of 2, as a quadratic remainder has it"),
        "finite differences": ("care", "the deviation is an error of the finite differences: the exact tangent has 2"),
        "float noise": (
            "care",
            "the deviation stays with the exact tangent, and at least half of its error at the smallest scale is "
            "float noise of the two exact runs",
        ),
        "real": ("bad", "the deviation stays with the exact tangent and is well above float noise: it is real"),
        "exact tangent only": (
            "care",
            "only the exact tangent deviates: a finite step averages over what bends inside it",
        ),
        "undefined": ("note", "an exponent is not defined"),
    }
    for cause, (level, meaning) in words.items():
        some = [d for d in deviations if d.cause == cause]
        if some:
            farthest = max(abs(d.fd - SMOOTH) for d in some)
            listed = "; ".join(f"{d.name} {d.fd:.2f} and {d.tangent:.2f} (noise {d.noise:.1%})" for d in some)
            sentence = (
                f"Error exponent with finite differences and with the exact tangent, in {len(some)} of "
                f"{len(deviations)} systems: {meaning}. {listed}."
            )
            yield Finding(level, f"exponents: {cause}", "distance from 2", farthest, NEAR, sentence)  # type: ignore[arg-type]


def _validity(found: Validity) -> Finding:
    meaning = {
        "none": ("ok", "It rises with neither; in the paper it rises from the first scale to the second."),
        "finite differences": ("care", "It rises only with finite differences: the rise is their error."),
        "float noise": ("care", "It rises with both, where float noise is a sizable part of the response."),
        "real": ("bad", "It rises with both, well above float noise: the rise is real."),
        "exact tangent only": ("care", "It rises only with the exact tangent."),
    }
    level, words = meaning[found.cause]
    fd, tangent = (", ".join(f"{share:.1%}" for share in shares) for shares in (found.fd, found.tangent))
    scales = ", ".join(f"{scale:g}" for scale in found.scales)
    sentence = (
        f"Share of valid candidates at α = {scales}: {fd} with finite differences, {tangent} with the exact tangent. "
        f"{words}"
    )
    return Finding(level, "validity", "float noise over the response", found.noise, None, sentence)  # type: ignore[arg-type]


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
