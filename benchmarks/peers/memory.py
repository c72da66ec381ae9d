"""How much memory one piece of work needs at its highest, in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

M_MMAP_THRESHOLD = -3  # glibc's name for its option


def hand_back_freed() -> None:
    """Make glibc give freed tensors back to the system, so that a mark shows the work and not the allocator."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)


def peak_apart(run: Callable[[], object], warm: Callable[[], object]) -> int:
    """Bytes by which a forked copy of this process rises while it runs, once it is warm.

    The mark of resident memory is what the system must give: saved tensors, states, temporaries and all. It cannot be
    put back inside a process, and starts at the present size in a forked one. Call `hand_back_freed` first.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            warm()  # code, kernels and work buffers that any run needs
            before = resident("VmRSS")
            run()
            os.write(sending, str(resident("VmHWM") - before).encode())
            status = 0
        finally:
            os._exit(status)  # the parent's own cleaning up is not the child's
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError("the process that measures memory died; is there enough of it?")
    return int(answer)


def resident(field: str) -> int:
    """Bytes resident now (VmRSS) or at most so far (VmHWM)."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
