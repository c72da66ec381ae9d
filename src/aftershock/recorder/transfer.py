"""From the GPU to the host while training goes on: a side stream, pinned memory, and nobody waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STAGE_BYTES = 2**25  # of pinned memory, through which states pass

Number = Tensor | float | None


@dataclass(frozen=True)
class Landing:
    """A step on its way to the host: it may be read once the event has passed. On the CPU it is there."""

    tensors: tuple[Tensor, ...]
    known: tuple[float, ...] = ()  # numbers; NaN for None, and for those that are sent
    sent: Tensor | None = None  # the latter as one tensor
    places: tuple[int, ...] = ()  # of the latter
    event: torch.cuda.Event | None = None

    @property
    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def numbers(self) -> list[float]:
        found = list(self.known)
        for place, number in zip(self.places, [] if self.sent is None else self.sent.tolist()):
            found[place] = number
        return found


class Transfer:
    """Tensors for the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._made = None if self.stream is None else torch.cuda.Event()
        self._stage: Tensor | None = None

    def own(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Copies of tensors as they are now: the loop may overwrite a batch at once.

        On the GPU they are made there, in the order of training, and this returns before they are.
        """
        return tuple(t.detach().clone() if self._on_gpu(t) else t.detach().to("cpu", copy=True) for t in tensors)

    def carry(self, owned: Sequence[Tensor], numbers: Sequence[Number] = ()) -> Landing:
        """Tensors that nobody else writes to, and a step's numbers as they are now. Returns before the GPU has made
        them: the numbers that are there travel as one tensor, since every copy costs the loop's thread."""
        places = tuple(i for i, number in enumerate(numbers) if self._on_gpu(number))
        known = tuple(math.nan if x is None or i in places else float(x) for i, x in enumerate(numbers))
        if self.stream is None or self._made is None:
            return Landing(tuple(owned), known)
        away = torch.stack([numbers[i].detach().reshape(()) for i in places]) if places else None  # type: ignore[union-attr]
        self._made.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._made)
        with torch.cuda.stream(self.stream):
            tensors = tuple(self._sent(tensor, self.stream) for tensor in owned)
            sent = None if away is None else self._sent(away, self.stream)
            return Landing(tensors, known, sent, places, self.stream.record_event())

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
        return isinstance(value, Tensor) and value.is_cuda and value.device == self.device

    def _sent(self, value: Tensor, stream: torch.cuda.Stream) -> Tensor:
        if not self._on_gpu(value):
            return value
        host = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        value.record_stream(stream)  # its memory is not reused before it was read
        return host


def _bytes(dense: Tensor) -> Tensor:
    """The memory of a dense tensor, in its own order."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
