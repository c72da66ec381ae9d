"""The script that trains: what `aftershock explain --build` is to be told."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path


def build_reference() -> str | None:
    """Such as train.py:build: the running script, from the working folder where it lies inside; None in a notebook."""
    script = _script()
    return None if script is None else f"{script}:build"


def missing_build() -> str | None:
    """What to write so that the command works, where the running script has no function `build`."""
    script = _script()
    if script is None or callable(getattr(sys.modules["__main__"], "build", None)):
        return None
    with contextlib.suppress(OSError):
        if re.search(r"^def build\(", script.read_text("utf-8", "replace"), re.MULTILINE):  # below what runs now
            return None
    return (
        f"for that command, write a function build() in {script} that returns (model, optimizer, loss_fn) as the "
        'training makes them, and put the training itself under `if __name__ == "__main__":`; '
        "ak.explain(recorder) in this process needs neither"
    )


def _script() -> Path | None:
    """None for a notebook, and for what is installed (a test runner, a launcher)."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return None
    try:
        path, here = Path(file).resolve(), Path.cwd()
    except OSError:  # the working folder is gone; that is no reason to stop recording
        return None
    installed = (sys.prefix, sys.base_prefix, Path(__file__).parents[1])
    if not path.is_file() or any(path.is_relative_to(place) for place in installed):
        return None
    return path.relative_to(here) if path.is_relative_to(here) else path
