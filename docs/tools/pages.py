"""The documentation's own code: Python blocks of a page are run in order in one namespace, or become a notebook.

    python docs/tools/pages.py run [PAGE …]        run pages, the slow ones too, and compare what they print
    python docs/tools/pages.py fill [PAGE …]       run pages and write what they print into their output blocks
    python docs/tools/pages.py notebooks FOLDER    write every tutorial as a notebook, in a folder of its own

A block that begins with ```python runs; a line such as `# snippets/small_run.py` in it stands for that file. A block
with title="Not run: …" does not run, and its title says why. A ```text block with title="Output" right after a block is
what that block prints; numbers in it may differ from machine to machine. A page with `slow: true` in its header runs
with `make docs` only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?P<indent> *)```(?P<about>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r"^( *)# (snippets/\w+\.py)$", re.MULTILINE)
NUMBER = re.compile(r"[-+−±]?\d[\d,]*(\.\d+)?([eE][-+]?\d+)?")
BARS = re.compile(r"[▁▂▃▄▅▆▇█~∞]+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and where its inside stands in the text."""

    about: str
    code: str
    span: tuple[int, int]

    @property
    def title(self) -> str:
        found = re.search(r'title="(.*?)"', self.about)
        return found[1] if found else ""

    @property
    def runs(self) -> bool:
        return self.about.split()[:1] == ["python"] and not self.title.startswith("Not run")

    @property
    def is_output(self) -> bool:
        return self.about.split()[:1] == ["text"] and self.title == "Output"


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.relative_to(DOCS).with_suffix("").as_posix()

    @property
    def text(self) -> str:
        return self.file.read_text()

    @property
    def slow(self) -> bool:
        header = re.match(r"---\n(.*?)\n---\n", self.text, re.DOTALL)
        return header is not None and "slow: true" in header[1]

    @property
    def body(self) -> str:
        return re.sub(r"\A---\n.*?\n---\n", "", self.text, flags=re.DOTALL)

    def blocks(self) -> list[Block]:
        return [
            Block(found["about"].strip(), textwrap.dedent(included(found["code"])), found.span("code"))
            for found in FENCE.finditer(self.text)
        ]


def included(code: str) -> str:
    """The file in the place of a comment that is its name alone, as the site shows it."""
    return INCLUDE.sub(lambda found: textwrap.indent((DOCS / found[2]).read_text().rstrip(), found[1]), code)


def pages() -> list[Page]:
    """Every page but the studies' results, which are made by `aftershock reproduce`."""
    return [Page(file) for file in sorted(DOCS.rglob("*.md")) if file.relative_to(DOCS).parts[0] != "results"]


def tutorials() -> list[Page]:
    return [page for page in pages() if page.file.parent.name == "tutorials" and page.file.stem != "index"]


def run(page: Page) -> list[tuple[Block, str]]:
    """Run a page's blocks in a temporary folder; each output block with what was printed in its place."""
    names: dict[str, object] = {"__name__": "page"}
    outputs: list[tuple[Block, str]] = []
    printed = ""
    with _in_temporary_folder():
        for block in page.blocks():
            if block.is_output:
                outputs.append((block, printed))
            elif block.runs:
                line = page.text.count("\n", 0, block.span[0])
                code = compile("\n" * line + block.code, str(page.file), "exec")  # tracebacks name the page's line
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(code, names)
                printed = out.getvalue()
    return outputs


@contextlib.contextmanager
def _in_temporary_folder() -> Iterator[None]:
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def masked(text: str) -> list[str]:
    """Its words, without what depends on the machine: numbers, the bars of small curves, spaces."""
    return BARS.sub("▇", NUMBER.sub("#", text)).split()


def differences(page: Page) -> list[str]:
    """Output blocks that do not say what is printed, numbers aside."""
    return [
        f"{page.name} says:\n{block.code}\nbut prints:\n{printed}"
        for block, printed in run(page)
        if masked(block.code) != masked(printed)
    ]


def fill(page: Page) -> None:
    """Write what the page prints into its output blocks."""
    text = page.text
    for block, printed in reversed(run(page)):
        start, stop = block.span
        text = text[:start] + printed.rstrip() + "\n" + text[stop:]
    page.file.write_text(text)


# --- notebooks


def notebook(page: Page) -> str:
    """The page as a notebook: prose and blocks that are not run become Markdown cells, output blocks are left out."""
    text, cells, at = page.text, [], len(page.text) - len(page.body)
    for found, block in zip(FENCE.finditer(text), page.blocks()):
        if not (block.runs or block.is_output):
            continue
        cells += _markdown(text[at : found.start()])
        if block.runs:
            cells.append({"cell_type": "code", "execution_count": None, "outputs": [], **_source(block.code)})
        at = found.end()
    cells += _markdown(text[at:])
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(about, indent=1, ensure_ascii=False) + "\n"


def _markdown(text: str) -> list[dict[str, object]]:
    return [{"cell_type": "markdown", **_source(text)}] if text.strip() else []


def _source(text: str) -> dict[str, object]:
    return {"metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}


# --- the command


def main(arguments: list[str]) -> int:
    order, *rest = arguments or [""]
    if order == "notebooks" and len(rest) == 1:
        for page in tutorials():
            file = Path(rest[0]) / page.file.stem / f"{page.file.stem}.ipynb"  # what it records lies beside it
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(notebook(page))
        return 0
    if order not in ("run", "fill"):
        print(__doc__)
        return 2
    wanted = [page for page in pages() if not rest or page.name in rest]
    wrong = []
    for page in wanted:
        start = time.process_time()
        if order == "fill":
            fill(page)
        else:
            wrong += differences(page)
        print(f"{page.name:<40} {time.process_time() - start:6.1f} s of one core")
    print("\n\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
