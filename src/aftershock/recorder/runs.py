"""Whose folder this is: one run, one flight.

    flight/                the first run's own folder: its ring, its frozen windows, and a lock while it records
    flight/run-2/          the second run's, and so on

A lock names the process that records, which holds it. It is removed at the end; that of a process that died is stale:
the system lets go of it, however the process ended and in whichever container of the machine it ran. When a run begins,
the rings of runs that are over are dropped, so that disk does not grow with every run: their windows stay, and a ring
that a trigger was waiting in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

LOCK = "lock.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")  # of the running system, which its containers share
PARTS = re.compile(r"\.(step|state)-\d+\.safetensors\..*|\.(run|trigger)\.json\..*")  # files that were being written


def claim(directory: Path) -> tuple[Path, str]:
    """(a folder of this run's own under `directory`, the run's id); what nobody needs of runs that are over goes."""
    directory.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(directory):
        earlier = run_folders(directory)
        for folder in earlier:
            if not in_use(folder):
                _clear(folder)
        newest = earlier[-1]
        free = not in_use(newest) and not recorded(newest)
        folder = newest if free else directory / f"run-{_number(newest) + 1}"
        folder.mkdir(exist_ok=True)
        run = uuid.uuid4().hex
        _lock(folder, run)
    return folder, run


def release(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a lock that stays is stale when the process ends
        (folder / LOCK).unlink()
    if folder in _open:
        os.close(_open.pop(folder))


_open: dict[Path, int] = {}  # the locks that this process holds


def _lock(folder: Path, run: str) -> None:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    owner = {"run": run, "pid": os.getpid(), "host": socket.gethostname(), "namespace": _namespace()}
    if _taken(descriptor):
        _open[folder], owner["boot"] = descriptor, _boot()
    with open(descriptor, "w", closefd=folder not in _open) as file:
        file.write(json.dumps(owner))


def _taken(descriptor: int) -> bool:
    """Take a lock that goes with the process; not where another one holds it, or the disk or system has no such."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _let_go() -> None:
    """In a forked process, such as a loader's worker, which may outlive the one that records."""
    while _open:
        os.close(_open.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def run_folders(directory: Path) -> list[Path]:
    """The folders of the runs under `directory`, the newest last."""
    others = [path for path in directory.glob("run-*") if _number(path) > 1 and path.is_dir()]
    return [directory, *sorted(others, key=_number)]


def place_of(folder: Path) -> tuple[str, int, int]:
    """(the name of the folder that the recorder was given, which of its runs this folder is, how many there are)."""
    inside = _number(folder) > 1 and (recorded(folder.parent) or (folder.parent / "ring" / "run.json").exists())
    root = folder.parent if inside else folder
    return root.name, _number(folder) if inside else 1, len(run_folders(root))


def recorded(folder: Path) -> bool:
    """Has a run left anything there?"""
    return any(folder.glob("ring/step-*")) or any(folder.glob("step-*"))


def in_use(folder: Path) -> bool:
    """Is the process that locked it alive? The system knows that of its own. On another machine, or in another
    container where the disk has no such locks, nobody can tell: it counts as alive."""
    try:
        owner = json.loads((folder / LOCK).read_text())
        here_too = owner.get("boot") and owner["boot"] == _boot()
        if here_too and (held := _held(folder / LOCK)) is not None:
            return held
        here = socket.gethostname(), _namespace()
        if (owner["host"], owner.get("namespace", here[1])) != here:
            return True
        os.kill(int(owner["pid"]), 0)
    except PermissionError:
        return True  # another user's process
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return False  # no lock, no such process, or a lock that was cut off
    return True


def _held(lock: Path) -> bool | None:
    """Whether a process holds it; None where the disk does not tell."""
    if fcntl is None:
        return None
    with open(lock) as file:
        try:  # shared: those who ask at the same time do not hold it
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def _namespace() -> str:
    """In which a process number means something: containers may share a machine's name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # a system without such
        return ""


def _number(folder: Path) -> int:
    found = re.fullmatch(r"run-([0-9]{1,9})", folder.name)
    return int(found[1]) if found else 1


def _clear(folder: Path) -> None:
    for part in folder.glob(".flight-*"):
        shutil.rmtree(part, ignore_errors=True)
    for path in [*folder.glob(".*"), *folder.glob("ring/.*")]:
        if PARTS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if not (folder / "ring" / "trigger.json").exists():  # else the run was killed before it could keep the window
        for path in [*folder.glob("ring/step-*.safetensors"), *folder.glob("ring/state-*.safetensors")]:
            path.unlink(missing_ok=True)
    release(folder)


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Two processes that start together must not take the same folder."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a disk without such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
