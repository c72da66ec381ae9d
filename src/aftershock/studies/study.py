"""What a study is: independent systems, the pieces of work on each, and what made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInput

if TYPE_CHECKING:
    import xarray as xr

SEEDS = 4  # top-level seeds of the paper: root, root + 1, …


@dataclass(frozen=True)
class System:
    """One independent training system: everything in it is drawn from (kind, seed, index)."""

    kind: str
    seed: int
    index: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}-{self.index}"

    def entropy(self, stream: str) -> int:
        """A seed for one named stream of this system's randomness, independent of every other."""
        import numpy as np

        words = np.frombuffer(f"{self.kind}/{stream}".encode(), dtype=np.uint8).tolist()
        return int(np.random.SeedSequence([self.seed, self.index, *words]).generate_state(1, np.uint64)[0] >> 1)

    def generator(self, stream: str) -> torch.Generator:
        """Draws of one named stream, on the CPU."""
        return torch.Generator().manual_seed(self.entropy(stream))


def systems_of(kind: str, root_seed: int, each: int, roots: int = 1) -> tuple[System, ...]:
    """`each` systems for each of the paper's four seeds; of several root seeds, four apart, that many times more."""
    return tuple(System(kind, root_seed + s, i) for s in range(SEEDS * roots) for i in range(each))


@dataclass(frozen=True)
class Study:
    """A recipe: `run(system, piece)` gives that piece's results by setting (a row of the paper's tables).

    `run` is a module-level function or a partial of one, so that it travels to other processes, and it draws
    everything from `System.entropy`: its bits depend neither on the order nor on the number of workers.
    """

    name: str
    systems: tuple[System, ...]
    pieces: tuple[str, ...]
    run: Callable[[System, str], dict[str, xr.Dataset]]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def require_device(device: str) -> None:
    """Refuse a device that is not there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"device {device!r} cannot be used here ({reason}); take cpu, or cuda on a GPU") from error
