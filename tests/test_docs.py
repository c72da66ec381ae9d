"""The documentation: the site builds strictly, its code runs and prints what it says, cited labels exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

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
