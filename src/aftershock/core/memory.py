"""How much memory there is, and how much a budget allows."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import re
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import InvalidInput, OutOfMemory
from .host import free_of_host

Size = TypeVar("Size")
Result = TypeVar("Result")

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
MALLOC_OPTIONS = {-1: 2**31 - 1, -4: 0}  # glibc's M_TRIM_THRESHOLD and M_MMAP_MAX
CARD_SHARE, LIBRARIES = 0.95, 2**30  # of a card's memory, what may be used; bytes of it that libraries take
FREE_SHARE = {"cpu": 0.7, "cuda": 0.85}  # of what is free: the user's own process needs the rest
MARGIN = 1.02  # of a need, that is advised: what is free moves a little between two calls
NO_MEMORY = ("DefaultCPUAllocator: ", "std::bad_alloc")  # what torch says on a CPU, in a plain RuntimeError


_set_aside: dict[int, int] = {}  # by owner: what torch counts as free and only the owner can use


def set_aside(owner: object, nbytes: int) -> None:
    """Count bytes that a recording has reserved for itself as taken for as long as it lives."""
    _set_aside[id(owner)] = nbytes
    weakref.finalize(owner, _set_aside.pop, id(owner), None).atexit = False


def budget(memory: str | int | None, device: torch.device) -> int:
    """Bytes that may be used: "8GiB", a number of bytes, or None for what is free on the device."""
    if memory is None:
        return int(FREE_SHARE[device.type] * free(device))
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", memory)
        if match is None or match[2].lower() not in UNITS:
            raise InvalidInput(f'memory is a number of bytes or a text like "8GiB"; got {memory!r}')
        memory = int(float(match[1]) * UNITS[match[2].lower()])
    if memory <= 0:
        raise InvalidInput("memory must be positive")
    return int(memory)


def free(device: torch.device) -> int:
    """Free bytes on the device."""
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return available + cached - sum(_set_aside.values())
    return free_of_host()


def free_of_all() -> str:
    """Such as 1.0 GiB of 8.0 GiB: of the GPU that is in use, or of the host without one, for an error."""
    if not torch.cuda.is_available():
        return readable(free(torch.device("cpu")))
    return " of ".join(map(readable, torch.cuda.mem_get_info()))


def left_on_card(device: torch.device, limit: int, ours: int) -> int | None:
    """What work that may take so much of a whole card has beside what is there; None on a CPU: what is free.

    ours: bytes there that are a part of the work.
    """
    if device.type != "cuda":
        return None
    whole = min(limit, int(CARD_SHARE * torch.cuda.get_device_properties(device).total_memory))
    return whole - LIBRARIES - (torch.cuda.memory_allocated(device) - ours)


_highest: dict[int, int] = {}  # by GPU: its peak before torch's own was last reset


def begin_peak(device: torch.device) -> None:
    """Count the peak of what torch holds on a GPU from here on."""
    _highest[_number(device)] = 0
    torch.cuda.reset_peak_memory_stats(device)


def note_peak(device: torch.device) -> None:
    """Torch's peak is reset, to see that of a single piece of work; the one so far counts on."""
    _highest[_number(device)] = peak_held(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_held(device: torch.device) -> int:
    """Bytes at the peak since `begin_peak`, or since torch's statistics began."""
    return max(_highest.get(_number(device), 0), torch.cuda.max_memory_allocated(device))


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def ran_out(error: BaseException) -> bool:
    """Whether it says that memory ran out: torch's error of a GPU, its plain one of a CPU, Python's, or ours."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def in_smaller_pieces(
    size: Size, work: Callable[[Size], Result], smaller: Callable[[Size], Size | None], what: str
) -> Result:
    """Work in pieces of a size that was planned, and in smaller ones where memory runs out in spite of the plan."""
    trying: Size | None = size
    while trying is not None:
        try:
            return work(trying)
        except Exception as error:  # what it held is gone before the next try
            if not ran_out(error):  # ours: a part of it has no smaller piece of its own
                raise
        torch.cuda.empty_cache()
        trying = smaller(trying)
    raise OutOfMemory(
        f"{what} ran out of memory in spite of the plan ({size}), in the smallest pieces, too; free some memory, or "
        "use a smaller batch"
    )


def in_chunks(count: int, size: int, work: Callable[[range], Result], what: str) -> list[Result]:
    """`work` on so many things, `size` at a time as planned, and fewer from where memory runs out in spite of that."""
    found, first = list[Result](), 0

    def some(size: int) -> tuple[int, Result]:
        return size, work(range(first, min(first + size, count)))

    while first < count:
        size, result = in_smaller_pieces(size, some, lambda size: size // 2 or None, what)
        found.append(result)
        first += size
    return found


def in_one_piece(work: Callable[[], Result], what: str) -> Result:
    """Work that is not cut: where memory runs out, the error says so by name."""
    (found,) = in_chunks(1, 1, lambda _: work(), what)
    return found


def readable(count: float, digits: int = 1) -> str:
    """1536 → '1.5 KiB'."""
    count, unit = _in_units(count)
    return f"{count:.{digits if unit != 'B' else 0}f} {unit}"


def enough(need: float) -> str:
    """The memory= that a need fits into, for an error: its digits are rounded up, so that what is shown is enough."""
    count, unit = _in_units(MARGIN * need)
    return f'memory="{math.ceil(10 * count) / 10:.1f} {unit}"'


def lacking(need: int, available: int) -> str:
    """What work needs and what it may use, which is less, in as many digits as tell the two apart."""
    pairs = ((readable(need, digits), readable(available, digits)) for digits in itertools.count(1))
    needed, limit = next((a, b) for a, b in pairs if a != b)
    return f"needs {needed} beside the model and the path, and {limit} may be used"


def _in_units(count: float) -> tuple[float, str]:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return count, unit
        count /= 1024
    return count, "TiB"


def keep_freed() -> None:
    """Freed memory stays with this process, for work whose large tensors come and go at every step.

    By default glibc hands it back and takes it again page by page: on the paper's MLP this took a fifth of a study's
    time, and made the same gradient vary by 40 %. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


def hand_back() -> None:
    """Freed memory goes back to the system: glibc keeps what lies below anything that is still there, and pieces of
    other sizes are then taken beside it. Without glibc this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
