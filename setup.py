"""What the package index shows: README.md, whose links lead to the repository that pyproject.toml names.

Everything else about the package stands in pyproject.toml. Without a `Repository` under [project.urls] the links stay
as they are: right in a clone, wrong on an index.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def absolute(text: str, repository: str) -> str:
    """Its links to files and folders of the repository, written out; pictures as their raw bytes."""

    def written_out(link: re.Match) -> str:
        picture, words, target = link.groups()
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", written_out, text)


project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
readme = (ROOT / "README.md").read_text()
repository = project.get("urls", {}).get("Repository")
setup(
    long_description=absolute(readme, repository.rstrip("/")) if repository else readme,
    long_description_content_type="text/markdown",
)
