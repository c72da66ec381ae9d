"""Packages that only some of the library needs: what is missing is said with the extra that brings it."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import MissingPackage


def install(extra: str) -> str:
    """The command that brings an extra."""
    return f'pip install "aftershock[{extra}]" (in a clone: pip install ".[{extra}]")'


def require(package: str, extra: str, what: str) -> None:
    """Refuse, before any work is done, what cannot be done without a package.

    what: who needs it, as the user would say it, such as "pages and figures".
    """
    if find_spec(package) is None:
        raise MissingPackage(f"{what} need the package {package}, which is not installed: {install(extra)}")
