"""The page that every report shares: its look, its behaviour, and the parts it is made of."""

from __future__ import annotations

import base64
import gzip
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..results.files import write_whole

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..results.certificate import Certificate

WORDS = {"ok": "good", "care": "with care", "bad": "beware", "note": "note"}  # for those who see no colours


LIBRARY = "plotly-basic-4.1.1.min.js"  # lines and bars; its licence is beside it


class Section(str):
    """A piece of HTML that the page's contents lead to."""

    heading: str
    anchor: str


def write_page(
    path: Path,
    title: str,
    sections: Sequence[str],
    *,
    style: str = "",
    script: str = "",
    library: Path | None = None,
) -> Path:
    """Write the sections as one HTML file, whole or not at all.

    style, script: what this kind of page adds to the shared ones; the script runs when the figures are drawn.
    library: a file of the plotting library for several pages to share, written where it is missing. Without it the
    page carries the library, and needs nothing beside itself.
    """
    if library is not None and not library.is_file():
        _write(library, SHARED.format(packed=_packed()))
    page = PAGE.format(
        title=escape(title),
        style=asset("page.css") + style,
        library=PACKED.format(packed=_packed()) if library is None else _shared_library(library, path),
        script=f"{asset('page.js')}(async () => {{\nawait loadLibrary();\ndraw();\n{script}watch();\n}})();",
        body="\n".join(_with_contents(sections)),
    )
    _write(path, page)
    return path


@cache
def asset(name: str) -> str:
    """The text of a file of the pages: their style, their script, the plotting library."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def _packed() -> str:
    """The plotting library, gzip in base64: less than half its size."""
    return base64.b64encode(gzip.compress(asset(LIBRARY).encode(), mtime=0)).decode()


def _shared_library(library: Path, page: Path) -> str:
    place = Path(os.path.relpath(library, page.parent)).as_posix()
    return f'<script src="{escape(quote(place))}"></script>'


def _write(path: Path, text: str) -> None:
    def write(part: str) -> None:
        Path(part).write_text(text, encoding="utf-8")

    write_whole(path, write)


def section(heading: str, *parts: str) -> Section:
    """A heading with its anchor, and what stands under it."""
    anchor = re.sub(r"\W+", "-", heading.lower()).strip("-")
    made = Section(
        f'<section id="{anchor}">\n<h2>{escape(heading)}<a class="anchor" href="#{anchor}" aria-label="link to this '
        'section">#</a></h2>\n' + "\n".join(parts) + "\n</section>"
    )
    made.heading, made.anchor = heading, anchor
    return made


def _with_contents(pieces: Sequence[str]) -> list[str]:
    """The page's pieces, with links to its sections before the first of them."""
    sections = [piece for piece in pieces if isinstance(piece, Section)]
    links = " ".join(f'<a href="#{each.anchor}">{escape(each.heading)}</a>' for each in sections)
    first = len(pieces) - len(sections)  # what comes before them: the header and a story
    return [*pieces[:first], f'<nav class="contents" aria-label="contents">{links}</nav>', *pieces[first:]]


def opening(title: str, verdict: str) -> str:
    """What a page says first: its title, the verdict's first sentence large, and the rest of it to be read on."""
    first, *rest = re.split(r"(?<=[.!?])\s+(?=[A-Z])", verdict, maxsplit=1)
    more = f" <span class='rest'>{escape(rest[0])}</span>" if rest else ""
    return f"<h1>{escape(title)}</h1>\n<p class='verdict'>{escape(first)}{more}</p>"


def plot(figure: Figure, name: str, caption: str, alternative: str) -> str:
    """A figure whose data is in the page, with words for those who cannot see it."""
    data = figure.to_json()  # in which < is escaped: nothing ends the script
    return (
        f'<figure>\n<div role="img" aria-label="{escape(alternative)}">'
        f'<div class="plot" id="plot-{name}" style="min-height: {figure.layout.height}px"></div>'
        f'<script type="application/vnd.plotly.v1+json">{data}</script></div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def findings(certificate: Certificate) -> str:
    """The sentences of a certificate, each in the colour of its level."""
    items = "\n".join(
        f"<li class='{found.level}'><strong>{WORDS[found.level]}</strong><span>{escape(found.sentence)}</span></li>"
        for found in certificate.findings
    )
    return f"<ul class='certificate'>\n{items}\n</ul>"


def number(value: float, text: str | None = None) -> str:
    """A cell of a sortable table; text: what is shown, where that is not the signed number itself."""
    shown = text if text is not None else f"{value:+.3g}" if value else "0"
    # what is not a number sorts last, and the script's infinity has a name of its own
    key = str(-math.inf if math.isnan(value) else value).replace("inf", "Infinity")
    return f'<td data-value="{key}" class="number">{escape(shown)}</td>'


def provenance_table(attrs: Mapping[Any, Any]) -> str:
    """What made a result, from its attributes."""
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(key).replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for key, value in attrs.items()
        if str(value)
    )
    return f"<table class='provenance'>\n<caption>What made this result.</caption>\n<tbody>\n{rows}\n</tbody>\n</table>"


PACKED = '<script type="application/gzip" id="library">{packed}</script>'

# a file of its own that puts the same into every page that names it
SHARED = """{{
const library = Object.assign(document.createElement("script"), {{type: "application/gzip", id: "library"}});
library.textContent = "{packed}";
document.head.append(library);
}}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline' 'self' file:; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{style}</style>
{library}
</head>
<body>
<main>
{body}
<noscript><p class="story">The figures need JavaScript; everything else on this page does not.</p></noscript>
</main>
<script>{script}</script>
</body>
</html>
"""
