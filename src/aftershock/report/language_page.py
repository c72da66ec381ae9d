"""What the page of the language study says beside its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from ..results.certificate import Certificate
from ..studies.language.candidates import Candidates
from ..studies.language.conditions import described
from ..studies.language.deviations import EXPONENTS
from ..studies.language.deviations import findings as deviations
from .shell import findings, section

if TYPE_CHECKING:
    import xarray as xr


def language_sections(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Which models these are, and what of the paper's deviations is noise; nothing for other studies."""
    if "language" not in results:
        return []
    found = Candidates(results["language"])
    paper = all(condition.from_paper for condition in found.once.conditions)
    judged = "" if paper else " These are not the systems of the paper, so that its numbers are shown and not judged."
    words = f"{described(found.conditions)}{judged}"
    return [
        section("Which models", f"<p class='story'>{escape(words)}</p>"),
        section(
            "Noise of finite differences, or real?",
            f"<p class='story'>{escape(EXPONENTS)}</p>",
            findings(Certificate(deviations(found))),
        ),
    ]
