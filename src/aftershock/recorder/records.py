"""What is kept of one update, and how it becomes tensors and JSON."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..core.adamw import Hyper
from ..core.batches import Accumulated, Batch
from ..core.calls import Autocast
from ..core.capture import dense_stride
from ..core.randomness import RandomState
from ..core.structure import fields_of
from ..errors import InvalidInput

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Fed:
    """One batch as it was fed: its tensors copied to the CPU, its place in the data, the random state before it."""

    structure: Any
    tensors: tuple[Tensor, ...]
    index: int
    random: RandomState


@dataclass(frozen=True)
class Source:
    """How a recorded batch becomes one again: on which device, and from which dataset where indices were recorded."""

    device: torch.device
    dataset: Any = None

    def batch(self, fed: Fed) -> Batch:
        found = decode(fed.structure, fed.tensors, self.device)
        if self.dataset is None:
            return found
        indices = found.tolist() if isinstance(found, Tensor) else found
        return default_collate([self.dataset[int(i)] for i in indices])


@dataclass(frozen=True)
class Forward:
    """What surrounds a forward pass: autocast, and the modules in eval mode."""

    autocast: bool
    autocast_dtype: torch.dtype
    evaluating: tuple[str, ...]
    begun: bool = False  # the loop said where it begins: what loss_fn draws before it calls the model is replayed

    @classmethod
    def now(cls, parts: Sequence[tuple[str, nn.Module]], device: torch.device, *, begun: bool = False) -> Forward:
        """What surrounds a pass that begins now. parts: the model's `named_modules`, which take longer to list."""
        autocast = Autocast.now(device)
        evaluating = tuple(name for name, part in parts if not part.training)
        return cls(autocast.enabled, autocast.dtype, evaluating, begun)


@dataclass(frozen=True)
class Record:
    """One update. `step` counts the updates made before it, from 0.

    `norm` is that of the gradient that reached the optimizer, after clipping; `raw_norm` the one before it,
    NaN where it was not told.
    """

    step: int
    fed: tuple[Fed, ...]
    loss: float
    norm: float
    raw_norm: float
    hypers: tuple[Hyper, ...]
    clip: float | None
    forward: Forward
    divisor: float | None = None  # of each micro-batch's loss; None: their number
    scale: float = 1.0  # by which a GradScaler multiplied the loss

    def batch(self, source: Source) -> Batch:
        """What loss_fn was given; several micro-batches are one accumulated batch with its own random states."""
        if len(self.fed) == 1 and self.divisor in (None, 1):
            return source.batch(self.fed[0])
        random = tuple(fed.random for fed in self.fed)
        return Accumulated(tuple(source.batch(fed) for fed in self.fed), random=random, divisor=self.divisor)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def told_norm(self) -> float:
        """The norm before clipping where it is known, else that which reached the optimizer."""
        return self.norm if math.isnan(self.raw_norm) else self.raw_norm

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(fed.index for fed in self.fed)

    @property
    def lr(self) -> float:
        return float(self.hypers[0].lr)


class Fields(dict[Any, Any]):
    """What comes back of a tokenizer's `BatchEncoding` or a dataclass: its fields, by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the recorded batch has no field {name!r}, only {', '.join(map(str, self))}"
            ) from None


def encode(batch: Batch) -> tuple[Any, tuple[Tensor, ...]]:
    """(a JSON description, tensors copied to the CPU) of a batch: tensors, numbers, text in lists, dicts, fields."""
    structure, tensors = describe(batch)
    return structure, tuple(tensor.to("cpu", copy=True) for tensor in tensors)


def describe(batch: Batch) -> tuple[Any, tuple[Tensor, ...]]:
    """The same, with the batch's own tensors."""
    tensors: list[Tensor] = []

    def walk(x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
                raise InvalidInput(f"the batch holds a {type(x).__name__} ({x.layout}); record ordinary dense tensors")
            tensors.append(x.detach())
            return {"tensor": len(tensors) - 1, "device": x.device.type, "stride": list(dense_stride(x))}
        if isinstance(x, PLAIN):
            return {"plain": x}
        if type(x) in (list, tuple):
            return {type(x).__name__: [walk(y) for y in x]}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return {"named": [[name, walk(value)] for name, value in zip(x._fields, x)]}
        fields = fields_of(x)
        if fields is not None:
            return {"fields": [[walk(key), walk(value)] for key, value in fields.items()]}
        if isinstance(x, Mapping):
            return {"dict": [[walk(key), walk(value)] for key, value in x.items()]}
        raise InvalidInput(
            f"the batch holds a {type(x).__module__}.{type(x).__qualname__}, which cannot be written down without "
            "pickling; give recorder.step() tensors in lists, tuples and dicts, or indices with dataset="
        )

    return walk(batch), tuple(tensors)


def check(structure: Any, tensors: Sequence[Tensor]) -> None:
    """Raises where a description from a file does not fit its tensors: nothing may be allocated on its word."""

    def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
        whole = len(stride) == len(shape) and all(type(s) is int and s >= 0 for s in stride)
        return whole and (0 in shape or 1 + sum((n - 1) * s for n, s in zip(shape, stride)) == math.prod(shape))

    def fitting(kind: str, value: Any, stride: Any, device: str = "cpu") -> Any:
        if kind == "tensor" and (type(value) is not int or value < 0 or not dense(tensors[value].shape, stride)):
            raise ValueError(f"tensor {value} with stride {stride}")
        return value

    _walk(structure, fitting)


def decode(structure: Any, tensors: Sequence[Tensor], device: torch.device) -> Batch:
    """The inverse of `encode`; tensors that were on the model's kind of device go to `device`.

    They are copied: a file's memory is neither aligned nor strided as the batch was, and kernels then round otherwise.
    """

    def made(kind: str, value: Any, stride: Any, there: str = "cpu") -> Any:
        if kind == "plain":
            return value
        found = tensors[value]
        tensor = torch.empty_strided(found.shape, stride, dtype=found.dtype, device=found.device).copy_(found)
        return tensor if there == "cpu" else tensor.to(device)

    return _walk(structure, made)


def _walk(node: Any, leaf: Callable[..., Any]) -> Any:
    """The batch that a description describes, its leaves made by `leaf(kind, value, stride, device)`."""
    ((kind, value),) = [(k, v) for k, v in node.items() if k not in ("device", "stride")]
    if kind == "tensor":
        return leaf(kind, value, node["stride"], node["device"])
    if kind == "plain":
        if not isinstance(value, PLAIN):
            raise ValueError(f"{kind} holds a {type(value).__name__}")
        return leaf(kind, value, None)
    if kind in ("dict", "fields"):
        return (dict if kind == "dict" else Fields)((_walk(key, leaf), _walk(item, leaf)) for key, item in value)
    if kind == "named":
        return namedtuple("Batch", [name for name, _ in value])(*(_walk(item, leaf) for _, item in value))
    return {"list": list, "tuple": tuple}[kind](_walk(item, leaf) for item in value)
