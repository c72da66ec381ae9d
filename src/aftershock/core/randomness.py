"""torch's global random state: read, installed, put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """torch's global generators at one moment: the CPU's, and the device's where there is one."""

    cpu: Tensor
    cuda: Tensor | None = None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda)

    def same(self, other: RandomState) -> bool:
        cuda = self.cuda is None or (other.cuda is not None and torch.equal(self.cuda, other.cuda))
        return cuda and torch.equal(self.cpu, other.cpu)

    def install(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)


@contextlib.contextmanager
def restored_random(device: torch.device) -> Iterator[None]:
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.install(device)
