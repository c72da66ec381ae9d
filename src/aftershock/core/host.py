"""What is free of the host's memory: a container or a job may be allowed less of it than the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# By kernel interface: where control groups lie, their limit, what they use, and how names of its parts begin.
SECOND = ("", "memory.max", "memory.current", "")
FIRST = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
CACHED = ("inactive_file", "active_file")  # files that the kernel drops for others; one read twice is active


def free_of_host(root: Path = Path("/")) -> int:
    """Free bytes: of the machine, and of every control group that this process is in (Docker's, Slurm's, systemd's)."""
    return max(0, min([_free_of_machine(root), *_left_in_groups(root)]))


def _free_of_machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: half of what is installed
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of a group and those around it; a container may see its own as the root, whatever the name is."""
    for tree, limit, used, prefix in _groups(root):
        for group in (tree, *tree.parents):
            try:
                allowed = int((group / limit).read_text())  # "max" is no number, and no limit
                taken = int((group / used).read_text())
                numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            yield allowed - taken + sum(int(numbers.get(prefix + name, 0)) for name in CACHED)


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """A line of /proc/self/cgroup is number:controllers:path, of the second interface without controllers."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            folder, limit, used, prefix = FIRST if controllers else SECOND
            yield root / "sys/fs/cgroup" / folder / path.lstrip("/"), limit, used, prefix
