"""The package: what its import costs and shows, what each extra brings, what its archives hold."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import aftershock as ak
from aftershock.errors import MissingPackage
from aftershock.extras import require

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", line)[0] for line in requirements}  # type: ignore[index]


def test_every_public_name_is_what_its_module_holds() -> None:
    for name, home in ak._HOMES.items():
        assert getattr(ak, name) is getattr(importlib.import_module(f"aftershock.{home}"), name)
    assert {*ak._HOMES, "AftershockError"} == set(ak.__all__)
    with pytest.raises(AttributeError, match="no attribute 'captrue'"):
        ak.captrue  # noqa: B018


def test_the_core_needs_nothing_of_an_extra() -> None:
    core, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert not core & {"plotly", "matplotlib", "zarr", "lightning", "transformers", "distributed", "gguf"}
    everything = ",".join(sorted(set(extras) - {"all", "test", "bench", "docs"}))
    assert extras["all"] == [f"aftershock[{everything}]"]
    assert "aftershock[all]" in extras["test"]


BLOCKED = """
import sys
for name in ("plotly", "matplotlib", "zarr", "lightning", "pytorch_lightning", "transformers", "distributed", "gguf"):
    sys.modules[name] = None
import aftershock as ak
assert dir(ak) == sorted(ak.__all__), dir(ak)
assert not {"torch", "numpy", "xarray", "jaxtyping"} & set(sys.modules)  # it adds nothing to the time that torch takes
from aftershock import theory
from aftershock.commands import cli, demo, doctor
[getattr(ak, name) for name in dir(ak)]
for module in ("report.flight_page", "integrations.lightning", "integrations.transformers"):
    try:
        __import__("aftershock." + module)
    except ak.AftershockError as error:
        print(error)
"""


def test_the_import_is_light_and_what_needs_an_extra_says_which() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
    said = re.findall(r'pip install "aftershock\[(\w+)\]"', done.stdout)
    assert said == ["report", "lightning", "transformers"]
    assert set(said) <= set(PROJECT["optional-dependencies"])


def test_a_result_that_cannot_be_saved_says_so_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aftershock.results.files import save_dataset

    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingPackage, match=r'saved results need .* pip install "aftershock\[studies\]"'):
        save_dataset(None, tmp_path / "saved")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    require("torch", "report", "nothing")


def test_the_archives_hold_what_they_should(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "build", "dist", "results.zarr"
    )
    shutil.copytree(ROOT, tree, ignore=ignored)
    with (tree / "pyproject.toml").open("a") as file:  # as it will be once there is a public address
        file.write('\n[project.urls]\nRepository = "https://example.org/our/aftershock"\n')
    code = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    with tarfile.open(next((tree / "dist").glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("tests/cases.py", "docs/quickstart.md", "docs/tools/pages.py", "examples/plain_loop.py",
                   "benchmarks/__init__.py", "constraints.txt", "mkdocs.yml", "Makefile", "README.md"):  # fmt: skip
        assert needed in held, needed
    archived = zipfile.ZipFile(next((tree / "dist").glob("*.whl")))
    wheel = archived.namelist()
    ours = {f"aftershock/{file.relative_to(ROOT / 'src/aftershock')}" for file in (ROOT / "src").rglob("*.py")}
    assert ours <= set(wheel)
    assert {"aftershock/py.typed"} <= set(wheel)
    assert not [name for name in wheel if name.startswith(("tests", "docs", "examples"))]

    about = archived.read(f"aftershock-{PROJECT['version']}.dist-info/METADATA").decode()
    links = re.findall(r"\]\(([^)]+)\)", about)
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]
    assert "(https://example.org/our/aftershock/raw/main/docs/pictures/spike.png)" in about
    assert "[quickstart](https://example.org/our/aftershock/blob/main/docs/quickstart.md)" in about


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_make_help_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## \w", text, flags=re.MULTILINE), target
