"""What mkdocs does for this site: equations become MathML, and every tutorial is there as a notebook too."""

from __future__ import annotations

import html
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import pages

LABEL = re.compile(r"\\label\{([^}]+)\}")


def equation(source: str, *_: Any, **__: Any) -> str:
    """A ```math block: its lines are one equation each, the label is an anchor."""
    label = LABEL.search(source)
    lines = [line.strip().removesuffix(r"\\") for line in LABEL.sub("", source).splitlines() if line.strip()]
    shown = "".join(convert(line, display="block") for line in lines)
    if label is None:
        return f'<div class="equation">{shown}</div>'
    name = html.escape(label[1])
    return f'<div class="equation" id="{name}">{shown}<a class="label" href="#{name}">{name}</a></div>'


def on_config(config: Any) -> Any:
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.repo_url, config.repo_name = project.get("urls", {}).get("Repository"), project["name"]
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": equation}]
    return config


def on_files(files: Files, config: Any) -> Files:
    for page in pages.tutorials():
        files.append(File.generated(config, f"{page.name}.ipynb", content=pages.notebook(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    markdown = pages.included(markdown)
    if f"{Path(page.file.src_uri).with_suffix('')}.ipynb" not in files.src_uris:
        return markdown
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n[As a notebook]({Path(page.file.src_uri).stem}.ipynb){{ download }}\n{rest}"
