"""The documentation: the site builds strictly, its code runs and prints what it says, cited labels exist."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from aftershock.core.lanes import LANES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "tools"))
import pages  # noqa: E402

QUICK = [page for page in pages.pages() if not page.slow and any(block.runs for block in page.blocks())]


@pytest.mark.parametrize("page", QUICK, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page: pages.Page) -> None:
    with torch.random.fork_rng(devices=[]):
        assert pages.differences(page) == []


def test_every_block_that_is_not_run_says_why() -> None:
    for page in pages.pages():
        for block in page.blocks():
            if block.about.split()[:1] == ["python"] and not block.runs:
                assert len(block.title.removeprefix("Not run: ").split()) > 2, f"{page.name}: {block.title}"


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site"))
    build(config)
    assert (tmp_path / "site" / "index.html").is_file()


def test_counts_in_words_are_those_of_the_code() -> None:
    words = ("none", "one", "two", "three", "four", "five", "six")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    upwards = next(one["ignore_imports"] for one in contracts if one["type"] == "layers")
    assert f"{words[len(upwards)].capitalize()} imports go up" in (DOCS / "architecture.md").read_text()
    assert f"up to {words[LANES]} **lanes**" in (DOCS / "concepts" / "rows-and-answers.md").read_text()


# --- equations

LABEL = re.compile(r"\b(?:eq|thm|prop):\w+")


def cited() -> set[str]:
    return {label for file in (ROOT / "src").rglob("*.py") for label in LABEL.findall(file.read_text())}


def derived() -> list[str]:
    """Labels of equations, theorems and propositions of the derivations."""
    text = "".join(file.read_text() for file in sorted((DOCS / "derivations").glob("*.md")))
    return re.findall(r"\\label\{(\S+?)\}", text) + re.findall(r"^#+ .*\{ #(\S+) \}$", text, flags=re.MULTILINE)


def test_every_label_that_the_code_cites_is_derived() -> None:
    assert cited()
    assert sorted(cited() - set(derived())) == []


def test_every_derived_equation_is_cited_by_the_code_and_has_one_place() -> None:
    assert sorted(set(derived()) - cited()) == []
    assert len(derived()) == len(set(derived()))


# --- notebooks


def test_a_notebook_holds_the_code_of_its_page(tmp_path: Path) -> None:
    assert pages.main(["notebooks", str(tmp_path)]) == 0
    assert len(pages.tutorials()) == 5
    for page in pages.tutorials():
        cells = json.loads((tmp_path / page.file.stem / f"{page.file.stem}.ipynb").read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert code == [block.code.strip("\n") for block in page.blocks() if block.runs]
