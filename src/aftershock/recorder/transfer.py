"""From the GPU to the host while training goes on: a side stream, pinned memory, and nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STAGE_BYTES = 2**25  # of pinned memory, through which states pass


@dataclass(frozen=True)
class Landing:
    """Values on their way to the host: they may be read once the event has passed. On the CPU they are there."""

    values: tuple[Any, ...]
    event: torch.cuda.Event | None = None

    @property
    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Transfer:
    """Copies of tensors for the host. What is on the CPU already is copied at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stage: Tensor | None = None

    def carry(self, values: Sequence[Any]) -> Landing:
        """Copies of all tensors among the values; others stay as they are. Returns before the GPU has made them.

        The first copy is made on the GPU in the order of training, since the loop may overwrite a batch at once.
        """
        if self.stream is None or not any(self._on_gpu(value) for value in values):
            return Landing(tuple(_copied(value) for value in values))
        owned = [value.detach().clone() if self._on_gpu(value) else _copied(value) for value in values]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            return Landing(tuple(self._sent(value) for value in owned), self.stream.record_event())

    def fetch(self, tensor: Tensor) -> Tensor:
        """An ordinary host tensor with its bytes. Waits for it: this is for the writer's thread."""
        if self.stream is None or not self._on_gpu(tensor):
            return tensor
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        with torch.cuda.stream(self.stream):
            if self._stage is None:
                self._stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
            arrived = torch.cuda.Event(blocking=True)  # sleeps: a thread that spins would take a core from training
            for source, place in zip(_bytes(tensor).split(STAGE_BYTES), _bytes(host).split(STAGE_BYTES)):
                part = self._stage[: len(source)]
                part.copy_(source, non_blocking=True)
                arrived.record(self.stream)
                arrived.synchronize()
                place.copy_(part)
        return host

    def moment(self) -> torch.cuda.Event | None:
        """What the training stream has been given so far."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def after(self, moment: torch.cuda.Event | None) -> None:
        """Let what is fetched from now on come after that moment."""
        if self.stream is not None and moment is not None:
            self.stream.wait_event(moment)

    def _on_gpu(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.device.type == "cuda" and value.device == self.device

    def _sent(self, value: Any) -> Any:
        if not self._on_gpu(value):
            return value
        host = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        value.record_stream(self.stream)  # its memory is not reused before it was read
        return host


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _bytes(dense: Tensor) -> Tensor:
    """The memory of a dense tensor, in its own order."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
