"""The flight recorder under DistributedDataParallel: rank 0 records, every rank's batch is part of the step.

Batches travel as bytes of safetensors with a JSON description; nothing is pickled. The step's gradient is the mean
over ranks, so the replay is one step of `world_size` micro-batches. Two ranks that meet after every backward add up
in one way only and replay to the bit; more ranks, or accumulation inside `no_sync`, add up in the backend's own order,
and the replay agrees to rounding. Batch normalization's running statistics are rank 0's in training and every rank's
in the replay: losses do not see it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.batches import Batch
from ..core.randomness import RandomState
from ..errors import InvalidInput
from ..recorder.observing import Observer
from ..recorder.passes import UNSEEN
from ..recorder.recorder import FlightRecorder
from ..recorder.records import Fed, encode
from ..recorder.updates import ToldClip

FAILED = -1  # in the place of a message's length


def recorder_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    directory: str | Path,
    **options: Any,
) -> FlightRecorder | RankRecorder:
    """A `FlightRecorder`, or a `RankRecorder` where several ranks train together. options: the recorder's.

    >>> from aftershock.integrations.distributed import recorder_for
    >>> type(recorder_for(model, optimizer, loss_fn, "flight")).__name__
    'FlightRecorder'
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    kind = RankRecorder if together else FlightRecorder
    return kind(model, optimizer, loss_fn, directory, **options)


class RankRecorder:
    """A `FlightRecorder` of all ranks together; made and called by every rank in the same way.

    Each call of `micro` and `step` gathers the ranks' batches on rank 0: the traffic of one batch, and a number.
    Where one rank cannot go on, all stop recording in the same step, and training goes on.

    >>> from aftershock.integrations.distributed import RankRecorder
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with RankRecorder(model, optimizer, loss_fn, "flight") as recorder:
    ...     optimizer.zero_grad()
    ...     first = loss_fn(model, batches[0]) / 2
    ...     recorder.micro(batches[0], first)
    ...     second = loss_fn(model, batches[1]) / 2
    ...     (first + second).backward()
    ...     optimizer.step()
    ...     recorder.step(batches[1], second)
    >>> dist.destroy_process_group()
    >>> recorder.ranks, len(recorder.recorder.recent[0].fed)
    (1, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Batch], Tensor],
        directory: str | Path = "flight",
        **options: Any,
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model = model
        self.recorder = FlightRecorder(model, optimizer, loss_fn, directory, **options) if self.rank == 0 else None
        self.recording = False
        self._random: RandomState | None = None
        self._index = 0

    def __enter__(self) -> Self:
        self._device = next(self.model.parameters()).device
        self._handle = self.model.register_forward_pre_hook(Observer(self._before_forward))
        if self.recorder is not None:
            self.recorder.__enter__()
        self.recording = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()
        self.recording = False
        if self.recorder is not None:
            self.recorder.__exit__(kind, error, trace)

    def before_forward(self) -> None:
        """As `FlightRecorder.before_forward`, for this rank's own random state."""
        self._random = RandomState.now(self._device)
        if self.recorder is not None:
            self.recorder.before_forward()

    def micro(self, batch: Batch, loss: Tensor | float, *, index: int | None = None) -> None:
        """As `FlightRecorder.micro`: this rank's micro-batch and its loss."""
        self._take(batch, loss, index)

    def step(
        self,
        batch: Batch,
        loss: Tensor | float,
        *,
        index: int | None = None,
        norm: Tensor | float | None = None,
        clip: ToldClip = "as told",
        divisor: float | None = None,
    ) -> None:
        """As `FlightRecorder.step`: this rank's batch and its loss; the step's loss is the mean over ranks."""
        self._take(batch, loss, index)
        if self.recorder is not None and self.recording:
            self.recorder.finish(norm, None if divisor is None else divisor * self.ranks, clip)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self.recording and self._random is None and torch.is_grad_enabled():
            self._random = RandomState.now(self._device)

    def _take(self, batch: Batch, loss: Tensor | float, index: int | None) -> None:
        """All ranks' micro-batches into rank 0's recorder, in the order of the ranks."""
        if not self.recording:
            return  # every rank stopped in the same step
        message, reason = self._message(batch, loss, index)
        self._index, self._random = (self._index if index is None else index) + 1, None
        messages = gather_bytes(message, self._device)
        if messages is None:
            self._stop(reason)
        elif self.recorder is not None:
            for received in messages:
                fed, share = _decoded(received)
                self.recorder.take(fed, share / self.ranks)

    def _message(self, batch: Batch, loss: Tensor | float, index: int | None) -> tuple[bytes | None, str]:
        """What this rank sends; None and why, where it cannot. Nothing may be raised before the ranks have met."""
        if self.recorder is not None and not self.recorder.recording:
            return None, "rank 0 has stopped"
        try:
            if self._random is None:
                raise InvalidInput(UNSEEN)
            structure, tensors = encode(batch)
            number = self._index if index is None else index
            return _encoded(Fed(structure, tensors, number, self._random), loss), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _stop(self, reason: str) -> None:
        self.recording = False
        if self.recorder is not None:
            self.recorder._settle_all()
            self.recorder.recording = False
        warnings.warn(
            f"the flight recorder of rank {self.rank} has stopped, training goes on: "
            f"{reason or 'another rank could not record its batch'}",
            RuntimeWarning,
            stacklevel=4,
        )


def gather_bytes(message: bytes | None, device: torch.device) -> list[bytes] | None:
    """Every rank's message on rank 0, an empty list elsewhere; None on all ranks where one of them has none."""
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    ranks = dist.get_world_size()
    own = torch.tensor([FAILED if message is None else len(message)], device=place)
    lengths = [torch.zeros_like(own) for _ in range(ranks)]
    dist.all_gather(lengths, own)
    sizes = [int(length) for length in lengths]
    if FAILED in sizes or message is None:
        return None
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=place)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(place)
    received = [torch.empty_like(padded) for _ in range(ranks)] if dist.get_rank() == 0 else None
    dist.gather(padded, received)
    return [bytes(found[:size].cpu().numpy()) for found, size in zip(received or [], sizes)]


def _encoded(fed: Fed, loss: Tensor | float) -> bytes:
    from safetensors.torch import save

    about = json.dumps({"structure": fed.structure, "index": fed.index}).encode()
    tensors = {f"batch/{i}": tensor.contiguous() for i, tensor in enumerate(fed.tensors)}
    tensors |= {f"random/{name}": value for name, value in fed.random.tensors().items()}
    tensors["about"] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    tensors["loss"] = torch.as_tensor(loss).detach().reshape(1).cpu()
    return save(tensors)


def _decoded(message: bytes) -> tuple[Fed, Tensor]:
    from safetensors.torch import load

    tensors = load(message)
    about = json.loads(bytes(tensors.pop("about").numpy()))
    loss = tensors.pop("loss").reshape(())
    random = RandomState.of({k.removeprefix("random/"): t for k, t in tensors.items() if k.startswith("random/")})
    batch = tuple(tensors[f"batch/{i}"] for i in range(sum(key.startswith("batch/") for key in tensors)))
    return Fed(about["structure"], batch, about["index"], random), loss
